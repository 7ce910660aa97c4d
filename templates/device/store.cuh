// ---- Output -------------------------------------------------------------------------------------
//% if kernel.out_dtype == "fp32"
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

//% else
__device__ __forceinline__ void store_pair(u16* to, float x, float y) {
  *reinterpret_cast<u32*>(to) = $(cvt(kernel, kernel.out_dtype))(x, y);
}

//% endif
// The warp lays its rows of O out in shared memory, then writes them in the widest words their
// alignment allows. Each warp reads back only what it wrote itself.
__device__ __forceinline__ void store_output(Output* tile, const Accumulator& o, Output* global,
                                             i64 stride, int rows) {
  constexpr int kBytes = copy_bytes(kHeadDimV, sizeof(Output));
  constexpr int kElements = kBytes / int(sizeof(Output));
  constexpr int kCopies = kHeadDimV / kElements;
  constexpr int kChunk = 16 / int(sizeof(Output));
  using Word = typename WordOf<kBytes>::type;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kWarpRows;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kDV / 8; ++n) {
      const float (&pair)[4] = o[i / 2][n];
//% if kernel.dtype == "e4m3"
      const int column = n / 2 * 16 + lane % 4 * 4 + n % 2 * 2;  // as accumulate has them
//% else
      const int column = 8 * n + lane % 4 * 2;
//% endif
      Output* chunk = chunk_at<kDV>(tile, warp_row + 8 * i + lane / 4, column / kChunk);
      store_pair(chunk + column % kChunk, pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
  }
  __syncwarp();
  for (int i = lane; i < kWarpRows * kCopies; i += 32) {
    const int row = warp_row + i / kCopies;
    const int column = i % kCopies * kElements;
    const Output* chunk = chunk_at<kDV>(tile, row, column / kChunk);
    const Word word = *reinterpret_cast<const Word*>(chunk + column % kChunk);
    if (row < rows) *reinterpret_cast<Word*>(global + row * stride + column) = word;
  }
}

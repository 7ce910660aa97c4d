// ---- Output -------------------------------------------------------------------------------------
//% if kernel.dtype == "fp32"
__device__ __forceinline__ void store_pair(Element* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

//% else
__device__ __forceinline__ void store_pair(Element* to, float x, float y) {
  *reinterpret_cast<u32*>(to) = ptx::cvt_$(ptx_type(kernel.dtype))x2(x, y);
}

//% endif
// The warps lay dK or dV out in shared memory, then write their rows in the widest words that the
// alignment allows. A warp reads back what it wrote itself, or those with which it shares its keys.
template <int kCols, int kValidCols>
__device__ __forceinline__ void store_rows(Element* tile, const Accumulator<kCols>& sum,
                                           float factor, Element* global, i64 stride, int rows) {
  constexpr int kBytes = copy_bytes(kValidCols);
  constexpr int kElements = kBytes / int(sizeof(Element));
  constexpr int kCopies = kValidCols / kElements;
  using Word = typename WordOf<kBytes>::type;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < 2 * warp_blocks(kCols); ++n) {
      if (kCols / 16 % kSplit && warp_column(n) >= kCols) break;
      const float (&pair)[4] = sum[i / 2][n];
      const int row = warp_keys() + 8 * i + lane / 4, column = warp_column(n) + lane % 4 * 2;
      Element* chunk = chunk_at<kCols>(tile, row, column / kChunkElements);
      store_pair(chunk + column % kChunkElements, factor * pair[i % 2 * 2],
                 factor * pair[i % 2 * 2 + 1]);
    }
  }
  if constexpr (kSplit > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  for (int i = warp_part() * 32 + lane; i < kWarpKeys * kCopies; i += 32 * kSplit) {
    const int row = warp_keys() + i / kCopies;
    const int column = i % kCopies * kElements;
    const Element* chunk = chunk_at<kCols>(tile, row, column / kChunkElements);
    const Word word = *reinterpret_cast<const Word*>(chunk + column % kChunkElements);
    if (row < rows) *reinterpret_cast<Word*>(global + row * stride + column) = word;
  }
}

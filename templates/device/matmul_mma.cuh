// ---- Matrix products on the tensor cores --------------------------------------------------------
// Each warp owns kRowTiles x 16 rows. Lane 4 g + t holds rows g and g + 8 of each, and of every 8
// columns 2t and 2t + 1. The scores come out in that layout; P goes in in the same registers.

//% if kernel.odd_rows
// s = Q K^T for the warp's rows and kStepKV keys. Unrolled whole: parts of equal size would leave
// most such rows a rest with code, addresses and waits of its own.
//% else
// s = Q K^T for the warp's rows and kStepKV keys. Long rows are not unrolled whole: the loads of all
// steps at once would not fit the registers.
//% endif
constexpr int kDepth = 2 * kChunkElements;  // of a matrix step: 32 bytes of a row
constexpr int kDepthUnroll = $("kD / kDepth" if kernel.odd_rows else "kD > 8 * kDepth ? 4 : 8");

__device__ __forceinline__ void scores(Scores& s, const Element* q_tile, const Element* k_tile) {
  constexpr int kRowBytes = kD * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const int row = $("" if kernel.splits else "threadIdx.x / 32 * kWarpRows + ")lane % 16;
  const int key = lane / 16 * 8 + lane % 8;
  const u32 q_first = ptx::smem_address(chunk_at<kD>(q_tile, row, lane / 16));
  const u32 k_first = ptx::smem_address(chunk_at<kD>(k_tile, key, lane / 8 % 2));
  zero(s);
#pragma unroll kDepthUnroll
  for (int depth = 0; depth < kD; depth += kDepth) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::ldmatrix_x4(a[i], along_row<kD>(q_first, depth / kChunkElements) + 16 * i * kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kStepKV; n += 16) {
      u32 b[4];
      ptx::ldmatrix_x4(b, along_row<kD>(k_first, depth / kChunkElements) + n * kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        $(mma(kernel))(s[i][n / 8], a[i], b[0], b[1]);
        $(mma(kernel))(s[i][n / 8 + 1], a[i], b[2], b[3]);
      }
    }
  }
}

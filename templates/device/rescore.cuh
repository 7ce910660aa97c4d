// ---- Scores, again ------------------------------------------------------------------------------
// 16 rows of one warp against 8 keys, by the instructions that a warp can issue alone: for the rare tile
// whose scores were overwritten with weights that turned out too large.
using FewScores = float[1][1][4];

__device__ __forceinline__ void few_scores(FewScores& s, const SlabTile<64, kSlabs>& q,
                                           const SlabTile<kBlockKV, kSlabs>& k, int column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][0][i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < kD / 8; ++step) {
    u32 a[2], b[1];
    ptx::ldmatrix_x2(a, chunk_address(q, 16 * warp + lane % 16, step));
    ptx::ldmatrix_x1(b, chunk_address(k, column + lane % 8, step));
    ptx::mma_m16n8k8_$(ptx_type(kernel.dtype))(s[0][0], a, b[0]);
  }
}

// ---- Scores, again ------------------------------------------------------------------------------
// 16 rows of one warp against 32 keys, by the instructions that a warp can issue alone: for the rare tile
// whose scores were given up for weights that turned out too large.
using FewScores = float[1][4][4];

__device__ __forceinline__ void few_scores(FewScores& s, const SlabTile<64, kSlabs>& q,
                                           const SlabTile<kBlockKV, kSlabs>& k, int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  zero(s);
#pragma unroll 1
  for (int step = 0; step < kD / 32; ++step) {
    u32 a[4], b[2];
    ptx::ldmatrix_x4(a, chunk_address(q, 16 * warp + lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      ptx::ldmatrix_x2(b, chunk_address(k, first + 8 * n + lane % 8, 2 * step + lane / 8 % 2));
      ptx::mma_m16n8k32_e4m3(s[0][n], a, b[0], b[1]);
    }
  }
}

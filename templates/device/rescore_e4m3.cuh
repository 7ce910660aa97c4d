// ---- Again --------------------------------------------------------------------------------------
// Products of 16 rows by the instructions that a warp can issue alone, for the rare tile whose scores were
// given up for weights that turned out too large: its scores for 32 keys,
using FewScores = float[1][4][4];

__device__ __forceinline__ void few_scores(FewScores& s, const SlabTile<64, kSlabs>& q,
                                           const SlabTile<kBlockKV, kSlabs>& k, int first) {
  const u32 thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32 % 4;
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

// and P V, for the columns from the tile's first row on, of the rows that have new weights.
template <int kTiles>
__device__ __forceinline__ void few_values(float (&t)[1][kTiles][4], const Weights& p,
                                           const bool (&renewed)[2], const SlabTile<kRowsV, 1>& v) {
  const u32 lane = ptx::thread_index() % 32;
#pragma unroll 1
  for (int n = 0; n < kTiles; ++n) {
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int step = 0; step < kBlockKV / 32; ++step) {
      u32 b[2];
      ptx::ldmatrix_x2(b, chunk_address(v, 8 * n + lane % 8, 2 * step + lane / 8 % 2));
      ptx::mma_m16n8k32_e4m3(sums, p[0][step], b[0], b[1]);
    }
    // t moves on by one place a step, so that the loop need not be unrolled.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float next = renewed[i / 2] ? sums[i] : t[0][0][i];
#pragma unroll
      for (int k = 0; k + 1 < kTiles; ++k) t[0][k][i] = t[0][k + 1][i];
      t[0][kTiles - 1][i] = next;
    }
  }
}

// ---- P and dS, queries by keys ------------------------------------------------------------------
// The second pass turns the scores over: a warp's rows are queries here, the columns keys, and what
// other kernels know of queries in columns it knows of its rows.
using RowStatistics = float[2 * kRowTiles];  // L or D of a thread's rows

__device__ __forceinline__ int row_of(int i) { return warp_keys() + 8 * i + threadIdx.x % 32 / 4; }

// One lane of the quad that shares a row reads for all four; rows past the end get 0.
__device__ __forceinline__ void load_statistics(RowStatistics& x, const float* global, int rows) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const bool reads = threadIdx.x % 4 == 0 && row_of(i) < rows;
    x[i] = __shfl_sync(~0u, reads ? global[row_of(i)] : 0.f, threadIdx.x % 32 & ~3);
  }
}

// From s = Q K^T: P = exp(scale s - L).
__device__ __forceinline__ void weights_of_rows(Scores<kStepQ>& s, const RowStatistics& lse,
                                                float scale_log2) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 2; ++i) {
    const int tile = i / (kStepQ / 2), n = i / 4 % (kStepQ / 8), r = i % 4;
    float& x = s[tile][n][r];
    x = ptx::ex2(fmaf(x, scale_log2, -kLog2e * lse[2 * tile + r / 2]));
  }
}

// From dp = dO V^T: dS = P (dP - D), of the keys from `first` on.
__device__ __forceinline__ void score_gradient_of_rows(Scores<kPartQ>& dp, const Scores<kStepQ>& p,
                                                       const RowStatistics& delta, int first) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kPartQ / 2; ++i) {
    const int tile = i / (kPartQ / 2), n = i / 4 % (kPartQ / 8), r = i % 4;
    float& x = dp[tile][n][r];
    x = p[tile][first / 8 + n][r] * (x - delta[2 * tile + r / 2]);
  }
}

// Zeroes dS of hidden pairs: of the block's queries from `query` on and the keys from `key` on.
__device__ __forceinline__ void mask_rows(Scores<kPartQ>& ds, int query, int key, int seq_q,
                                          int seq_kv) {
  const int column = key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int last = last_key_of(query + row_of(i), seq_q, seq_kv) - column;
#pragma unroll
    for (int n = 0; n < kPartQ / 4; ++n) {
      if (n / 2 * 8 + n % 2 > last) ds[i / 2][n / 2][i % 2 * 2 + n % 2] = 0.f;
    }
  }
}

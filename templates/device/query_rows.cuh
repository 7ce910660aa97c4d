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

//% if kernel.bias != "none"
// Of the block's queries from `query` on and the keys from `key` on.
__device__ __forceinline__ void finish_scores_of_rows(Scores<kStepQ>& s, const ScoreTerms& terms,
                                                      int query, int key, const Span& span) {
  const int column = key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepQ / 4; ++n) {
      float& score = s[i / 2][n / 2][i % 2 * 2 + n % 2];
      finish_score(score, terms, column + n / 2 * 8 + n % 2, query + row_of(i), span);
    }
  }
}

//% endif
// From s = Q K^T: P = exp(factor s - L).
__device__ __forceinline__ void weights_of_rows(Scores<kStepQ>& s, const RowStatistics& lse,
                                                float factor) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 2; ++i) {
    const int tile = i / (kStepQ / 2), n = i / 4 % (kStepQ / 8), r = i % 4;
    float& x = s[tile][n][r];
    x = exponential(x, factor, -kLog2e * lse[2 * tile + r / 2]);
  }
}

// From dp = dO V^T: dS = P (dP - D), of the keys from `first` on.
__device__ __forceinline__ void score_gradient_of_rows(Scores<kPartQ>& dp, const Scores<kStepQ>& p,
                                                       const RowStatistics& delta, int first) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kPartQ / 2; ++i) {
    const int tile = i / (kPartQ / 2), n = i / 4 % (kPartQ / 8), r = i % 4;
    float& x = dp[tile][n][r];
    const float weight = p[tile][first / 8 + n][r];
    x = $("hidden(weight) ? 0.f : " if kernel.bias_dtype)weight * (x - delta[2 * tile + r / 2]);
  }
}

// Whether the mask hides any of the kBlockQ keys from `key` on from one of the warp's rows.
__device__ __forceinline__ bool crosses_mask_of_rows(int query, int key, const Span& span) {
//% if kernel.mask == "window"
  if (key < first_key_of(query + warp_keys() + kWarpKeys - 1, span)) return true;
//% endif
  return key + kBlockQ - 1 > last_key_of(query + warp_keys(), span);
}

// Zeroes dS of hidden pairs: of the block's queries from `query` on and the keys from `key` on.
__device__ __forceinline__ void mask_rows(Scores<kPartQ>& ds, int query, int key,
                                          const Span& span) {
  const int column = key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int last = last_key_of(query + row_of(i), span) - column;
//% if kernel.mask == "window"
    const int first = first_key_of(query + row_of(i), span) - column;
//% endif
#pragma unroll
    for (int n = 0; n < kPartQ / 4; ++n) {
      const int place = n / 2 * 8 + n % 2;
      if (place > last$(" || place < first" if kernel.mask == "window")) ds[i / 2][n / 2][i % 2 * 2 + n % 2] = 0.f;
    }
  }
}

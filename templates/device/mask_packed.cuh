// ---- Mask ---------------------------------------------------------------------------------------
// Keys at or beyond a row's limit are invisible. Causal is aligned bottom-right: query i sees the
// keys up to i + seq_kv - seq_q.

__device__ __forceinline__ int visible_keys(int query, int seq_q, int seq_kv) {
  return kCausal ? min(seq_kv, query + 1 - seq_q + seq_kv) : seq_kv;
}

// Of each of a thread's rows, from packed row `first_row` on. The division is why they are kept.
struct RowLimits {
  int keys[2 * kRowTiles];
};

__device__ __forceinline__ RowLimits row_limits(int first_row, int group, int seq_q, int seq_kv) {
  RowLimits limits;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    limits.keys[i] = visible_keys((first_row + tile_row(i)) / group, seq_q, seq_kv);
  }
  return limits;
}

// s holds the scores of those rows against the keys from `key` on.
__device__ __forceinline__ void mask_scores(Scores& s, const RowLimits& limits, int key) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int limit = limits.keys[i] - key - threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) {
      if (n / 2 * 8 + n % 2 >= limit) s[i / 2][n / 2][i % 2 * 2 + n % 2] = -kInfinity;
    }
  }
}

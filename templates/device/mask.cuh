// ---- Mask ---------------------------------------------------------------------------------------
// Keys at or beyond a row's limit are invisible. Causal is aligned bottom-right: query i sees the
// keys up to i + seq_kv - seq_q.

__device__ __forceinline__ int visible_keys(int query, int seq_q, int seq_kv) {
  return kCausal ? min(seq_kv, query + 1 - seq_q + seq_kv) : seq_kv;
}

// s holds the scores of the warp's rows from `query` on against the keys from `key` on.
__device__ __forceinline__ void mask_scores(Scores& s, int query, int key, int seq_q, int seq_kv) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int limit = visible_keys(query + 8 * i + lane / 4, seq_q, seq_kv) - key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) {
      if (n / 2 * 8 + n % 2 >= limit) s[i / 2][n / 2][i % 2 * 2 + n % 2] = -kInfinity;
    }
  }
}

// ---- Mask ---------------------------------------------------------------------------------------
//% if kernel.mask == "window"
// Keys outside a row's window are invisible. It is aligned bottom-right: query i sees the keys from
// i + seq_kv - seq_q - window_left to i + seq_kv - seq_q + window_right.

struct Span {
  int seq_q, seq_kv, window_left, window_right;
};

// The number of keys up to the last one that a query sees.
__device__ __forceinline__ int visible_keys(int query, const Span& span) {
  return min(span.seq_kv, query + 1 - span.seq_q + span.seq_kv + span.window_right);
}

// The first of them.
__device__ __forceinline__ int first_visible(int query, const Span& span) {
  return max(0, query - span.seq_q + span.seq_kv - span.window_left);
}

// Whether a row of the warp does not see some of the next kStepKV keys.
__device__ __forceinline__ bool crosses_mask(int query, int key, const Span& span) {
  return key + kStepKV > visible_keys(query, span) ||
         key < first_visible(query + kWarpRows - 1, span);
}

// s holds the scores of the warp's rows from `query` on against the keys from `key` on.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kRowTiles][kTiles][4], int query, int key,
                                            const Span& span) {
  const int lane = $("ptx::thread_index()" if kernel.transposes else "threadIdx.x") % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = query + 8 * i + lane / 4, first_key = key + lane % 4 * 2;
    const int first = first_visible(row, span) - first_key;
    const int limit = visible_keys(row, span) - first_key;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      const int column = n / 2 * 8 + n % 2;
      if (column < first || column >= limit) s[i / 2][n / 2][i % 2 * 2 + n % 2] = -kInfinity;
    }
  }
}
//% else
// Keys at or beyond a row's limit are invisible. Causal is aligned bottom-right: query i sees the
// keys up to i + seq_kv - seq_q.

__device__ __forceinline__ int visible_keys(int query, int seq_q, int seq_kv) {
  return kCausal ? min(seq_kv, query + 1 - seq_q + seq_kv) : seq_kv;
}

// s holds the scores of the warp's rows from `query` on against the keys from `key` on.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kRowTiles][kTiles][4], int query, int key,
                                            int seq_q, int seq_kv) {
  const int lane = $("ptx::thread_index()" if kernel.transposes else "threadIdx.x") % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int limit = visible_keys(query + 8 * i + lane / 4, seq_q, seq_kv) - key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      if (n / 2 * 8 + n % 2 >= limit) s[i / 2][n / 2][i % 2 * 2 + n % 2] = -kInfinity;
    }
  }
}
//% endif

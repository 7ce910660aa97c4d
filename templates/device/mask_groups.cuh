// ---- Mask of packed rows ------------------------------------------------------------------------
// A row is query r / group of the group's head r % group; what other kernels take for a query is a row
// here, and seq_q counts rows. The group is a power of two: nothing is divided. Masks are aligned
// bottom-right: query i sees keys around i + seq_kv - the number of queries.

struct Span {
  int seq_q, seq_kv, group_log2$(", window_left, window_right" if kernel.mask == "window");
};

// The key that a row's query is aligned with.
__device__ __forceinline__ int aligned_key(int row, const Span& span) {
  return ((row - span.seq_q) >> span.group_log2) + span.seq_kv;
}

// The number of keys up to the last one that a row sees.
//% if kernel.mask == "full"
__device__ __forceinline__ int visible_keys(int row, const Span& span) { return span.seq_kv; }
//% else
__device__ __forceinline__ int visible_keys(int row, const Span& span) {
  return min(span.seq_kv, aligned_key(row, span) + 1$(" + span.window_right" if kernel.mask == "window"));
}
//% endif

//% if kernel.mask == "window"
// The first of them.
__device__ __forceinline__ int first_visible(int row, const Span& span) {
  return max(0, aligned_key(row, span) - span.window_left);
}

//% endif
// s holds the scores of the warp's rows from `row` on against the keys from `key` on.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kRowTiles][kTiles][4], int row, int key,
                                            const Span& span) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int own_row = row + 8 * i + lane / 4, first_key = key + lane % 4 * 2;
    const int limit = visible_keys(own_row, span) - first_key;
//% if kernel.mask == "window"
    const int first = first_visible(own_row, span) - first_key;
//% endif
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      const int column = n / 2 * 8 + n % 2;
      const bool hidden = $("column < first || " if kernel.mask == "window")column >= limit;
      if (hidden) s[i / 2][n / 2][i % 2 * 2 + n % 2] = -kInfinity;
    }
  }
}

// Where the log-sum-exp of a tile's row lies, counted from that of its first: a head's are together.
__device__ __forceinline__ i64 lse_place(int row, const Span& span) {
  const int head = row % (1 << span.group_log2), query = row >> span.group_log2;
  return i64(head) * (span.seq_q >> span.group_log2) + query;
}

// The first key in a query's window.
__device__ __forceinline__ int first_key_of(int query, const Span& span) {
  return max(0, query + span.seq_kv - span.seq_q - span.window_left);
}

// The last key that a query sees, below 0 if it sees none.
__device__ __forceinline__ int last_key_of(int query, const Span& span) {
//% if kernel.mask == "window"
  return min(span.seq_kv - 1, query + span.seq_kv - span.seq_q + span.window_right);
//% else
  return kCausal ? min(span.seq_kv - 1, query + span.seq_kv - span.seq_q) : span.seq_kv - 1;
//% endif
}

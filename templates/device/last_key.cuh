// The last key that a query sees, below 0 if it sees none.
__device__ __forceinline__ int last_key_of(int query, int seq_q, int seq_kv) {
  return kCausal ? min(seq_kv - 1, query + seq_kv - seq_q) : seq_kv - 1;
}

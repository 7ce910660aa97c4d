// ---- Packed sequences ---------------------------------------------------------------------------
// Sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1] of the packed tensors.
struct Sequence {
  int q, k;  // its first tokens
  int seq_q, seq_kv;
};

__device__ __forceinline__ Sequence sequence_at(const int* cu_seqlens_q, const int* cu_seqlens_k,
                                                i64 i) {
  const int q = cu_seqlens_q[i], k = cu_seqlens_k[i];
  return {q, k, cu_seqlens_q[i + 1] - q, cu_seqlens_k[i + 1] - k};
}

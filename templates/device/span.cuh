// The lengths of a sequence, by which its mask is aligned.
struct Span {
  int seq_q, seq_kv;
};

__device__ __forceinline__ int visible_keys(int query, const Span& span) {
  return visible_keys(query, span.seq_q, span.seq_kv);
}

template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kRowTiles][kTiles][4], int query, int key,
                                            const Span& span) {
  mask_scores(s, query, key, span.seq_q, span.seq_kv);
}

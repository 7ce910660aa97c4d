//% if kernel.softcap
// The derivative of tanh: 1 - tanh^2, without cancellation.
__device__ __forceinline__ float soft_slope(float x) {
  const float tail = soft_tail(x);
  return 4.f * tail * (1.f - tail);
}

//% endif
// The same for scores that stand on their side: the warp's keys from `key` on, queries from `query`
// on.$(" `derivative` is that of the softcap." if kernel.softcap)
//% if kernel.softcap
__device__ __forceinline__ void finish_scores(Scores<kStepQ>& s, Scores<kStepQ>& derivative,
                                              const ScoreTerms& terms, int key, int query,
                                              const Span& span) {
//% else
__device__ __forceinline__ void finish_scores(Scores<kStepQ>& s, const ScoreTerms& terms, int key,
                                              int query, const Span& span) {
//% endif
//% if kernel.bias != "none"
  const int first_row = key + threadIdx.x % 32 / 4, first_column = query + threadIdx.x % 4 * 2;
//% endif
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepQ / 4; ++n) {
//% if kernel.bias != "none"
      const int row = first_row + 8 * i, column = first_column + n / 2 * 8 + n % 2;
//% endif
      float& score = s[i / 2][n / 2][i % 2 * 2 + n % 2];
//% if kernel.softcap
      derivative[i / 2][n / 2][i % 2 * 2 + n % 2] = soft_slope(score * terms.scale_by_cap);
//% endif
//% if kernel.bias == "alibi"
      const float distance = fabsf(float(column + span.seq_kv - span.seq_q - row));
      score = fmaf(-terms.slope_log2, distance, scaled(score, terms));
//% elif kernel.bias_dtype
      if (row < span.seq_kv && column < span.seq_q) {
        add_bias(score, terms.bias[column * terms.stride + row], terms);
      } else {
        score = -kInfinity;
      }
//% else
      score = scaled(score, terms);
//% endif
    }
  }
}

//% if kernel.softcap
// What a derivative leaves of dS, in P's place.
__device__ __forceinline__ void damp(Scores<kStepQ>& p, const Scores<kStepQ>& derivative) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 2; ++i) {
    const int tile = i / (kStepQ / 2), n = i / 4 % (kStepQ / 8);
    p[tile][n][i % 4] *= derivative[tile][n][i % 4];
  }
}
//% endif

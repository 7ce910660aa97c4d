// The same for scores that stand on their side: the warp's keys from `key` on, queries from `query`
// on.
//% if kernel.bias == "none"
__device__ __forceinline__ void finish_scores(Scores<kStepQ>& s, const ScoreTerms& terms) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 2; ++i) {
    float& score = s[i / (kStepQ / 2)][i / 4 % (kStepQ / 8)][i % 4];
    score = scaled(score, terms);
  }
}
//% else
__device__ __forceinline__ void finish_score(float& score, const ScoreTerms& terms, int key,
                                             int query, const Span& span) {
//% if kernel.bias == "alibi"
  const float distance = fabsf(float(query + span.seq_kv - span.seq_q - key));
  score = fmaf(-terms.slope_log2, distance, scaled(score, terms));
//% else
  if (key < span.seq_kv && query < span.seq_q) {
    add_bias(score, terms.bias[query * terms.stride + key], terms);
  } else {
    score = -kInfinity;
  }
//% endif
}

__device__ __forceinline__ void finish_scores(Scores<kStepQ>& s, const ScoreTerms& terms, int key,
                                              int query, const Span& span) {
  const int row = key + threadIdx.x % 32 / 4, column = query + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepQ / 4; ++n) {
      float& score = s[i / 2][n / 2][i % 2 * 2 + n % 2];
      finish_score(score, terms, row + 8 * i, column + n / 2 * 8 + n % 2, span);
    }
  }
}
//% endif
//% if kernel.softcap

// The derivative of the softcap, that of tanh: 1 - tanh^2, without cancellation.
__device__ __forceinline__ void soft_slopes(Scores<kStepQ>& derivative, const Scores<kStepQ>& s,
                                            const ScoreTerms& terms) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 2; ++i) {
    const int tile = i / (kStepQ / 2), n = i / 4 % (kStepQ / 8);
    const float tail = soft_tail(s[tile][n][i % 4] * terms.scale_by_cap);
    derivative[tile][n][i % 4] = 4.f * tail * (1.f - tail);
  }
}

// What a derivative leaves of dS, in P's place.
__device__ __forceinline__ void damp(Scores<kStepQ>& p, const Scores<kStepQ>& derivative) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 2; ++i) {
    const int tile = i / (kStepQ / 2), n = i / 4 % (kStepQ / 8);
    p[tile][n][i % 4] *= derivative[tile][n][i % 4];
  }
}
//% endif

// ---- P and dS -----------------------------------------------------------------------------------

// From s = K Q^T: P = exp(factor s - L), already normalised, as L is the logarithm of the row's sum.
//% if kernel.bias_dtype
// A pair that the bias hides gets -0, which no exponential gives: whatever L is, it is told apart.
__device__ __forceinline__ bool hidden(float p) { return __float_as_uint(p) == 1u << 31; }

__device__ __forceinline__ float exponential(float score, float factor, float shift) {
  return score == -kInfinity ? -0.f : ptx::ex2(fmaf(score, factor, shift));
}

//% else
__device__ __forceinline__ float exponential(float score, float factor, float shift) {
  return ptx::ex2(fmaf(score, factor, shift));
}

//% endif
__device__ __forceinline__ void weights(Scores<kStepQ>& s, const float* lse, float factor) {
#pragma unroll
  for (int n = 0; n < kStepQ / 8; ++n) {
    const float2 l = *reinterpret_cast<const float2*>(lse + 8 * n + threadIdx.x % 4 * 2);
    const float shift[2] = {-kLog2e * l.x, -kLog2e * l.y};
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
      float& x = s[i / 4][n][i % 4];
      x = exponential(x, factor, shift[i % 2]);
    }
  }
}

// From dp = V dO^T: dS = P (dP - D), of the queries from `first` on. Its scale waits until the end.
__device__ __forceinline__ void score_gradient(Scores<kPartQ>& dp, const Scores<kStepQ>& p,
                                               const float* delta, int first) {
#pragma unroll
  for (int n = 0; n < kPartQ / 8; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(delta + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
      float& x = dp[i / 4][n][i % 4];
      const float weight = p[i / 4][first / 8 + n][i % 4];
      x = $("hidden(weight) ? 0.f : " if kernel.bias_dtype)weight * (x - (i % 2 ? d.y : d.x));
    }
  }
}

// ---- Mask ---------------------------------------------------------------------------------------
// Keys and queries are aligned at their ends: the last query with the last key.
struct Span {
  int seq_q, seq_kv;
//% if kernel.mask == "window"
  int window_left, window_right;  // keys that a query sees beside the aligned one
//% endif
};

// The first query that sees a key.
__device__ __forceinline__ int first_query_of(int key, const Span& span) {
//% if kernel.mask == "window"
  return key + span.seq_q - span.seq_kv - span.window_right;
//% else
  return kCausal ? key + span.seq_q - span.seq_kv : 0;
//% endif
}

// The one after the last that does.
//% if kernel.mask == "window"
__device__ __forceinline__ int end_query_of(int key, const Span& span) {
  return min(span.seq_q, key + span.seq_q - span.seq_kv + span.window_left + 1);
}

//% else
__device__ __forceinline__ int end_query_of(int key, const Span& span) { return span.seq_q; }

//% endif
// Whether the mask hides any of the warp's keys from `key` on from a query of the tile at `query`.
__device__ __forceinline__ bool crosses_mask(int key, int query, const Span& span) {
  const int last = key + kWarpKeys - 1;
//% if kernel.mask == "window"
  if (query + kBlockQ > end_query_of(key, span)) return true;
//% endif
  return last >= span.seq_kv || query < first_query_of(last, span);
}

// Zeroes P or dS of hidden pairs: of the warp's keys from `key` on and the queries from `query` on.
// Done last, so that no NaN of a hidden pair remains. Queries past the end need none: their Q, dO, L
// and D are zeros, which make dS = 0 and a finite P, and they add nothing.
template <int kQueries>
__device__ __forceinline__ void mask_weights(Scores<kQueries>& weights, int key, int query,
                                             const Span& span) {
  const int lane = threadIdx.x % 32;
  const int column = query + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = key + 8 * i + lane / 4;
    const int first = row < span.seq_kv ? first_query_of(row, span) - column : kQueries;
//% if kernel.mask == "window"
    const int end = end_query_of(row, span) - column;
//% endif
#pragma unroll
    for (int n = 0; n < kQueries / 4; ++n) {
      const int place = n / 2 * 8 + n % 2;
      if (place < first$(" || place >= end" if kernel.mask == "window")) weights[i / 2][n / 2][i % 2 * 2 + n % 2] = 0.f;
    }
  }
}

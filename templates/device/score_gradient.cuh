// ---- P and dS -----------------------------------------------------------------------------------

// From s = K Q^T: P = exp(scale s - L), already normalised, as L is the logarithm of the row's sum.
__device__ __forceinline__ void weights(Scores<kStepQ>& s, const float* lse, float scale_log2) {
#pragma unroll
  for (int n = 0; n < kStepQ / 8; ++n) {
    const float2 l = *reinterpret_cast<const float2*>(lse + 8 * n + threadIdx.x % 4 * 2);
    const float shift[2] = {-kLog2e * l.x, -kLog2e * l.y};
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
      float& x = s[i / 4][n][i % 4];
      x = ptx::ex2(fmaf(x, scale_log2, shift[i % 2]));
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
      x = p[i / 4][first / 8 + n][i % 4] * (x - (i % 2 ? d.y : d.x));
    }
  }
}

// The first query that sees a key. Causal is aligned bottom-right: query i sees the keys up to
// i + seq_kv - seq_q.
__device__ __forceinline__ int first_query_of(int key, int seq_q, int seq_kv) {
  return kCausal ? key + seq_q - seq_kv : 0;
}

// Zeroes P or dS of hidden pairs: of the warp's keys from `key` on and the queries from `query` on.
// Done last, so that no NaN of a hidden pair remains. Queries past the end need none: their Q, dO, L
// and D are zeros, which make P = 1 and dS = 0, and they add nothing.
template <int kQueries>
__device__ __forceinline__ void mask_weights(Scores<kQueries>& weights, int key, int query,
                                             int seq_q, int seq_kv) {
  const int lane = threadIdx.x % 32;
  const int column = query + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = key + 8 * i + lane / 4;
    const int first = row < seq_kv ? first_query_of(row, seq_q, seq_kv) - column : kQueries;
#pragma unroll
    for (int n = 0; n < kQueries / 4; ++n) {
      if (n / 2 * 8 + n % 2 < first) weights[i / 2][n / 2][i % 2 * 2 + n % 2] = 0.f;
    }
  }
}

// Weights for the other warps: rows are keys, columns the queries of a tile, from `query` on these.
__device__ __forceinline__ void share_weights(Element* tile, const Weights& weights, int query) {
  const int lane = threadIdx.x % 32;
  const int key = warp_keys() + lane / 4;
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 4; ++i) {
    const int row_tile = i / (kStepQ / 4), step = i / 4 % (kStepQ / 16), part = i % 4;
    const int row = key + 16 * row_tile + part % 2 * 8;
    Element* chunk = chunk_at<kBlockQ>(tile, row, query / 8 + 2 * step + part / 2);
    *reinterpret_cast<u32*>(chunk + lane % 4 * 2) = weights[step][row_tile][part];
  }
}

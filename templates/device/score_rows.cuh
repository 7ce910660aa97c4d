// The same for a thread's part of the scores of whole rows.
//% if kernel.bias == "none"
template <int kTiles>
__device__ __forceinline__ void finish_scores(float (&s)[kRowTiles][kTiles][4],
                                              const ScoreTerms& terms) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kTiles * 4; ++i) {
    float& score = s[i / (4 * kTiles)][i / 4 % kTiles][i % 4];
    score = scaled(score, terms);
  }
}
//% elif kernel.bias == "alibi"
// -slope |distance| for every score: the last key is aligned with the last query, as in the mask.
// The warp's rows begin at `query`, the keys at `key`.
template <int kTiles>
__device__ __forceinline__ void finish_scores(float (&s)[kRowTiles][kTiles][4],
                                              const ScoreTerms& terms, int query, int key,
                                              int seq_q, int seq_kv) {
  const int lane = $("ptx::thread_index()" if kernel.transposes else "threadIdx.x") % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const float aligned = query + 8 * i + lane / 4 + seq_kv - seq_q - key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      float& score = s[i / 2][n / 2][i % 2 * 2 + n % 2];
      const float distance = fabsf(aligned - (n / 2 * 8 + n % 2));
      score = fmaf(-terms.slope_log2, distance, scaled(score, terms));
    }
  }
}
//% else
// Two neighbours of a row, as one word where the whole tile allows it.
struct alignas(2 * sizeof(Bias)) BiasPair {
  Bias x, y;
};

template <bool kWhole>
__device__ __forceinline__ BiasPair load_bias(const Bias* row, int column, int columns) {
  if constexpr (kWhole) return *reinterpret_cast<const BiasPair*>(row + column);
  BiasPair pair = {};
  if (column < columns) pair.x = row[column];
  if (column + 1 < columns) pair.y = row[column + 1];
  return pair;
}

template <bool kWhole>
__device__ __forceinline__ void add_biases(Scores& s, const ScoreTerms& terms, int query, int key,
                                           int seq_q, int seq_kv) {
  const int lane = $("ptx::thread_index()" if kernel.transposes else "threadIdx.x") % 32;
  const int first = key + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = query + 8 * i + lane / 4;
    const Bias* source = terms.bias + row * terms.stride + first;
    const int columns = row < seq_q ? seq_kv - first : 0;
    __syncwarp();  // the next row's loads wait, or all rows' would fill the registers
#pragma unroll
    for (int n = 0; n < kStepKV / 8; ++n) {
      const BiasPair pair = load_bias<kWhole>(source, 8 * n, columns);
      add_bias(s[i / 2][n][i % 2 * 2], pair.x, terms);
      add_bias(s[i / 2][n][i % 2 * 2 + 1], pair.y, terms);
    }
  }
}

// The warp's rows begin at `query`, the keys at `key`; what lies beyond either end is not read.
__device__ __forceinline__ void finish_scores(Scores& s, const ScoreTerms& terms, int query,
                                              int key, int seq_q, int seq_kv) {
  const bool pairs = (terms.stride | i64(terms.bias) / i64(sizeof(Bias))) % 2 == 0;
  if (pairs && query + kWarpRows <= seq_q && key + kStepKV <= seq_kv) {
    add_biases<true>(s, terms, query, key, seq_q, seq_kv);
  } else {
    add_biases<false>(s, terms, query, key, seq_q, seq_kv);
  }
}
//% endif

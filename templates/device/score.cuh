// ---- Scores -------------------------------------------------------------------------------------
// What happens to a score between Q K^T and the mask, in the order of the contract: scale, softcap,
// bias. Scores leave in units of log2, so the softmax after them needs no factor of its own.
constexpr float kLog2e = 1.44269504f;

struct ScoreTerms {
//% if kernel.softcap
  float scale_by_cap, cap_log2;  // scale / cap, and cap log2(e)
//% else
  float scale_log2;
//% endif
//% if kernel.bias == "alibi"
  float slope_log2;  // of this head
//% elif kernel.bias != "none"
  const Bias* bias;  // of this head
  i64 stride;  // between its rows
//% endif
};

//% if kernel.softcap
// tanh with a relative error below 2^-21. Away from 0 from the exponential; near it, where that
// would cancel, x + x^3 P(x^2), P fitted to the interval. NaN stays NaN.
__device__ __forceinline__ float soft_sign(float x) {
  const float square = x * x;
  float p = fmaf(1.725698e-2f, square, -5.3052940e-2f);
  p = fmaf(p, square, 1.3325987e-1f);
  p = fmaf(p, square, -3.3333148e-1f);
  const float away = 1.f - 2.f * ptx::rcp(1.f + ptx::ex2(2.f * kLog2e * x));
  return fabsf(x) < 0.5f ? fmaf(p * square, x, x) : away;
}
//% endif

__device__ __forceinline__ float scaled(float score, const ScoreTerms& terms) {
//% if kernel.softcap
  return terms.cap_log2 * soft_sign(score * terms.scale_by_cap);
//% else
  return score * terms.scale_log2;
//% endif
}

//% if kernel.bias == "none"
__device__ __forceinline__ void finish_scores(Scores& s, const ScoreTerms& terms) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepKV / 2; ++i) {
    float& score = s[i / (kStepKV / 2)][i / 4 % (kStepKV / 8)][i % 4];
    score = scaled(score, terms);
  }
}
//% elif kernel.bias == "alibi"
// -slope |distance| for every score: the last key is aligned with the last query, as in the mask.
// The warp's rows begin at `query`, the keys at `key`.
__device__ __forceinline__ void finish_scores(Scores& s, const ScoreTerms& terms, int query,
                                              int key, int seq_q, int seq_kv) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const float aligned = query + 8 * i + lane / 4 + seq_kv - seq_q - key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) {
      float& score = s[i / 2][n / 2][i % 2 * 2 + n % 2];
      const float distance = fabsf(aligned - (n / 2 * 8 + n % 2));
      score = fmaf(-terms.slope_log2, distance, scaled(score, terms));
    }
  }
}
//% else
//% if kernel.bias_dtype == "fp32"
__device__ __forceinline__ float bias_value(float x) { return x; }
//% elif kernel.bias_dtype == "bf16"
__device__ __forceinline__ float bias_value(u16 x) { return __uint_as_float(u32(x) << 16); }
//% else
__device__ __forceinline__ float bias_value(u16 x) { return ptx::cvt_f32_f16(x); }
//% endif

// A bias of -inf hides its key, whatever the score is.
__device__ __forceinline__ void add_bias(float& score, Bias bias, const ScoreTerms& terms) {
  const float b = bias_value(bias);
  score = b == -kInfinity ? b : fmaf(b, kLog2e, scaled(score, terms));
}

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
  const int lane = threadIdx.x % 32, first = key + lane % 4 * 2;
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

// ---- Scores -------------------------------------------------------------------------------------
// What happens to a score between Q K^T and the mask, in the order of the contract: scale, softcap,
// bias. Scores leave in units of log2, so the softmax after them needs no factor of its own.

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
// 1 / (1 + exp(2 |x|)), from which tanh and its slope are made.
__device__ __forceinline__ float soft_tail(float x) {
  return ptx::rcp(1.f + ptx::ex2(2.f * kLog2e * fabsf(x)));
}

// tanh with a relative error below 2^-21. Away from 0 from the exponential; near it, where that
// would cancel, x + x^3 P(x^2), P fitted to the interval. NaN stays NaN.
__device__ __forceinline__ float soft_sign(float x) {
  const float square = x * x;
  float p = fmaf(1.725698e-2f, square, -5.3052940e-2f);
  p = fmaf(p, square, 1.3325987e-1f);
  p = fmaf(p, square, -3.3333148e-1f);
  const float away = copysignf(1.f - 2.f * soft_tail(x), x);
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

//% if kernel.bias_dtype == "fp32"
__device__ __forceinline__ float bias_value(float x) { return x; }

//% elif kernel.bias_dtype == "bf16"
__device__ __forceinline__ float bias_value(u16 x) { return __uint_as_float(u32(x) << 16); }
//% elif kernel.bias_dtype == "fp16"
__device__ __forceinline__ float bias_value(u16 x) { return ptx::cvt_f32_f16(x); }

//% endif
//% if kernel.bias_dtype
// A bias of -inf hides its key, whatever the score is.
__device__ __forceinline__ void add_bias(float& score, Bias bias, const ScoreTerms& terms) {
  const float b = bias_value(bias);
  score = b == -kInfinity ? b : fmaf(b, kLog2e, scaled(score, terms));
}
//% endif

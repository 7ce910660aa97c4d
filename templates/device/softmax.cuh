// ---- Online softmax -----------------------------------------------------------------------------
// Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1. A thread keeps, for each of its rows,
// the largest score so far and its own share of the row's sum of exponentials.

struct RowState {
  float max[kRowTiles][2];
  float sum[kRowTiles][2];
};

__device__ __forceinline__ void reset(RowState& row) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    row.max[i / 2][i % 2] = -kInfinity;
    row.sum[i / 2][i % 2] = 0.f;
  }
}

// Turns scores into weights exp(scale (s - max)), and rescales what was summed under the old
// maximum. The maximum is subtracted before scaling: the largest weight is then exactly 1, however
// large the scores are.
__device__ __forceinline__ void online_softmax(Scores& s, Accumulator& o, RowState& row,
                                               float scale_log2) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int tile = i / 2, half = i % 2;
    float max = row.max[tile][half];
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) max = fmaxf(max, s[tile][n / 2][2 * half + n % 2]);
    max = quad_max(max);
    const float reference = reference_of(max);
    const float rescale = ptx::ex2((row.max[tile][half] - reference) * scale_log2);
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) {
      float& weight = s[tile][n / 2][2 * half + n % 2];
//% if kernel.dtype == "e4m3"
      weight = ptx::ex2(fmaf(weight - reference, scale_log2, kWeightExponent));
//% else
      weight = ptx::ex2((weight - reference) * scale_log2);
//% endif
      sum += weight;
    }
    row.max[tile][half] = max;
    row.sum[tile][half] = row.sum[tile][half] * rescale + sum;
#pragma unroll
    for (int n = 0; n < kDV / 4; ++n) o[tile][n / 2][2 * half + n % 2] *= rescale;
  }
}

// Turns scores into rounded weights, exp(scale (s - max)), and keeps O and the sums in step.
__device__ __forceinline__ void weigh(Weights& p, Scores& s, Accumulator& o, RowState& row,
                                      float scale_log2) {
  online_softmax(s, o, row, scale_log2);
  round_weights(p, s);
}

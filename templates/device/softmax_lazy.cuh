// ---- Online softmax, lazily ---------------------------------------------------------------------
// FlashAttention-2, algorithm 1, with weights relative to an earlier maximum: any reference gives the
// same result while no weight leaves the range of its type. So scores become weights at once, by one
// multiply-add and one exponential each, and only where their sum shows that one grew large is the
// maximum looked for again and what was summed so far rescaled.

struct RowState {
  float max[kRowTiles][2];  // the largest score when it was last looked for
  float sum[kRowTiles][2];
  bool settled[kRowTiles];  // every row of these 16 has a reference, and none is huge
};

constexpr float kLargestSum = 16384.f;  // of a lane's weights in one tile; fp16 ends at 65504
// A fused multiply-add takes the exact product from a rounded reference: beyond this exponent the
// rounding would show, and the difference is taken before it is scaled.
constexpr float kHugeExponent = 262144.f;

__device__ __forceinline__ void reset(RowState& row) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    row.max[i / 2][i % 2] = -kInfinity;
    row.sum[i / 2][i % 2] = 0.f;
    row.settled[i / 2] = false;
  }
}

using TileScores = float[kStepKV / 8][4];
using TileWeights = u32[kStepKV / 16][4];

// Weights of 16 rows, exp2(s scale - shift), and the lane's sums of them.
__device__ __forceinline__ void exponentials(TileWeights& p, const TileScores& s, float (&sum)[2],
                                             const float (&shift)[2], float scale_log2) {
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int i = 0; i < kStepKV / 4; ++i) {
    const int n = i / 2, half = i % 2;
    const float x = ptx::ex2(fmaf(s[n][2 * half], scale_log2, -shift[half]));
    const float y = ptx::ex2(fmaf(s[n][2 * half + 1], scale_log2, -shift[half]));
    sum[half] += x + y;
    p[n / 2][n % 2 * 2 + half] = ptx::cvt_$(ptx_type(kernel.dtype))x2(x, y);
  }
}

// Looks for the maximum of 16 rows, takes it from their scores, and rescales what was summed under
// the old one.
__device__ __forceinline__ void move_reference(TileScores& s, float (&o)[kDV / 8][4],
                                               float (&max)[2], float (&sum)[2], bool& settled,
                                               float scale_log2) {
  settled = true;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float old = max[half];
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) max[half] = fmaxf(max[half], s[n / 2][2 * half + n % 2]);
    max[half] = quad_max(max[half]);
    const float reference = reference_of(max[half]);
    const float rescale = ptx::ex2((old - reference) * scale_log2);
    sum[half] *= rescale;
#pragma unroll
    for (int n = 0; n < kDV / 4; ++n) o[n / 2][2 * half + n % 2] *= rescale;
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) s[n / 2][2 * half + n % 2] -= reference;
    settled &= fabsf(max[half]) * scale_log2 < kHugeExponent;
  }
  settled = __all_sync(~0u, settled);
}

// Turns scores into rounded weights, exp(scale (s - max)) for a recent maximum. The first attempt
// takes it from before; if that was none, or too small, there is a second.
__device__ __forceinline__ void weigh(Weights& p, Scores& s, Accumulator& o, RowState& row,
                                      float scale_log2) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    float sum[2], shift[2] = {row.max[tile][0] * scale_log2, row.max[tile][1] * scale_log2};
    bool good = row.settled[tile];
#pragma unroll 1
    for (;;) {
      if (!good) {
        move_reference(s[tile], o[tile], row.max[tile], row.sum[tile], row.settled[tile],
                       scale_log2);
        shift[0] = shift[1] = 0.f;
      }
      exponentials(p[tile], s[tile], sum, shift, scale_log2);
      if (!good || !__any_sync(~0u, fmaxf(sum[0], sum[1]) > kLargestSum)) break;
      good = false;
    }
    row.sum[tile][0] += sum[0];
    row.sum[tile][1] += sum[1];
  }
}

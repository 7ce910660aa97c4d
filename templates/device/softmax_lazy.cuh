// ---- Online softmax, lazily ---------------------------------------------------------------------
// FlashAttention-2, algorithm 1, with weights relative to an earlier maximum: any reference gives the
// same result while no weight leaves the range of its type. So scores become weights at once, by one
// multiply-add and one exponential each, and only where their sum shows that one grew large is the
// maximum looked for again and what was summed so far rescaled.

struct RowState {
  float max[kRowTiles][2];  // the largest score when it was last looked for
  float sum[kRowTiles][2];
  bool settled[kRowTiles];  // all of these 16 rows are
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
    p[n / 2][n % 2 * 2 + half] = $(cvt(kernel, kernel.dtype))(x, y);
  }
}

// Whether a row has a reference that a fused multiply-add may take away.
__device__ __forceinline__ bool is_settled(float max, float scale_log2) {
  return fabsf(max) * scale_log2 < kHugeExponent;
}

// Looks for the maximum of those of 16 rows that are to move, takes it from their scores, and
// rescales what was summed under the old one. What becomes of a row depends on no other row.
__device__ __forceinline__ void move_references(TileScores& s, float (&o)[kDV / 8][4],
                                                float (&max)[2], float (&sum)[2], float (&shift)[2],
                                                const bool (&moves)[2], float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = max[half];
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) highest = fmaxf(highest, s[n / 2][2 * half + n % 2]);
    highest = quad_max(highest);
    const float reference = moves[half] ? reference_of(highest) : 0.f;
    const float rescale = moves[half] ? ptx::ex2((max[half] - reference) * scale_log2) : 1.f;
    if (moves[half]) {
      max[half] = highest;
      shift[half] = 0.f;
    }
    sum[half] *= rescale;
#pragma unroll
    for (int n = 0; n < kDV / 4; ++n) o[n / 2][2 * half + n % 2] *= rescale;
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) s[n / 2][2 * half + n % 2] -= reference;
  }
}

// Turns scores into rounded weights, exp(scale (s - max)) for a recent maximum. Where a row has none
// yet, or its weights show that it is too small, it moves, and there is another attempt.
__device__ __forceinline__ void weigh(Weights& p, Scores& s, Accumulator& o, RowState& row,
                                      float scale_log2) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    float (&max)[2] = row.max[tile];
    float sum[2], shift[2] = {max[0] * scale_log2, max[1] * scale_log2};
    bool moves[2] = {!is_settled(max[0], scale_log2), !is_settled(max[1], scale_log2)};
    bool again = !row.settled[tile];
#pragma unroll 1
    for (;;) {
      if (again) {
        move_references(s[tile], o[tile], max, row.sum[tile], shift, moves, scale_log2);
        const bool settled = is_settled(max[0], scale_log2) && is_settled(max[1], scale_log2);
        row.settled[tile] = __all_sync(~0u, settled);
      }
      exponentials(p[tile], s[tile], sum, shift, scale_log2);
      again = __any_sync(~0u, fmaxf(sum[0], sum[1]) > kLargestSum);
      if (!again) break;
      moves[0] = quad_max(sum[0]) > kLargestSum;
      moves[1] = quad_max(sum[1]) > kLargestSum;
    }
    row.sum[tile][0] += sum[0];
    row.sum[tile][1] += sum[1];
  }
}

// ---- Online softmax, lazily and in place --------------------------------------------------------
// FlashAttention-3, algorithm 1, with weights relative to an earlier maximum, which changes nothing while
// none leaves the range of e4m3. Its weight is 2^6: what a row has seen by then may outgrow it 7 times,
// and 2^-16 of it is not lost. Unit normal scores seldom do: of 256 the largest is 2.8 or so, and one
// above 2.8 + ln 7 comes once in a million. So scores become weights at once, in their own registers; only
// where a sum tells that one may be too large is it looked for, and if it is, scores are computed again
// and what was summed so far is rescaled. What the first tiles show of a row is always looked at.
//
// A lone large weight need not be a number of e4m3: O is divided by the sum of the rounded weights, with
// which its rounding goes; the log-sum-exp takes the weights as they are.
constexpr float kLargestWeight = 448.f;
constexpr int kLookedAt = 2;  // whole tiles

struct RowState {  // of the two rows of a thread
  float max[2];  // the largest score when it was last looked for
  float sum[2];
  bool settled;  // all rows of the warp are
};

// A fused multiply-add takes the exact product from a rounded reference: beyond this exponent the
// rounding would show, and the difference is taken before it is scaled.
constexpr float kHugeExponent = 262144.f;

__device__ __forceinline__ void reset(RowState& row) {
  row = {{-kInfinity, -kInfinity}, {0.f, 0.f}, false};
}

// Whether a row has a reference that a fused multiply-add may take away.
__device__ __forceinline__ bool is_settled(float max, float scale_log2) {
  return fabsf(max) * scale_log2 < kHugeExponent;
}

// All rows of the warp.
__device__ __forceinline__ bool all_settled(const RowState& row, float scale_log2) {
  const bool both = is_settled(row.max[0], scale_log2) && is_settled(row.max[1], scale_log2);
  return __all_sync(~0u, both);
}

// Makes these the references of the rows, for what was summed so far too: O, and T once it is there. If
// the rows are fresh those belong to others: they stay. A row that sees no key keeps no reference.
__device__ __forceinline__ void move_to(RowState& row, Accumulator& o, TileSums& t,
                                        const float (&max)[2], float scale_log2, bool fresh) {
  finish_products<0>(t);
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float down = (row.max[half] - reference_of(max[half])) * scale_log2;
    factor[half] = row.max[half] == max[half] ? 1.f : ptx::ex2(down);
    row.sum[half] *= factor[half];
    row.max[half] = max[half];
  }
  row.settled = all_settled(row, scale_log2);
  if (fresh) return;
#pragma unroll
  for (int i = 0; i < kRowsV / 2; ++i) o[0][i / 4][i % 4] *= factor[i / 2 % 2];
#pragma unroll
  for (int i = 0; i < kLastColumns / 2; ++i) t[0][i / 4][i % 4] *= factor[i / 2 % 2];
}

// Gives rows the maximum for their reference: those that have none, and all that are looked at. Where a
// multiply-add may not take it away it is taken from the scores: `shift`, what the exponent is still to
// be lowered by, says so.
__device__ __forceinline__ void settle(Scores& s, Accumulator& o, TileSums& t, RowState& row,
                                       float (&shift)[2], float scale_log2, bool fresh,
                                       bool looks) {
  float max[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = row.max[half];
#pragma unroll
    for (int n = 0; n < kBlockKV / 4; ++n) highest = fmaxf(highest, s[0][n / 2][2 * half + n % 2]);
    highest = quad_max(highest);
    max[half] = row.max[half];
    if (is_settled(max[half], scale_log2) && (!looks || highest == max[half])) continue;
    max[half] = highest;
    const float reference = reference_of(max[half]);
    shift[half] = -kWeightExponent;
#pragma unroll
    for (int n = 0; n < kBlockKV / 4; ++n) s[0][n / 2][2 * half + n % 2] -= reference;
  }
  if (__any_sync(~0u, max[0] != row.max[0] || max[1] != row.max[1] || !row.settled)) {
    move_to(row, o, t, max, scale_log2, fresh);
  }
}

//% if kernel.scales == "block"
// Scores in units of the tile's scale factor become those that all tiles share.
template <int kTiles>
__device__ __forceinline__ void multiply(float (&s)[1][kTiles][4], float factor) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) s[0][i / 4][i % 4] *= factor;
}

//% endif
// Scores become weights, exp2(s scale - shift).
__device__ __forceinline__ void exponentials(Scores& s, const float (&shift)[2], float scale_log2) {
#pragma unroll
  for (int i = 0; i < kBlockKV / 2; ++i) {
    float& x = s[0][i / 4][i % 4];
    x = ptx::ex2(fmaf(x, scale_log2, -shift[i / 2 % 2]));
  }
}

// A lane's sums of its weights, and the larger of the halves in which they are made: no weight exceeds it.
__device__ __forceinline__ float add_up(float (&sum)[2], const Scores& s) {
  float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kBlockKV / 4; ++i) {
    part[i % 4] += s[0][i / 2][i % 2 * 2] + s[0][i / 2][i % 2 * 2 + 1];
  }
  sum[0] = part[0] + part[2];
  sum[1] = part[1] + part[3];
  return fmaxf(fmaxf(part[0], part[2]), fmaxf(part[1], part[3]));
}

// The weights of rows that have too large ones again, from a maximum that is theirs. `rescored(few,
// column)` computes the scores of 8 keys; what becomes of a row depends on no other row.
template <typename Rescored>
__device__ __forceinline__ void lower(Scores& s, Accumulator& o, TileSums& t, RowState& row,
                                      float (&sum)[2], float scale_log2, bool fresh,
                                      const Rescored& rescored) {
  float largest[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kBlockKV / 2; ++i) {
    largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[0][i / 4][i % 4]);
  }
  const bool moves[2] = {quad_max(largest[0]) > kLargestWeight,
                         quad_max(largest[1]) > kLargestWeight};
  if (!__any_sync(~0u, moves[0] || moves[1])) return;
  float max[2] = {row.max[0], row.max[1]};
  FewScores few;
#pragma unroll 1
  for (int n = 0; n < kBlockKV / 8; ++n) {
    rescored(few, 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) max[i / 2] = fmaxf(max[i / 2], few[0][0][i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float highest = quad_max(max[half]);
    max[half] = moves[half] ? highest : row.max[half];
  }
  // s moves on by one place a step, so that the loop need not be unrolled.
#pragma unroll 1
  for (int n = 0; n < kBlockKV / 8; ++n) {
    rescored(few, 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = ptx::ex2(fmaf(few[0][0][i] - max[i / 2], scale_log2, kWeightExponent));
      const float next = moves[i / 2] ? weight : s[0][0][i];
#pragma unroll
      for (int k = 0; k + 1 < kBlockKV / 8; ++k) s[0][k][i] = s[0][k + 1][i];
      s[0][kBlockKV / 8 - 1][i] = next;
    }
  }
  __syncwarp();  // all lanes have read their rows and keys again: a vote would not order that
  add_up(sum, s);
  move_to(row, o, t, max, scale_log2, fresh);
}

// Turns scores into weights, exp(scale (s - max)) 2^6 for a recent maximum.
template <typename Rescored>
__device__ __forceinline__ void weigh(Scores& s, Accumulator& o, TileSums& t, RowState& row,
                                      float scale_log2, bool fresh, bool looks,
                                      const Rescored& rescored) {
  float sum[2], shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shift[half] = fmaf(row.max[half], scale_log2, -kWeightExponent);
  }
  if (looks || !row.settled) settle(s, o, t, row, shift, scale_log2, fresh, looks);
  exponentials(s, shift, scale_log2);
  if (__any_sync(~0u, add_up(sum, s) > kLargestWeight)) {
    lower(s, o, t, row, sum, scale_log2, fresh, rescored);
  }
  row.sum[0] += sum[0];
  row.sum[1] += sum[1];
}

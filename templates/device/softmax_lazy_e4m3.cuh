//% if kernel.bias_dtype
// ---- Online softmax -----------------------------------------------------------------------------
// FlashAttention-3, algorithm 1. The largest weight of a row is 2^5. To compute scores again their biases
// would have to be read again: the maximum is looked for in every tile instead, and no weight is too large.
//% else
// ---- Online softmax, lazily ---------------------------------------------------------------------
// FlashAttention-3, algorithm 1, with weights relative to an earlier maximum, which changes nothing while
// none leaves the range of e4m3. Its weight is 2^5: what a row has seen by then may outgrow it 14 times,
// and 2^-15 of it is not lost. Unit normal scores hardly ever do: of 512 the largest is 3.0 or so, and one
// above 3.0 + ln 14 comes once in 100 million. So scores become weights at once, rounded and packed; only
// where a sum tells that one may be too large is it looked for, and if it is, scores are computed again
// and what was summed so far is rescaled. By then the products with V have begun: they do not wait for
// an answer that is always no. The first tiles of a row are always looked at, and then those
// that are four times as far on.
//% endif
//
// A lone large weight need not be a number of e4m3: O is divided by the sum of the rounded weights, with
// which its rounding goes; the log-sum-exp takes the weights as they are.
//% if not kernel.bias_dtype
constexpr float kLargestWeight = 448.f;

// Whether a tile is looked at, the so-manieth of those whose keys a row all sees (the others come before).
// To look at the last one would help none that follows, and pays only where few came before.
__device__ __forceinline__ bool is_looked_at(int tile, bool last) {
  const bool due = tile <= 0 || (tile & (tile - 1) | tile & 0x2aaaaaaa) == 0;
  return due && !(last && tile >= 4);
}

//% endif
// Makes these the references of the rows, for what was summed so far too: nothing, where no row had one.
// A row that sees no key keeps none.
__device__ __forceinline__ void move_to(RowState& row, Accumulator& o, const float (&max)[2],
                                        float scale_log2) {
  const bool fresh = __all_sync(~0u, fmaxf(row.max[0], row.max[1]) == -kInfinity);
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float down = (row.max[half] - reference_of(max[half])) * scale_log2;
    factor[half] = row.max[half] == max[half] ? 1.f : ptx::ex2(down);
    row.sum[half] *= factor[half];
    row.max[half] = max[half];
  }
  if (fresh) return;
#pragma unroll
  for (int i = 0; i < kRowsV / 2; ++i) {
    if (!is_beside_ones(i)) o[0][i / 4][i % 4] *= factor[i / 2 % 2];
  }
}

// Gives rows the maximum for their reference: those that have none, and all that are looked at.
__device__ __forceinline__ void settle(Scores& s, Accumulator& o, RowState& row, float scale_log2,
                                       bool looks) {
  float max[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float highest = quad_max(highest_of(s, half, row.max[half]));
    const bool stays = !looks && is_settled(row.max[half], scale_log2);
    max[half] = stays ? row.max[half] : highest;
  }
  if (__any_sync(~0u, max[0] != row.max[0] || max[1] != row.max[1])) {
    move_to(row, o, max, scale_log2);
  }
  take_references(s, row, scale_log2);
}

//% if kernel.scales == "block"
// Scores in units of the tile's scale factor become those that all tiles share.
template <int kTiles>
__device__ __forceinline__ void multiply(float (&s)[1][kTiles][4], float factor) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) s[0][i / 4][i % 4] *= factor;
}
//% if unscaled(kernel)

// Those of one of a thread's rows.
__device__ __forceinline__ void multiply(Scores& s, int half, float factor) {
#pragma unroll
  for (int n = 0; n < kBlockKV / 4; ++n) s[0][n / 2][2 * half + n % 2] *= factor;
}
//% endif

//% endif
// Scores of 32 keys become weights, exp2(s scale - shift), each row's by its own. They join a lane's sums
// and are rounded.
__device__ __forceinline__ void weigh_step(u32 (&p)[4], float (&sum)[2], const float (&s)[4][4],
                                           const float (&shift)[2], const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = i / 2 * 2, half = i % 2;
    float w[4] = {s[n][2 * half], s[n][2 * half + 1], s[n + 1][2 * half], s[n + 1][2 * half + 1]};
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = ptx::ex2(fmaf(w[j], scale[half], -shift[half]));
    sum[half] += (w[0] + w[1]) + (w[2] + w[3]);
    p[i] = ptx::cvt_e4m3x2(w[0], w[1]) | u32(ptx::cvt_e4m3x2(w[2], w[3])) << 16;
  }
}

//% if not kernel.bias_dtype
// Whether a row has the largest weight there is, which stands for all that are larger.
__device__ __forceinline__ bool has_largest(const Weights& p, int half) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < kBlockKV / 16; ++i) found |= p[0][i / 2][i % 2 * 2 + half] + 0x02020202;
  return quad_max(found & 0x80808080 ? 1.f : 0.f) > 0.f;
}

// The weights of rows that have too large ones again, from a maximum that is theirs. `rescored(few, step)`
// computes the scores of 32 keys; what becomes of a row depends on no other row.
template <typename Rescored>
__device__ __forceinline__ void lower(Weights& p, Accumulator& o, RowState& row, float (&sum)[2],
                                      const bool (&moves)[2], float scale_log2,
                                      const Rescored& rescored) {
  float max[2] = {row.max[0], row.max[1]};
  FewScores few;
#pragma unroll 1
  for (int step = 0; step < kBlockKV / 32; ++step) {
    rescored(few, step);
#pragma unroll
    for (int i = 0; i < 16; ++i) max[i / 2 % 2] = fmaxf(max[i / 2 % 2], few[0][i / 4][i % 4]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float highest = quad_max(max[half]);
    max[half] = moves[half] ? highest : row.max[half];
    sum[half] = moves[half] ? 0.f : sum[half];
  }
  move_to(row, o, max, scale_log2);
  // p moves on by one place a step, so that the loop need not be unrolled.
#pragma unroll 1
  for (int step = 0; step < kBlockKV / 32; ++step) {
    rescored(few, step);
    u32 fresh[4];
    float fresh_sum[2] = {0.f, 0.f};
    const float shift[2] = {-kWeightExponent, -kWeightExponent};
#pragma unroll
    for (int i = 0; i < 16; ++i) few[0][i / 4][i % 4] -= row.max[i / 2 % 2];
    weigh_step(fresh, fresh_sum, few[0], shift, {scale_log2, scale_log2});
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fresh[i] = moves[i % 2] ? fresh[i] : p[0][0][i];
      if (moves[i % 2] && i < 2) sum[i] += fresh_sum[i];
    }
#pragma unroll
    for (int i = 0; i < kBlockKV / 8; ++i) {
      p[0][i / 4][i % 4] = i + 4 < kBlockKV / 8 ? p[0][(i + 4) / 4][i % 4] : fresh[i % 4];
    }
  }
}

//% endif
// Turns scores into weights, exp(scale (s - max)) 2^5 for a recent maximum, or if the row looks that of
// all its scores so far; and gives a lane's sums of them, before they were rounded.
__device__ __forceinline__ void weigh(Weights& p, float (&sum)[2], Scores& s, Accumulator& o,
                                      RowState& row, float scale_log2, bool looks$(", float unit" if unscaled(kernel))) {
//% if unscaled(kernel)
  // s is in units of the tile's scale factor.
  float factor[2] = {scale_log2 * unit, scale_log2 * unit};
//% else
  const float factor[2] = {scale_log2, scale_log2};
//% endif
//% if unscaled(kernel)
  if (looks || !all_settled(row, scale_log2)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // a row's bits are not to depend on what others need
      if (!looks && is_settled(row.max[half], scale_log2)) continue;
      multiply(s, half, unit);
      factor[half] = scale_log2;
    }
    settle(s, o, row, scale_log2, looks);
  }
//% else
  if (looks || !all_settled(row, scale_log2)) settle(s, o, row, scale_log2, looks);
//% endif
  float shift[2];  // what an exponent is still to be lowered by
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float max = is_settled(row.max[half], scale_log2) ? row.max[half] : 0.f;
    shift[half] = fmaf(max, scale_log2, -kWeightExponent);
    sum[half] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < kBlockKV / 32; ++step) {
    const auto& few = reinterpret_cast<const float (&)[4][4]>(s[0][4 * step]);
    weigh_step(p[0][step], sum, few, shift, factor);
  }
}

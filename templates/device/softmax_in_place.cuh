// ---- Online softmax, lazily and in place --------------------------------------------------------
// FlashAttention-3, algorithm 1, with weights relative to an earlier maximum: any reference gives the
// same result while no weight leaves the range of its type. So scores become weights at once, in their
// own registers, by one multiply-add and one exponential each. Only where their sum shows that one grew
// large are the scores computed again, the maximum looked for, and what was summed so far rescaled.

// O is to follow the rows of a tile whose references move. But products are being added to it, and to
// wait for them takes all four warps, while one may be here alone. So the warp leaves a factor of each row.
struct Late {
  float* factors;
  bool fresh;  // O belongs to other rows: it stays, and the factors are theirs
};

// Makes these the references of the rows, for what was summed so far too. A row that sees no key keeps
// no reference. `again`: rows of the warp have moved in this tile already.
__device__ __forceinline__ void move_to(RowState& row, const Late& late, const float (&max)[2],
                                        float scale_log2, bool again) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float down = (row.max[half] - reference_of(max[half])) * scale_log2;
    const float factor = row.max[half] == max[half] ? 1.f : ptx::ex2(down);
    row.sum[half] *= factor;
    row.max[half] = max[half];
    if (late.fresh || threadIdx.x % 4 != 0) continue;
    float& all = late.factors[tile_row(half)];
    all = again ? all * factor : factor;
  }
  row.settled = false;
}

// O follows, once its products are done.
__device__ __forceinline__ void follow(RowState& row, Accumulator& o, const Late& late,
                                       float scale_log2) {
  if (row.settled) return;
  row.settled = all_settled(row, scale_log2);
  if (late.fresh) return;
  __syncwarp();  // one lane of a quad wrote its factors
  const u32 thread = ptx::thread_index();  // asked again, lest the address be kept all along
  const float* mine = late.factors + thread / 32 * kWarpRows + thread % 32 / 4;
  const float factor[2] = {mine[0], mine[8]};
  __syncwarp();  // ... and is to write there again
#pragma unroll
  for (int i = 0; i < kDV / 2; ++i) o[0][i / 4][i % 4] *= factor[i / 2 % 2];
}

//% if not kernel.bias_dtype
// Gives the rows that have none a reference, the maximum.
__device__ __forceinline__ void settle(Scores& s, RowState& row, const Late& late,
                                       float scale_log2) {
  float max[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float highest = quad_max(highest_of(s, half, row.max[half]));
    max[half] = is_settled(row.max[half], scale_log2) ? row.max[half] : highest;
  }
  move_to(row, late, max, scale_log2, false);
  take_references(s, row, scale_log2);
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

// A lane's sums of its weights.
__device__ __forceinline__ void add_up(float (&sum)[2], const Scores& s) {
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int i = 0; i < kBlockKV / 4; ++i) {
    sum[i % 2] += s[0][i / 2][i % 2 * 2] + s[0][i / 2][i % 2 * 2 + 1];
  }
}

//% if kernel.bias_dtype
// Turns scores into weights, exp(scale (s - max)). To compute scores again their biases would have to be
// read again: the maximum is looked for in every tile instead.
__device__ __forceinline__ void weigh(Scores& s, RowState& row, const Late& late,
                                      float scale_log2) {
  float max[2], sum[2], shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    max[half] = quad_max(highest_of(s, half, row.max[half]));
    shift[half] = reference_of(max[half]) * scale_log2;
  }
  const bool moves = max[0] != row.max[0] || max[1] != row.max[1];
  row.settled = !__any_sync(~0u, moves);
  if (!row.settled) move_to(row, late, max, scale_log2, false);
  exponentials(s, shift, scale_log2);
  add_up(sum, s);
  row.sum[0] += sum[0];
  row.sum[1] += sum[1];
}
//% else
constexpr float kLargestSum = 16384.f;  // of a lane's weights in one tile; fp16 ends at 65504

// The weights of those rows again, from a maximum that is theirs. `rescored(few, column)` computes the
// scores of 8 keys; what becomes of a row depends on no other row.
template <typename Rescored>
__device__ __forceinline__ void lower(Scores& s, RowState& row, const Late& late, float (&sum)[2],
                                      float scale_log2, const Rescored& rescored) {
  const bool moves[2] = {quad_max(sum[0]) > kLargestSum, quad_max(sum[1]) > kLargestSum};
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
      const float weight = ptx::ex2((few[0][0][i] - max[i / 2]) * scale_log2);
      const float next = moves[i / 2] ? weight : s[0][0][i];
#pragma unroll
      for (int k = 0; k + 1 < kBlockKV / 8; ++k) s[0][k][i] = s[0][k + 1][i];
      s[0][kBlockKV / 8 - 1][i] = next;
    }
  }
//% if kernel.tiles_stay
  __syncwarp();  // all lanes have read Q and K again: a vote would not order that
//% endif
  add_up(sum, s);
  move_to(row, late, max, scale_log2, !row.settled);
}

// Turns scores into weights, exp(scale (s - max)) for a recent maximum.
template <typename Rescored>
__device__ __forceinline__ void weigh(Scores& s, RowState& row, const Late& late, float scale_log2,
                                      const Rescored& rescored) {
  if (!row.settled) settle(s, row, late, scale_log2);
  float sum[2], shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shift[half] = is_settled(row.max[half], scale_log2) ? row.max[half] * scale_log2 : 0.f;
  }
  exponentials(s, shift, scale_log2);
  add_up(sum, s);
  if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > kLargestSum)) {
    lower(s, row, late, sum, scale_log2, rescored);
  }
  row.sum[0] += sum[0];
  row.sum[1] += sum[1];
}
//% endif

__device__ __forceinline__ void round_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kBlockKV / 4; ++i) {
    const float (&pair)[4] = s[0][i / 2];
    p[0][i / 4][i % 4] = ptx::cvt_$(ptx_type(kernel.dtype))x2(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
  }
}

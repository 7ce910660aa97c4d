// ---- Parts of a row -----------------------------------------------------------------------------
// What some of its keys gave a row: the output, not normalised, the largest score and the sum of
// exponentials under it. Parts merge exactly, however large the scores: a log-sum-exp, which adds
// the two, would round the sum away. When a warp merges a row, lane i has columns i, i + 32 …

constexpr int kLaneColumns = (kHeadDimV + 31) / 32;
constexpr int kPartColumns = kDV + 8;  // in shared memory: O, maximum, sum; 8 rows in 8 bank groups

// Leaves the part of this warp's keys in shared memory.
__device__ __forceinline__ void store_part(float* part, const Accumulator& o, const RowState& row) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    float* to = part + tile_row(i) * kPartColumns;
#pragma unroll
    for (int n = 0; n < kDV / 8; ++n) {
      const float (&pair)[4] = o[i / 2][n];
      *reinterpret_cast<float2*>(to + 8 * n + threadIdx.x % 4 * 2) =
          make_float2(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
    const float sum = quad_sum(row.sum[i / 2][i % 2]);
    if (threadIdx.x % 4 == 0) {
      *reinterpret_cast<float2*>(to + kDV) = make_float2(row.max[i / 2][i % 2], sum);
    }
  }
}

// Merges the warps' parts of one row, in the order of the warps, into the part of all their keys.
__device__ __forceinline__ void merge_warps(const float* part, float scale_log2, float* o, float* m,
                                            float* l) {
  constexpr int kNext = kBlockQ * kPartColumns;  // from a warp's part to the next warp's
  const int lane = threadIdx.x % 32;
  float max = -kInfinity;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, part[w * kNext + kDV]);
  float sum = 0.f;
  float sums[kLaneColumns] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w, part += kNext) {
    const float weight = ptx::ex2((part[kDV] - reference_of(max)) * scale_log2);
    sum += weight * part[kDV + 1];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if (32 * c + lane < kHeadDimV) sums[c] += weight * part[32 * c + lane];
    }
  }
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    if (32 * c + lane < kHeadDimV) o[32 * c + lane] = sums[c];
  }
  if (lane == 0) {
    *m = max;
    *l = sum;
  }
}

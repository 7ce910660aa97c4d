// ---- Rows and their references ------------------------------------------------------------------
struct RowState {  // of the two rows of a thread
  float max[2];  // the largest score when it was last looked for
  float sum[2];
//% if not kernel.scaled
  bool settled;  // all rows of the warp are, and O has followed them
//% endif
};

// A fused multiply-add takes the exact product from a rounded reference: beyond this exponent the
// rounding would show, and the difference is taken before it is scaled.
constexpr float kHugeExponent = 262144.f;

__device__ __forceinline__ void reset(RowState& row) {
  row = {{-kInfinity, -kInfinity}, {0.f, 0.f}$(", false" if not kernel.scaled)};
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

// The largest of `max` and a thread's scores of one row: two by two, as each has to wait for another.
__device__ __forceinline__ float highest_of(const Scores& s, int half, float max) {
  float highest[2] = {max, max};
#pragma unroll
  for (int n = 0; n < kBlockKV / 4; ++n) {
    highest[n % 2] = fmaxf(highest[n % 2], s[0][n / 2][2 * half + n % 2]);
  }
  return fmaxf(highest[0], highest[1]);
}

//% if kernel.scaled or not kernel.bias_dtype
// Takes the references of rows from their scores where a multiply-add may not.
__device__ __forceinline__ void take_references(Scores& s, const RowState& row, float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (is_settled(row.max[half], scale_log2)) continue;
    const float reference = reference_of(row.max[half]);
#pragma unroll
    for (int n = 0; n < kBlockKV / 4; ++n) s[0][n / 2][2 * half + n % 2] -= reference;
  }
}
//% endif

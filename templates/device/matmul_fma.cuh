// ---- Matrix products in fp32, by fused multiply-add ---------------------------------------------
// The layout is that of the tensor cores: each warp owns kRowTiles x 16 rows, lane 4 g + t holds
// rows g and g + 8 of each, and of every 8 columns 2t and 2t + 1. So the rest stays the same.
//% include "device/dots.cuh"

// s = Q K^T for the warp's rows and kStepKV keys.
__device__ __forceinline__ void scores(Scores& s, const float* q_tile, const float* k_tile) {
  const int lane = threadIdx.x % 32;
  const int row = $("" if kernel.splits else "threadIdx.x / 32 * kWarpRows + ")lane / 4;
  zero(s);
#pragma unroll 1
  for (int chunk = 0; chunk < kD / 4; ++chunk) {
    float4 q[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      q[i / 2][i % 2] = load_chunk<kD>(q_tile, row + 8 * i, chunk);
    }
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) {
      const int key = n / 2 * 8 + lane % 4 * 2 + n % 2;
      const float4 k = load_chunk<kD>(k_tile, key, chunk);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        float& sum = s[i / 2][n / 2][i % 2 * 2 + n % 2];
        sum = dot(q[i / 2][i % 2], k, sum);
      }
    }
  }
}

using Weights = Scores;

__device__ __forceinline__ void round_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepKV / 8; ++i) {
    const int tile = i / (kStepKV / 8), n = i % (kStepKV / 8);
#pragma unroll
    for (int r = 0; r < 4; ++r) p[tile][n][r] = s[tile][n][r];
  }
}

// o += P V: the lane of the quad that holds a key's weight lends it to the other three. All lanes
// read the same row of V, so its tile is not permuted. Four keys are summed before they meet the
// output: a quarter of the roundings in the long sum.
constexpr bool kSwizzledV = false;

__device__ __forceinline__ void accumulate(Accumulator& o, const Weights& p, const float* v_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int key = 0; key < kStepKV; key += 4) {
    float weight[2 * kRowTiles][4];
#pragma unroll
    for (int i = 0; i < 8 * kRowTiles; ++i) {
      const int row = i / 4, k = key % 8 + i % 4;
      const float held = p[row / 2][key / 8][row % 2 * 2 + k % 2];
      weight[row][i % 4] = __shfl_sync(~0u, held, (lane & ~3) + k / 2);
    }
#pragma unroll
    for (int d = 0; d < kDV / 8; ++d) {
      float2 v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* pair = v_tile + (key + k) * kDV + 8 * d + lane % 4 * 2;
        v[k] = *reinterpret_cast<const float2*>(pair);
      }
#pragma unroll
      for (int row = 0; row < 2 * kRowTiles; ++row) {
        float* sum = &o[row / 2][d][row % 2 * 2];
        sum[0] += dot(weight[row], v[0].x, v[1].x, v[2].x, v[3].x);
        sum[1] += dot(weight[row], v[0].y, v[1].y, v[2].y, v[3].y);
      }
    }
  }
}

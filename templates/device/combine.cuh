// ---- The splits' parts of a row -----------------------------------------------------------------

constexpr int kSplitsInFlight = kLaneColumns > 4 ? 8 : 16;  // whose loads a warp issues at once

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// sums += the outputs of up to 32 splits, of which lane i knows the weight of the i-th.
__device__ __forceinline__ void add_parts(float (&sums)[kLaneColumns], const float* o_part,
                                          float weight, int splits) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < min(splits, 32); first += kSplitsInFlight) {
    float part[kSplitsInFlight][kLaneColumns];
#pragma unroll
    for (int i = 0; i < kSplitsInFlight * kLaneColumns; ++i) {
      const int split = first + i / kLaneColumns, column = i % kLaneColumns * 32 + lane;
      const bool valid = split < splits && column < kHeadDimV;
      part[i / kLaneColumns][i % kLaneColumns] = valid ? o_part[split * kHeadDimV + column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kSplitsInFlight; ++i) {
      const float w = __shfl_sync(~0u, weight, first + i);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sums[c] += w * part[i][c];
    }
  }
}

//% if kernel.out_dtype == "fp32"
__device__ __forceinline__ Output rounded(float x) { return x; }
//% else
__device__ __forceinline__ Output rounded(float x) { return u16($(cvt(kernel, kernel.out_dtype))(x, x)); }
//% endif

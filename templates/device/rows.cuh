// A row of scores lies in one quad of lanes.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// A row that has seen no key has maximum -inf; its exponents are taken from 0 instead.
__device__ __forceinline__ float reference_of(float max) { return max == -kInfinity ? 0.f : max; }

// Natural logarithm of a row's sum of exp(scale s); -inf for a row that saw no key.
__device__ __forceinline__ float log_sum_exp(float max, float sum, float scale_log2) {
//% if kernel.dtype == "e4m3"
  return (max * scale_log2 + ptx::lg2(sum) - kWeightExponent) * kLn2;
//% else
  return (max * scale_log2 + ptx::lg2(sum)) * kLn2;
//% endif
}

// The row of the tile that a thread's i-th row of fragments is.
//% if kernel.splits
__device__ __forceinline__ int tile_row(int i) { return 8 * i + threadIdx.x % 32 / 4; }
//% else
__device__ __forceinline__ int tile_row(int i) {
  return threadIdx.x / 32 * kWarpRows + 8 * i + threadIdx.x % 32 / 4;
}
//% endif

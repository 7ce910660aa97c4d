// The threads of several blocks add four numbers at a time to a few sums.
//% include "device/integers.cuh"

//% include "ptx/red_add_f32x4.cuh"

extern "C" __global__ void atomic_x4(const int* bins, const float* x, float* sums) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float four[4];
  for (int r = 0; r < 4; ++r) four[r] = x[4 * i + r];
  ptx::red_add_f32x4(sums + 4 * bins[i], four);
}

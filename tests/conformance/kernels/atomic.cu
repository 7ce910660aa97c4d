// The threads of several blocks add to a few sums. The old values that they get are 0, 1, 2, … in
// some order: each is ticked off.
//% include "device/integers.cuh"

//% include "ptx/red_add_f32.cuh"
//% include "ptx/atom_add_f32.cuh"
//% include "ptx/atom_add_u32.cuh"

extern "C" __global__ void atomic(const int* bins, const float* x, float* sums, float* count_f32,
                                  u32* count_u32, u32* seen_f32, u32* seen_u32) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int bin = bins[i], first = bin * gridDim.x * blockDim.x;
  ptx::red_add_f32(sums + bin, x[i]);
  seen_f32[first + int(ptx::atom_add_f32(count_f32 + bin, 1.f))] = 1;
  seen_u32[first + ptx::atom_add_u32(count_u32 + bin, 1)] = 1;
}

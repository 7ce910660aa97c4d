// Blocks take numbers and add to one sum in the order of these: one thread asks for the turn, another
// adds, a third ends the turn.
//% include "device/integers.cuh"

//% include "ptx/red_add_f32.cuh"
//% include "ptx/atom_add_u32.cuh"
//% include "ptx/ld_acquire_u32.cuh"
//% include "ptx/red_release_add_u32.cuh"

extern "C" __global__ void turns(const float* x, float* sum, u32* started, u32* turn) {
  __shared__ u32 number;
  if (threadIdx.x == 0) number = ptx::atom_add_u32(started, 1);
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) {
    while (ptx::ld_acquire_u32(turn) != number) {
    }
  }
  __syncthreads();
  if (threadIdx.x == 32) ptx::red_add_f32(sum, x[number]);
  __syncthreads();
  if (threadIdx.x == 0) ptx::red_release_add_u32(turn, 1);
}

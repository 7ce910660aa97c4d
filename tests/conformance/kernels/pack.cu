// packed = $(instruction)(low, high), pair by pair.
//% include "device/integers.cuh"
//% include "ptx/" ~ instruction ~ ".cuh"

extern "C" __global__ void pack(const float* pairs, $(target)* packed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  packed[i] = ptx::$(instruction)(pairs[2 * i], pairs[2 * i + 1]);
}

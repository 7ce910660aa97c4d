// y = $(instruction)(x), element by element.
//% include "device/integers.cuh"
//% include "ptx/" ~ instruction ~ ".cuh"

extern "C" __global__ void unary(const $(source)* x, $(target)* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = ptx::$(instruction)(x[i]);
}

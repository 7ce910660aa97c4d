// One warp a block multiplies fragments as they come: registers[block][lane][register].
//% include "device/integers.cuh"
//% include "ptx/" ~ instruction ~ ".cuh"

extern "C" __global__ void mma(const u32* a, const u32* b, const float* c, float* d) {
  constexpr int kA = $(a_registers), kB = $(b_registers);
  const int lane = blockIdx.x * blockDim.x + threadIdx.x;
  u32 left[kA];
  float sum[4];
  for (int i = 0; i < kA; ++i) left[i] = a[lane * kA + i];
  for (int i = 0; i < 4; ++i) sum[i] = c[lane * 4 + i];
//% if b_registers == 1
  ptx::$(instruction)(sum, left, b[lane * kB]);
//% else
  ptx::$(instruction)(sum, left, b[lane * kB], b[lane * kB + 1]);
//% endif
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}

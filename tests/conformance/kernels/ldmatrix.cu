// One warp a block loads $(matrices) matrices from rows of shared memory in any order.
//% include "device/integers.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/ldmatrix_x" ~ matrices ~ ".cuh"

constexpr int kMatrices = $(matrices);
constexpr int kRows = 64;  // of 8 codes

extern "C" __global__ void ldmatrix(const u16* codes, const int* rows, u32* registers) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  u16* tile = reinterpret_cast<u16*>(smem_raw);
  for (int i = threadIdx.x; i < kRows * 8; i += blockDim.x) tile[i] = codes[i];
  __syncthreads();
  const int lane = blockIdx.x * blockDim.x + threadIdx.x;
  u32 r[kMatrices];
  ptx::$(instruction)(r, ptx::smem_address(tile + rows[lane] * 8));
  for (int i = 0; i < kMatrices; ++i) registers[lane * kMatrices + i] = r[i];
}

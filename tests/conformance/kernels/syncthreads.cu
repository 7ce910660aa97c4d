// A block turns an array round through shared memory, tile after tile.
//% include "device/integers.cuh"

constexpr int kRounds = 8;

extern "C" __global__ void syncthreads(const u32* x, u32* y) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  u32* tile = reinterpret_cast<u32*>(smem_raw);
  const int threads = blockDim.x, i = threadIdx.x;
  for (int round = 0; round < kRounds; ++round) {
    tile[i] = x[round * threads + i];
    __syncthreads();
    y[(kRounds - 1 - round) * threads + i] = tile[threads - 1 - i];
    __syncthreads();
  }
}

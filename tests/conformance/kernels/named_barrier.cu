// Half of the warps hand a tile to the other half, round after round, over two named barriers: one
// says that the tile is full, the other that it is empty again.
//% include "device/integers.cuh"

//% include "ptx/bar_sync.cuh"
//% include "ptx/bar_arrive.cuh"

constexpr int kHalf = 64, kThreads = 2 * kHalf, kRounds = 8;
constexpr int kFull = 1, kEmpty = 2;

extern "C" __global__ void named_barrier(const u32* x, u32* y) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  u32* tile = reinterpret_cast<u32*>(smem_raw);
  const int i = threadIdx.x % kHalf;
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x < kHalf) {
      ptx::bar_sync(kEmpty, kThreads);
      tile[i] = x[round * kHalf + i];
      ptx::bar_arrive(kFull, kThreads);
    } else {
      ptx::bar_arrive(kEmpty, kThreads);
      ptx::bar_sync(kFull, kThreads);
      y[round * kHalf + i] = tile[kHalf - 1 - i];
    }
  }
}

// Copies of 4, 8 and 16 bytes, each size a group, awaited one group after the other. What is not
// valid becomes zero, and its source is not read: it lies outside.
//% include "device/integers.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/cp_async.cuh"

constexpr int kThreads = 128;
constexpr int kOutside = 1 << 28;  // words

// A thread copies so many words into its part of the tile.
template <int kWords>
__device__ __forceinline__ void start(u32* tile, const u32* source, bool valid) {
  const int first = threadIdx.x * kWords;
  ptx::cp_async<4 * kWords>(tile + first, source + (valid ? first : kOutside), valid);
  ptx::cp_async_commit_group();
}

// ... and writes out what other threads copied.
template <int kWords, int kGroupsInFlight>
__device__ __forceinline__ void finish(u32* copied, const u32* tile) {
  ptx::cp_async_wait_group<kGroupsInFlight>();
  __syncthreads();
  for (int i = threadIdx.x; i < kThreads * kWords; i += kThreads) {
    copied[kThreads * kWords - 1 - i] = tile[kThreads * kWords - 1 - i];
  }
}

extern "C" __global__ void cp_async(const u32* source, const int* valid, u32* copied) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  u32* tile = reinterpret_cast<u32*>(smem_raw);
  for (int i = threadIdx.x; i < 7 * kThreads; i += kThreads) tile[i] = ~0u;
  __syncthreads();
  start<1>(tile, source, valid[threadIdx.x]);
  start<2>(tile + kThreads, source, valid[kThreads + threadIdx.x]);
  start<4>(tile + 3 * kThreads, source, valid[2 * kThreads + threadIdx.x]);
  finish<1, 2>(copied, tile);
  finish<2, 1>(copied + kThreads, tile + kThreads);
  finish<4, 0>(copied + 3 * kThreads, tile + 3 * kThreads);
}

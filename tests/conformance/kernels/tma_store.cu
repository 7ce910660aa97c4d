// Box after box is written from shared memory to its coordinates, or added there; what lies outside
// the tensor must not be touched.
//% include "device/integers.cuh"

//% include "device/tensor_map.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/fence_proxy_async.cuh"
//% include "ptx/" ~ file ~ ".cuh"
//% include "ptx/cp_async_bulk_commit_group.cuh"
//% include "ptx/cp_async_bulk_wait_group.cuh"

constexpr int kRank = $(rank), kBoxBytes = $(box_bytes), kThreads = 128;

extern "C" __global__ void tma_store(const int* at, const uint4* x,
                                     const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  uint4* tile = reinterpret_cast<uint4*>(smem_raw);
  for (int box = 0; box < $(boxes); ++box) {
    for (int i = threadIdx.x; i < kBoxBytes / 16; i += kThreads) {
      tile[i] = x[box * (kBoxBytes / 16) + i];
    }
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int* c = at + box * kRank;
      ptx::$(instruction)(&map, smem_raw, c[$(range(rank) | join("], c["))]);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group$(wait)<0>();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group<0>();
}

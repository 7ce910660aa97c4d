// One thread brings box after box into shared memory, each at its own coordinates, and all threads
// write out what came, as it lies there.
//% include "device/integers.cuh"

//% include "device/tensor_map.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/mbarrier_init.cuh"
//% include "ptx/mbarrier_arrive_expect_tx.cuh"
//% include "ptx/mbarrier_try_wait.cuh"
//% include "ptx/fence_mbarrier_init.cuh"
//% include "ptx/cp_async_bulk_tensor_" ~ rank ~ "d.cuh"
//% include "device/mbarrier.cuh"

constexpr int kRank = $(rank), kBoxBytes = $(box_bytes), kThreads = 128;

extern "C" __global__ void tma_load(const __grid_constant__ TensorMap map, const int* at,
                                    uint4* out) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  for (int box = 0; box < $(boxes); ++box) {
    if (threadIdx.x == 0) {
      const int* c = at + box * kRank;
      ptx::mbarrier_arrive_expect_tx(&full, kBoxBytes);
      ptx::cp_async_bulk_tensor_$(rank)d(smem_raw, &map, &full, c[$(range(rank) | join("], c["))]);
    }
    wait(&full, box % 2);
    const uint4* tile = reinterpret_cast<const uint4*>(smem_raw);
    for (int i = threadIdx.x; i < kBoxBytes / 16; i += kThreads) {
      out[box * (kBoxBytes / 16) + i] = tile[i];
    }
    __syncthreads();
  }
}

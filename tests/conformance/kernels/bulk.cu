// Runs of bytes to shared memory and back: copied, and added to floats.
//% include "device/integers.cuh"

//% include "device/tensor_map.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/mbarrier_init.cuh"
//% include "ptx/mbarrier_arrive_expect_tx.cuh"
//% include "ptx/mbarrier_try_wait.cuh"
//% include "ptx/fence_mbarrier_init.cuh"
//% include "ptx/cp_async_bulk.cuh"
//% include "ptx/cp_reduce_async_bulk.cuh"
//% include "ptx/cp_async_bulk_commit_group.cuh"
//% include "ptx/cp_async_bulk_wait_group.cuh"
//% include "device/mbarrier.cuh"

constexpr int kBytes = 4096;

extern "C" __global__ void bulk(const float* x, float* copied, float* sums) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&full, kBytes);
    ptx::cp_async_bulk(smem_raw, x + blockIdx.x * (kBytes / 4), kBytes, &full);
    wait(&full, 0);
    ptx::cp_async_bulk_store(copied + blockIdx.x * (kBytes / 4), smem_raw, kBytes);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_reduce_async_bulk(sums, smem_raw + 16, kBytes / 2);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group<0>();
  }
}

// A producer fills a ring of two slots, two warpgroups empty it; each slot has a barrier that says
// full and one that says empty, whose phases alternate.
//% include "device/integers.cuh"

//% include "device/tensor_map.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/mbarrier_init.cuh"
//% include "ptx/mbarrier_arrive.cuh"
//% include "ptx/mbarrier_arrive_expect_tx.cuh"
//% include "ptx/mbarrier_try_wait.cuh"
//% include "ptx/fence_mbarrier_init.cuh"
//% include "ptx/cp_async_bulk.cuh"
//% include "ptx/setmaxnreg_inc.cuh"
//% include "ptx/setmaxnreg_dec.cuh"
//% include "ptx/elect_sync.cuh"
//% include "device/mbarrier.cuh"

constexpr int kSlots = 2, kRounds = 9, kWords = 256, kBytes = 4 * kWords;
constexpr int kConsumers = 256;

extern "C" __global__ void __launch_bounds__(384, 1) mbarrier_ring(const u32* x, u32* y, u32* elected) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  __shared__ u64 full[kSlots], empty[kSlots];
  u32* ring = reinterpret_cast<u32*>(smem_raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(&full[i], 1);
      ptx::mbarrier_init(&empty[i], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x < 32) {
      const bool leader = ptx::elect_sync();
      elected[threadIdx.x] = leader;
      for (int round = 0; leader && round < kRounds; ++round) {
        const int slot = round % kSlots, parity = round / kSlots % 2;
        wait(&empty[slot], parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(&full[slot], kBytes);
        ptx::cp_async_bulk(ring + slot * kWords, x + round * kWords, kBytes, &full[slot]);
      }
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    const int i = threadIdx.x - 128;
    for (int round = 0; round < kRounds; ++round) {
      const int slot = round % kSlots, parity = round / kSlots % 2;
      wait(&full[slot], parity);
      y[round * kWords + i] = ring[slot * kWords + (kWords - 1 - i)];
      ptx::mbarrier_arrive(&empty[slot]);
    }
  }
}

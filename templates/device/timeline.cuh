// ---- Timeline -----------------------------------------------------------------------------------
// A build with FASIM_TIMELINE notes when each warpgroup of the first block did what, step by step (a step
// is a tile of keys): `fasim bench --timeline`. Any other build has no trace of it.
enum Act { kLoadQ, kLoadK, kLoadV, kAsked, kBegan, kScored, kWeighed, kSummed, kStored, kActs };

#ifdef FASIM_TIMELINE
//% include "ptx/clock64.cuh"

constexpr int kNotedSteps = 1024;

extern "C" {
__device__ u64 fasim_timeline[kConsumers + 1][kNotedSteps][kActs];
}
#endif

__device__ __forceinline__ void note(Act act, int step) {
#ifdef FASIM_TIMELINE
  const u32 thread = ptx::thread_index();  // asked again, lest addresses be kept all along
  if (blockIdx.x != 0 || thread % 128 != 0 || step >= kNotedSteps) return;
  fasim_timeline[thread / 128][step][act] = ptx::clock64();
#endif
}

namespace ptx {
#ifndef FASIM_EMULATE

// Barriers that this thread initialised become visible to TMA. PTX ISA: fence.mbarrier_init.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

#endif
}  // namespace ptx

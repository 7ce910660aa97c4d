namespace ptx {
#ifndef FASIM_EMULATE

// Waits until at most kGroups of this warpgroup's groups are in flight. PTX ISA: wgmma.wait_group.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  static_assert(0 <= kGroups && kGroups <= 7, "at most 7 groups stay in flight");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

#endif
}  // namespace ptx

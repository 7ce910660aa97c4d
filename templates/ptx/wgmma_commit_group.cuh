namespace ptx {
#ifndef FASIM_EMULATE

// Closes the group of products issued by this warpgroup so far. PTX ISA: wgmma.commit_group.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

#endif
}  // namespace ptx

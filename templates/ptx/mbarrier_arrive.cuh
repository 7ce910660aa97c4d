namespace ptx {
#ifndef FASIM_EMULATE

// One arrival at the current phase. PTX ISA: mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// A barrier in shared memory (8 bytes, aligned) whose phases each wait for so many arrivals.
// PTX ISA: mbarrier.init.
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals)
               : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Counts so many bytes as arrived without any copy. PTX ISA: mbarrier.complete_tx.
__device__ __forceinline__ void mbarrier_complete_tx(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

#endif
}  // namespace ptx

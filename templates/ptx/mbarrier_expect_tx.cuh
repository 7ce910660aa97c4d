namespace ptx {
#ifndef FASIM_EMULATE

// The current phase is to wait for so many bytes more. PTX ISA: mbarrier.expect_tx.
__device__ __forceinline__ void mbarrier_expect_tx(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

#endif
}  // namespace ptx

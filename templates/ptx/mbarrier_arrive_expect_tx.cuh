namespace ptx {
#ifndef FASIM_EMULATE

// One arrival at the current phase, which is also to wait for so many bytes.
// PTX ISA: mbarrier.arrive.expect_tx.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

#endif
}  // namespace ptx

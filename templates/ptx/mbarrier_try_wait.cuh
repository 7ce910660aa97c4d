namespace ptx {
#ifndef FASIM_EMULATE

// Whether the phase of that parity is complete; it may first wait for a while. A fresh barrier is
// in its phase of parity 0, and the one before counts as complete. PTX ISA: mbarrier.try_wait.
__device__ __forceinline__ bool mbarrier_try_wait(u64* barrier, u32 parity) {
  u32 complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(complete)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return complete;
}

#endif
}  // namespace ptx

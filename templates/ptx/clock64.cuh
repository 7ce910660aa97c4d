namespace ptx {
#ifndef FASIM_EMULATE

// Clocks of the SM so far. PTX ISA: special registers, %clock64.
__device__ __forceinline__ u64 clock64() {
  u64 clocks;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clocks)::"memory");
  return clocks;
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Counts towards a named barrier without waiting at it. PTX ISA: bar.arrive.
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Waits at a named barrier until so many threads, whole warps, have come. PTX ISA: bar.sync.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#endif
}  // namespace ptx

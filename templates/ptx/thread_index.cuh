namespace ptx {
#ifndef FASIM_EMULATE

// threadIdx.x, read anew: nothing computed from it is kept in registers from one use to the next.
// PTX ISA: special registers, %tid.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

#endif
}  // namespace ptx

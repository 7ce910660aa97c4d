namespace ptx {
#ifndef FASIM_EMULATE

// threadIdx.x, read anew: nothing computed from it is kept in registers from one use to the next.
// PTX ISA: special registers, %tid.
__device__ __forceinline__ u32 thread_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

#endif
}  // namespace ptx

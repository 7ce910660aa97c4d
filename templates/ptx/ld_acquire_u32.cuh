namespace ptx {
#ifndef FASIM_EMULATE

// A word of global memory, and with it all that was released to it. PTX ISA: ld.acquire.
__device__ __forceinline__ u32 ld_acquire_u32(const u32* global) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

#endif
}  // namespace ptx

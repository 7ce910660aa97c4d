namespace ptx {
#ifndef FASIM_EMULATE

// *address += x, atomically; returns the old value. PTX ISA: atom.
__device__ __forceinline__ u32 atom_add_u32(u32* address, u32 x) {
  u32 old;
  asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(x)
               : "memory");
  return old;
}

#endif
}  // namespace ptx

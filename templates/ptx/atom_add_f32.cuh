namespace ptx {
#ifndef FASIM_EMULATE

// *address += x, atomically; returns the old value. PTX ISA: atom.
__device__ __forceinline__ float atom_add_f32(float* address, float x) {
  float old;
  asm volatile("atom.relaxed.gpu.add.f32 %0, [%1], %2;"
               : "=f"(old)
               : "l"(address), "f"(x)
               : "memory");
  return old;
}

#endif
}  // namespace ptx

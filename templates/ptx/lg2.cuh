namespace ptx {
#ifndef FASIM_EMULATE

// log2(x). PTX ISA: lg2.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
}  // namespace ptx

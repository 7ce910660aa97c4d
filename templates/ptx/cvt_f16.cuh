namespace ptx {
#ifndef FASIM_EMULATE

// A float as f16, rounded to nearest even. PTX ISA: cvt.
__device__ __forceinline__ u16 cvt_f16(float x) {
  u16 rounded;
  asm volatile("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
  return rounded;
}

#endif
}  // namespace ptx

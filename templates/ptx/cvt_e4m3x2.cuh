namespace ptx {
#ifndef FASIM_EMULATE

// Two floats as e4m3, rounded to nearest even, at most 448 in magnitude, the first in the low byte.
// From sm_89 on. PTX ISA: cvt.
__device__ __forceinline__ u16 cvt_e4m3x2(float low, float high) {
  u16 packed;
  asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

#endif
}  // namespace ptx

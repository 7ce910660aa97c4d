namespace ptx {
#ifndef FASIM_EMULATE

// Two floats as f16, rounded to nearest even, the first in the low half. PTX ISA: cvt.
__device__ __forceinline__ u32 cvt_f16x2(float low, float high) {
  u32 packed;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

#endif
}  // namespace ptx

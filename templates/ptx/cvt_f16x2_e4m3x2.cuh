namespace ptx {
#ifndef FASIM_EMULATE

// Two e4m3 as f16, exactly, in the same order. From sm_89 on. PTX ISA: cvt.
__device__ __forceinline__ u32 cvt_f16x2_e4m3x2(u16 pair) {
  u32 packed;
  asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(packed) : "h"(pair));
  return packed;
}

#endif
}  // namespace ptx

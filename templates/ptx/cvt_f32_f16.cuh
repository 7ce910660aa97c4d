namespace ptx {
#ifndef FASIM_EMULATE

// An f16 as a float, exactly. PTX ISA: cvt.
__device__ __forceinline__ float cvt_f32_f16(u16 half) {
  float x;
  asm volatile("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}

#endif
}  // namespace ptx

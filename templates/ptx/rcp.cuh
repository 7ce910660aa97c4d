namespace ptx {
#ifndef FASIM_EMULATE

// 1 / x, 1 ulp; inf gives 0. PTX ISA: rcp.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
}  // namespace ptx

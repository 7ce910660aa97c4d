namespace ptx {
#ifndef FASIM_EMULATE

// 2^x, 2 ulp; -inf gives 0. PTX ISA: ex2.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
}  // namespace ptx

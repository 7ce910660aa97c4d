namespace ptx {
#ifndef FASIM_EMULATE

// *global += x, atomically, without the old value. PTX ISA: red.
__device__ __forceinline__ void red_add_f32(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

#endif
}  // namespace ptx

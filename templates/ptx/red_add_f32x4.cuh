namespace ptx {
#ifndef FASIM_EMULATE

// Four floats added to global memory at a 16-byte boundary, each atomically, without the old values.
// PTX ISA: red, .v4.f32.
__device__ __forceinline__ void red_add_f32x4(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

#endif
}  // namespace ptx

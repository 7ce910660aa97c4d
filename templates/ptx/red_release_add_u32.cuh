namespace ptx {
#ifndef FASIM_EMULATE

// *global += x, atomically; whoever acquires the sum knows all that this thread knew. PTX ISA:
// red.release.
__device__ __forceinline__ void red_release_add_u32(u32* global, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// True in one lane of a whole warp. PTX ISA: elect.sync.
__device__ __forceinline__ bool elect_sync() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}\n"
      : "=r"(elected)::"memory");
  return elected;
}

#endif
}  // namespace ptx

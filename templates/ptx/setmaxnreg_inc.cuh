namespace ptx {
#ifndef FASIM_EMULATE

// Each thread of the warpgroup asks for so many registers, a multiple of 8, and waits until they are free.
// PTX ISA: setmaxnreg.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(24 <= kRegisters && kRegisters <= 256 && kRegisters % 8 == 0, "24, 32, ... 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif
}  // namespace ptx

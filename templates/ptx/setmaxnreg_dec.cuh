namespace ptx {
#ifndef FASIM_EMULATE

// Each thread of the warpgroup keeps only so many registers, a multiple of 8; the rest goes back to the pool.
// PTX ISA: setmaxnreg.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(24 <= kRegisters && kRegisters <= 256 && kRegisters % 8 == 0, "24, 32, ... 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Orders this warp's own accesses to registers before the products that follow. PTX ISA: wgmma.fence.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Keeps the compiler from moving accesses to an accumulator, or to the fragments of A, across this
// point; no instruction.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_fence_registers(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

#endif
}  // namespace ptx

// Before sm_80 a conversion takes one float, and a matrix instruction is 8 deep: two of each do what
// one does later. A fragment of 16 columns is one of its first 8 and one of its last.
__device__ __forceinline__ u32 cvt_f16x2(float low, float high) {
  return ptx::cvt_f16(low) | u32(ptx::cvt_f16(high)) << 16;
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 first[2] = {a[0], a[1]}, last[2] = {a[2], a[3]};
  ptx::mma_m16n8k8_f16(d, first, b0);
  ptx::mma_m16n8k8_f16(d, last, b1);
}

namespace ptx {
#ifndef FASIM_EMULATE

// d += a b for one 16x8 tile, 8 deep; d as of m16n8k16. PTX ISA: mma.m16n8k8.
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], const u32 (&a)[2], u32 b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
}

#endif
}  // namespace ptx

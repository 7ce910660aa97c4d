namespace ptx {
#ifndef FASIM_EMULATE

// d += a b for one 16x8 tile, 32 deep; d as of m16n8k16, four columns of a or rows of b a register.
// From sm_89 on. PTX ISA: mma.m16n8k32.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                  u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
}  // namespace ptx

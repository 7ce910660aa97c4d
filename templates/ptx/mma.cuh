namespace ptx {
#ifndef FASIM_EMULATE

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
// PTX ISA: ldmatrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

//% set suffix = {"fp16": "f16", "bf16": "bf16"}[kernel.dtype]
// d += a b for one 16x8 tile, 16 deep. Lane 4 g + t holds d[0], d[1] = row g, columns 2t, 2t+1 and
// d[2], d[3] = row g + 8. PTX ISA: mma.m16n8k16.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.$(suffix).$(suffix).f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as $(kernel.dtype), rounded to nearest even, the first in the low half. PTX ISA: cvt.
__device__ __forceinline__ u32 cvt_pack(float low, float high) {
  u32 packed;
  asm volatile("cvt.rn.$(suffix)x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
// Lane 4 g + t stores columns 2t, 2t + 1 of row g. PTX ISA: stmatrix.
__device__ __forceinline__ void stmatrix_x4(u32 row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(u32 row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Two 8x8 matrices of 16-bit elements; lane i < 16 gives the address of row i % 8 of matrix
// i / 8.
// Lane 4 g + t stores columns 2t, 2t + 1 of row g. PTX ISA: stmatrix.
__device__ __forceinline__ void stmatrix_x2(u32 row, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(r[0]),
               "r"(r[1])
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x2_trans(u32 row, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row),
               "r"(r[0]), "r"(r[1])
               : "memory");
}

#endif
}  // namespace ptx

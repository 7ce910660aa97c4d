namespace ptx {
#ifndef FASIM_EMULATE

// One 8x8 matrix of 16-bit elements; lane i < 8 gives the address of row i.
// Lane 4 g + t stores columns 2t, 2t + 1 of row g. PTX ISA: stmatrix.
__device__ __forceinline__ void stmatrix_x1(u32 row, const u32 (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(r[0])
               : "memory");
}

// The same, transposed.
__device__ __forceinline__ void stmatrix_x1_trans(u32 row, const u32 (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row), "r"(r[0])
               : "memory");
}

#endif
}  // namespace ptx

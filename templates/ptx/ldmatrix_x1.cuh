namespace ptx {
#ifndef FASIM_EMULATE

// One 8x8 matrix of 16-bit elements; lane i < 8 gives the address of row i. PTX ISA: ldmatrix.
__device__ __forceinline__ void ldmatrix_x1(u32 (&r)[1], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(row)
               : "memory");
}

// The same, transposed.
__device__ __forceinline__ void ldmatrix_x1_trans(u32 (&r)[1], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(row)
               : "memory");
}

#endif
}  // namespace ptx

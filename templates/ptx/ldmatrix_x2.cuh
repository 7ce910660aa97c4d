namespace ptx {
#ifndef FASIM_EMULATE

// Two 8x8 matrices of 16-bit elements; lane i < 16 gives the address of row i % 8 of matrix i / 8.
// PTX ISA: ldmatrix.
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

#endif
}  // namespace ptx

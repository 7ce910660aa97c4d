// dq = dS K for one unit: dS^T as the warps left it, all keys of the block.
__device__ __forceinline__ void query_gradient(QueryGradient& dq, const Element* ds_tile,
                                               const Element* k_tile, int unit) {
  constexpr int kRowBytes = kBlockQ * int(sizeof(Element));
  constexpr int kKeyBytes = kD * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const int query = unit_query(unit) / 8 + lane / 8 % 2;
  const int column = unit_column(unit) / 8 + lane / 16;
  const int a_key = lane / 16 * 8 + lane % 8;
  const u32 a_first = ptx::smem_address(chunk_at<kBlockQ>(ds_tile, a_key, query));
  const u32 b_first = ptx::smem_address(chunk_at<kD>(k_tile, lane % 16, column));
  zero(dq);
#pragma unroll 4
  for (int key = 0; key < kBlockKV; key += 16) {
    u32 a[kUnitRows / 16][4];
#pragma unroll
    for (int i = 0; i < kUnitRows / 16; ++i) {
      ptx::ldmatrix_x4_trans(a[i], (a_first ^ 32 * i) + key * kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kUnitCols; n += 16) {
      u32 b[4];
      ptx::ldmatrix_x4_trans(b, (b_first ^ 2 * n) + key * kKeyBytes);
#pragma unroll
      for (int i = 0; i < kUnitRows / 16; ++i) {
        ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(dq[i][n / 8], a[i], b[0], b[1]);
        ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(dq[i][n / 8 + 1], a[i], b[2], b[3]);
      }
    }
  }
}

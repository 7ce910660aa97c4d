// dq = dS K for one unit: dS^T as the warps left it, all keys of the block.
__device__ __forceinline__ void query_gradient(QueryGradient& dq, const float* ds_tile,
                                               const float* k_tile, int unit) {
  const int lane = threadIdx.x % 32;
  const int query = unit_query(unit) + lane / 4;
  const int column = unit_column(unit) + lane % 4 * 2;
  zero(dq);
#pragma unroll 1
  for (int key = 0; key < kBlockKV; key += 4) {
    float weight[kUnitRows / 8][4];
#pragma unroll
    for (int i = 0; i < kUnitRows / 2; ++i) {
      weight[i / 4][i % 4] = *element_at<kBlockQ>(ds_tile, key + i % 4, query + i / 4 * 8);
    }
#pragma unroll
    for (int n = 0; n < kUnitCols / 8; ++n) {
      float2 k[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) k[i] = load_pair<kD>(k_tile, key + i, column + 8 * n);
#pragma unroll
      for (int i = 0; i < kUnitRows / 8; ++i) add_dots(&dq[i / 2][n][i % 2 * 2], weight[i], k);
    }
  }
}

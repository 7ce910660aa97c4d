// Divides O by the sums, once, and writes the log-sum-exp of each row. A row that saw no key
// gives 0 and -inf.
__device__ __forceinline__ void finish(Accumulator& o, const RowState& row, float* lse,
                                       float scale_log2, $("float v_factor, " if kernel.scaled else "")int rows) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int tile = i / 2, half = i % 2;
    const float sum = quad_sum(row.sum[tile][half]);
    const float inverse = sum == 0.f ? 0.f : $("v_factor" if kernel.scaled else "1.f") / sum;
#pragma unroll
    for (int n = 0; n < kDV / 4; ++n) o[tile][n / 2][2 * half + n % 2] *= inverse;
    if (threadIdx.x % 4 == 0 && tile_row(i) < rows) {
      lse[tile_row(i)] = log_sum_exp(row.max[tile][half], sum, scale_log2);
    }
  }
}

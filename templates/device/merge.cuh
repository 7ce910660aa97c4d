// ---- O, m and l in HBM --------------------------------------------------------------------------

// One lane of the quad reads a row's statistic for all four.
__device__ __forceinline__ float load_statistic(const float* statistic, int row, bool valid) {
  const float x = valid && threadIdx.x % 4 == 0 ? statistic[row] : 0.f;
  return __shfl_sync(~0u, x, threadIdx.x % 32 & ~3);
}

__device__ __forceinline__ float2 load_two(const float* row, int column) {
  if constexpr (kHeadDimV % 2 == 0) {
    return column < kHeadDimV ? *reinterpret_cast<const float2*>(row + column) : float2{};
  }
  return make_float2(column < kHeadDimV ? row[column] : 0.f,
                     column + 1 < kHeadDimV ? row[column + 1] : 0.f);
}

__device__ __forceinline__ void store_two(float* row, int column, float x, float y) {
  if constexpr (kHeadDimV % 2 == 0) {
    if (column < kHeadDimV) *reinterpret_cast<float2*>(row + column) = make_float2(x, y);
  } else {
    if (column < kHeadDimV) row[column] = x;
    if (column + 1 < kHeadDimV) row[column + 1] = y;
  }
}

// Merges what one tile of keys gave with the rows' O, m and l so far, all normalised
// (FlashAttention, algorithm 1, lines 11 to 13). Before the first tile there is nothing to read.
__device__ __forceinline__ void merge(Accumulator& o, RowState& row, const float* o_acc,
                                      const float* m, const float* l, float scale_log2, int rows,
                                      bool first) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int tile = i / 2, half = i % 2;
    const bool known = !first && tile_row(i) < rows;
    const float old_max = first ? -kInfinity : load_statistic(m, tile_row(i), known);
    const float old_sum = first ? 0.f : load_statistic(l, tile_row(i), known);
    const float max = fmaxf(old_max, row.max[tile][half]);
    const float old_weight = old_sum * ptx::ex2((old_max - reference_of(max)) * scale_log2);
    const float weight = ptx::ex2((row.max[tile][half] - reference_of(max)) * scale_log2);
    const float sum = old_weight + quad_sum(row.sum[tile][half]) * weight;
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    __syncwarp();  // the next row's loads wait, or all rows' would fill the registers
    const float* old_row = o_acc + i64(tile_row(i)) * kHeadDimV;
#pragma unroll
    for (int n = 0; n < kDV / 8; ++n) {
      const float2 old = known ? load_two(old_row, 8 * n + threadIdx.x % 4 * 2) : float2{};
      float& x = o[tile][n][2 * half];
      float& y = o[tile][n][2 * half + 1];
      x = (x * weight + old.x * old_weight) * inverse;
      y = (y * weight + old.y * old_weight) * inverse;
    }
    row.max[tile][half] = max;
    row.sum[tile][half] = sum;
  }
}

// Leaves O, m and l for the next tile of keys.
__device__ __forceinline__ void store_partial(const Accumulator& o, const RowState& row,
                                              float* o_acc, float* m, float* l, int rows) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    if (tile_row(i) >= rows) continue;
    float* o_row = o_acc + i64(tile_row(i)) * kHeadDimV;
#pragma unroll
    for (int n = 0; n < kDV / 8; ++n) {
      const float (&pair)[4] = o[i / 2][n];
      store_two(o_row, 8 * n + threadIdx.x % 4 * 2, pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
    if (threadIdx.x % 4 == 0) {
      m[tile_row(i)] = row.max[i / 2][i % 2];
      l[tile_row(i)] = row.sum[i / 2][i % 2];
    }
  }
}

// After the last tile of keys only the log-sum-exp of each row remains to be written.
__device__ __forceinline__ void store_lse(const RowState& row, float* lse, float scale_log2,
                                          int rows) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    if (threadIdx.x % 4 == 0 && tile_row(i) < rows) {
      lse[tile_row(i)] = log_sum_exp(row.max[i / 2][i % 2], row.sum[i / 2][i % 2], scale_log2);
    }
  }
}

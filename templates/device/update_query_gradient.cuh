// Where a lane's i-th fragment lies in its unit.
__device__ __forceinline__ int unit_place(int i) { return (32 * i + threadIdx.x % 32) * 4; }

// A fragment of dQ as the result: scaled, rounded, in its place.
__device__ __forceinline__ void store_fragment(Element* dq, i64 stride, int unit, int i,
                                               const float (&x)[4], float scale, int rows) {
  const int lane = threadIdx.x % 32;
  const int column = unit_column(unit) + i % (kUnitCols / 8) * 8 + lane % 4 * 2;
  const int query = unit_query(unit) + i / (kUnitCols / 8) * 16 + lane / 4;
  Element* row = dq + query * stride;
  if (query < rows) store_two(row, column, scale * x[0], scale * x[1]);
  if (query + 8 < rows) store_two(row + 8 * stride, column, scale * x[2], scale * x[3]);
}

// dQ += dS K for one tile of queries. dQ comes from HBM and goes back there, in fp32; before the first
// keys there is nothing to read, after the last it leaves as the result. A lane meets only values of
// its own.
__device__ __forceinline__ void update_query_gradient(float* dq_tile, Element* dq, i64 stride,
                                                      const Element* ds_tile, const Element* k_tile,
                                                      float scale, int rows, bool first,
                                                      bool last) {
#pragma unroll 1
  for (int unit = threadIdx.x / 32; unit < kUnits; unit += kWarps) {
    QueryGradient gradient;
    query_gradient(gradient, ds_tile, k_tile, unit);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      float (&x)[4] = gradient[i / (kUnitCols / 8)][i % (kUnitCols / 8)];
      float4* place = reinterpret_cast<float4*>(dq_tile + unit * kUnitElements + unit_place(i));
      if (!first) {
        const float4 before = *place;
        x[0] += before.x, x[1] += before.y, x[2] += before.z, x[3] += before.w;
      }
      __syncwarp();  // the next fragment's load waits, or all of them would fill the registers
      if (last) {
        store_fragment(dq, stride, unit, i, x, scale, rows);
      } else {
        *place = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

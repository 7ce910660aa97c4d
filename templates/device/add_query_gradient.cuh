//% if kernel.arch in ("sm_80", "sm_86", "sm_89")
// Where element r of a lane's i-th fragment lies in its unit.
__device__ __forceinline__ int unit_place(int i, int r) {
  return (4 * i + r) * 32 + threadIdx.x % 32;
}

__device__ __forceinline__ void add_fragment(float* unit, int i, const float (&x)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) ptx::red_add_f32(unit + unit_place(i, r), x[r]);
}

//% else
// Where element r of a lane's i-th fragment lies in its unit: four together, added as one.
__device__ __forceinline__ int unit_place(int i, int r) {
  return (32 * i + threadIdx.x % 32) * 4 + r;
}

__device__ __forceinline__ void add_fragment(float* unit, int i, const float (&x)[4]) {
  ptx::red_add_f32x4(unit + unit_place(i, 0), x);
}

//% endif
// The warps' share of dQ += dS K for one tile of queries.
__device__ __forceinline__ void add_query_gradient(float* dq_tile, const Element* ds_tile,
                                                   const Element* k_tile) {
#pragma unroll
  for (int first = 0; first < kUnits; first += kWarps) {
    const int unit = first + threadIdx.x / 32;
    if (unit >= kUnits) break;
    QueryGradient dq;
    query_gradient(dq, ds_tile, k_tile, unit);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      add_fragment(dq_tile + unit * kUnitElements, i, dq[i / (kUnitCols / 8)][i % (kUnitCols / 8)]);
    }
  }
}

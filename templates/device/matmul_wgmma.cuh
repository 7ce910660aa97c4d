// ---- Products on the tensor cores ---------------------------------------------------------------
// A warpgroup multiplies 64 rows in the background: what it reads and writes, registers too, is not to
// be touched until it has waited. A slab's rows are 128 bytes, its groups of 8 rows 1024 bytes apart.
constexpr u32 kGroupBytes = 1024;

//% if not kernel.scaled
using Weights = u32[1][kBlockKV / 16][4];  // rounded, left operands of 16 keys each

//% endif
// The descriptor of the same matrix so many bytes further on; its upper half does not change.
__device__ __forceinline__ u64 further(u64 descriptor, u32 bytes) {
  return descriptor >> 32 << 32 | u32(u32(descriptor) + (bytes >> 4));
}

template <int kRows, int kTileSlabs>
__device__ __forceinline__ u64 descriptor_of(const SlabTile<kRows, kTileSlabs>& tile) {
  const u32 address = ptx::smem_address(&tile);
  return matrix_descriptor(address, sizeof(tile.slab[0]), kGroupBytes, Swizzle::k128);
}

template <int kTiles>
__device__ __forceinline__ float (&flat(float (&x)[1][kTiles][4]))[4 * kTiles] {
  return reinterpret_cast<float (&)[4 * kTiles]>(x);
}

//% if kernel.keeps_q
using Queries = u32[kD / 16][4];  // left operands of 16 columns each

// A warp takes its rows of Q, whose place then serves the next tile's.
__device__ __forceinline__ void take_queries(Queries& q, Shared& shared, int slot, int consumer) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * kWarpRows + lane % 16;
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    ptx::ldmatrix_x4(q[step], chunk_address(shared.q[slot][consumer], row, 2 * step + lane / 16));
  }
  __syncwarp();  // all lanes have read
  if (lane == 0) ptx::mbarrier_arrive(&shared.empty_q[slot]);
}

// Starts s = Q K^T: Q in registers, K with the head dimension contiguous, of which a step has 32 bytes.
__device__ __forceinline__ void start_scores(Scores& s, const Queries& q, u64 k) {
//% else
// Starts s = Q K^T: both lie with the head dimension contiguous, a step's columns are 32 bytes of a row.
__device__ __forceinline__ void start_scores(Scores& s, u64 q, u64 k) {
//% endif
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / kGranule; ++step) {
    const u32 column = step % 4 * 32, slab = step / 4;
//% if kernel.keeps_q
    const u64 right = further(k, slab * kBlockKV * 128 + column);
    ptx::wgmma_m64k16_$(ptx_type(kernel.dtype))<0>(flat(s), q[step], right, step > 0);
//% else
    const u64 left = further(q, slab * 64 * 128 + column);
    const u64 right = further(k, slab * kBlockKV * 128 + column);
//% if kernel.scaled
    if (step == 0) ptx::wgmma_m64k32_e4m3_fresh(flat(s), left, right);
    if (step > 0) ptx::wgmma_m64k32_e4m3(flat(s), left, right, true);
//% else
    ptx::wgmma_m64k16_$(ptx_type(kernel.dtype))(flat(s), left, right, step > 0);
//% endif
//% endif
  }
  ptx::wgmma_commit_group();
}

//% if not kernel.scaled
// Starts o += P V: P in registers, V with its rows the depth, 16 of them 2048 bytes.
__device__ __forceinline__ void start_values(Accumulator& o, const Weights& p, u64 v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockKV / 16; ++step) {
    ptx::wgmma_m64k16_$(ptx_type(kernel.dtype))<1>(flat(o), p[0][step], further(v, step * 16 * 128), true);
  }
  ptx::wgmma_commit_group();
}
//% endif

// Waits for all products but the last kLeft started; their results may be read then.
template <int kLeft, int kTiles>
__device__ __forceinline__ void finish_products(float (&result)[1][kTiles][4]) {
  ptx::wgmma_wait_group<kLeft>();
  ptx::wgmma_fence_registers(flat(result));
}
//% if kernel.scaled
//% set parameter = ", float by" if kernel.scales == "block" else ""
//% set argument = ", by" if kernel.scales == "block" else ""

// These products keep few bits below the largest, so that a tile of keys has sums of its own, and fp32
// those of all. They take the registers that the scores have left.
template <int kColumns>
using TileSums = float[1][kColumns / 8][4];

// t = P V, for columns from kColumn on: P in registers, V with the keys contiguous.
template <int kColumn, int kColumns>
__device__ __forceinline__ void multiply_columns(TileSums<kColumns>& t, const Weights& p, u64 v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockKV / kGranule; ++step) {
    const u64 right = further(v, kColumn * 128 + step * 32);
    if (step == 0) ptx::wgmma_m64k32_e4m3_fresh(flat(t), p[0][step], right);
    if (step > 0) ptx::wgmma_m64k32_e4m3(flat(t), p[0][step], right, true);
  }
  ptx::wgmma_commit_group();
}

// Whether the i-th number of O stays 0: beside the sums of weights in its last columns is nothing.
__device__ __forceinline__ constexpr bool is_beside_ones(int i) {
  return i >= kDV / 2 && i % 2 == 1;
}

template <int kColumn, int kColumns>
__device__ __forceinline__ void add_columns(Accumulator& o, const TileSums<kColumns>& t$(parameter)) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    if (is_beside_ones(kColumn / 2 + i)) continue;
    float& sum = o[0][kColumn / 8 + i / 4][i % 4];
//% if kernel.scales == "block"
    const float scale = kColumn + i / 4 * 8 < kDV ? by : 1.f;  // the ones have none
    sum = fmaf(t[0][i / 4][i % 4], scale, sum);
//% else
    sum += t[0][i / 4][i % 4];
//% endif
  }
}

// The rounds from kColumn on, while that of the columns before is under way.
template <int kColumn, int kTiles>
__device__ __forceinline__ void add_rest(Accumulator& o, const Weights& p, u64 v,
                                         float (&before)[1][kTiles][4]$(parameter)) {
  constexpr int kBefore = 8 * kTiles;
  if constexpr (kColumn < kRowsV) {
    TileSums<kColumnsAtOnce> t;
    multiply_columns<kColumn, kColumnsAtOnce>(t, p, v);
    finish_products<1>(before);
    add_columns<kColumn - kBefore, kBefore>(o, before$(argument));
    add_rest<kColumn + kColumnsAtOnce>(o, p, v, t$(argument));
  } else {
    finish_products<0>(before);
    add_columns<kColumn - kBefore, kBefore>(o, before$(argument));
  }
}

// o += P V, in rounds of columns: the sums of one join O while the next is under way. `check` may change
// P and what is summed in o. It is asked before the products start; where one round of them is all, once
// they are done, with their sums: then they started as soon as P was there. `meanwhile` runs under the
// first of several; behind a single one, which is short, it costs less.
template <typename Check, typename Meanwhile>
//% if kernel.scales == "block"
__device__ __forceinline__ void add_values(Accumulator& o, Weights& p, u64 v, float by,
                                           const Check& check, const Meanwhile& meanwhile) {
//% else
__device__ __forceinline__ void add_values(Accumulator& o, Weights& p, u64 v, const Check& check,
                                           const Meanwhile& meanwhile) {
//% endif
  constexpr int kRest = kRowsV % kColumnsAtOnce;
  constexpr int kColumns = kRest > 0 ? kRest : kColumnsAtOnce;
  TileSums<kColumns> t;
  if constexpr (!kOneRound) check();
  multiply_columns<0, kColumns>(t, p, v);
  if constexpr (kOneRound) {
    finish_products<0>(t);
    check(t);
    add_columns<0, kColumns>(o, t$(argument));
    meanwhile();
  } else {
    meanwhile();
    add_rest<kColumns>(o, p, v, t$(argument));
  }
}
//% endif

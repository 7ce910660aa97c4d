// v2_bwd_sm80_fp32_d64_full_dense_cef12704
//
// regenerate  fasim gen v2_bwd_sm80_fp32_d64_full_dense_cef12704.cu
// compile     nvcc -std=c++17 -arch=sm_80 -cubin v2_bwd_sm80_fp32_d64_full_dense_cef12704.cu
// run alone   nvcc -std=c++17 -arch=sm_80 -DFASIM_MAIN v2_bwd_sm80_fp32_d64_full_dense_cef12704.cu && ./a.out
// launch      v2_bwd_sm80_fp32_d64_full_dense_cef12704_prepare<<<1024, 256, 0>>>, as planned
// launch      v2_bwd_sm80_fp32_d64_full_dense_cef12704<<<512, 256, 115456>>>, as planned
// launch      v2_bwd_sm80_fp32_d64_full_dense_cef12704_finish<<<1024, 256, 0>>>, as planned
//
// arguments
//   ptr    q           device memory
//   ptr    k           device memory
//   ptr    v           device memory
//   ptr    o           device memory
//   ptr    do          device memory
//   ptr    lse         device memory
//   ptr    delta       device memory
//   ptr    dq_acc      device memory
//   ptr    dq          device memory
//   ptr    dk          device memory
//   ptr    dv          device memory
//   ptr    bias        device memory
//   i32    heads       16
//   i32    kv_heads    16
//   i32    seq_q       2048
//   i32    seq_kv      2048
//   i64x3  q_strides   (2097152, 131072, 64)
//   i64x3  k_strides   (2097152, 131072, 64)
//   i64x3  v_strides   (2097152, 131072, 64)
//   i64x3  o_strides   (2097152, 131072, 64)
//   i64x3  do_strides  (2097152, 131072, 64)
//   i64x3  bias_strides  (67108864, 4194304, 2048)
//   f32    scale_log2  0.18033688011112042
//   f32    scale       0.125
//
// shared memory
//   from      0   16384 bytes  K, and dK at the end
//   from  16384   16384 bytes  V, and dV at the end
//   from  32768    8192 bytes  Q, slot 0
//   from  40960    8192 bytes  dO, slot 0
//   from  49152    8192 bytes  Q, slot 1
//   from  57344    8192 bytes  dO, slot 1
//   from  65536    8192 bytes  Q, slot 2
//   from  73728    8192 bytes  dO, slot 2
//   from  81920    8192 bytes  dS, slot 0
//   from  90112    8192 bytes  dS, slot 1
//   from  98304    8192 bytes  P, slot 0
//   from 106496    8192 bytes  P, slot 1
//   from 114688     256 bytes  L and D, slot 0
//   from 114944     256 bytes  L and D, slot 1
//   from 115200     256 bytes  L and D, slot 2
//
// templates, with the first 8 digits of their sha256
//   e4e804e3  device/add_query_gradient.cuh
//   7ef51f94  device/copy.cuh
//   f0c63492  device/copy_async.cuh
//   ab3ac69d  device/dots.cuh
//   76c2f1b5  device/integers.cuh
//   814facd2  device/matmul_bwd_fma.cuh
//   3f4ebe3a  device/query_gradient.cuh
//   b3497e68  device/query_gradient_fma.cuh
//   cb1e2090  device/row_products.cuh
//   23af4307  device/score.cuh
//   da8cc47b  device/score_columns.cuh
//   577ba899  device/score_gradient.cuh
//   091cdbcc  device/store_rows.cuh
//   6364541a  device/tile.cuh
//   c2706fe3  device/types.cuh
//   8792d681  device/words.cuh
//   a1a94af8  kernels/v2_bwd.cu
//   c3ce054e  parts/constants_bwd.cuh
//   5a818b86  parts/main_arrays.cuh
//   b86622cb  parts/main_bwd.cu
//   92b4175b  parts/main_options.cuh
//   337a472a  ptx/cp_async.cuh
//   422cf4a7  ptx/ex2.cuh
//   84027e88  ptx/red_add_f32.cuh
//   9f71dff2  ptx/smem_address.cuh
//

// ---- plan
// {"gpu": {"arch": "sm_80", "name": "a100-sxm4-80gb"}, "kernel": {"algo": "v2", "arch": "sm_80",
// "bias": "dense", "deterministic": false, "dtype": "fp32", "head_dim": 64, "head_dim_v": 64,
// "mask": "full", "out_dtype": "fp32", "pack_gqa": false, "pass": "bwd", "scales": "none",
// "softcap": false, "splits": false, "tile": {"block_kv": 64, "block_q": 32, "p_in": "shared",
// "registers": 255, "stages": 3, "step_kv": 0, "warps": 8}, "varlen": false}, "problem": {"batch":
// 1, "bias": "dense", "causal": false, "deterministic": false, "dtype": "fp32", "head_dim": 64,
// "head_dim_v": 64, "heads": 16, "incoherent": false, "kv_heads": 16, "out_dtype": "fp32", "pass":
// "bwd", "scale": 0.125, "scales": "tensor", "seq": 2048, "seq_kv": 2048, "softcap": 0.0, "varlen":
// false, "window": [-1, -1]}, "schema": "fasim.plan/1", "smem_bytes": 115456}
// ---- the rest of the file has sha256 61953201c41ffe6ba1a14cfc8364f1f6d6319afef9a2fbe943d786d493e6fc9f
// FlashAttention-2, backward (Dao 2023, algorithm 2).
//
// Three kernels, launched one after the other with the same arguments:
//   prepare  D = rowsum(dO * O), one fp32 a row, and zeros for dQ
//   main     one thread block per block of keys. It walks the queries that see them, of every head
//            that shares them, makes P again from Q, K and L, keeps dK and dV in registers, and adds
//            its part of dQ in HBM, in fp32
//   finish   dQ, scaled and rounded
//
// dK and dV are sums in a fixed order. dQ is summed by atomic additions in any order. S and P stand
// on their side, keys by queries, so that they feed dV and dK from registers; only dS passes through
// shared memory, for dQ, a step later: one barrier a step is enough.
//
//   paper   here                    paper   here
//   B_r     kBlockQ                 T_r     q_tiles
//   B_c     kBlockKV                T_c     kv_tiles
//   S, P    s (transposed)          L       lse
//   dP, dS  dp (transposed)         D       delta
//
// P takes the place of S, and dS that of dP.

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct Strides {  // of one tensor, in elements; its last dimension is contiguous
  i64 batch, head, seq;
};

using Element = float;  // fp32
using Output = float;  // fp32
using Bias = float;  // fp32

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kHeadDim = 64;  // d, of Q and K
constexpr int kHeadDimV = 64;  // of V and O
constexpr int kD = 64;  // as stored: whole 16-wide matrix steps, the rest zero
constexpr int kDV = 64;
constexpr int kBlockQ = 32;  // B_r: queries of one tile
constexpr int kBlockKV = 64;  // B_c: keys of one tile
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSplit = 2;  // warps that share keys, each with its columns of dK and dV
constexpr int kWarpKeys = kBlockKV / kWarps * kSplit;
constexpr int kSlots = 3;  // tiles of Q and dO in shared memory
constexpr int kRowTiles = kWarpKeys / 16;
constexpr int kStepQ = 16;  // queries whose scores fit the registers beside dK and dV …
constexpr int kPartQ = kStepQ / kRowTiles;  // … and whose dP fits beside those
constexpr int kRegisters = 255;  // of a thread: so many that as many blocks fit an SM as planned
constexpr int kSmemBytes = 115456;
constexpr bool kCausal = false;
constexpr int kChunkElements = 16 / int(sizeof(Element));  // of the 16-byte unit of copies
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2e = 1.442695041f;

static_assert(kRowTiles * 16 * kWarps == kBlockKV * kSplit, "every warp has whole 16-key tiles");
static_assert(kBlockQ % (kStepQ * kSplit) == 0, "whole steps of queries for every warp");

// The first of the keys that a warp has in a tile, and its place among those that share them.
__device__ __forceinline__ int warp_keys() { return threadIdx.x / 32 / kSplit * kWarpKeys; }
__device__ __forceinline__ int warp_part() { return threadIdx.x / 32 % kSplit; }

// Warps that share keys take turns at blocks of 16 columns: how many a warp has at most, and where
// the i-th of a warp's 8-column tiles begins.
__device__ constexpr int warp_blocks(int columns) { return (columns / 16 + kSplit - 1) / kSplit; }
__device__ __forceinline__ int warp_column(int i) {
  return (i / 2 * kSplit + warp_part()) * 16 + i % 2 * 8;
}

constexpr int kSlotElements = kBlockQ * (kD + kDV);  // Q and dO of one tile
constexpr int kWeightElements = kBlockQ * kBlockKV;  // dS or P of one tile
constexpr int kWeightTiles = 4;  // two of dS, two of P
constexpr int kSharedElements =
    kBlockKV * (kD + kDV) + kSlots * kSlotElements + kWeightTiles * kWeightElements;

static_assert(kSharedElements * sizeof(Element) + 2 * kSlots * kBlockQ * sizeof(float) ==
                  kSmemBytes,
              "shared memory as planned");

// ---- Instructions -------------------------------------------------------------------------------

namespace ptx {
#ifndef FASIM_EMULATE

// Where a generic pointer into shared memory lies in the shared window. PTX ISA: cvta.
__device__ __forceinline__ u32 smem_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Copies kBytes (4, 8 or 16) in the background, or writes zeros where not valid. PTX ISA: cp.async.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* smem, const void* global, bool valid) {
  const u32 address = smem_address(smem);
  const int size = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(size)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global),
                 "n"(kBytes), "r"(size)
                 : "memory");
  }
}

// Closes the group of copies issued by this thread so far. PTX ISA: cp.async.commit_group.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kGroups of this thread's groups are in flight. PTX ISA: cp.async.wait_group.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// 2^x, 2 ulp; -inf gives 0. PTX ISA: ex2.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// *global += x, atomically, without the old value. PTX ISA: red.
__device__ __forceinline__ void red_add_f32(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

#endif
}  // namespace ptx

// An unsigned word of so many bytes, and the widest one every row of a tensor is aligned to.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using type = u16;
};
template <>
struct WordOf<4> {
  using type = u32;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

__device__ constexpr int copy_bytes(int columns, int size = sizeof(Element)) {
  int bytes = 16;
  while (columns * size % bytes != 0) bytes /= 2;
  return bytes;
}

// The largest power of two that divides n, but no more than limit.
__device__ constexpr int power_of_two_in(int n, int limit) {
  const int power = n & -n;
  return power < limit ? power : limit;
}

// The smallest power of two that is at least n, but no more than limit.
__device__ constexpr int min_power_of_two(int n, int limit) {
  int power = 1;
  while (power < n && power < limit) power *= 2;
  return power;
}

// ---- Tiles in shared memory ---------------------------------------------------------------------
// A tile is row-major with no padding. Its 16-byte chunks are permuted inside a row, differently in
// neighbouring rows, so that the 8 rows one matrix load touches lie in 8 different bank groups.

// Chunks that are permuted among themselves: the largest of 8, 4, 2 that divides a row.
__device__ constexpr int swizzle_group(int chunks) {
  return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;
}

template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int kGroup = swizzle_group(kChunks);
  return chunk ^ (row / (8 / kGroup) % kGroup);
}

// The 16-byte chunk of a tile of kCols columns.
template <int kCols, bool kSwizzled = true, typename T>
__device__ __forceinline__ T* chunk_at(T* tile, int row, int chunk) {
  constexpr int kElements = 16 / int(sizeof(T));
  const int place = kSwizzled ? swizzled<kCols / kElements>(row, chunk) : chunk;
  return tile + row * kCols + place * kElements;
}

// The shared address `chunks` further along a row than chunk 0, or an even number further than chunk
// 1, at address `first`.
template <int kCols>
__device__ __forceinline__ u32 along_row(u32 first, int chunks) {
  constexpr int kGroup = swizzle_group(kCols / kChunkElements);
  return (first ^ chunks % kGroup * 16) + chunks / kGroup * kGroup * 16;
}

// One aligned copy into shared memory, in the background where the hardware can (not 1 or 2
// bytes).
template <int kBytes>
__device__ __forceinline__ void copy(Element* to, const Element* from, bool valid) {
  if constexpr (kBytes >= 4) {
    ptx::cp_async<kBytes>(to, from, valid);
  } else {
    using Word = typename WordOf<kBytes>::type;
    *reinterpret_cast<Word*>(to) = valid ? *reinterpret_cast<const Word*>(from) : Word(0);
  }
}

// Rows that are copied at once by as many threads each as they have copies: neighbours copy neighbours,
// and a row's cache lines are asked for once. So many that the permutation of chunks only alternates;
// 0 where a quarter of the threads or more would be left over.
__device__ constexpr int whole_rows(int copies, int chunks) {
  const int period = 8 / swizzle_group(chunks);
  const int rows = kThreads / copies / period * period;
  return 4 * rows * copies > 3 * kThreads ? rows : 0;
}

// Fills a tile of kRows x kCols from rows of global memory, all threads together. What lies beyond
// `rows` or kValidCols becomes zero, so padding never reaches a product. Of a whole tile nothing need
// be asked, and its addresses are constants apart. Where rows are not copied whole, as many threads
// share one as divide its copies, so that all have as many.
template <int kRows, int kCols, int kValidCols, bool kSwizzled = true>
__device__ __forceinline__ void copy_tile(Element* tile, const Element* source, i64 stride,
                                          int rows) {
  constexpr int kBytes = copy_bytes(kValidCols);
  constexpr int kElements = kBytes / int(sizeof(Element));
  constexpr bool kUnrolled = kCols == kValidCols && sizeof(Element) < 4;  // fp32 has no registers
  constexpr int kCopies = kCols / kElements;  // of a row
  constexpr int kWhole = kUnrolled ? whole_rows(kCopies, kCols / kChunkElements) : 0;
  constexpr int kRowThreads = kWhole > 0 ? kCopies : power_of_two_in(kCopies, kThreads);
  constexpr int kRowStep = kWhole > 0 ? kWhole : kThreads / kRowThreads;
  constexpr int kColStep = kRowThreads * kElements;
  constexpr int kRowSteps = (kRows + kRowStep - 1) / kRowStep, kColSteps = kCols / kColStep;
  const int first_col = threadIdx.x % kRowThreads * kElements;
  const int first_row = threadIdx.x / kRowThreads;
  if (kRowStep * kRowThreads < kThreads && first_row >= kRowStep) return;  // left over
  source += first_row * stride + first_col;
  const auto at = [&](int row, int col) {
    return chunk_at<kCols, kSwizzled>(tile, row, col / kChunkElements) + col % kChunkElements;
  };
  if (kUnrolled && rows >= kRows) {
#pragma unroll
    for (int i = 0; i < kRowSteps * kColSteps; ++i) {
      const int row = i / kColSteps * kRowStep, col = i % kColSteps * kColStep;
      if (row + kRowStep <= kRows || first_row + row < kRows) {  // all but the last rows: known now
        copy<kBytes>(at(first_row + row, first_col + col), source + col, true);
      }
      if ((i + 1) % kColSteps == 0) source += kRowStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < kRows; row += kRowStep) {
#pragma unroll
    for (int i = 0; i < kColSteps; ++i) {
      const int col = first_col + i * kColStep;
      const bool valid = row < rows && col < kValidCols;
      copy<kBytes>(at(row, col), source + i * kColStep, valid);
    }
    source += kRowStep * stride;
  }
}

// ---- Matrix products in fp32, by fused multiply-add ---------------------------------------------
// The layout is that of the tensor cores. Scores stand on their side: each warp owns kRowTiles x 16
// keys, and lane 4 g + t holds keys g and g + 8 of each, and of every 8 queries 2t and 2t + 1.
template <int kQueries>
using Scores = float[kRowTiles][kQueries / 8][4];
using Weights = Scores<kStepQ>;

// The warp's columns of dK or dV.
template <int kCols>
using Accumulator = float[kRowTiles][2 * warp_blocks(kCols)][4];

template <int kRows, int kTiles>
__device__ __forceinline__ void zero(float (&fragment)[kRows][kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRows * kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) fragment[i / kTiles][i % kTiles][r] = 0.f;
  }
}

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

__device__ __forceinline__ float dot(const float (&a)[4], float x, float y, float z, float w) {
  return fmaf(a[3], w, fmaf(a[2], z, fmaf(a[1], y, a[0] * x)));
}

template <int kCols>
__device__ __forceinline__ float4 load_chunk(const float* tile, int row, int chunk) {
  return *reinterpret_cast<const float4*>(chunk_at<kCols>(tile, row, chunk));
}

template <int kCols, typename T>
__device__ __forceinline__ T* element_at(T* tile, int row, int column) {
  return chunk_at<kCols>(tile, row, column / 4) + column % 4;
}

template <int kCols>
__device__ __forceinline__ float2 load_pair(const float* tile, int row, int column) {
  return *reinterpret_cast<const float2*>(element_at<kCols>(tile, row, column));
}

// Two neighbours of a row += four weights times four rows, which are summed before they meet the
// long sum: a quarter of its roundings.
__device__ __forceinline__ void add_dots(float* sum, const float (&w)[4], const float2 (&x)[4]) {
  sum[0] += dot(w, x[0].x, x[1].x, x[2].x, x[3].x);
  sum[1] += dot(w, x[0].y, x[1].y, x[2].y, x[3].y);
}

// s = K Q^T, or V dO^T: the warp's keys against kQueries rows of queries.
template <int kCols, int kQueries>
__device__ __forceinline__ void scores(Scores<kQueries>& s, const float* keys,
                                       const float* queries) {
  const int lane = threadIdx.x % 32;
  zero(s);
#pragma unroll 1
  for (int chunk = 0; chunk < kCols / 4; ++chunk) {
    float4 k[2 * kRowTiles];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      k[i] = load_chunk<kCols>(keys, warp_keys() + lane / 4 + 8 * i, chunk);
    }
#pragma unroll
    for (int n = 0; n < kQueries / 4; ++n) {
      const int query = n / 2 * 8 + lane % 4 * 2 + n % 2;
      const float4 q = load_chunk<kCols>(queries, query, chunk);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        float& sum = s[i / 2][n / 2][i % 2 * 2 + n % 2];
        sum = dot(k[i], q, sum);
      }
    }
  }
}

template <int kQueries>
__device__ __forceinline__ void round_weights(Weights& p, const Scores<kQueries>& s, int first) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kQueries / 2; ++i) {
    const int tile = i / (kQueries / 2), n = i / 4 % (kQueries / 8);
    p[tile][first / 8 + n][i % 4] = s[tile][n][i % 4];
  }
}

// sum += P^T dO, or dS^T Q, over four queries from `query` on: weights times the warp's columns of
// their rows.
template <int kCols>
__device__ __forceinline__ void accumulate(Accumulator<kCols>& sum,
                                           const float (&weight)[2 * kRowTiles][4],
                                           const float* queries, int query) {
#pragma unroll
  for (int n = 0; n < 2 * warp_blocks(kCols); ++n) {
    if (kCols / 16 % kSplit && warp_column(n) >= kCols) break;
    float2 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = load_pair<kCols>(queries, query + i, warp_column(n) + threadIdx.x % 4 * 2);
    }
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) add_dots(&sum[i / 2][n][i % 2 * 2], weight[i], x);
  }
}

// sum += P^T dO, or dS^T Q, over a tile of queries: weights as all warps left them, keys by queries.
template <int kCols>
__device__ __forceinline__ void accumulate_tile(Accumulator<kCols>& sum, const float* weights,
                                                const float* queries) {
#pragma unroll 1
  for (int query = 0; query < kBlockQ; query += 4) {
    float weight[2 * kRowTiles][4];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int key = warp_keys() + 8 * i + threadIdx.x % 32 / 4;
      *reinterpret_cast<float4*>(weight[i]) = load_chunk<kBlockQ>(weights, key, query / 4);
    }
    accumulate<kCols>(sum, weight, queries, query);
  }
}

// Weights for the other warps: rows are keys, columns the queries of a tile, from `query` on these.
__device__ __forceinline__ void share_weights(float* tile, const Weights& weights, int query) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 4; ++i) {
    const int row_tile = i / (kStepQ / 4), n = i / 2 % (kStepQ / 8), half = i % 2;
    const int row = warp_keys() + 16 * row_tile + 8 * half + lane / 4;
    const float* pair = &weights[row_tile][n][2 * half];
    float* to = element_at<kBlockQ>(tile, row, query + 8 * n + lane % 4 * 2);
    *reinterpret_cast<float2*>(to) = make_float2(pair[0], pair[1]);
  }
}

// ---- P and dS -----------------------------------------------------------------------------------

// From s = K Q^T: P = exp(factor s - L), already normalised, as L is the logarithm of the row's sum.
// A pair that the bias hides gets -0, which no exponential gives: whatever L is, it is told apart.
__device__ __forceinline__ bool hidden(float p) { return __float_as_uint(p) == 1u << 31; }

__device__ __forceinline__ float exponential(float score, float factor, float shift) {
  return score == -kInfinity ? -0.f : ptx::ex2(fmaf(score, factor, shift));
}

__device__ __forceinline__ void weights(Scores<kStepQ>& s, const float* lse, float factor) {
#pragma unroll
  for (int n = 0; n < kStepQ / 8; ++n) {
    const float2 l = *reinterpret_cast<const float2*>(lse + 8 * n + threadIdx.x % 4 * 2);
    const float shift[2] = {-kLog2e * l.x, -kLog2e * l.y};
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
      float& x = s[i / 4][n][i % 4];
      x = exponential(x, factor, shift[i % 2]);
    }
  }
}

// From dp = V dO^T: dS = P (dP - D), of the queries from `first` on. Its scale waits until the end.
__device__ __forceinline__ void score_gradient(Scores<kPartQ>& dp, const Scores<kStepQ>& p,
                                               const float* delta, int first) {
#pragma unroll
  for (int n = 0; n < kPartQ / 8; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(delta + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
      float& x = dp[i / 4][n][i % 4];
      const float weight = p[i / 4][first / 8 + n][i % 4];
      x = hidden(weight) ? 0.f : weight * (x - (i % 2 ? d.y : d.x));
    }
  }
}

// ---- Mask ---------------------------------------------------------------------------------------
// Keys and queries are aligned at their ends: the last query with the last key.
struct Span {
  int seq_q, seq_kv;
};

// The first query that sees a key.
__device__ __forceinline__ int first_query_of(int key, const Span& span) {
  return kCausal ? key + span.seq_q - span.seq_kv : 0;
}

// The one after the last that does.
__device__ __forceinline__ int end_query_of(int key, const Span& span) { return span.seq_q; }

// Whether the mask hides any of the warp's keys from `key` on from a query of the tile at `query`.
__device__ __forceinline__ bool crosses_mask(int key, int query, const Span& span) {
  const int last = key + kWarpKeys - 1;
  return last >= span.seq_kv || query < first_query_of(last, span);
}

// Zeroes P or dS of hidden pairs: of the warp's keys from `key` on and the queries from `query` on.
// Done last, so that no NaN of a hidden pair remains. Queries past the end need none: their Q, dO, L
// and D are zeros, which make dS = 0 and a finite P, and they add nothing.
template <int kQueries>
__device__ __forceinline__ void mask_weights(Scores<kQueries>& weights, int key, int query,
                                             const Span& span) {
  const int lane = threadIdx.x % 32;
  const int column = query + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = key + 8 * i + lane / 4;
    const int first = row < span.seq_kv ? first_query_of(row, span) - column : kQueries;
#pragma unroll
    for (int n = 0; n < kQueries / 4; ++n) {
      const int place = n / 2 * 8 + n % 2;
      if (place < first) weights[i / 2][n / 2][i % 2 * 2 + n % 2] = 0.f;
    }
  }
}

// ---- Scores -------------------------------------------------------------------------------------
// What happens to a score between Q K^T and the mask, in the order of the contract: scale, softcap,
// bias. Scores leave in units of log2, so the softmax after them needs no factor of its own.

struct ScoreTerms {
  float scale_log2;
  const Bias* bias;  // of this head
  i64 stride;  // between its rows
};

__device__ __forceinline__ float scaled(float score, const ScoreTerms& terms) {
  return score * terms.scale_log2;
}

__device__ __forceinline__ float bias_value(float x) { return x; }

// A bias of -inf hides its key, whatever the score is.
__device__ __forceinline__ void add_bias(float& score, Bias bias, const ScoreTerms& terms) {
  const float b = bias_value(bias);
  score = b == -kInfinity ? b : fmaf(b, kLog2e, scaled(score, terms));
}

// The same for scores that stand on their side: the warp's keys from `key` on, queries from `query`
// on.
__device__ __forceinline__ void finish_score(float& score, const ScoreTerms& terms, int key,
                                             int query, const Span& span) {
  if (key < span.seq_kv && query < span.seq_q) {
    add_bias(score, terms.bias[query * terms.stride + key], terms);
  } else {
    score = -kInfinity;
  }
}

__device__ __forceinline__ void finish_scores(Scores<kStepQ>& s, const ScoreTerms& terms, int key,
                                              int query, const Span& span) {
  const int row = key + threadIdx.x % 32 / 4, column = query + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kStepQ / 4; ++n) {
      float& score = s[i / 2][n / 2][i % 2 * 2 + n % 2];
      finish_score(score, terms, row + 8 * i, column + n / 2 * 8 + n % 2, span);
    }
  }
}

// ---- dQ -----------------------------------------------------------------------------------------
// A tile of dQ is cut into units of kUnitRows queries by kUnitCols columns, dealt out to the warps.
// In HBM it lies as the lanes hold it, unit by unit, so that a warp's additions are contiguous; only
// `finish` puts it in order.
constexpr int kUnitRows = kBlockQ % 32 == 0 ? 32 : 16;
constexpr int kUnitCols = kD % 32 == 0 && kBlockQ * kD >= 32 * kUnitRows * kWarps ? 32 : 16;
constexpr int kUnits = kBlockQ / kUnitRows * (kD / kUnitCols);
constexpr int kUnitElements = kUnitRows * kUnitCols;
constexpr int kFragments = kUnitElements / 128;  // of a lane, four elements each
using QueryGradient = float[kUnitRows / 16][kUnitCols / 8][4];

__device__ __forceinline__ int unit_query(int unit) { return unit / (kD / kUnitCols) * kUnitRows; }
__device__ __forceinline__ int unit_column(int unit) { return unit % (kD / kUnitCols) * kUnitCols; }

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

// Where element r of a lane's i-th fragment lies in its unit.
__device__ __forceinline__ int unit_place(int i, int r) {
  return (4 * i + r) * 32 + threadIdx.x % 32;
}

__device__ __forceinline__ void add_fragment(float* unit, int i, const float (&x)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) ptx::red_add_f32(unit + unit_place(i, r), x[r]);
}

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

// ---- Output -------------------------------------------------------------------------------------
__device__ __forceinline__ void store_pair(Element* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

// The warps lay dK or dV out in shared memory, then write their rows in the widest words that the
// alignment allows. A warp reads back what it wrote itself, or those with which it shares its keys.
template <int kCols, int kValidCols>
__device__ __forceinline__ void store_rows(Element* tile, const Accumulator<kCols>& sum,
                                           float factor, Element* global, i64 stride, int rows) {
  constexpr int kBytes = copy_bytes(kValidCols);
  constexpr int kElements = kBytes / int(sizeof(Element));
  constexpr int kCopies = kValidCols / kElements;
  using Word = typename WordOf<kBytes>::type;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < 2 * warp_blocks(kCols); ++n) {
      if (kCols / 16 % kSplit && warp_column(n) >= kCols) break;
      const float (&pair)[4] = sum[i / 2][n];
      const int row = warp_keys() + 8 * i + lane / 4, column = warp_column(n) + lane % 4 * 2;
      Element* chunk = chunk_at<kCols>(tile, row, column / kChunkElements);
      store_pair(chunk + column % kChunkElements, factor * pair[i % 2 * 2],
                 factor * pair[i % 2 * 2 + 1]);
    }
  }
  if constexpr (kSplit > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  for (int i = warp_part() * 32 + lane; i < kWarpKeys * kCopies; i += 32 * kSplit) {
    const int row = warp_keys() + i / kCopies;
    const int column = i % kCopies * kElements;
    const Element* chunk = chunk_at<kCols>(tile, row, column / kChunkElements);
    const Word word = *reinterpret_cast<const Word*>(chunk + column % kChunkElements);
    if (row < rows) *reinterpret_cast<Word*>(global + row * stride + column) = word;
  }
}

// ---- Before and after ---------------------------------------------------------------------------
__device__ __forceinline__ float to_float(Element x) { return x; }

// kRowThreads lanes share a row, kRowElements each at a time.
constexpr int kRowElements = copy_bytes(kHeadDimV) / int(sizeof(Element));
constexpr int kRowThreads = min_power_of_two(kHeadDimV / kRowElements, 32);

// The sum over two rows' products, 0 where not valid. All lanes of a row get it.
__device__ __forceinline__ float row_product(const Element* x, const Element* y, bool valid) {
  using Word = typename WordOf<copy_bytes(kHeadDimV)>::type;
  float sum = 0.f;
  for (int first = threadIdx.x % kRowThreads * kRowElements; valid && first < kHeadDimV;
       first += kRowThreads * kRowElements) {
    alignas(16) Element a[kRowElements], b[kRowElements];
    *reinterpret_cast<Word*>(a) = *reinterpret_cast<const Word*>(x + first);
    *reinterpret_cast<Word*>(b) = *reinterpret_cast<const Word*>(y + first);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) sum = fmaf(to_float(a[i]), to_float(b[i]), sum);
  }
#pragma unroll
  for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  return sum;
}

// A pair of dQ, as far as the row reaches.
__device__ __forceinline__ void store_two(Element* row, int column, float x, float y) {
  if (column < kHeadDim) row[column] = x;
  if (column + 1 < kHeadDim) row[column + 1] = y;
}

// ---- Kernels ------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void
v2_bwd_sm80_fp32_d64_full_dense_cef12704_prepare(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    const Element* __restrict__ o, const Element* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ delta, float* __restrict__ dq_acc, Element* __restrict__ dq,
    Element* __restrict__ dk, Element* __restrict__ dv, const Bias* __restrict__ bias,
    const int heads, const int kv_heads, const int seq_q, const int seq_kv, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides o_strides,
    const Strides do_strides, const Strides bias_strides, const float scale_log2,
    const float scale) {
  // clang-format on
  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ;
  const int first = blockIdx.x % q_blocks * kBlockQ;
  const i64 batch = blockIdx.x / q_blocks / heads, head = blockIdx.x / q_blocks % heads;
  o += batch * o_strides.batch + head * o_strides.head;
  dO += batch * do_strides.batch + head * do_strides.head;
  delta += (batch * heads + head) * seq_q;
  for (int row = threadIdx.x / kRowThreads; row < kBlockQ; row += kThreads / kRowThreads) {
    const i64 query = first + row;
    const bool valid = query < seq_q;
    const float product =
        row_product(o + query * o_strides.seq, dO + query * do_strides.seq, valid);
    if (valid && threadIdx.x % kRowThreads == 0) delta[query] = product;
  }
  const i64 tile = (batch * heads + head) * q_blocks + first / kBlockQ;
  float4* dq_tile = reinterpret_cast<float4*>(dq_acc + tile * (kBlockQ * kD));
  for (int i = threadIdx.x; i < kBlockQ * kD / 4; i += kThreads) {
    dq_tile[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
v2_bwd_sm80_fp32_d64_full_dense_cef12704(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    const Element* __restrict__ o, const Element* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ delta, float* __restrict__ dq_acc, Element* __restrict__ dq,
    Element* __restrict__ dk, Element* __restrict__ dv, const Bias* __restrict__ bias,
    const int heads, const int kv_heads, const int seq_q, const int seq_kv, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides o_strides,
    const Strides do_strides, const Strides bias_strides, const float scale_log2,
    const float scale) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* k_tile = reinterpret_cast<Element*>(smem_raw);
  Element* v_tile = k_tile + kBlockKV * kD;
  Element* slots = v_tile + kBlockKV * kDV;  // tiles of Q and dO
  Element* weight_tiles = slots + kSlots * kSlotElements;  // dS and perhaps P, keys by queries
  float* statistics = reinterpret_cast<float*>(weight_tiles + kWeightTiles * kWeightElements);

  // This block's keys. Under a causal mask the first ones are seen by the most queries.
  const int kv_tiles = (seq_kv + kBlockKV - 1) / kBlockKV;
  const int first_key = blockIdx.x % kv_tiles * kBlockKV;
  const int kv_head = blockIdx.x / kv_tiles % kv_heads;
  const i64 batch = blockIdx.x / kv_tiles / kv_heads;
  const int keys = min(kBlockKV, seq_kv - first_key);
  k += batch * k_strides.batch + kv_head * k_strides.head + first_key * k_strides.seq;
  v += batch * v_strides.batch + kv_head * v_strides.head + first_key * v_strides.seq;
  q += batch * q_strides.batch;
  dO += batch * do_strides.batch;

  // The tiles of queries that see any of them, head after head of those that share the keys.
  const int group = heads / kv_heads;
  const Span span = {seq_q, seq_kv};
  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ;
  const int first_tile = max(0, first_query_of(first_key, span)) / kBlockQ;
  const int end_query = end_query_of(first_key + keys - 1, span);
  const int q_tiles = max(0, (end_query + kBlockQ - 1) / kBlockQ - first_tile);
  const int steps = group * q_tiles;
  const auto head_at = [&](int t) { return kv_head * group + t / q_tiles; };
  const auto query_at = [&](int t) { return (first_tile + t % q_tiles) * kBlockQ; };
  const auto q_slot = [&](int t) { return slots + t % kSlots * kSlotElements; };
  const auto do_slot = [&](int t) { return q_slot(t) + kBlockQ * kD; };
  const auto ds_tile = [&](int t) { return weight_tiles + t % 2 * kWeightElements; };
  const auto p_tile = [&](int t) { return weight_tiles + (2 + t % 2) * kWeightElements; };
  const auto lse_slot = [&](int t) { return statistics + t % kSlots * 2 * kBlockQ; };
  const auto delta_slot = [&](int t) { return lse_slot(t) + kBlockQ; };
  const auto load = [&](int t) {
    if (t < steps) {
      const int head = head_at(t);
      const i64 query = query_at(t);
      const int rows = seq_q - int(query);
      const i64 row = (batch * heads + head) * seq_q + query;
      const Element* q_source = q + head * q_strides.head + query * q_strides.seq;
      const Element* do_source = dO + head * do_strides.head + query * do_strides.seq;
      copy_tile<kBlockQ, kD, kHeadDim>(q_slot(t), q_source, q_strides.seq, rows);
      copy_tile<kBlockQ, kDV, kHeadDimV>(do_slot(t), do_source, do_strides.seq, rows);
      for (int i = threadIdx.x; i < kBlockQ; i += kThreads) {
        ptx::cp_async<4>(lse_slot(t) + i, lse + row + i, i < rows);
        ptx::cp_async<4>(delta_slot(t) + i, delta + row + i, i < rows);
      }
    }
    ptx::cp_async_commit_group();
  };
  const auto add_dq = [&](int t) {
    const int head = head_at(t);
    const i64 tile = (batch * heads + head) * q_blocks + query_at(t) / kBlockQ;
    add_query_gradient(dq_acc + tile * (kBlockQ * kD), ds_tile(t), k_tile);
  };

  copy_tile<kBlockKV, kD, kHeadDim>(k_tile, k, k_strides.seq, keys);
  copy_tile<kBlockKV, kDV, kHeadDimV>(v_tile, v, v_strides.seq, keys);
  load(0);

  Accumulator<kD> dk_acc;
  Accumulator<kDV> dv_acc;
  zero(dk_acc);
  zero(dv_acc);
  const int warp_key = first_key + warp_keys();
  const auto add_dv_dk = [&](int t) {
    if (t < 0) return;
    accumulate_tile<kDV>(dv_acc, p_tile(t), do_slot(t));
    accumulate_tile<kD>(dk_acc, ds_tile(t), q_slot(t));
  };
  // What is left to do of tile t when all warps have left their part.
  const auto finish_tile = [&](int t) {
    if (t < 0) return;
    add_dv_dk(t);
    add_dq(t);
  };
  for (int t = 0; t < steps; ++t) {
    // Tile t has arrived, and every warp has made S of tile t - 1 and left its P and dS.
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    load(t + 1);
    finish_tile(t - 1);
    const int query = query_at(t);
    const bool masked = crosses_mask(warp_key, query, span);
    const int head = head_at(t);
    const Bias* head_bias = bias + batch * bias_strides.batch + head * bias_strides.head;
    const ScoreTerms terms = {scale_log2, head_bias, bias_strides.seq};
#pragma unroll 1
    for (int step = warp_part() * kStepQ; step < kBlockQ; step += kStepQ * kSplit) {
      Scores<kStepQ> s;
      Weights p, ds;
      scores<kD, kStepQ>(s, k_tile, q_slot(t) + step * kD);
      finish_scores(s, terms, warp_key, query + step, span);
      weights(s, lse_slot(t) + step, 1.f);
      if (masked) mask_weights<kStepQ>(s, warp_key, query + step, span);
#pragma unroll
      for (int part = 0; part < kStepQ; part += kPartQ) {
        Scores<kPartQ> dp;
        scores<kDV, kPartQ>(dp, v_tile, do_slot(t) + (step + part) * kDV);
        score_gradient(dp, s, delta_slot(t) + step + part, part);
        if (masked) mask_weights<kPartQ>(dp, warp_key, query + step + part, span);
        round_weights<kPartQ>(ds, dp, part);
      }
      round_weights<kStepQ>(p, s, 0);
      share_weights(ds_tile(t), ds, step);
      share_weights(p_tile(t), p, step);
    }
  }

  ptx::cp_async_wait_group<0>();
  __syncthreads();
  finish_tile(steps - 1);
  __syncthreads();  // the tiles of K and V are free for dK and dV
  const i64 apart = 1;  // rows from a key of this head to the next
  const i64 row = (batch * kv_heads + kv_head) * seq_kv + first_key;
  store_rows<kD, kHeadDim>(k_tile, dk_acc, scale, dk + row * kHeadDim, apart * kHeadDim, keys);
  store_rows<kDV, kHeadDimV>(v_tile, dv_acc, 1.f, dv + row * kHeadDimV, apart * kHeadDimV, keys);
}

// clang-format off
extern "C" __global__ void
v2_bwd_sm80_fp32_d64_full_dense_cef12704_finish(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    const Element* __restrict__ o, const Element* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ delta, float* __restrict__ dq_acc, Element* __restrict__ dq,
    Element* __restrict__ dk, Element* __restrict__ dv, const Bias* __restrict__ bias,
    const int heads, const int kv_heads, const int seq_q, const int seq_kv, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides o_strides,
    const Strides do_strides, const Strides bias_strides, const float scale_log2,
    const float scale) {
  // clang-format on
  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ;
  const int first = blockIdx.x % q_blocks * kBlockQ;
  const i64 batch = blockIdx.x / q_blocks / heads, head = blockIdx.x / q_blocks % heads;
  const int lane = threadIdx.x % 32;
  const i64 stride = kHeadDim;
  dq += (batch * heads + head) * seq_q * stride;
  const i64 tile = (batch * heads + head) * q_blocks + first / kBlockQ;
  const float* dq_tile = dq_acc + tile * (kBlockQ * kD);
  for (int unit = threadIdx.x / 32; unit < kUnits; unit += kWarps) {
    const float* source = dq_tile + unit * kUnitElements;
    for (int i = 0; i < kFragments; ++i) {
      const int column = unit_column(unit) + i % (kUnitCols / 8) * 8 + lane % 4 * 2;
      const i64 query = first + unit_query(unit) + i / (kUnitCols / 8) * 16 + lane / 4;
      float x[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) x[r] = scale * source[unit_place(i, r)];
      if (query < seq_q) store_two(dq + query * stride, column, x[0], x[1]);
      if (query + 8 < seq_q) store_two(dq + (query + 8) * stride, column, x[2], x[3]);
    }
  }
}

#ifdef FASIM_MAIN
// One backward pass on pseudo-random inputs, timed: enough to profile this file by itself. L is 0
// and O what it is, so the gradients mean nothing.
// usage: a.out [batch [heads [kv_heads [seq_q [seq_kv]]]]]
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

__global__ void fill(Element* x, i64 n, u32 seed) {
  const i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x;
  const u32 hash = (u32(i) * 2654435761u ^ seed) * 2246822519u;
  const float value = float(hash >> 8) / (1 << 23) - 1.f;
  if (i < n) x[i] = value;
}

template <typename T>
T* device_array(i64 n) {
  T* array = nullptr;
  cudaMalloc(&array, n * sizeof(T) + 16);
  cudaMemset(array, 0, n * sizeof(T) + 16);
  return array;
}

Element* input(i64 n, u32 seed) {
  Element* array = device_array<Element>(n);
  fill<<<(n + 255) / 256, 256>>>(array, n, seed);
  return array;
}

// An array whose values are computed on the host.
template <typename T, typename Value>
T* made(i64 n, Value value) {
  T* host = static_cast<T*>(std::malloc(n * sizeof(T)));
  for (i64 i = 0; i < n; ++i) host[i] = value(i);
  T* array = device_array<T>(n);
  cudaMemcpy(array, host, n * sizeof(T), cudaMemcpyHostToDevice);
  std::free(host);
  return array;
}

Strides contiguous(i64 heads, i64 seq, i64 head_dim) {
  return {heads * seq * head_dim, seq * head_dim, head_dim};
}

int main(int argc, char** argv) {
  const auto size = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int batch = size(1, 1), heads = size(2, 16), kv_heads = size(3, heads);
  const int seq_q = size(4, 4096), seq_kv = size(5, seq_q);
  const i64 rows = i64(batch) * heads * seq_q, keys = i64(batch) * kv_heads * seq_kv;
  const Strides q_strides = contiguous(heads, seq_q, kHeadDim);
  const Strides k_strides = contiguous(kv_heads, seq_kv, kHeadDim);
  const Strides v_strides = contiguous(kv_heads, seq_kv, kHeadDimV);
  const Strides o_strides = contiguous(heads, seq_q, kHeadDimV);
  const Strides do_strides = o_strides;
  const float scale = 1.f / sqrtf(kHeadDim);
  const int q_grid = batch * heads * ((seq_q + kBlockQ - 1) / kBlockQ);
  const int kv_grid = batch * kv_heads * ((seq_kv + kBlockKV - 1) / kBlockKV);

  const float scale_log2 = 1.442695041f / sqrtf(kHeadDim);
  const Bias* bias = made<Bias>(i64(seq_q) * seq_kv, [](i64) { return Bias(0); });
  const Strides bias_strides = {0, 0, seq_kv};

  Element* q = input(rows * kHeadDim, 1);
  Element* k = input(keys * kHeadDim, 2);
  Element* v = input(keys * kHeadDimV, 3);
  Element* o = input(rows * kHeadDimV, 4);
  Element* dO = input(rows * kHeadDimV, 5);
  float* lse = device_array<float>(rows);
  float* delta = device_array<float>(rows);
  const i64 dq_tiles = q_grid;
  float* dq_acc = device_array<float>(dq_tiles * kBlockQ * kD);
  Element* dq = device_array<Element>(rows * kHeadDim);
  Element* dk = device_array<Element>(keys * kHeadDim);
  Element* dv = device_array<Element>(keys * kHeadDimV);
  const auto prepare = v2_bwd_sm80_fp32_d64_full_dense_cef12704_prepare;
  const auto kernel = v2_bwd_sm80_fp32_d64_full_dense_cef12704;
  const auto finish = v2_bwd_sm80_fp32_d64_full_dense_cef12704_finish;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  const auto launch = [&](auto entry, int grid, int smem_bytes) {
    // clang-format off
    entry<<<grid, kThreads, smem_bytes>>>(
        q, k, v, o, dO, lse, delta, dq_acc, dq, dk, dv, bias, heads, kv_heads, seq_q, seq_kv,
        q_strides, k_strides, v_strides, o_strides, do_strides, bias_strides, scale_log2, scale);
    // clang-format on
  };
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  float ms = 0;
  for (int run = 0; run < 2; ++run) {  // the second one counts
    cudaEventRecord(start);
    launch(prepare, q_grid, 0);
    launch(kernel, kv_grid, kSmemBytes);
    launch(finish, q_grid, 0);
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    cudaEventElapsedTime(&ms, start, stop);
  }
  std::printf("%s, %.3f ms\n", cudaGetErrorString(cudaGetLastError()), ms);
}
#endif

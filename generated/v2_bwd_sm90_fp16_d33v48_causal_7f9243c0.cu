// v2_bwd_sm90_fp16_d33v48_causal_7f9243c0
//
// regenerate  fasim gen v2_bwd_sm90_fp16_d33v48_causal_7f9243c0.cu
// compile     nvcc -std=c++17 -arch=sm_90 -cubin v2_bwd_sm90_fp16_d33v48_causal_7f9243c0.cu
// run alone   nvcc -std=c++17 -arch=sm_90 -DFASIM_MAIN v2_bwd_sm90_fp16_d33v48_causal_7f9243c0.cu && ./a.out
// launch      v2_bwd_sm90_fp16_d33v48_causal_7f9243c0_prepare<<<128, 128, 0>>>, as planned
// launch      v2_bwd_sm90_fp16_d33v48_causal_7f9243c0<<<256, 128, 96256>>>, as planned
// launch      v2_bwd_sm90_fp16_d33v48_causal_7f9243c0_finish<<<128, 128, 0>>>, as planned
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
//   i32    heads       16
//   i32    kv_heads    16
//   i32    seq_q       1000
//   i32    seq_kv      1000
//   i32    heads_together  16
//   i64x3  q_strides   (528000, 33000, 33)
//   i64x3  k_strides   (528000, 33000, 33)
//   i64x3  v_strides   (768000, 48000, 48)
//   i64x3  o_strides   (768000, 48000, 48)
//   i64x3  do_strides  (768000, 48000, 48)
//   f32    scale_log2  0.2511409709768604
//   f32    scale       0.17407765595569785
//
// shared memory
//   from      0    6144 bytes  K, and dK at the end
//   from   6144    6144 bytes  V, and dV at the end
//   from  12288   12288 bytes  Q, slot 0
//   from  24576   12288 bytes  dO, slot 0
//   from  36864   12288 bytes  Q, slot 1
//   from  49152   12288 bytes  dO, slot 1
//   from  61440   16384 bytes  dS, slot 0
//   from  77824   16384 bytes  dS, slot 1
//   from  94208    1024 bytes  L and D, slot 0
//   from  95232    1024 bytes  L and D, slot 1
//
// templates, with the first 8 digits of their sha256
//   e4e804e3  device/add_query_gradient.cuh
//   7ef51f94  device/copy.cuh
//   f0c63492  device/copy_async.cuh
//   76c2f1b5  device/integers.cuh
//   354a138d  device/matmul_bwd.cuh
//   29371656  device/order.cuh
//   3f4ebe3a  device/query_gradient.cuh
//   d68be398  device/query_gradient_mma.cuh
//   cb1e2090  device/row_products.cuh
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
//   42d2ca0a  ptx/cvt_f16x2.cuh
//   23f60c67  ptx/cvt_f32_f16.cuh
//   422cf4a7  ptx/ex2.cuh
//   5bef9f17  ptx/ldmatrix_x4.cuh
//   07544763  ptx/mma_m16n8k16_f16.cuh
//   7f47ad15  ptx/red_add_f32x4.cuh
//   9f71dff2  ptx/smem_address.cuh
//

// ---- plan
// {"gpu": {"arch": "sm_90", "name": "h200-sxm5-141gb"}, "kernel": {"algo": "v2", "arch": "sm_90",
// "bias": "none", "deterministic": false, "dtype": "fp16", "head_dim": 33, "head_dim_v": 48,
// "mask": "causal", "out_dtype": "fp16", "pack_gqa": false, "pass": "bwd", "scales": "none",
// "softcap": false, "splits": false, "tile": {"block_kv": 64, "block_q": 128, "p_in": "registers",
// "registers": 255, "stages": 2, "step_kv": 0, "warps": 4}, "varlen": false}, "l2_bytes": 62914560,
// "problem": {"batch": 1, "bias": "none", "causal": true, "deterministic": false, "dtype": "fp16",
// "head_dim": 33, "head_dim_v": 48, "heads": 16, "incoherent": false, "kv_heads": 16, "out_dtype":
// "fp16", "pass": "bwd", "scale": 0.17407765595569785, "scales": "tensor", "seq": 1000, "seq_kv":
// 1000, "softcap": 0.0, "varlen": false, "window": [-1, -1]}, "schema": "fasim.plan/1", "slots":
// 264, "smem_bytes": 96256}
// ---- the rest of the file has sha256 c954d5e1c04a88f031c975bc4a87d580f7afcb15fc9df5cfb56403a0a1ae5e7b
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

using Element = u16;  // fp16
using Output = u16;  // fp16

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kHeadDim = 33;  // d, of Q and K
constexpr int kHeadDimV = 48;  // of V and O
constexpr int kD = 48;  // as stored: whole 16-wide matrix steps, the rest zero
constexpr int kDV = 48;
constexpr int kBlockQ = 128;  // B_r: queries of one tile
constexpr int kBlockKV = 64;  // B_c: keys of one tile
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kSplit = 1;  // warps that share keys, each with its columns of dK and dV
constexpr int kWarpKeys = kBlockKV / kWarps * kSplit;
constexpr int kSlots = 2;  // tiles of Q and dO in shared memory
constexpr int kRowTiles = kWarpKeys / 16;
constexpr int kStepQ = 32;  // queries whose scores fit the registers beside dK and dV …
constexpr int kPartQ = kStepQ / kRowTiles;  // … and whose dP fits beside those
constexpr int kRegisters = 255;  // of a thread: so many that as many blocks fit an SM as planned
constexpr int kSmemBytes = 96256;
constexpr bool kCausal = true;
constexpr int kChunkElements = 16 / int(sizeof(Element));  // of the 16-byte unit of copies
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
constexpr int kWeightTiles = 2;  // two of dS
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

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
// PTX ISA: ldmatrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// d += a b for one 16x8 tile, 16 deep. Lane 4 g + t holds d[0], d[1] = row g, columns 2t, 2t+1 and
// d[2], d[3] = row g + 8. PTX ISA: mma.m16n8k16.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Two floats as f16, rounded to nearest even, the first in the low half. PTX ISA: cvt.
__device__ __forceinline__ u32 cvt_f16x2(float low, float high) {
  u32 packed;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// An f16 as a float, exactly. PTX ISA: cvt.
__device__ __forceinline__ float cvt_f32_f16(u16 half) {
  float x;
  asm volatile("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Four floats added to global memory at a 16-byte boundary, each atomically, without the old values.
// PTX ISA: red, .v4.f32.
__device__ __forceinline__ void red_add_f32x4(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
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

// ---- Matrix products on the tensor cores --------------------------------------------------------
// Scores stand on their side: each warp owns kRowTiles x 16 keys, and lane 4 g + t holds keys g and
// g + 8 of each, and of every 8 queries 2t and 2t + 1. So P and dS go into the products that make
// dV and dK in the registers they came out in.
template <int kQueries>
using Scores = float[kRowTiles][kQueries / 8][4];
using Weights = u32[kStepQ / 16][kRowTiles][4];  // rounded, left operands of 16 queries each

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

// s = K Q^T, or V dO^T: the warp's keys against kQueries rows of queries. Beside 32 keys' dK and dV,
// or half of them, the loads of all steps at once would not fit the registers.
constexpr int kDepthUnroll = kRowTiles == 1 ? 8 : 2 * kSplit;

template <int kCols, int kQueries>
__device__ __forceinline__ void scores(Scores<kQueries>& s, const Element* keys,
                                       const Element* queries) {
  constexpr int kRowBytes = kCols * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const int key = warp_keys() + lane % 16;
  const int query = lane / 16 * 8 + lane % 8;
  const u32 a_first = ptx::smem_address(chunk_at<kCols>(keys, key, lane / 16));
  const u32 b_first = ptx::smem_address(chunk_at<kCols>(queries, query, lane / 8 % 2));
  zero(s);
#pragma unroll kDepthUnroll
  for (int depth = 0; depth < kCols; depth += 16) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::ldmatrix_x4(a[i], along_row<kCols>(a_first, depth / 8) + 16 * i * kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kQueries; n += 16) {
      u32 b[4];
      ptx::ldmatrix_x4(b, along_row<kCols>(b_first, depth / 8) + n * kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16_f16(s[i][n / 8], a[i], b[0], b[1]);
        ptx::mma_m16n8k16_f16(s[i][n / 8 + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// The values, rounded, as a left operand from query `first` on: each lane already holds the right
// ones.
template <int kQueries>
__device__ __forceinline__ void round_weights(Weights& p, const Scores<kQueries>& s, int first) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kQueries / 4; ++i) {
    const int tile = i / (kQueries / 4), step = i / 4 % (kQueries / 16), part = i % 4;
    const float (&pair)[4] = s[tile][2 * step + part / 2];
    p[first / 16 + step][tile][part] = ptx::cvt_f16x2(pair[part % 2 * 2], pair[part % 2 * 2 + 1]);
  }
}

// sum += P^T dO, or dS^T Q, over 16 queries: weights times the warp's columns of their rows, whose
// first chunk lies at `rows`.
template <int kCols>
__device__ __forceinline__ void accumulate(Accumulator<kCols>& sum, const u32 (&p)[kRowTiles][4],
                                           u32 rows) {
#pragma unroll
  for (int n = 0; n < warp_blocks(kCols); ++n) {
    if (kCols / 16 % kSplit && warp_column(2 * n) >= kCols) break;
    u32 b[4];
    ptx::ldmatrix_x4_trans(b, along_row<kCols>(rows, 2 * kSplit * n));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::mma_m16n8k16_f16(sum[i][2 * n], p[i], b[0], b[1]);
      ptx::mma_m16n8k16_f16(sum[i][2 * n + 1], p[i], b[2], b[3]);
    }
  }
}

// Where a lane's rows begin in a tile of queries, at the warp's columns.
template <int kCols>
__device__ __forceinline__ u32 columns_of(const Element* queries) {
  const int lane = threadIdx.x % 32;
  const int chunk = warp_column(0) / 8 + lane / 16;
  return ptx::smem_address(chunk_at<kCols>(queries, lane % 16, chunk));
}

// sum += P^T dO, or dS^T Q, over a step of queries, from registers.
template <int kCols>
__device__ __forceinline__ void accumulate_step(Accumulator<kCols>& sum, const Weights& p,
                                                const Element* queries) {
  const u32 rows = columns_of<kCols>(queries);
#pragma unroll
  for (int i = 0; i < kStepQ / 16; ++i) {
    accumulate<kCols>(sum, p[i], rows + 16 * i * kCols * int(sizeof(Element)));
  }
}

// Weights for the other warps: rows are keys, columns the queries of a tile, from `query` on these.
__device__ __forceinline__ void share_weights(Element* tile, const Weights& weights, int query) {
  const int lane = threadIdx.x % 32;
  const int key = warp_keys() + lane / 4;
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 4; ++i) {
    const int row_tile = i / (kStepQ / 4), step = i / 4 % (kStepQ / 16), part = i % 4;
    const int row = key + 16 * row_tile + part % 2 * 8;
    Element* chunk = chunk_at<kBlockQ>(tile, row, query / 8 + 2 * step + part / 2);
    *reinterpret_cast<u32*>(chunk + lane % 4 * 2) = weights[step][row_tile][part];
  }
}

// ---- P and dS -----------------------------------------------------------------------------------

// From s = K Q^T: P = exp(factor s - L), already normalised, as L is the logarithm of the row's sum.
__device__ __forceinline__ float exponential(float score, float factor, float shift) {
  return ptx::ex2(fmaf(score, factor, shift));
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
      x = weight * (x - (i % 2 ? d.y : d.x));
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
        ptx::mma_m16n8k16_f16(dq[i][n / 8], a[i], b[0], b[1]);
        ptx::mma_m16n8k16_f16(dq[i][n / 8 + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Where element r of a lane's i-th fragment lies in its unit: four together, added as one.
__device__ __forceinline__ int unit_place(int i, int r) {
  return (32 * i + threadIdx.x % 32) * 4 + r;
}

__device__ __forceinline__ void add_fragment(float* unit, int i, const float (&x)[4]) {
  ptx::red_add_f32x4(unit + unit_place(i, 0), x);
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

// ---- Order --------------------------------------------------------------------------------------
// Under a causal mask the tiles of a head differ in length, and blocks start in the order of their
// numbers. So that a launch ends with short ones, heads come in groups, and of a group the longest
// tiles of all heads start first. Those that fill no group come before the others: their end is in the
// middle of the launch.

struct Sorted {  // the head of a block, of all sequences, and its tile, the longest is the first
  int head, tile;
};

__device__ __forceinline__ Sorted sorted(int number, int tiles, int all_heads, int together) {
  const int head = number / tiles, rest = all_heads % together;
  const int first_head = head < rest ? 0 : rest + (head - rest) / together * together;
  const int members = head < rest ? rest : together;
  const int place = number - first_head * tiles;
  return {first_head + place % members, place / members};
}

// ---- Output -------------------------------------------------------------------------------------
__device__ __forceinline__ void store_pair(Element* to, float x, float y) {
  *reinterpret_cast<u32*>(to) = ptx::cvt_f16x2(x, y);
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
__device__ __forceinline__ float to_float(Element x) { return ptx::cvt_f32_f16(x); }
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
  const u32 pair = ptx::cvt_f16x2(x, y);
  if constexpr (kHeadDim % 2 == 0) {
    if (column < kHeadDim) *reinterpret_cast<u32*>(row + column) = pair;
  } else {
    if (column < kHeadDim) row[column] = Element(pair);
    if (column + 1 < kHeadDim) row[column + 1] = Element(pair >> 16);
  }
}

// ---- Kernels ------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void
v2_bwd_sm90_fp16_d33v48_causal_7f9243c0_prepare(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    const Element* __restrict__ o, const Element* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ delta, float* __restrict__ dq_acc, Element* __restrict__ dq,
    Element* __restrict__ dk, Element* __restrict__ dv, const int heads, const int kv_heads,
    const int seq_q, const int seq_kv, const int heads_together, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides o_strides,
    const Strides do_strides, const float scale_log2, const float scale) {
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
v2_bwd_sm90_fp16_d33v48_causal_7f9243c0(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    const Element* __restrict__ o, const Element* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ delta, float* __restrict__ dq_acc, Element* __restrict__ dq,
    Element* __restrict__ dk, Element* __restrict__ dv, const int heads, const int kv_heads,
    const int seq_q, const int seq_kv, const int heads_together, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides o_strides,
    const Strides do_strides, const float scale_log2, const float scale) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* k_tile = reinterpret_cast<Element*>(smem_raw);
  Element* v_tile = k_tile + kBlockKV * kD;
  Element* slots = v_tile + kBlockKV * kDV;  // tiles of Q and dO
  Element* weight_tiles = slots + kSlots * kSlotElements;  // dS and perhaps P, keys by queries
  float* statistics = reinterpret_cast<float*>(weight_tiles + kWeightTiles * kWeightElements);

  // This block's keys. Under a causal mask the first ones are seen by the most queries.
  const int kv_tiles = (seq_kv + kBlockKV - 1) / kBlockKV;
  const auto [any_head, turn] = sorted(blockIdx.x, kv_tiles, gridDim.x / kv_tiles, heads_together);
  const int first_key = turn * kBlockKV;
  const int kv_head = any_head % kv_heads;
  const i64 batch = any_head / kv_heads;
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
  // What is left to do of tile t when all warps have left their part.
  const auto finish_tile = [&](int t) {
    if (t < 0) return;
    add_dq(t);
  };
  for (int t = 0; t < steps; ++t) {
    // Tile t has arrived, and every warp has made S of tile t - 1 and left its dS.
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    load(t + 1);
    finish_tile(t - 1);
    const int query = query_at(t);
    const bool masked = crosses_mask(warp_key, query, span);
#pragma unroll 1
    for (int step = warp_part() * kStepQ; step < kBlockQ; step += kStepQ * kSplit) {
      Scores<kStepQ> s;
      Weights p, ds;
      scores<kD, kStepQ>(s, k_tile, q_slot(t) + step * kD);
      weights(s, lse_slot(t) + step, scale_log2);
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
      accumulate_step<kDV>(dv_acc, p, do_slot(t) + step * kDV);
      accumulate_step<kD>(dk_acc, ds, q_slot(t) + step * kD);
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
v2_bwd_sm90_fp16_d33v48_causal_7f9243c0_finish(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    const Element* __restrict__ o, const Element* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ delta, float* __restrict__ dq_acc, Element* __restrict__ dq,
    Element* __restrict__ dk, Element* __restrict__ dv, const int heads, const int kv_heads,
    const int seq_q, const int seq_kv, const int heads_together, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides o_strides,
    const Strides do_strides, const float scale_log2, const float scale) {
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
  if (i < n) x[i] = u16(ptx::cvt_f16x2(value, value));
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
  int places = 132;  // of blocks at once, as if an SM had two
  cudaDeviceGetAttribute(&places, cudaDevAttrMultiProcessorCount, 0);
  places *= 2;
  const int tiles = (seq_kv + kBlockKV - 1) / kBlockKV;
  const int heads_together = tiles > 0 && tiles < places ? places / tiles : 1;

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
  const auto prepare = v2_bwd_sm90_fp16_d33v48_causal_7f9243c0_prepare;
  const auto kernel = v2_bwd_sm90_fp16_d33v48_causal_7f9243c0;
  const auto finish = v2_bwd_sm90_fp16_d33v48_causal_7f9243c0_finish;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  const auto launch = [&](auto entry, int grid, int smem_bytes) {
    // clang-format off
    entry<<<grid, kThreads, smem_bytes>>>(
        q, k, v, o, dO, lse, delta, dq_acc, dq, dk, dv, heads, kv_heads, seq_q, seq_kv,
        heads_together, q_strides, k_strides, v_strides, o_strides, do_strides, scale_log2, scale);
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

// v1_fwd_sm80_fp16_d64_full_8858c1e0
//
// regenerate  fasim gen v1_fwd_sm80_fp16_d64_full_8858c1e0.cu
// compile     nvcc -std=c++17 -arch=sm_80 -cubin v1_fwd_sm80_fp16_d64_full_8858c1e0.cu
// run alone   nvcc -std=c++17 -arch=sm_80 -DFASIM_MAIN v1_fwd_sm80_fp16_d64_full_8858c1e0.cu && ./a.out
// launch      v1_fwd_sm80_fp16_d64_full_8858c1e0<<<1024, 256, 163840>>>, as planned
//
// arguments
//   ptr    q           device memory
//   ptr    k           device memory
//   ptr    v           device memory
//   ptr    o           device memory
//   ptr    lse         device memory
//   ptr    o_acc       device memory
//   ptr    m           device memory
//   ptr    l           device memory
//   i32    heads       16
//   i32    kv_heads    16
//   i32    seq_q       1024
//   i32    seq_kv      1024
//   i64x3  q_strides   (1048576, 65536, 64)
//   i64x3  k_strides   (1048576, 65536, 64)
//   i64x3  v_strides   (1048576, 65536, 64)
//   i64x3  o_strides   (1048576, 65536, 64)
//   f32    scale_log2  0.18033688011112042
//
// shared memory
//   from      0   32768 bytes  Q, and O at the end
//   from  32768   65536 bytes  K
//   from  98304   65536 bytes  V
//
// templates, with the first 8 digits of their sha256
//   7ef51f94  device/copy.cuh
//   a88d316f  device/copy_plain.cuh
//   b09b16a3  device/fragments.cuh
//   76c2f1b5  device/integers.cuh
//   1cbf0c76  device/mask.cuh
//   a77f5b87  device/matmul_mma.cuh
//   88db4618  device/merge.cuh
//   56ce5a2e  device/rows.cuh
//   9a619284  device/softmax.cuh
//   94288a38  device/store.cuh
//   6364541a  device/tile.cuh
//   c2706fe3  device/types.cuh
//   2655b8fc  device/values_mma.cuh
//   8792d681  device/words.cuh
//   79f1263a  kernels/v1_fwd.cu
//   77f6d870  parts/constants.cuh
//   8a2896d0  parts/main.cu
//   5a818b86  parts/main_arrays.cuh
//   92b4175b  parts/main_options.cuh
//   42d2ca0a  ptx/cvt_f16x2.cuh
//   422cf4a7  ptx/ex2.cuh
//   5bef9f17  ptx/ldmatrix_x4.cuh
//   ecba088f  ptx/lg2.cuh
//   07544763  ptx/mma_m16n8k16_f16.cuh
//   9f71dff2  ptx/smem_address.cuh
//

// ---- plan
// {"gpu": {"arch": "sm_80", "name": "a100-sxm4-80gb"}, "kernel": {"algo": "v1", "arch": "sm_80",
// "bias": "none", "deterministic": false, "dtype": "fp16", "head_dim": 64, "head_dim_v": 64,
// "mask": "full", "out_dtype": "fp16", "pack_gqa": false, "pass": "fwd", "scales": "none",
// "softcap": false, "splits": false, "tile": {"block_kv": 512, "block_q": 256, "p_in": "registers",
// "registers": 255, "stages": 1, "step_kv": 64, "warps": 8}, "varlen": false}, "problem": {"batch":
// 64, "bias": "none", "causal": false, "deterministic": false, "dtype": "fp16", "head_dim": 64,
// "head_dim_v": 64, "heads": 16, "incoherent": false, "kv_heads": 16, "out_dtype": "fp16", "pass":
// "fwd", "scale": 0.125, "scales": "tensor", "seq": 1024, "seq_kv": 1024, "softcap": 0.0, "varlen":
// false, "window": [-1, -1]}, "schema": "fasim.plan/1", "smem_bytes": 163840}
// ---- the rest of the file has sha256 bf0a597f3391aad0944f28cb5bc6ecc2a8c2d6385f4e1d2a39c53d0816af7848
// FlashAttention, forward, in the paper's order (Dao et al. 2022, algorithm 1).
//
// One thread block per head. The outer loop holds a tile of keys and values in shared memory; the
// inner loop brings every block of queries past it, and with each its output O and statistics m and
// l, which live in HBM between the visits. O is normalised at every step. The tile code is
// FlashAttention-2's: what differs is the order of the loops, the traffic that order causes, and
// that only batch and heads run in parallel.
//
//   paper   here                    paper   here
//   B_r     kBlockQ                 T_r     q_blocks
//   B_c     kBlockKV                T_c     kv_blocks
//   O       o_acc, at last o        m, l    m, l
//   S, P    s, p                    m~, l~  row.max, row.sum

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct Strides {  // of one tensor, in elements; its last dimension is contiguous
  i64 batch, head, seq;
};

using Element = u16;  // fp16
using Output = u16;  // fp16

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kHeadDim = 64;  // d, of Q and K
constexpr int kHeadDimV = 64;  // of V and O
constexpr int kD = 64;  // as stored: whole 16-wide matrix steps, the rest zero
constexpr int kDV = 64;
constexpr int kBlockQ = 256;  // B_r: queries of one tile
constexpr int kBlockKV = 512;  // B_c: keys of one tile
constexpr int kStepKV = 64;  // keys whose scores fit the registers at once
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kBlockQ / kWarps;  // a warp owns whole rows, so softmax stays inside it
constexpr int kRowTiles = kWarpRows / 16;
constexpr int kRegisters = 255;  // of a thread: so many that as many blocks fit an SM as planned
constexpr int kSmemBytes = 163840;
constexpr bool kCausal = false;
constexpr int kChunkElements = 16 / int(sizeof(Element));  // of the 16-byte unit of copies
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
static_assert(kRowTiles * 16 * kWarps == kBlockQ, "every warp owns whole 16-row tiles");
static_assert(kBlockKV % kStepKV == 0 && kStepKV % 16 == 0, "whole 16-key matrix steps");

constexpr int kQElements = kBlockQ * (kD > kDV ? kD : kDV);  // Q, and O at the end

static_assert((kQElements + kBlockKV * (kD + kDV)) * sizeof(Element) == kSmemBytes,
              "shared memory as planned");

// ---- Instructions -------------------------------------------------------------------------------

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

// log2(x). PTX ISA: lg2.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif
}  // namespace ptx

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

// One aligned copy into shared memory through a register.
template <int kBytes>
__device__ __forceinline__ void copy(Element* to, const Element* from, bool valid) {
  using Word = typename WordOf<kBytes>::type;
  *reinterpret_cast<Word*>(to) = valid ? *reinterpret_cast<const Word*>(from) : Word{};
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

// A thread's part of the scores and of the output: [16 rows][8 columns][row g: 2, row g + 8: 2].
using Scores = float[kRowTiles][kStepKV / 8][4];
using Accumulator = float[kRowTiles][kDV / 8][4];
template <int kTiles>
__device__ __forceinline__ void zero(float (&fragment)[kRowTiles][kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) fragment[i / kTiles][i % kTiles][r] = 0.f;
  }
}

// ---- Matrix products on the tensor cores --------------------------------------------------------
// Each warp owns kRowTiles x 16 rows. Lane 4 g + t holds rows g and g + 8 of each, and of every 8
// columns 2t and 2t + 1. The scores come out in that layout; P goes in in the same registers.

// s = Q K^T for the warp's rows and kStepKV keys. Long rows are not unrolled whole: the loads of all
// steps at once would not fit the registers.
constexpr int kDepth = 2 * kChunkElements;  // of a matrix step: 32 bytes of a row
constexpr int kDepthUnroll = kD > 8 * kDepth ? 4 : 8;

__device__ __forceinline__ void scores(Scores& s, const Element* q_tile, const Element* k_tile) {
  constexpr int kRowBytes = kD * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * kWarpRows + lane % 16;
  const int key = lane / 16 * 8 + lane % 8;
  const u32 q_first = ptx::smem_address(chunk_at<kD>(q_tile, row, lane / 16));
  const u32 k_first = ptx::smem_address(chunk_at<kD>(k_tile, key, lane / 8 % 2));
  zero(s);
#pragma unroll kDepthUnroll
  for (int depth = 0; depth < kD; depth += kDepth) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::ldmatrix_x4(a[i], along_row<kD>(q_first, depth / kChunkElements) + 16 * i * kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kStepKV; n += 16) {
      u32 b[4];
      ptx::ldmatrix_x4(b, along_row<kD>(k_first, depth / kChunkElements) + n * kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16_f16(s[i][n / 8], a[i], b[0], b[1]);
        ptx::mma_m16n8k16_f16(s[i][n / 8 + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// The weights, rounded, as the left operand of P V: each lane already holds the right ones.
using Weights = u32[kRowTiles][kStepKV / 16][4];

__device__ __forceinline__ void round_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepKV / 4; ++i) {
    const int tile = i / (kStepKV / 4), step = i / 4 % (kStepKV / 16), part = i % 4;
    const float (&pair)[4] = s[tile][2 * step + part / 2];
    p[tile][step][part] = ptx::cvt_f16x2(pair[part % 2 * 2], pair[part % 2 * 2 + 1]);
  }
}

// o += P V.
constexpr bool kSwizzledV = true;

__device__ __forceinline__ void accumulate(Accumulator& o, const Weights& p,
                                           const Element* v_tile) {
  constexpr int kRowBytes = kDV * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const u32 v_first = ptx::smem_address(chunk_at<kDV>(v_tile, lane % 16, lane / 16));
#pragma unroll
  for (int key = 0; key < kStepKV; key += 16) {
#pragma unroll
    for (int n = 0; n < kDV; n += 16) {
      u32 b[4];
      ptx::ldmatrix_x4_trans(b, along_row<kDV>(v_first, n / 8) + key * kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16_f16(o[i][n / 8], p[i][key / 16], b[0], b[1]);
        ptx::mma_m16n8k16_f16(o[i][n / 8 + 1], p[i][key / 16], b[2], b[3]);
      }
    }
  }
}

// ---- Mask ---------------------------------------------------------------------------------------
// Keys at or beyond a row's limit are invisible. Causal is aligned bottom-right: query i sees the
// keys up to i + seq_kv - seq_q.

__device__ __forceinline__ int visible_keys(int query, int seq_q, int seq_kv) {
  return kCausal ? min(seq_kv, query + 1 - seq_q + seq_kv) : seq_kv;
}

// s holds the scores of the warp's rows from `query` on against the keys from `key` on.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kRowTiles][kTiles][4], int query, int key,
                                            int seq_q, int seq_kv) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int limit = visible_keys(query + 8 * i + lane / 4, seq_q, seq_kv) - key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      if (n / 2 * 8 + n % 2 >= limit) s[i / 2][n / 2][i % 2 * 2 + n % 2] = -kInfinity;
    }
  }
}

// A row of scores lies in one quad of lanes.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// A row that has seen no key has maximum -inf; its exponents are taken from 0 instead.
__device__ __forceinline__ float reference_of(float max) { return max == -kInfinity ? 0.f : max; }

// Natural logarithm of a row's sum of exp(scale s); -inf for a row that saw no key.
__device__ __forceinline__ float log_sum_exp(float max, float sum, float scale_log2) {
  return (max * scale_log2 + ptx::lg2(sum)) * kLn2;
}

// The row of the tile that a thread's i-th row of fragments is.
__device__ __forceinline__ int tile_row(int i) {
  return threadIdx.x / 32 * kWarpRows + 8 * i + threadIdx.x % 32 / 4;
}

// ---- Online softmax -----------------------------------------------------------------------------
// Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1. A thread keeps, for each of its rows,
// the largest score so far and its own share of the row's sum of exponentials.

struct RowState {
  float max[kRowTiles][2];
  float sum[kRowTiles][2];
};

__device__ __forceinline__ void reset(RowState& row) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    row.max[i / 2][i % 2] = -kInfinity;
    row.sum[i / 2][i % 2] = 0.f;
  }
}

// Turns scores into weights exp(scale (s - max)), and rescales what was summed under the old
// maximum. The maximum is subtracted before scaling: the largest weight is then exactly 1, however
// large the scores are.
__device__ __forceinline__ void online_softmax(Scores& s, Accumulator& o, RowState& row,
                                               float scale_log2) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int tile = i / 2, half = i % 2;
    float max = row.max[tile][half];
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) max = fmaxf(max, s[tile][n / 2][2 * half + n % 2]);
    max = quad_max(max);
    const float reference = reference_of(max);
    const float rescale = ptx::ex2((row.max[tile][half] - reference) * scale_log2);
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) {
      float& weight = s[tile][n / 2][2 * half + n % 2];
      weight = ptx::ex2((weight - reference) * scale_log2);
      sum += weight;
    }
    row.max[tile][half] = max;
    row.sum[tile][half] = row.sum[tile][half] * rescale + sum;
#pragma unroll
    for (int n = 0; n < kDV / 4; ++n) o[tile][n / 2][2 * half + n % 2] *= rescale;
  }
}

// Turns scores into rounded weights, exp(scale (s - max)), and keeps O and the sums in step.
__device__ __forceinline__ void weigh(Weights& p, Scores& s, Accumulator& o, RowState& row,
                                      float scale_log2) {
  online_softmax(s, o, row, scale_log2);
  round_weights(p, s);
}

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

// ---- Output -------------------------------------------------------------------------------------
__device__ __forceinline__ void store_pair(u16* to, float x, float y) {
  *reinterpret_cast<u32*>(to) = ptx::cvt_f16x2(x, y);
}

// The warp lays its rows of O out in shared memory, then writes them in the widest words their
// alignment allows. Each warp reads back only what it wrote itself.
__device__ __forceinline__ void store_output(Output* tile, const Accumulator& o, Output* global,
                                             i64 stride, int rows) {
  constexpr int kBytes = copy_bytes(kHeadDimV, sizeof(Output));
  constexpr int kElements = kBytes / int(sizeof(Output));
  constexpr int kCopies = kHeadDimV / kElements;
  constexpr int kChunk = 16 / int(sizeof(Output));
  using Word = typename WordOf<kBytes>::type;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kWarpRows;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kDV / 8; ++n) {
      const float (&pair)[4] = o[i / 2][n];
      const int column = 8 * n + lane % 4 * 2;
      Output* chunk = chunk_at<kDV>(tile, warp_row + 8 * i + lane / 4, column / kChunk);
      store_pair(chunk + column % kChunk, pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
  }
  __syncwarp();
  for (int i = lane; i < kWarpRows * kCopies; i += 32) {
    const int row = warp_row + i / kCopies;
    const int column = i % kCopies * kElements;
    const Output* chunk = chunk_at<kDV>(tile, row, column / kChunk);
    const Word word = *reinterpret_cast<const Word*>(chunk + column % kChunk);
    if (row < rows) *reinterpret_cast<Word*>(global + row * stride + column) = word;
  }
}

// ---- Kernel -------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
v1_fwd_sm80_fp16_d64_full_8858c1e0(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    Output* __restrict__ o, float* __restrict__ lse, float* __restrict__ o_acc,
    float* __restrict__ m, float* __restrict__ l, const int heads, const int kv_heads,
    const int seq_q, const int seq_kv, const Strides q_strides, const Strides k_strides,
    const Strides v_strides, const Strides o_strides, const float scale_log2) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* q_tile = reinterpret_cast<Element*>(smem_raw);
  Element* k_tile = q_tile + kQElements;
  Element* v_tile = k_tile + kBlockKV * kD;

  const int head = blockIdx.x % heads;
  const int kv_head = head / (heads / kv_heads);
  const i64 batch = blockIdx.x / heads;
  q += batch * q_strides.batch + head * q_strides.head;
  k += batch * k_strides.batch + kv_head * k_strides.head;
  v += batch * v_strides.batch + kv_head * v_strides.head;
  o += batch * o_strides.batch + head * o_strides.head;
  const i64 head_rows = (batch * heads + head) * seq_q;  // before this head's, in m, l, O and LSE

  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ;
  const int kv_blocks = max(1, (seq_kv + kBlockKV - 1) / kBlockKV);  // without keys, O is still due
  for (int j = 0; j < kv_blocks; ++j) {
    const int first_key = j * kBlockKV;
    const int keys_left = seq_kv - first_key;
    const Element* k_source = k + first_key * k_strides.seq;
    const Element* v_source = v + first_key * v_strides.seq;
    __syncthreads();  // everyone is done with the previous keys and values
    copy_tile<kBlockKV, kD, kHeadDim>(k_tile, k_source, k_strides.seq, keys_left);
    copy_tile<kBlockKV, kDV, kHeadDimV, kSwizzledV>(v_tile, v_source, v_strides.seq, keys_left);

    for (int i = 0; i < q_blocks; ++i) {
      const i64 first_query = i * kBlockQ;
      const i64 first_row = head_rows + first_query;
      const int rows = min(kBlockQ, seq_q - i * kBlockQ);
      const int keys = visible_keys(i * kBlockQ + rows - 1, seq_q, seq_kv);
      const int last = max(0, (keys - 1) / kBlockKV);  // the last tile of keys these queries see
      if (j > last) continue;

      const Element* q_source = q + first_query * q_strides.seq;
      __syncthreads();  // Q's tile is free
      copy_tile<kBlockQ, kD, kHeadDim>(q_tile, q_source, q_strides.seq, rows);
      __syncthreads();

      Accumulator o_tile;
      RowState row;
      zero(o_tile);
      reset(row);
      const int warp_query = i * kBlockQ + threadIdx.x / 32 * kWarpRows;
#pragma unroll 1
      for (int step = 0; step < kBlockKV && first_key + step < keys; step += kStepKV) {
        Scores s;
        Weights p;
        scores(s, q_tile, k_tile + step * kD);
        if (first_key + step + kStepKV > visible_keys(warp_query, seq_q, seq_kv)) {
          mask_scores(s, warp_query, first_key + step, seq_q, seq_kv);
        }
        weigh(p, s, o_tile, row, scale_log2);
        accumulate(o_tile, p, v_tile + step * kDV);
      }

      float* o_rows = o_acc + first_row * kHeadDimV;
      merge(o_tile, row, o_rows, m + first_row, l + first_row, scale_log2, rows, j == 0);
      if (j < last) {
        store_partial(o_tile, row, o_rows, m + first_row, l + first_row, rows);
      } else {
        store_lse(row, lse + first_row, scale_log2, rows);
        Output* o_target = o + first_query * o_strides.seq;
        __syncthreads();  // Q's tile is free for O
        store_output(reinterpret_cast<Output*>(smem_raw), o_tile, o_target, o_strides.seq, rows);
      }
    }
  }
}

#ifdef FASIM_MAIN
// One launch on pseudo-random inputs, timed: enough to profile this file by itself.
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

  const float scale_log2 = 1.442695041f / sqrtf(kHeadDim);

  Element* q = input(rows * kHeadDim, 1);
  Element* k = input(keys * kHeadDim, 2);
  Element* v = input(keys * kHeadDimV, 3);
  Output* o = device_array<Output>(rows * kHeadDimV);
  float* lse = device_array<float>(rows);
  float* o_acc = device_array<float>(rows * kHeadDimV);
  float* m = device_array<float>(rows);
  float* l = device_array<float>(rows);
  const int grid = batch * heads;
  const auto kernel = v1_fwd_sm80_fp16_d64_full_8858c1e0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  float ms = 0;
  for (int run = 0; run < 2; ++run) {  // the second one counts
    cudaEventRecord(start);
    kernel<<<grid, kThreads, kSmemBytes>>>(q, k, v, o, lse, o_acc, m, l, heads, kv_heads, seq_q,
                                           seq_kv, q_strides, k_strides, v_strides, o_strides,
                                           scale_log2);
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    cudaEventElapsedTime(&ms, start, stop);
  }
  std::printf("%s, %.3f ms\n", cudaGetErrorString(cudaGetLastError()), ms);
}
#endif

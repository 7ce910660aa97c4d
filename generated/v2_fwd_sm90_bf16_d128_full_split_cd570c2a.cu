// v2_fwd_sm90_bf16_d128_full_split_cd570c2a
//
// regenerate  fasim gen v2_fwd_sm90_bf16_d128_full_split_cd570c2a.cu
// compile     nvcc -std=c++17 -arch=sm_90 -cubin v2_fwd_sm90_bf16_d128_full_split_cd570c2a.cu
// run alone   nvcc -std=c++17 -arch=sm_90 -DFASIM_MAIN v2_fwd_sm90_bf16_d128_full_split_cd570c2a.cu && ./a.out
// launch      v2_fwd_sm90_bf16_d128_full_split_cd570c2a<<<256, 128, 102400>>>, as planned
// launch      v2_fwd_sm90_bf16_d128_full_split_cd570c2a_combine<<<64, 32, 0>>>, as planned
//
// arguments
//   ptr    q           device memory
//   ptr    k           device memory
//   ptr    v           device memory
//   ptr    o           device memory
//   ptr    lse         device memory
//   ptr    o_part      device memory
//   ptr    m_part      device memory
//   ptr    l_part      device memory
//   i32    heads       64
//   i32    kv_heads    8
//   i32    seq_q       1
//   i32    seq_kv      32768
//   i32    splits      32
//   i64x3  q_strides   (8192, 128, 128)
//   i64x3  k_strides   (33554432, 4194304, 128)
//   i64x3  v_strides   (33554432, 4194304, 128)
//   i64x3  o_strides   (8192, 128, 128)
//   f32    scale_log2  0.12751743082459868
//
// shared memory
//   from      0    4096 bytes  Q, and the warps' parts at the end
//   from   4096   16384 bytes  K and V, ring slot 0
//   from  20480   16384 bytes  K and V, ring slot 1
//   from  36864   16384 bytes  K and V, ring slot 2
//   from  53248   16384 bytes  K and V, ring slot 3
//   from  69632   16384 bytes  K and V, ring slot 4
//   from  86016   16384 bytes  K and V, ring slot 5
//
// templates, with the first 8 digits of their sha256
//   67f2059a  device/combine.cuh
//   7ef51f94  device/copy.cuh
//   f0c63492  device/copy_async.cuh
//   b145b0f2  device/copy_packed.cuh
//   b09b16a3  device/fragments.cuh
//   76c2f1b5  device/integers.cuh
//   ef12ae03  device/mask_packed.cuh
//   a77f5b87  device/matmul_mma.cuh
//   dc7b5b3b  device/parts.cuh
//   56ce5a2e  device/rows.cuh
//   9a619284  device/softmax.cuh
//   6364541a  device/tile.cuh
//   c2706fe3  device/types.cuh
//   2655b8fc  device/values_mma.cuh
//   8792d681  device/words.cuh
//   352e33cd  kernels/v2_split.cu
//   77f6d870  parts/constants.cuh
//   8a2896d0  parts/main.cu
//   5a818b86  parts/main_arrays.cuh
//   92b4175b  parts/main_options.cuh
//   337a472a  ptx/cp_async.cuh
//   33562fdf  ptx/cvt_bf16x2.cuh
//   422cf4a7  ptx/ex2.cuh
//   5bef9f17  ptx/ldmatrix_x4.cuh
//   ecba088f  ptx/lg2.cuh
//   0f317959  ptx/mma_m16n8k16_bf16.cuh
//   9f71dff2  ptx/smem_address.cuh
//

// ---- plan
// {"gpu": {"arch": "sm_90", "name": "h200-sxm5-141gb"}, "kernel": {"algo": "v2", "arch": "sm_90",
// "bias": "none", "deterministic": false, "dtype": "bf16", "head_dim": 128, "head_dim_v": 128,
// "mask": "full", "out_dtype": "bf16", "pack_gqa": true, "pass": "fwd", "scales": "none",
// "softcap": false, "splits": true, "tile": {"block_kv": 64, "block_q": 16, "p_in": "registers",
// "registers": 152, "stages": 3, "step_kv": 16, "warps": 4}, "varlen": false}, "problem": {"batch":
// 1, "bias": "none", "causal": false, "deterministic": false, "dtype": "bf16", "head_dim": 128,
// "head_dim_v": 128, "heads": 64, "incoherent": false, "kv_heads": 8, "out_dtype": "bf16", "pass":
// "fwd", "scale": 0.08838834764831843, "scales": "tensor", "seq": 1, "seq_kv": 32768, "softcap":
// 0.0, "varlen": false, "window": [-1, -1]}, "schema": "fasim.plan/1", "slots": 264, "smem_bytes":
// 102400}
// ---- the rest of the file has sha256 37fbdff6b92492554c70f30d425789670e70b4462ee7e5406c164e66382cb604
// FlashAttention-2, forward, for few queries against many keys: split keys (Flash-Decoding, Dao,
// Haziza, Massa and Sizov 2023).
//
// Few queries make few thread blocks, and few rows keep few warps busy: what is left to divide are
// the keys, twice. `splits` blocks share the tiles of keys that a block of queries sees; in a block
// each warp scores its own keys of every tile against all the rows. Both leave a row in parts: an
// output that is not normalised, a maximum, a sum. The warps' are merged in shared memory, those
// of the blocks by a second kernel, a warp a row. Heads that share keys and values are packed into
// one tile of rows, so K and V are read once for all of them.
//
//   paper   here                    paper   here
//   B_r     kBlockQ packed rows     T_r     row_blocks
//   B_c     kBlockKV                T_c     kv_tiles, of them this split's: tiles
//   O~      o_part                  m, l    m_part, l_part
//   S, P    s, p                    L       lse

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct Strides {  // of one tensor, in elements; its last dimension is contiguous
  i64 batch, head, seq;
};

using Element = u16;  // bf16
using Output = u16;  // bf16

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kHeadDim = 128;  // d, of Q and K
constexpr int kHeadDimV = 128;  // of V and O
constexpr int kD = 128;  // as stored: whole 16-wide matrix steps, the rest zero
constexpr int kDV = 128;
constexpr int kBlockQ = 16;  // B_r: queries of one tile
constexpr int kBlockKV = 64;  // B_c: keys of one tile
constexpr int kStepKV = 16;  // keys whose scores fit the registers at once
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kBlockQ;  // every warp has all rows, and its own keys of each tile
constexpr int kRowTiles = kWarpRows / 16;
constexpr int kRegisters = 152;  // of a thread: so many that as many blocks fit an SM as planned
constexpr int kSmemBytes = 102400;
constexpr bool kCausal = false;
constexpr int kChunkElements = 16 / int(sizeof(Element));  // of the 16-byte unit of copies
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
static_assert(kRowTiles * 16 == kBlockQ, "whole 16-row tiles");
static_assert(kStepKV * kWarps == kBlockKV, "every warp has as many keys of a tile");
static_assert(kBlockKV % kStepKV == 0 && kStepKV % 16 == 0, "whole 16-key matrix steps");

constexpr int kSlots = 6;  // ring of tiles in shared memory: K, V, K, V …
constexpr int kSlotElements = kBlockKV * (kD > kDV ? kD : kDV);
constexpr int kQElements = kBlockQ * (kD > kDV ? kD : kDV);

static_assert((kQElements + kSlots * kSlotElements) * sizeof(Element) == kSmemBytes,
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
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                  u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Two floats as bf16, rounded to nearest even, the first in the low half. PTX ISA: cvt.
__device__ __forceinline__ u32 cvt_bf16x2(float low, float high) {
  u32 packed;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
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

// Fills the query tile with packed rows: row r of all is query r / group of the group's head
// r % group. What lies beyond `rows` or kHeadDim becomes zero.
__device__ __forceinline__ void copy_packed(Element* tile, const Element* q, const Strides& strides,
                                            int group, int first_row, int rows) {
  constexpr int kBytes = copy_bytes(kHeadDim);
  constexpr int kElements = kBytes / int(sizeof(Element));
  constexpr int kCopies = kD / kElements;
  for (int i = threadIdx.x; i < kBlockQ * kCopies; i += kThreads) {
    const int row = i / kCopies, col = i % kCopies * kElements;
    const i64 head = (first_row + row) % group, query = (first_row + row) / group;
    const Element* source = q + head * strides.head + query * strides.seq + col;
    Element* chunk = chunk_at<kD>(tile, row, col / kChunkElements);
    copy<kBytes>(chunk + col % kChunkElements, source, row < rows && col < kHeadDim);
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
  const int row = lane % 16;
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
        ptx::mma_m16n8k16_bf16(s[i][n / 8], a[i], b[0], b[1]);
        ptx::mma_m16n8k16_bf16(s[i][n / 8 + 1], a[i], b[2], b[3]);
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
    p[tile][step][part] = ptx::cvt_bf16x2(pair[part % 2 * 2], pair[part % 2 * 2 + 1]);
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
        ptx::mma_m16n8k16_bf16(o[i][n / 8], p[i][key / 16], b[0], b[1]);
        ptx::mma_m16n8k16_bf16(o[i][n / 8 + 1], p[i][key / 16], b[2], b[3]);
      }
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
__device__ __forceinline__ int tile_row(int i) { return 8 * i + threadIdx.x % 32 / 4; }

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

// ---- Mask ---------------------------------------------------------------------------------------
// Keys at or beyond a row's limit are invisible. Causal is aligned bottom-right: query i sees the
// keys up to i + seq_kv - seq_q.

__device__ __forceinline__ int visible_keys(int query, int seq_q, int seq_kv) {
  return kCausal ? min(seq_kv, query + 1 - seq_q + seq_kv) : seq_kv;
}

// Of each of a thread's rows, from packed row `first_row` on. The division is why they are kept.
struct RowLimits {
  int keys[2 * kRowTiles];
};

__device__ __forceinline__ RowLimits row_limits(int first_row, int group, int seq_q, int seq_kv) {
  RowLimits limits;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    limits.keys[i] = visible_keys((first_row + tile_row(i)) / group, seq_q, seq_kv);
  }
  return limits;
}

// s holds the scores of those rows against the keys from `key` on.
__device__ __forceinline__ void mask_scores(Scores& s, const RowLimits& limits, int key) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int limit = limits.keys[i] - key - threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kStepKV / 4; ++n) {
      if (n / 2 * 8 + n % 2 >= limit) s[i / 2][n / 2][i % 2 * 2 + n % 2] = -kInfinity;
    }
  }
}

// ---- Parts of a row -----------------------------------------------------------------------------
// What some of its keys gave a row: the output, not normalised, the largest score and the sum of
// exponentials under it. Parts merge exactly, however large the scores: a log-sum-exp, which adds
// the two, would round the sum away. When a warp merges a row, lane i has columns i, i + 32 …

constexpr int kLaneColumns = (kHeadDimV + 31) / 32;
constexpr int kPartColumns = kDV + 8;  // in shared memory: O, maximum, sum; 8 rows in 8 bank groups

// Leaves the part of this warp's keys in shared memory.
__device__ __forceinline__ void store_part(float* part, const Accumulator& o, const RowState& row) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    float* to = part + tile_row(i) * kPartColumns;
#pragma unroll
    for (int n = 0; n < kDV / 8; ++n) {
      const float (&pair)[4] = o[i / 2][n];
      *reinterpret_cast<float2*>(to + 8 * n + threadIdx.x % 4 * 2) =
          make_float2(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
    const float sum = quad_sum(row.sum[i / 2][i % 2]);
    if (threadIdx.x % 4 == 0) {
      *reinterpret_cast<float2*>(to + kDV) = make_float2(row.max[i / 2][i % 2], sum);
    }
  }
}

// Merges the warps' parts of one row, in the order of the warps, into the part of all their keys.
__device__ __forceinline__ void merge_warps(const float* part, float scale_log2, float* o, float* m,
                                            float* l) {
  constexpr int kNext = kBlockQ * kPartColumns;  // from a warp's part to the next warp's
  const int lane = threadIdx.x % 32;
  float max = -kInfinity;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, part[w * kNext + kDV]);
  float sum = 0.f;
  float sums[kLaneColumns] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w, part += kNext) {
    const float weight = ptx::ex2((part[kDV] - reference_of(max)) * scale_log2);
    sum += weight * part[kDV + 1];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if (32 * c + lane < kHeadDimV) sums[c] += weight * part[32 * c + lane];
    }
  }
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    if (32 * c + lane < kHeadDimV) o[32 * c + lane] = sums[c];
  }
  if (lane == 0) {
    *m = max;
    *l = sum;
  }
}

static_assert(kWarps * kBlockQ * kPartColumns * sizeof(float) <= kSmemBytes,
              "the warps' parts fit where Q and the ring were");

// ---- The splits' parts of a row -----------------------------------------------------------------

constexpr int kSplitsInFlight = kLaneColumns > 4 ? 8 : 16;  // whose loads a warp issues at once

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// sums += the outputs of up to 32 splits, of which lane i knows the weight of the i-th.
__device__ __forceinline__ void add_parts(float (&sums)[kLaneColumns], const float* o_part,
                                          float weight, int splits) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < min(splits, 32); first += kSplitsInFlight) {
    float part[kSplitsInFlight][kLaneColumns];
#pragma unroll
    for (int i = 0; i < kSplitsInFlight * kLaneColumns; ++i) {
      const int split = first + i / kLaneColumns, column = i % kLaneColumns * 32 + lane;
      const bool valid = split < splits && column < kHeadDimV;
      part[i / kLaneColumns][i % kLaneColumns] = valid ? o_part[split * kHeadDimV + column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kSplitsInFlight; ++i) {
      const float w = __shfl_sync(~0u, weight, first + i);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sums[c] += w * part[i][c];
    }
  }
}

__device__ __forceinline__ Output rounded(float x) { return u16(ptx::cvt_bf16x2(x, x)); }

// ---- Kernels ------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
v2_fwd_sm90_bf16_d128_full_split_cd570c2a(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    Output* __restrict__ o, float* __restrict__ lse, float* __restrict__ o_part,
    float* __restrict__ m_part, float* __restrict__ l_part, const int heads, const int kv_heads,
    const int seq_q, const int seq_kv, const int splits, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides o_strides,
    const float scale_log2) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* q_tile = reinterpret_cast<Element*>(smem_raw);

  // This block's rows: neighbours walk the same keys.
  const int group = heads / kv_heads;
  const int row_blocks = (group * seq_q + kBlockQ - 1) / kBlockQ;
  const int first_row = blockIdx.x % row_blocks * kBlockQ;
  const int rows = min(kBlockQ, group * seq_q - first_row);
  const int split = blockIdx.x / row_blocks % splits;
  const int kv_head = blockIdx.x / row_blocks / splits % kv_heads;
  const i64 batch = blockIdx.x / row_blocks / splits / kv_heads;
  q += batch * q_strides.batch + i64(kv_head) * group * q_strides.head;
  k += batch * k_strides.batch + kv_head * k_strides.head;
  v += batch * v_strides.batch + kv_head * v_strides.head;

  // Its share of the tiles that any of them sees, as a stream K, V, K, V … through the ring.
  const int last_query = (first_row + rows - 1) / group;
  const int keys = max(0, visible_keys(last_query, seq_q, seq_kv));
  const i64 kv_tiles = (keys + kBlockKV - 1) / kBlockKV;
  const int first_tile = kv_tiles * split / splits;
  const int tiles = kv_tiles * (split + 1) / splits - first_tile;
  const auto slot = [&](int t) { return q_tile + kQElements + t % kSlots * kSlotElements; };
  const auto load = [&](int t) {
    const i64 key = i64(first_tile + t / 2) * kBlockKV;
    if (t < 2 * tiles && t % 2 == 0) {
      const Element* source = k + key * k_strides.seq;
      copy_tile<kBlockKV, kD, kHeadDim>(slot(t), source, k_strides.seq, seq_kv - key);
    } else if (t < 2 * tiles) {
      const Element* source = v + key * v_strides.seq;
      copy_tile<kBlockKV, kDV, kHeadDimV, kSwizzledV>(slot(t), source, v_strides.seq, seq_kv - key);
    }
    ptx::cp_async_commit_group();  // an empty group keeps the count in step
  };
  // Tile t has arrived, and every warp is done with tile t - 1, whose slot is then filled again.
  const auto advance = [&](int t) {
    ptx::cp_async_wait_group<kSlots - 2>();
    __syncthreads();
    load(t + kSlots - 1);
  };

  copy_packed(q_tile, q, q_strides, group, first_row, rows);
  for (int t = 0; t < kSlots - 1; ++t) load(t);

  Scores s;
  Weights p;
  Accumulator o_acc;
  RowState row;
  zero(o_acc);
  reset(row);
  const int warp = threadIdx.x / 32;
  const RowLimits limits = row_limits(first_row, group, seq_q, seq_kv);
  const int unmasked = visible_keys(first_row / group, seq_q, seq_kv);
  for (int j = 0; j < tiles; ++j) {
    const int key = (first_tile + j) * kBlockKV + warp * kStepKV;
    advance(2 * j);
    scores(s, q_tile, slot(2 * j) + warp * kStepKV * kD);
    if (key + kStepKV > unmasked) mask_scores(s, limits, key);
    weigh(p, s, o_acc, row, scale_log2);
    advance(2 * j + 1);
    accumulate(o_acc, p, slot(2 * j + 1) + warp * kStepKV * kDV);
  }

  ptx::cp_async_wait_group<0>();
  __syncthreads();  // Q and the ring are free for the parts
  float* parts = reinterpret_cast<float*>(smem_raw);
  store_part(parts + warp * kBlockQ * kPartColumns, o_acc, row);
  __syncthreads();
  for (int r = warp; r < rows; r += kWarps) {
    const i64 head = kv_head * group + (first_row + r) % group;
    const i64 query = (first_row + r) / group;
    const i64 part = ((batch * heads + head) * seq_q + query) * splits + split;
    merge_warps(parts + r * kPartColumns, scale_log2, o_part + part * kHeadDimV, m_part + part,
                l_part + part);
  }
}

// One block an SM is enough: so the compiler takes the registers to have many loads in flight.
// clang-format off
extern "C" __global__ void __launch_bounds__(32, 1)
v2_fwd_sm90_bf16_d128_full_split_cd570c2a_combine(
    const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
    Output* __restrict__ o, float* __restrict__ lse, float* __restrict__ o_part,
    float* __restrict__ m_part, float* __restrict__ l_part, const int heads, const int kv_heads,
    const int seq_q, const int seq_kv, const int splits, const Strides q_strides,
    const Strides k_strides, const Strides v_strides, const Strides o_strides,
    const float scale_log2) {
  // clang-format on
  const int lane = threadIdx.x;
  const i64 row = blockIdx.x;
  const i64 query = row % seq_q, head = row / seq_q % heads, batch = row / seq_q / heads;
  o += batch * o_strides.batch + head * o_strides.head + query * o_strides.seq;
  o_part += row * splits * kHeadDimV;
  m_part += row * splits;
  l_part += row * splits;

  float max = -kInfinity;
  for (int split = lane; split < splits; split += 32) max = fmaxf(max, m_part[split]);
  max = warp_max(max);
  float sum = 0.f;
  float sums[kLaneColumns] = {};
  for (int first = 0; first < splits; first += 32) {
    float weight = 0.f;
    if (first + lane < splits) {
      weight = ptx::ex2((m_part[first + lane] - reference_of(max)) * scale_log2);
      sum += weight * l_part[first + lane];
    }
    add_parts(sums, o_part + first * kHeadDimV, weight, splits - first);
  }
  sum = warp_sum(sum);
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    if (32 * c + lane < kHeadDimV) o[32 * c + lane] = rounded(sums[c] * inverse);
  }
  if (lane == 0) lse[row] = log_sum_exp(max, sum, scale_log2);
}

#ifdef FASIM_MAIN
// One launch on pseudo-random inputs, timed: enough to profile this file by itself.
// usage: a.out [batch [heads [kv_heads [seq_q [seq_kv [splits]]]]]]
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

__global__ void fill(Element* x, i64 n, u32 seed) {
  const i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x;
  const u32 hash = (u32(i) * 2654435761u ^ seed) * 2246822519u;
  const float value = float(hash >> 8) / (1 << 23) - 1.f;
  if (i < n) x[i] = u16(ptx::cvt_bf16x2(value, value));
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
  const int row_blocks = (heads / kv_heads * seq_q + kBlockQ - 1) / kBlockQ;
  const int splits = size(6, 32);
  float* o_part = device_array<float>(rows * splits * kHeadDimV);
  float* m_part = device_array<float>(rows * splits);
  float* l_part = device_array<float>(rows * splits);
  const int grid = batch * kv_heads * row_blocks * splits;
  const auto kernel = v2_fwd_sm90_bf16_d128_full_split_cd570c2a;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  float ms = 0;
  for (int run = 0; run < 2; ++run) {  // the second one counts
    cudaEventRecord(start);
    kernel<<<grid, kThreads, kSmemBytes>>>(q, k, v, o, lse, o_part, m_part, l_part, heads, kv_heads,
                                           seq_q, seq_kv, splits, q_strides, k_strides, v_strides,
                                           o_strides, scale_log2);
    v2_fwd_sm90_bf16_d128_full_split_cd570c2a_combine<<<rows, 32>>>(
        q, k, v, o, lse, o_part, m_part, l_part, heads, kv_heads, seq_q, seq_kv, splits, q_strides,
        k_strides, v_strides, o_strides, scale_log2);
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    cudaEventElapsedTime(&ms, start, stop);
  }
  std::printf("%s, %.3f ms\n", cudaGetErrorString(cudaGetLastError()), ms);
}
#endif

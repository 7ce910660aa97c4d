// v3_fwd_sm90a_fp16_d64_causal_alibi_2a670209
//
// regenerate  fasim gen v3_fwd_sm90a_fp16_d64_causal_alibi_2a670209.cu
// compile     nvcc -std=c++17 -arch=sm_90a -cubin v3_fwd_sm90a_fp16_d64_causal_alibi_2a670209.cu
// run alone   nvcc -std=c++17 -gencode arch=compute_90a,code=sm_90a -DFASIM_MAIN v3_fwd_sm90a_fp16_d64_causal_alibi_2a670209.cu && ./a.out
// launch      v3_fwd_sm90a_fp16_d64_causal_alibi_2a670209<<<132, 512, 160768>>>, as planned
//
// arguments
//   map    q_map       device memory
//   map    k_map       device memory
//   map    v_map       device memory
//   map    o_map       device memory
//   ptr    lse         device memory
//   ptr    slopes      device memory
//   i32    batch       1
//   i32    heads       16
//   i32    kv_heads    16
//   i32    seq_q       4096
//   i32    seq_kv      4096
//   i32    heads_together  16
//   f32    scale_log2  0.18033688011112042
//
// shared memory
//   from      0   24576 bytes  Q, slot 0
//   from  24576   24576 bytes  Q, slot 1
//   from  49152   24576 bytes  O on its way out
//   from  73728   14336 bytes  K, slot 0
//   from  88064   14336 bytes  K, slot 1
//   from 102400   14336 bytes  K, slot 2
//   from 116736   14336 bytes  V, slot 0
//   from 131072   14336 bytes  V, slot 1
//   from 145408   14336 bytes  V, slot 2
//   from 159744    1024 bytes  barriers, factors of rows, works
//
// templates, with the first 8 digits of their sha256
//   3ce08f21  device/chunk_address.cuh
//   b09b16a3  device/fragments.cuh
//   76c2f1b5  device/integers.cuh
//   e2fc8c58  device/load_v3.cuh
//   1cbf0c76  device/mask.cuh
//   1a579de9  device/matmul_wgmma.cuh
//   06eb1102  device/matrix_descriptor.cuh
//   772adaad  device/mbarrier.cuh
//   e573e32e  device/rescore.cuh
//   56ce5a2e  device/rows.cuh
//   d0950750  device/schedule.cuh
//   23af4307  device/score.cuh
//   2aadce9b  device/score_rows.cuh
//   ddeea4d9  device/settled_rows.cuh
//   9429bcb5  device/shared_v3.cuh
//   fbb13e4f  device/softmax_in_place.cuh
//   17509448  device/span.cuh
//   ed306108  device/store_tma.cuh
//   567f0171  device/tensor_map.cuh
//   734305da  device/timeline.cuh
//   39f26ecb  device/turn.cuh
//   c2706fe3  device/types.cuh
//   4a62a261  kernels/v3_fwd.cu
//   11563be6  parts/constants_v3.cuh
//   5a818b86  parts/main_arrays.cuh
//   92b4175b  parts/main_options.cuh
//   5e5034e8  parts/main_v3.cu
//   5af47db7  ptx/bar_arrive.cuh
//   18bd1382  ptx/bar_sync.cuh
//   f0e3942d  ptx/clock64.cuh
//   bdcce3e8  ptx/cp_async_bulk_commit_group.cuh
//   646951b4  ptx/cp_async_bulk_tensor_4d.cuh
//   f3bd1237  ptx/cp_async_bulk_wait_group.cuh
//   42d2ca0a  ptx/cvt_f16x2.cuh
//   422cf4a7  ptx/ex2.cuh
//   748f3f8d  ptx/fence_mbarrier_init.cuh
//   3e612fa4  ptx/fence_proxy_async.cuh
//   5aaba4e8  ptx/ldmatrix_x1.cuh
//   2da781dd  ptx/ldmatrix_x2.cuh
//   ecba088f  ptx/lg2.cuh
//   20ab12bf  ptx/mbarrier_arrive.cuh
//   ab5dda3a  ptx/mbarrier_arrive_expect_tx.cuh
//   247d5e56  ptx/mbarrier_init.cuh
//   17d531ff  ptx/mbarrier_try_wait.cuh
//   ab3ed0a3  ptx/mma_m16n8k8_f16.cuh
//   5dfa5b8c  ptx/setmaxnreg_dec.cuh
//   aaf5d506  ptx/setmaxnreg_inc.cuh
//   9f71dff2  ptx/smem_address.cuh
//   8df270ba  ptx/stmatrix_x4.cuh
//   72449329  ptx/thread_index.cuh
//   dd0cf2ad  ptx/wgmma.cuh
//   348da6bd  ptx/wgmma_commit_group.cuh
//   a6ad2961  ptx/wgmma_fence.cuh
//   f539230e  ptx/wgmma_wait_group.cuh
//

// ---- plan
// {"gpu": {"arch": "sm_90a", "name": "h200-sxm5-141gb"}, "kernel": {"algo": "v3", "arch": "sm_90a",
// "bias": "alibi", "deterministic": false, "dtype": "fp16", "head_dim": 64, "head_dim_v": 64,
// "mask": "causal", "out_dtype": "fp16", "pack_gqa": false, "pass": "fwd", "scales": "none",
// "softcap": false, "splits": false, "tile": {"block_kv": 112, "block_q": 192, "p_in": "registers",
// "registers": 160, "stages": 3, "step_kv": 0, "warps": 12}, "varlen": false}, "problem": {"batch":
// 1, "bias": "alibi", "causal": true, "deterministic": false, "dtype": "fp16", "head_dim": 64,
// "head_dim_v": 64, "heads": 16, "incoherent": false, "kv_heads": 16, "out_dtype": "fp16", "pass":
// "fwd", "scale": 0.125, "scales": "tensor", "seq": 4096, "seq_kv": 4096, "softcap": 0.0, "varlen":
// false, "window": [-1, -1]}, "schema": "fasim.plan/1", "slots": 132, "smem_bytes": 160768}
// ---- the rest of the file has sha256 b142ea6347fc13a8b38f2c1d0f7a7a1c88553b285e6cbf28ec9f663c66c79efb
// FlashAttention-3, forward (Shah et al. 2024, algorithms 1 and 2).
//
// A block stays on its SM and works on one tile of queries after the other. One warpgroup, the producer,
// gives its registers away and loads by TMA; the others, the consumers, multiply on the tensor cores 64
// rows each (wgmma). A consumer's products run in the background: while it turns the scores of a tile of
// keys into weights, the values of the tile before are summed. The stream of tiles does not end with a
// tile of queries: the first scores of the next are computed while O leaves. Consumers take turns to start
// their products, so that the softmax of one runs under the products of another.
//
//   paper   here                    paper   here
//   B_r     kBlockQ                 T_r     q_blocks
//   B_c     kBlockKV                T_c     tiles.end - tiles.begin
//   s       kKeyStages, kStages     m, l    row.max, row.sum
//   O_i     o                       L_i     lse
//   S, P    s, p

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

struct Strides {  // of one tensor, in elements; its last dimension is contiguous
  i64 batch, head, seq;
};

using Element = u16;  // fp16
using Output = u16;  // fp16

using u64 = unsigned long long;

// How TMA sees a tensor in global memory: its sizes, its strides, and the box that one instruction
// moves. The host encodes it.
struct alignas(64) TensorMap {
  u64 word[16];
};

// ---- Constants ----------------------------------------------------------------------------------

constexpr int kHeadDim = 64;  // d, of Q and K
constexpr int kHeadDimV = 64;  // of V and O
constexpr int kGranule = 16;  // columns, or keys, of a matrix step: 32 bytes
constexpr int kD = 64;  // as multiplied: whole matrix steps
constexpr int kDV = 64;
constexpr int kBlockQ = 192;  // B_r: queries of one tile
constexpr int kBlockKV = 112;  // B_c: keys of one tile
constexpr int kStepKV = kBlockKV;  // keys whose scores fit the registers at once
constexpr int kConsumers = 3;  // warpgroups that compute, 64 queries each
constexpr int kThreads = 128 * (kConsumers + 1);  // and one that loads
constexpr int kBlocks = 1;  // on an SM
constexpr int kWarpRows = 16;  // a warp owns whole rows, so softmax stays inside it
constexpr int kRowTiles = 1;
constexpr int kStages = 3;  // tiles of V in shared memory
constexpr int kKeyStages = 3;  // of K
constexpr int kQStages = 2;  // of Q
constexpr int kOutputParts = 1;  // O leaves a tile in so many parts, to save shared memory
constexpr int kPartsAtOnce = 1;
constexpr int kRegisters = 160;  // of a thread that computes
constexpr int kLoaderRegisters = 32;  // of one that loads
constexpr int kSmemBytes = 160768;
constexpr bool kCausal = true;
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
constexpr float kLog2e = 1.44269504f;
// A tile in shared memory is slabs of rows of 128 bytes, in which TMA and wgmma permute the 16-byte
// chunks (the 128-byte swizzle). What lies beyond the tensor is zero.
constexpr int kSlabBytes = 128;
constexpr int kSlabColumns = kSlabBytes / int(sizeof(Element));
constexpr int kSlabs = (kD + kSlabColumns - 1) / kSlabColumns;  // of Q and K
constexpr int kColumnsO = kSlabBytes / int(sizeof(Output));  // of a slab of O
constexpr int kSlabsO = (kDV + kColumnsO - 1) / kColumnsO;
constexpr int kPartSlabs = kSlabsO / kOutputParts;
constexpr int kSlabsV = kSlabsO;
static_assert(kConsumers * 64 == kBlockQ && 1 <= kConsumers && kConsumers <= 3, "64 rows each");
static_assert(kBlockKV % kGranule == 0 && kBlockKV <= 256, "whole steps, one instruction wide");
static_assert(kSlabsO % kOutputParts == 0, "whole slabs of O");
static_assert(128 * (kConsumers * kRegisters + kLoaderRegisters) * kBlocks <= 65536, "they fit");
static_assert(kD - kHeadDim < kGranule && kDV - kHeadDimV < kGranule, "zeros to the next step");

// Named barriers: 0 is __syncthreads.
constexpr int kConsumerBarrier = 1;  // and those after it: a consumer alone
constexpr int kTurnBarrier = 1 + kConsumers;  // a consumer's turn to start products
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

// threadIdx.x, read anew: nothing computed from it is kept in registers from one use to the next.
// PTX ISA: special registers, %tid.
__device__ __forceinline__ u32 thread_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// A barrier in shared memory (8 bytes, aligned) whose phases each wait for so many arrivals.
// PTX ISA: mbarrier.init.
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals)
               : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// One arrival at the current phase. PTX ISA: mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// One arrival at the current phase, which is also to wait for so many bytes.
// PTX ISA: mbarrier.arrive.expect_tx.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Whether the phase of that parity is complete; it may first wait for a while. A fresh barrier is
// in its phase of parity 0, and the one before counts as complete. PTX ISA: mbarrier.try_wait.
__device__ __forceinline__ bool mbarrier_try_wait(u64* barrier, u32 parity) {
  u32 complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(complete)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return complete;
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Barriers that this thread initialised become visible to TMA. PTX ISA: fence.mbarrier_init.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// What this thread wrote to shared memory becomes visible to TMA and wgmma, once they are ordered
// after it. PTX ISA: fence.proxy.async.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Closes the group of bulk stores issued by this thread so far. PTX ISA: cp.async.bulk.commit_group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Waits until at most kGroups of this thread's bulk groups are in flight.
// PTX ISA: cp.async.bulk.wait_group.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Waits until at most kGroups still read shared memory.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Each thread of the warpgroup keeps only so many registers, a multiple of 8; the rest goes back to the pool.
// PTX ISA: setmaxnreg.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(24 <= kRegisters && kRegisters <= 256 && kRegisters % 8 == 0, "24, 32, ... 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Each thread of the warpgroup asks for so many registers, a multiple of 8, and waits until they are free.
// PTX ISA: setmaxnreg.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(24 <= kRegisters && kRegisters <= 256 && kRegisters % 8 == 0, "24, 32, ... 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Waits at a named barrier until so many threads, whole warps, have come. PTX ISA: bar.sync.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Orders this warp's own accesses to registers before the products that follow. PTX ISA: wgmma.fence.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Keeps the compiler from moving accesses to an accumulator, or to the fragments of A, across this
// point; no instruction.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_fence_registers(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Closes the group of products issued by this warpgroup so far. PTX ISA: wgmma.commit_group.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Waits until at most kGroups of this warpgroup's groups are in flight. PTX ISA: wgmma.wait_group.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  static_assert(0 <= kGroups && kGroups <= 7, "at most 7 groups stay in flight");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
// Lane 4 g + t stores columns 2t, 2t + 1 of row g. PTX ISA: stmatrix.
__device__ __forceinline__ void stmatrix_x4(u32 row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(u32 row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
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

// Counts towards a named barrier without waiting at it. PTX ISA: bar.arrive.
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Two 8x8 matrices of 16-bit elements; lane i < 16 gives the address of row i % 8 of matrix i / 8.
// PTX ISA: ldmatrix.
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// One 8x8 matrix of 16-bit elements; lane i < 8 gives the address of row i. PTX ISA: ldmatrix.
__device__ __forceinline__ void ldmatrix_x1(u32 (&r)[1], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(row)
               : "memory");
}

// The same, transposed.
__device__ __forceinline__ void ldmatrix_x1_trans(u32 (&r)[1], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(row)
               : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// d += a b for one 16x8 tile, 8 deep; d as of m16n8k16. PTX ISA: mma.m16n8k8.
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], const u32 (&a)[2], u32 b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// One thread copies the box at these coordinates, the innermost first, into shared memory; what
// lies outside the tensor becomes zero. The barrier's phase receives the bytes of the whole box.
// PTX ISA: cp.async.bulk.tensor.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(void* smem, const TensorMap* map,
                                                        u64* barrier, int c0, int c1, int c2,
                                                        int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// One thread copies shared memory to the box, but for what lies outside the tensor, as part of a
// bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const TensorMap* map,
                                                              const void* smem, int c0, int c1,
                                                              int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
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

// d = a b, or d += a b, for 64 x 112 elements, 16 deep, by a warpgroup, in the background.
// Both a and b describe matrices in shared memory.
// Transposed: it is not the depth that is contiguous, but the rows of a, the columns of b.
// Lane 4 g + t of warp w: d[4 i + 2 j + k] = row 16 w + g + 8 j, column 8 i + 2 t + k.
// PTX ISA: wgmma.mma_async.
// clang-format off
template <int kTransposeA = 0, int kTransposeB = 0>
__device__ __forceinline__ void wgmma_m64k16_f16(
    float (&d)[56], u64 a, u64 b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %58, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55}, "
      "%56, "
      "%57, p, 1, 1, %59, %60;\n"
      "}\n"
      :
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
      : "l"(a), "l"(b), "r"(int(add))
      , "n"(kTransposeA), "n"(kTransposeB)
      : "memory");
}
// clang-format on

#endif
}  // namespace ptx
namespace ptx {
#ifndef FASIM_EMULATE

// d = a b, or d += a b, for 64 x 64 elements, 16 deep, by a warpgroup, in the background.
// Lane 4 g + t of warp w holds rows 16 w + g and 16 w + g + 8 of a, as for mma; b describes a matrix in
// shared memory.
// Transposed: it is not the depth that is contiguous, but the rows of a, the columns of b.
// Lane 4 g + t of warp w: d[4 i + 2 j + k] = row 16 w + g + 8 j, column 8 i + 2 t + k.
// PTX ISA: wgmma.mma_async.
// clang-format off
template <int kTransposeB = 0>
__device__ __forceinline__ void wgmma_m64k16_f16(
    float (&d)[32], const u32 (&a)[4], u64 b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, "
      "%36, p, 1, 1, %38;\n"
      "}\n"
      :
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add))
      , "n"(kTransposeB)
      : "memory");
}
// clang-format on

#endif
}  // namespace ptx

// Waits until the barrier's phase of that parity is complete. With FASIM_WAIT_LIMIT, a debugging
// build's, it gives up after so many tries instead of hanging.
__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
#ifdef FASIM_WAIT_LIMIT
  int tries = 0;
#endif
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
#ifdef FASIM_WAIT_LIMIT
    if (++tries == FASIM_WAIT_LIMIT) __trap();
#endif
  }
}

// A number that is the same in all lanes, where the compiler cannot see that it is: what is computed from
// it goes to the registers that a warp shares, whence wgmma takes its descriptors.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// The place of the n-th tile in a ring of tiles, and the parity of the phase in which it is there.
struct Turn {
  int slot;
  u32 parity;
};

template <int kSlots>
__device__ __forceinline__ Turn turn(u32 n) {
  return {int(n % kSlots), n / kSlots % 2};
}

// Waits until it is there.
template <int kSlots>
__device__ __forceinline__ void wait_for(u64 (&full)[kSlots], u32 n) {
  const Turn at = turn<kSlots>(n);
  wait(&full[at.slot], at.parity);
}

// ---- Timeline -----------------------------------------------------------------------------------
// A build with FASIM_TIMELINE notes when each warpgroup of the first block did what, step by step (a step
// is a tile of keys): `fasim bench --timeline`. Any other build has no trace of it.
enum Act { kLoadQ, kLoadK, kLoadV, kAsked, kBegan, kScored, kWeighed, kSummed, kStored, kActs };

#ifdef FASIM_TIMELINE

namespace ptx {
#ifndef FASIM_EMULATE

// Clocks of the SM so far. PTX ISA: special registers, %clock64.
__device__ __forceinline__ u64 clock64() {
  u64 clocks;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clocks)::"memory");
  return clocks;
}

#endif
}  // namespace ptx

constexpr int kNotedSteps = 1024;

extern "C" {
__device__ u64 fasim_timeline[kConsumers + 1][kNotedSteps][kActs];
}
#endif

__device__ __forceinline__ void note(Act act, int step) {
#ifdef FASIM_TIMELINE
  const u32 thread = ptx::thread_index();  // asked again, lest addresses be kept all along
  if (blockIdx.x != 0 || thread % 128 != 0 || step >= kNotedSteps) return;
  fasim_timeline[thread / 128][step][act] = ptx::clock64();
#endif
}

// ---- Shared memory ------------------------------------------------------------------------------
// A tile as TMA leaves it, and wgmma reads it.
template <int kRows, int kTileSlabs>
struct alignas(1024) SlabTile {
  unsigned char slab[kTileSlabs][kRows][kSlabBytes];
};

struct Work {  // a tile of queries, of one head; head < 0: there is no more
  int first_query, head;
  int batch;
};

constexpr int kWorks = 4;  // that someone may still ask about: the loader is at most two ahead

struct Shared {
  SlabTile<64, kSlabs> q[kQStages][kConsumers];
  SlabTile<64, kPartSlabs> o[kConsumers];
  SlabTile<kBlockKV, kSlabs> k[kKeyStages];
  SlabTile<kBlockKV, kSlabsV> v[kStages];
  u64 full_q[kQStages], empty_q[kQStages];  // barriers: a tile has arrived, all are done with it
  u64 full_k[kKeyStages], empty_k[kKeyStages];
  u64 full_v[kStages], empty_v[kStages];
  // What O's rows are to be multiplied by: from the softmax of a tile of keys to the end of the products
  // beside it, where their references move in that tile; from the end of their softmax until O leaves, 1 / l.
  // Meanwhile the first tile of other rows is weighed, whose O is still to come.
  float factors[kBlockQ];
  Work works[kWorks];
};

static_assert(sizeof(Shared) == kSmemBytes, "shared memory as planned");

// A warp arrives where it may read a tile again itself, a warpgroup where only its products do.
__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int i = 0; i < kQStages; ++i) {
    ptx::mbarrier_init(&shared.full_q[i], 1);
    ptx::mbarrier_init(&shared.empty_q[i], 4 * kConsumers);
  }
  for (int i = 0; i < kKeyStages; ++i) {
    ptx::mbarrier_init(&shared.full_k[i], 1);
    ptx::mbarrier_init(&shared.empty_k[i], 4 * kConsumers);
  }
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(&shared.full_v[i], 1);
    ptx::mbarrier_init(&shared.empty_v[i], kConsumers);
  }
  ptx::fence_mbarrier_init();
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

// ---- Scores -------------------------------------------------------------------------------------
// What happens to a score between Q K^T and the mask, in the order of the contract: scale, softcap,
// bias. Scores leave in units of log2, so the softmax after them needs no factor of its own.

struct ScoreTerms {
  float scale_log2;
  float slope_log2;  // of this head
};

__device__ __forceinline__ float scaled(float score, const ScoreTerms& terms) {
  return score * terms.scale_log2;
}

// The same for a thread's part of the scores of whole rows.
// -slope |distance| for every score: the last key is aligned with the last query, as in the mask.
// The warp's rows begin at `query`, the keys at `key`.
template <int kTiles>
__device__ __forceinline__ void finish_scores(float (&s)[kRowTiles][kTiles][4],
                                              const ScoreTerms& terms, int query, int key,
                                              int seq_q, int seq_kv) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const float aligned = query + 8 * i + lane / 4 + seq_kv - seq_q - key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      float& score = s[i / 2][n / 2][i % 2 * 2 + n % 2];
      const float distance = fabsf(aligned - (n / 2 * 8 + n % 2));
      score = fmaf(-terms.slope_log2, distance, scaled(score, terms));
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

// The lengths of a sequence, by which its mask is aligned.
struct Span {
  int seq_q, seq_kv;
};

__device__ __forceinline__ int visible_keys(int query, const Span& span) {
  return visible_keys(query, span.seq_q, span.seq_kv);
}

template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kRowTiles][kTiles][4], int query, int key,
                                            const Span& span) {
  mask_scores(s, query, key, span.seq_q, span.seq_kv);
}

// ---- Schedule -----------------------------------------------------------------------------------
// A block works on many tiles of queries, one after the other. The heads come in groups; in a group the
// tiles with the most keys come first, those of all its heads together, so that their K and V are in
// L2 for all who read them. Every other round hands the tiles out in reverse order: who had the longest
// of the round before has the shortest of this one. The host knows groups after which all end together.
struct Grid {  // of tiles of queries
  int batch, heads, queries;
  int heads_together;  // of a group
};

__device__ __forceinline__ Work work_at(int round, const Grid& grid) {
  const int blocks = gridDim.x, q_blocks = (grid.queries + kBlockQ - 1) / kBlockQ;
  const int all_heads = grid.batch * grid.heads, group = grid.heads_together;
  const int turn = round * blocks + (round % 2 ? blocks - 1 - int(blockIdx.x) : int(blockIdx.x));
  if (turn >= all_heads * q_blocks) return {0, -1};
  const int first_head = turn / (group * q_blocks) * group;
  const int members = min(group, all_heads - first_head);
  const int place = turn - first_head * q_blocks;
  const int head = first_head + place % members;
  // Where tiles have rows to spare, the first has them, which sees the fewest keys: those of consumers that
  // begin before the first query. What TMA finds there are zeros.
  const int spare = (q_blocks * kBlockQ - grid.queries) / 64 * 64;
  const int first_query = (q_blocks - 1 - place / members) * kBlockQ - spare;
  return {first_query, head % grid.heads, head / grid.heads};
}

struct Tiles {  // of keys: one past the last, and the first
  int end, begin;
};

// Those that a tile of queries visits. Where no query sees a key, one beyond the last: its loads bring
// zeros, its mask hides them.
__device__ __forceinline__ Tiles key_tiles(int first_query, const Span& span) {
  const int keys = visible_keys(min(first_query + kBlockQ, span.seq_q) - 1, span);
  const int beyond = span.seq_kv / kBlockKV + 1;
  const int begin = 0;
  const int end = keys > 0 ? (keys + kBlockKV - 1) / kBlockKV : 0;
  return end > begin ? Tiles{end, begin} : Tiles{beyond + 1, beyond};
}

// The rows of a tile, from its first on, that a consumer answers for.
__device__ __forceinline__ int own_rows(const Work& work, int consumer, const Span& span) {
  if (work.first_query + 64 * consumer < 0) return 0;
  return span.seq_q - work.first_query;
}

// Those of which all rows of a consumer, from `query` on, see all keys.
__device__ __forceinline__ Tiles whole_tiles(int query, const Span& span) {
  return {visible_keys(query, span) / kBlockKV, 0};
}

__device__ __forceinline__ bool is_among(int tile, const Tiles& tiles) { return tile < tiles.end; }

// ---- Loads --------------------------------------------------------------------------------------
// Where TMA finds the rows of a head: they count from `row` on, in the head of `batch`.
struct Place {
  int row, batch;
};

// One thread brings a tile, slab by slab; the barrier completes when all its bytes have come.
template <int kRows, int kTileSlabs>
__device__ __forceinline__ void load_slabs(SlabTile<kRows, kTileSlabs>& tile, const TensorMap* map,
                                           u64* full, int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < kTileSlabs; ++i) {
    ptx::cp_async_bulk_tensor_4d(tile.slab[i], map, full, i * kSlabColumns, row, head, batch);
  }
}

struct Loader {  // its thread's view of the rings of K and V
  Shared& shared;
  const TensorMap* k_map;
  const TensorMap* v_map;
  u32 count_k = 0, count_v = 0;
  __device__ __forceinline__ void load_k(int tile, int head, const Place& keys) {
    const Turn at = turn<kKeyStages>(count_k++);
    wait(&shared.empty_k[at.slot], at.parity ^ 1);  // passes at once the first time round
    ptx::mbarrier_arrive_expect_tx(&shared.full_k[at.slot], sizeof(shared.k[0]));
    load_slabs(shared.k[at.slot], k_map, &shared.full_k[at.slot], keys.row + tile * kBlockKV, head,
               keys.batch);
    note(kLoadK, count_k - 1);
  }

  __device__ __forceinline__ void load_v(int tile, int head, const Place& keys) {
    const Turn at = turn<kStages>(count_v++);
    wait(&shared.empty_v[at.slot], at.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(&shared.full_v[at.slot], sizeof(shared.v[0]));
    load_slabs(shared.v[at.slot], v_map, &shared.full_v[at.slot], keys.row + tile * kBlockKV, head,
               keys.batch);
    note(kLoadV, count_v - 1);
  }
};

// All that a block needs: for every tile of queries Q, then tile by tile K and V, until there is no work.
// V of a tile of keys comes behind K of the next one, as that is the order of use.
template <typename WorkOf, typename QueriesOf, typename KeysOf, typename TilesOf>
__device__ __forceinline__ void load_all(Loader& loader, const TensorMap* q_map, int group,
                                         const WorkOf& work_of, const QueriesOf& queries_of,
                                         const KeysOf& keys_of, const TilesOf& tiles_of) {
  Shared& shared = loader.shared;
  int before = 0, before_head = 0;  // the tile whose V is still to come
  Place before_keys = {0, 0};
  for (int round = 0;; ++round) {
    const Turn at = turn<kQStages>(round);
    const Work work = work_of(round);
    wait(&shared.empty_q[at.slot], at.parity ^ 1);
    shared.works[round % kWorks] = work;
    if (work.head < 0) {
      ptx::mbarrier_arrive(&shared.full_q[at.slot]);
      break;
    }
    const Place queries = queries_of(work), keys = keys_of(work);
    ptx::mbarrier_arrive_expect_tx(&shared.full_q[at.slot], sizeof(shared.q[0]));
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      const int query = queries.row + work.first_query + 64 * i;
      load_slabs(shared.q[at.slot][i], q_map, &shared.full_q[at.slot], query, work.head,
                 queries.batch);
    }
    note(kLoadQ, loader.count_k);
    const int kv_head = work.head / group;
    const Tiles tiles = tiles_of(work);
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      loader.load_k(tile, kv_head, keys);
      if (loader.count_k > 1) loader.load_v(before, before_head, before_keys);
      before = tile, before_head = kv_head, before_keys = keys;
    }
  }
  if (loader.count_k > 0) loader.load_v(before, before_head, before_keys);
}

// How the rows of a tile in shared memory are swizzled: in spans of so many bytes.
enum class Swizzle : u32 { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// A matrix in shared memory as wgmma sees it. Offsets are in bytes: `leading` between core matrices
// along the contiguous direction (unused where one swizzled span holds all), `stride` between groups
// of 8 rows. PTX ISA: asynchronous warpgroup level matrix shared memory layout.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading, u32 stride,
                                                 Swizzle swizzle) {
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 |
         u64(swizzle) << 62;
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

// Where 8 columns of a row lie in a tile.
template <int kRows, int kTileSlabs>
__device__ __forceinline__ u32 chunk_address(const SlabTile<kRows, kTileSlabs>& tile, u32 row,
                                             u32 chunk) {
  const u32 slab = ptx::smem_address(&tile) + chunk / 8 * sizeof(tile.slab[0]);
  return slab + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

// ---- Scores, again ------------------------------------------------------------------------------
// 16 rows of one warp against 8 keys, by the instructions that a warp can issue alone: for the rare tile
// whose scores were overwritten with weights that turned out too large.
using FewScores = float[1][1][4];

__device__ __forceinline__ void few_scores(FewScores& s, const SlabTile<64, kSlabs>& q,
                                           const SlabTile<kBlockKV, kSlabs>& k, int column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][0][i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < kD / 8; ++step) {
    u32 a[2], b[1];
    ptx::ldmatrix_x2(a, chunk_address(q, 16 * warp + lane % 16, step));
    ptx::ldmatrix_x1(b, chunk_address(k, column + lane % 8, step));
    ptx::mma_m16n8k8_f16(s[0][0], a, b[0]);
  }
}

// ---- Products on the tensor cores ---------------------------------------------------------------
// A warpgroup multiplies 64 rows in the background: what it reads and writes, registers too, is not to
// be touched until it has waited. A slab's rows are 128 bytes, its groups of 8 rows 1024 bytes apart.
constexpr u32 kGroupBytes = 1024;

using Weights = u32[1][kBlockKV / 16][4];  // rounded, left operands of 16 keys each

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

// Starts s = Q K^T: both lie with the head dimension contiguous, a step's columns are 32 bytes of a row.
__device__ __forceinline__ void start_scores(Scores& s, u64 q, u64 k) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / kGranule; ++step) {
    const u32 column = step % 4 * 32, slab = step / 4;
    const u64 left = further(q, slab * 64 * 128 + column);
    const u64 right = further(k, slab * kBlockKV * 128 + column);
    ptx::wgmma_m64k16_f16(flat(s), left, right, step > 0);
  }
  ptx::wgmma_commit_group();
}

// Starts o += P V: P in registers, V with its rows the depth, 16 of them 2048 bytes.
__device__ __forceinline__ void start_values(Accumulator& o, const Weights& p, u64 v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockKV / 16; ++step) {
    ptx::wgmma_m64k16_f16<1>(flat(o), p[0][step], further(v, step * 16 * 128), true);
  }
  ptx::wgmma_commit_group();
}
// Waits for all products but the last kLeft started; their results may be read then.
template <int kLeft, int kTiles>
__device__ __forceinline__ void finish_products(float (&result)[1][kTiles][4]) {
  ptx::wgmma_wait_group<kLeft>();
  ptx::wgmma_fence_registers(flat(result));
}

// ---- Rows and their references ------------------------------------------------------------------
struct RowState {  // of the two rows of a thread
  float max[2];  // the largest score when it was last looked for
  float sum[2];
  bool settled;  // all rows of the warp are, and O has followed them
};

// A fused multiply-add takes the exact product from a rounded reference: beyond this exponent the
// rounding would show, and the difference is taken before it is scaled.
constexpr float kHugeExponent = 262144.f;

__device__ __forceinline__ void reset(RowState& row) {
  row = {{-kInfinity, -kInfinity}, {0.f, 0.f}, false};
}

// Whether a row has a reference that a fused multiply-add may take away.
__device__ __forceinline__ bool is_settled(float max, float scale_log2) {
  return fabsf(max) * scale_log2 < kHugeExponent;
}

// All rows of the warp.
__device__ __forceinline__ bool all_settled(const RowState& row, float scale_log2) {
  const bool both = is_settled(row.max[0], scale_log2) && is_settled(row.max[1], scale_log2);
  return __all_sync(~0u, both);
}

// The largest of `max` and a thread's scores of one row: two by two, as each has to wait for another.
__device__ __forceinline__ float highest_of(const Scores& s, int half, float max) {
  float highest[2] = {max, max};
#pragma unroll
  for (int n = 0; n < kBlockKV / 4; ++n) {
    highest[n % 2] = fmaxf(highest[n % 2], s[0][n / 2][2 * half + n % 2]);
  }
  return fmaxf(highest[0], highest[1]);
}

// Takes the references of rows from their scores where a multiply-add may not.
__device__ __forceinline__ void take_references(Scores& s, const RowState& row, float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (is_settled(row.max[half], scale_log2)) continue;
    const float reference = reference_of(row.max[half]);
#pragma unroll
    for (int n = 0; n < kBlockKV / 4; ++n) s[0][n / 2][2 * half + n % 2] -= reference;
  }
}

// ---- Online softmax, lazily and in place --------------------------------------------------------
// FlashAttention-3, algorithm 1, with weights relative to an earlier maximum: any reference gives the
// same result while no weight leaves the range of its type. So scores become weights at once, in their
// own registers, by one multiply-add and one exponential each. Only where their sum shows that one grew
// large are the scores computed again, the maximum looked for, and what was summed so far rescaled.

// O is to follow the rows of a tile whose references move. But products are being added to it, and to
// wait for them takes all four warps, while one may be here alone. So the warp leaves a factor of each row.
struct Late {
  float* factors;
  bool fresh;  // O belongs to other rows: it stays, and the factors are theirs
};

// Makes these the references of the rows, for what was summed so far too. A row that sees no key keeps
// no reference. `again`: rows of the warp have moved in this tile already.
__device__ __forceinline__ void move_to(RowState& row, const Late& late, const float (&max)[2],
                                        float scale_log2, bool again) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float down = (row.max[half] - reference_of(max[half])) * scale_log2;
    const float factor = row.max[half] == max[half] ? 1.f : ptx::ex2(down);
    row.sum[half] *= factor;
    row.max[half] = max[half];
    if (late.fresh || threadIdx.x % 4 != 0) continue;
    float& all = late.factors[tile_row(half)];
    all = again ? all * factor : factor;
  }
  row.settled = false;
}

// O follows, once its products are done.
__device__ __forceinline__ void follow(RowState& row, Accumulator& o, const Late& late,
                                       float scale_log2) {
  if (row.settled) return;
  row.settled = all_settled(row, scale_log2);
  if (late.fresh) return;
  __syncwarp();  // one lane of a quad wrote its factors
  const u32 thread = ptx::thread_index();  // asked again, lest the address be kept all along
  const float* mine = late.factors + thread / 32 * kWarpRows + thread % 32 / 4;
  const float factor[2] = {mine[0], mine[8]};
  __syncwarp();  // ... and is to write there again
#pragma unroll
  for (int i = 0; i < kDV / 2; ++i) o[0][i / 4][i % 4] *= factor[i / 2 % 2];
}

// Gives the rows that have none a reference, the maximum.
__device__ __forceinline__ void settle(Scores& s, RowState& row, const Late& late,
                                       float scale_log2) {
  float max[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float highest = quad_max(highest_of(s, half, row.max[half]));
    max[half] = is_settled(row.max[half], scale_log2) ? row.max[half] : highest;
  }
  move_to(row, late, max, scale_log2, false);
  take_references(s, row, scale_log2);
}

// Scores become weights, exp2(s scale - shift).
__device__ __forceinline__ void exponentials(Scores& s, const float (&shift)[2], float scale_log2) {
#pragma unroll
  for (int i = 0; i < kBlockKV / 2; ++i) {
    float& x = s[0][i / 4][i % 4];
    x = ptx::ex2(fmaf(x, scale_log2, -shift[i / 2 % 2]));
  }
}

// A lane's sums of its weights.
__device__ __forceinline__ void add_up(float (&sum)[2], const Scores& s) {
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int i = 0; i < kBlockKV / 4; ++i) {
    sum[i % 2] += s[0][i / 2][i % 2 * 2] + s[0][i / 2][i % 2 * 2 + 1];
  }
}

constexpr float kLargestSum = 16384.f;  // of a lane's weights in one tile; fp16 ends at 65504

// The weights of those rows again, from a maximum that is theirs. `rescored(few, column)` computes the
// scores of 8 keys; what becomes of a row depends on no other row.
template <typename Rescored>
__device__ __forceinline__ void lower(Scores& s, RowState& row, const Late& late, float (&sum)[2],
                                      float scale_log2, const Rescored& rescored) {
  const bool moves[2] = {quad_max(sum[0]) > kLargestSum, quad_max(sum[1]) > kLargestSum};
  float max[2] = {row.max[0], row.max[1]};
  FewScores few;
#pragma unroll 1
  for (int n = 0; n < kBlockKV / 8; ++n) {
    rescored(few, 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) max[i / 2] = fmaxf(max[i / 2], few[0][0][i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float highest = quad_max(max[half]);
    max[half] = moves[half] ? highest : row.max[half];
  }
  // s moves on by one place a step, so that the loop need not be unrolled.
#pragma unroll 1
  for (int n = 0; n < kBlockKV / 8; ++n) {
    rescored(few, 8 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = ptx::ex2((few[0][0][i] - max[i / 2]) * scale_log2);
      const float next = moves[i / 2] ? weight : s[0][0][i];
#pragma unroll
      for (int k = 0; k + 1 < kBlockKV / 8; ++k) s[0][k][i] = s[0][k + 1][i];
      s[0][kBlockKV / 8 - 1][i] = next;
    }
  }
  __syncwarp();  // all lanes have read Q and K again: a vote would not order that
  add_up(sum, s);
  move_to(row, late, max, scale_log2, !row.settled);
}

// Turns scores into weights, exp(scale (s - max)) for a recent maximum.
template <typename Rescored>
__device__ __forceinline__ void weigh(Scores& s, RowState& row, const Late& late, float scale_log2,
                                      const Rescored& rescored) {
  if (!row.settled) settle(s, row, late, scale_log2);
  float sum[2], shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    shift[half] = is_settled(row.max[half], scale_log2) ? row.max[half] * scale_log2 : 0.f;
  }
  exponentials(s, shift, scale_log2);
  add_up(sum, s);
  if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > kLargestSum)) {
    lower(s, row, late, sum, scale_log2, rescored);
  }
  row.sum[0] += sum[0];
  row.sum[1] += sum[1];
}
__device__ __forceinline__ void round_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kBlockKV / 4; ++i) {
    const float (&pair)[4] = s[0][i / 2];
    p[0][i / 4][i % 4] = ptx::cvt_f16x2(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
  }
}

// ---- Output -------------------------------------------------------------------------------------
// Ends the softmax of a tile: log-sum-exp, and 1 / l for the products to come. A row that saw no key
// gives -inf, and 0.
__device__ __forceinline__ void end_rows(const RowState& row, float* inverse, float* lse,
                                         float scale_log2, int rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(row.sum[half]);
    if (threadIdx.x % 4 != 0) continue;
    inverse[tile_row(half)] = sum == 0.f ? 0.f : 1.f / sum;
    if (tile_row(half) < rows) lse[tile_row(half)] = log_sum_exp(row.max[half], sum, scale_log2);
  }
  __syncwarp();
}
// O divided by l, through shared memory to where it belongs, by TMA: the next tile's products may start
// while it leaves. TMA leaves out what lies beyond the tensor.
__device__ __forceinline__ void store_output(Shared& shared, const Accumulator& o,
                                             const TensorMap* o_map, const Work& work,
                                             const Place& queries, int seq_q) {
  const u32 thread = ptx::thread_index();  // asked again, lest addresses be kept all along
  const u32 consumer = thread / 128, lane = thread % 32, row = thread % 128 / 32 * 16 + lane % 16;
  const int first_row = thread / 32 * kWarpRows + lane / 4;
  const float inverse[2] = {shared.factors[first_row], shared.factors[first_row + 8]};
  const bool leads = thread % 128 == 0;
#pragma unroll
  for (int first = 0; first < kOutputParts; first += kPartsAtOnce) {
    if (leads) ptx::cp_async_bulk_wait_group_read<0>();  // what lay here before has been read
    ptx::bar_sync(kConsumerBarrier + consumer, 128);
#pragma unroll
    for (int step = 0; step < kPartsAtOnce * kPartSlabs * 4; ++step) {
      const int column = first * kPartSlabs * 8 + 2 * step;  // in units of 8
      if (column * 8 >= kDV) break;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = o[0][column + i / 2];
        const float x = pair[i % 2 * 2] * inverse[i % 2], y = pair[i % 2 * 2 + 1] * inverse[i % 2];
        pairs[i] = ptx::cvt_f16x2(x, y);
      }
      ptx::stmatrix_x4(chunk_address(shared.o[consumer], row, 2 * step + lane / 16), pairs);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(kConsumerBarrier + consumer, 128);
    const int query = work.first_query + consumer * 64;
    if (leads && query >= 0 && query < seq_q) {
#pragma unroll
      for (int i = 0; i < kPartsAtOnce * kPartSlabs; ++i) {
        const int slab = first * kPartSlabs + i;
        const auto& from = shared.o[consumer].slab[i];
        ptx::cp_async_bulk_tensor_4d_store(o_map, from, slab * kColumnsO, queries.row + query,
                                           work.head, queries.batch);
      }
      ptx::cp_async_bulk_commit_group();
    }
  }
}

// A consumer has started its products: the next one may. One alone takes no turns.
__device__ __forceinline__ void pass_turn() {
  const int next = threadIdx.x / 128 + 1 < kConsumers ? threadIdx.x / 128 + 1 : 0;
  if (kConsumers > 1) ptx::bar_arrive(kTurnBarrier + next, 256);
}

__device__ __forceinline__ void await_turn(int consumer) {
  if (kConsumers > 1) ptx::bar_sync(kTurnBarrier + consumer, 256);
}

// ---- Kernel -------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
v3_fwd_sm90a_fp16_d64_causal_alibi_2a670209(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map,
    float* __restrict__ lse, const float* __restrict__ slopes, const int batch, const int heads,
    const int kv_heads, const int seq_q, const int seq_kv, const int heads_together,
    const float scale_log2) {
  // clang-format on
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  Shared& shared = *reinterpret_cast<Shared*>(smem_raw);
  const int warpgroup = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  // Of a tile of queries: by which its mask is aligned, where TMA finds it and its keys, those it visits.
  const auto span_of = [&](const Work&) { return Span{seq_q, seq_kv}; };
  const auto queries_of = [](const Work& work) { return Place{0, work.batch}; };
  const auto keys_of = queries_of;
  const auto tiles_of = [&](const Work& work) {
    return key_tiles(work.first_query, span_of(work));
  };

  if (warpgroup == kConsumers) {  // ---- Producer ----
    ptx::setmaxnreg_dec<kLoaderRegisters>();
    if (threadIdx.x % 128 != 0) return;
    Loader loader = {shared, &k_map, &v_map};
    const Grid grid = {batch, heads, seq_q, heads_together};
    const auto work_of = [&](int round) { return work_at(round, grid); };
    load_all(loader, &q_map, heads / kv_heads, work_of, queries_of, keys_of, tiles_of);
    return;
  }

  // ---- Consumer ----
  ptx::setmaxnreg_inc<kRegisters>();
  const bool leads = threadIdx.x % 128 == 0;
  if (warpgroup == kConsumers - 1) pass_turn();  // the first one's first turn
  Scores s;
  Weights p;
  Accumulator o;
  RowState row;
  u32 round = 0;
  int tile = 0, last_tile = 0;
  Tiles whole = {0, 0};
  float slope_log2 = 0.f;  // of the head
  // The next tile of queries: false if there is none.
  const auto begin = [&] {
    const Turn at = turn<kQStages>(round);
    wait(&shared.full_q[at.slot], at.parity);
    const Work& work = shared.works[round % kWorks];
    const Tiles tiles = tiles_of(work);
    ++round;
    tile = tiles.end - 1, last_tile = tiles.begin;
    whole = whole_tiles(work.first_query + 64 * warpgroup, span_of(work));
    slope_log2 = work.head < 0 ? 0.f : slopes[work.head] * kLog2e;
    return work.head >= 0;
  };
  const auto end = [&] {
    const Work work = shared.works[(round - 2) % kWorks];
    const i64 rows = (i64(work.batch) * heads + work.head) * seq_q + work.first_query;
    end_rows(row, shared.factors, lse + rows, 1.f, own_rows(work, warpgroup, span_of(work)));
    reset(row);
  };
  const auto store = [&] {
    const Work& work = shared.works[(round - 2) % kWorks];
    store_output(shared, o, &o_map, work, queries_of(work), span_of(work).seq_q);
  };
  const auto await_keys = [&](u32 n) { wait_for(shared.full_k, n); };
  const auto start = [&](u32 n) {  // the scores of the n-th tile of keys
    note(kAsked, n);
    await_keys(n);
    await_turn(warpgroup);
    note(kBegan, n);
    start_scores(s, descriptor_of(shared.q[(round - 1) % kQStages][warpgroup]),
                 descriptor_of(shared.k[n % kKeyStages]));
  };
  // From products to what softmax sees, for the keys from the tile's `column`-th on.
  const auto finish = [&](auto& s, int column) {
    const Work& work = shared.works[(round - 1) % kWorks];
    const Span span = span_of(work);
    const int warp_query = work.first_query + threadIdx.x / 32 * kWarpRows;
    const int key = tile * kBlockKV + column;
    const ScoreTerms terms = {scale_log2, slope_log2};
    finish_scores(s, terms, warp_query, key, span.seq_q, span.seq_kv);
    if (is_among(tile, whole)) return;
    mask_scores(s, warp_query, key, span);
  };
  const auto await_values = [&](u32 n) { wait_for(shared.full_v, n); };
  const auto weigh_scores = [&](u32 n, const Late& late) {
    note(kScored, n);
    finish(s, 0);
    weigh(s, row, late, 1.f, [&](FewScores& few, int column) {
      const auto& q_rows = shared.q[(round - 1) % kQStages][warpgroup];
      few_scores(few, q_rows, shared.k[n % kKeyStages], column);
      finish(few, column);
    });
    if (ptx::thread_index() % 32 == 0) {  // asked again, lest it be kept
      ptx::mbarrier_arrive(&shared.empty_k[n % kKeyStages]);
      if (tile == last_tile) ptx::mbarrier_arrive(&shared.empty_q[(round - 1) % kQStages]);
    }
    note(kWeighed, n);
  };
  const auto start_values_of = [&](u32 n) {
    await_values(n);
    start_values(o, p, descriptor_of(shared.v[n % kStages]));
  };
  u32 n = 0;
  // The weights of the first tile of keys, and those of tile n + 1 while the values of tile n are summed.
  const auto first_weights = [&] {
    start(n);
    pass_turn();
    finish_products<0>(s);
    reset(row);
    zero(o);
    const Late late = {shared.factors, true};
    weigh_scores(n, late);
    follow(row, o, late, 1.f);
    round_weights(p, s);
  };
  const auto next_weights = [&](bool ends) {
    start(n + 1);
    start_values_of(n);
    pass_turn();
    if (ends) end();
    finish_products<1>(s);
    const Late late = {shared.factors, ends};
    weigh_scores(n + 1, late);
    finish_products<0>(o);  // here all warps wait, whether their rows move or not
    if (leads) ptx::mbarrier_arrive(&shared.empty_v[n % kStages]);
    note(kSummed, n);
    follow(row, o, late, 1.f);
    round_weights(p, s);
  };
  const auto last_values = [&] {
    start_values_of(n);
    end();
    finish_products<0>(o);
    note(kSummed, n);
    store();
    note(kStored, n);
  };
  bool more = begin();
  if (more) first_weights();
  while (more) {  // p holds the weights of tile n; whose scores are next?
    const bool ends = tile == last_tile;
    if (!ends) --tile;
    if (ends) {
      more = begin();
      if (__all_sync(~0u, !more)) break;  // a vote: the compiler sees that the warp stays together
    }
    next_weights(ends);
    if (ends) {
      store();
      zero(o);
      note(kStored, n);
    }
    ++n;
  }
  if (round > 1) last_values();
  if (leads) ptx::cp_async_bulk_wait_group_read<0>();
  if (warpgroup == 0) await_turn(0);  // the one that no one took
}

#ifdef FASIM_MAIN
// One launch on pseudo-random inputs, timed: enough to profile this file by itself.
// usage: a.out [batch [heads [kv_heads [seq_q [seq_kv]]]]]
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

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

// The driver's encoder, found through the runtime: nothing needs to be linked.
template <typename T>
TensorMap encoded(T* array, i64 batch, i64 heads, i64 seq, i64 width, int rows) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (!encode) {
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode),
                                     12000, cudaEnableDefault, &found);
  }
  const cuuint64_t ends = batch;
  const cuuint64_t row = width * sizeof(T), strides[] = {row, row * seq, row * seq * heads};
  const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(seq), cuuint64_t(heads), ends};
  const cuuint32_t box[] = {kSlabBytes / sizeof(T), cuuint32_t(rows), 1, 1}, ones[] = {1, 1, 1, 1};
  auto type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMap map;
  if (encode(&map, type, 4, array, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
    std::printf("rows of %lld elements are not multiples of 16 bytes\n", width);
    std::exit(1);
  }
  TensorMap result;
  std::memcpy(&result, &map, sizeof(result));
  return result;
}

int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }

int main(int argc, char** argv) {
  const auto size = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int batch = size(1, 1), heads = size(2, 16), kv_heads = size(3, heads);
  const int seq_q = size(4, 4096), seq_kv = size(5, seq_q);
  const i64 rows = i64(batch) * heads * seq_q, keys = i64(batch) * kv_heads * seq_kv;

  const float scale_log2 = 1.442695041f / sqrtf(kHeadDim);
  const auto slope = [&](i64 h) { return exp2f(-8.f * (h + 1) / heads); };
  const float* slopes = made<float>(heads, slope);

  Output* o = device_array<Output>(rows * kHeadDimV);
  float* lse = device_array<float>(rows);
  Element *q = input(rows * kHeadDim, 1), *k = input(keys * kHeadDim, 2);
  const TensorMap q_map = encoded(q, batch, heads, seq_q, kHeadDim, 64);
  const TensorMap k_map = encoded(k, batch, kv_heads, seq_kv, kHeadDim, kBlockKV);
  const TensorMap v_map =
      encoded(input(keys * kHeadDimV, 3), batch, kv_heads, seq_kv, kHeadDimV, kBlockKV);
  const TensorMap o_map = encoded(o, batch, heads, seq_q, kHeadDimV, 64);
  int blocks = 132;
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  blocks *= kBlocks;
  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ, tiles = batch * heads * q_blocks;
  const int grid = blocks < tiles ? blocks : tiles;
  const int rounds = 2 * blocks / greatest_common_divisor(2 * blocks, q_blocks);
  const int heads_together = rounds < batch * heads ? rounds : batch * heads;
  const auto kernel = v3_fwd_sm90a_fp16_d64_causal_alibi_2a670209;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  float ms = 0;
  for (int run = 0; run < 2; ++run) {  // the second one counts
    cudaEventRecord(start);
    kernel<<<grid, kThreads, kSmemBytes>>>(q_map, k_map, v_map, o_map, lse, slopes, batch, heads,
                                           kv_heads, seq_q, seq_kv, heads_together, scale_log2);
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    cudaEventElapsedTime(&ms, start, stop);
  }
  std::printf("%s, %.3f ms\n", cudaGetErrorString(cudaGetLastError()), ms);
}
#endif

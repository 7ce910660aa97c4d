// FlashAttention, backward, in the paper's order (Dao et al. 2022, algorithm 4).
//
// Two kernels, launched one after the other with the same arguments:
//   prepare  D = rowsum(dO * O), one fp32 a row, and dQ = 0 for queries that see no key
//   main     one thread block per head of keys. The outer loop holds a tile of keys and values in
//            shared memory and their dK and dV in registers; the inner loop brings every block of
//            queries past it, of every head that shares the keys, and with each its dQ, which lives
//            in HBM, in fp32, between the visits
//
// The tile code is FlashAttention-2's: what differs is the order of the loops, the traffic that order
// causes, and that only batch and heads run in parallel. Nobody else adds to a block's dQ, so every
// run gives the same bits.
//
//   paper   here                    paper   here
//   B_r     kBlockQ                 T_r     q_tiles
//   B_c     kBlockKV                T_c     kv_tiles
//   S, P    s (transposed)          L       lse, for m and l
//   dP, dS  dp (transposed)         D       delta
//
// P takes the place of S, and dS that of dP.

//% include "device/types.cuh"

// ---- Constants ----------------------------------------------------------------------------------
//% include "parts/constants_bwd.cuh"
constexpr int kTileElements = (kBlockKV + kBlockQ) * (kD + kDV) + kBlockQ * kBlockKV;

static_assert(kTileElements * sizeof(Element) + 2 * kBlockQ * sizeof(float) == kSmemBytes,
              "shared memory as planned");
static_assert(kSlots == 1, "copies and computes in turn");

// ---- Instructions -------------------------------------------------------------------------------
//% include "ptx/smem_address.cuh"
//% include "ptx/ex2.cuh"
//% include "ptx/ldmatrix_x4.cuh"
//% include "ptx/mma_m16n8k16_" ~ ptx_type(kernel.dtype) ~ ".cuh"
//% include "ptx/cvt_" ~ ptx_type(kernel.dtype) ~ "x2.cuh"
//% if kernel.dtype == "fp16"
//% include "ptx/cvt_f32_f16.cuh"
//% endif

//% include "device/words.cuh"

//% include "device/tile.cuh"

//% include "device/copy_plain.cuh"

//% include "device/copy.cuh"

//% include "device/matmul_bwd.cuh"

//% include "device/score_gradient.cuh"

//% include "device/last_key.cuh"

//% include "device/store_rows.cuh"

//% include "device/row_products.cuh"

//% include "device/query_gradient.cuh"

//% include "device/update_query_gradient.cuh"

// ---- Kernels ------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void
$(kernel.stem)_prepare(
$(parameters(kernel))) {
  // clang-format on
  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ;
  const i64 head_of_all = blockIdx.x / q_blocks;
  const int first = blockIdx.x % q_blocks * kBlockQ;
  const int rows = min(kBlockQ, seq_q - first);
  const i64 batch = head_of_all / heads, head = head_of_all % heads;
  o += batch * o_strides.batch + head * o_strides.head;
  dO += batch * do_strides.batch + head * do_strides.head;
  dq += (head_of_all * seq_q + first) * kHeadDim;
  for (int row = threadIdx.x / kRowThreads; row < kBlockQ; row += kThreads / kRowThreads) {
    const i64 query = first + row;
    const bool valid = row < rows;
    const float product =
        row_product(o + query * o_strides.seq, dO + query * do_strides.seq, valid);
    if (valid && threadIdx.x % kRowThreads == 0) delta[head_of_all * seq_q + query] = product;
  }
  if (last_key_of(first + rows - 1, seq_q, seq_kv) >= 0) return;
  for (int i = threadIdx.x; i < rows * kHeadDim; i += kThreads) dq[i] = 0;
}

// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
$(kernel.stem)(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* k_tile = reinterpret_cast<Element*>(smem_raw);
  Element* v_tile = k_tile + kBlockKV * kD;
  Element* q_tile = v_tile + kBlockKV * kDV;
  Element* do_tile = q_tile + kBlockQ * kD;
  Element* ds_tile = do_tile + kBlockQ * kDV;  // keys by queries
  float* lse_rows = reinterpret_cast<float*>(ds_tile + kBlockQ * kBlockKV);
  float* delta_rows = lse_rows + kBlockQ;

  const int kv_head = blockIdx.x % kv_heads;
  const i64 batch = blockIdx.x / kv_heads;
  const i64 first_kv_row = i64(blockIdx.x) * seq_kv;
  k += batch * k_strides.batch + kv_head * k_strides.head;
  v += batch * v_strides.batch + kv_head * v_strides.head;
  q += batch * q_strides.batch;
  dO += batch * do_strides.batch;

  const Span span = {seq_q, seq_kv};
  const int group = heads / kv_heads;
  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ;
  const int kv_tiles = (seq_kv + kBlockKV - 1) / kBlockKV;
  for (int j = 0; j < kv_tiles; ++j) {
    const int first_key = j * kBlockKV;
    const int keys = min(kBlockKV, seq_kv - first_key);
    __syncthreads();  // dK and dV of the previous keys have left through the tiles of K and V
    copy_tile<kBlockKV, kD, kHeadDim>(k_tile, k + first_key * k_strides.seq, k_strides.seq, keys);
    copy_tile<kBlockKV, kDV, kHeadDimV>(v_tile, v + first_key * v_strides.seq, v_strides.seq, keys);
    Accumulator<kD> dk_acc;
    Accumulator<kDV> dv_acc;
    zero(dk_acc);
    zero(dv_acc);
    const int warp_key = first_key + warp_keys();

    // The tiles of queries that see any of these keys, head after head of those that share them.
    const int first_tile = max(0, first_query_of(first_key, span)) / kBlockQ;
    const int q_tiles = q_blocks - first_tile;
    for (int t = 0; t < group * q_tiles; ++t) {
      const int head = kv_head * group + t / q_tiles;
      const int q_block = first_tile + t % q_tiles;
      const int query = q_block * kBlockQ;
      const int rows = min(kBlockQ, seq_q - query);
      const i64 row = (batch * heads + head) * seq_q + query;
      const Element* q_source = q + head * q_strides.head + query * q_strides.seq;
      const Element* do_source = dO + head * do_strides.head + query * do_strides.seq;
      copy_tile<kBlockQ, kD, kHeadDim>(q_tile, q_source, q_strides.seq, rows);
      copy_tile<kBlockQ, kDV, kHeadDimV>(do_tile, do_source, do_strides.seq, rows);
      for (int i = threadIdx.x; i < kBlockQ; i += kThreads) {
        lse_rows[i] = i < rows ? lse[row + i] : 0.f;
        delta_rows[i] = i < rows ? delta[row + i] : 0.f;
      }
      __syncthreads();  // they are there, and dS of the previous queries is done with

      const bool masked = crosses_mask(warp_key, query, span);
#pragma unroll 1
      for (int step = 0; step < kBlockQ; step += kStepQ) {
        Scores<kStepQ> s;
        Weights p, ds;
        scores<kD, kStepQ>(s, k_tile, q_tile + step * kD);
        weights(s, lse_rows + step, scale_log2);
        if (masked) mask_weights<kStepQ>(s, warp_key, query + step, span);
#pragma unroll
        for (int part = 0; part < kStepQ; part += kPartQ) {
          Scores<kPartQ> dp;
          scores<kDV, kPartQ>(dp, v_tile, do_tile + (step + part) * kDV);
          score_gradient(dp, s, delta_rows + step + part, part);
          if (masked) mask_weights<kPartQ>(dp, warp_key, query + step + part, span);
          round_weights<kPartQ>(ds, dp, part);
        }
        round_weights<kStepQ>(p, s, 0);
        share_weights(ds_tile, ds, step);
        accumulate_step<kDV>(dv_acc, p, do_tile + step * kDV);
        accumulate_step<kD>(dk_acc, ds, q_tile + step * kD);
      }
      __syncthreads();  // dS of all warps is there, and Q and dO are done with

      float* dq_tile = dq_acc + ((batch * heads + head) * q_blocks + q_block) * (kBlockQ * kD);
      const int last = last_key_of(query + rows - 1, seq_q, seq_kv) / kBlockKV;
      update_query_gradient(dq_tile, dq + row * kHeadDim, ds_tile, k_tile, scale, rows, j == 0,
                            j == last);
    }
    __syncthreads();  // the tiles of K and V are free for dK and dV
    const i64 kv_row = first_kv_row + first_key;
    store_rows<kD, kHeadDim>(k_tile, dk_acc, scale, dk + kv_row * kHeadDim, kHeadDim, keys);
    store_rows<kDV, kHeadDimV>(v_tile, dv_acc, 1.f, dv + kv_row * kHeadDimV, kHeadDimV, keys);
  }
}

//% include "parts/main_bwd.cu"

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
constexpr int kWeightTiles = $(tile.sharing);  // $("of dS" if tile.p_in == "registers" else "of dS and of P")
constexpr int kTileElements = (kBlockKV + kBlockQ) * (kD + kDV) + kWeightTiles * kBlockQ * kBlockKV;

static_assert(kTileElements * sizeof(Element) + 2 * kBlockQ * sizeof(float) == kSmemBytes,
              "shared memory as planned");
static_assert(kSlots == 1, "copies and computes in turn");

// ---- Instructions -------------------------------------------------------------------------------
//% include "ptx/ex2.cuh"
//% if kernel.dtype != "fp32"
//% include "ptx/smem_address.cuh"
//% include "ptx/ldmatrix_x4.cuh"
//% include "ptx/mma_m16n8k16_" ~ ptx_type(kernel.dtype) ~ ".cuh"
//% include "ptx/cvt_" ~ ptx_type(kernel.dtype) ~ "x2.cuh"
//% endif
//% if "fp16" in (kernel.dtype, kernel.bias_dtype)
//% include "ptx/cvt_f32_f16.cuh"
//% endif
//% if kernel.softcap
//% include "ptx/rcp.cuh"
//% endif

//% include "device/words.cuh"

//% include "device/tile.cuh"

//% include "device/copy_plain.cuh"

//% include "device/copy.cuh"

//% if kernel.dtype == "fp32"
//% include "device/matmul_bwd_fma.cuh"
//% else
//% include "device/matmul_bwd.cuh"
//% endif

//% if kernel.varlen
//% include "device/varlen.cuh"
//% endif

//% include "device/score_gradient.cuh"

//% if hooked(kernel)
//% include "device/score.cuh"

//% include "device/score_columns.cuh"
//% endif

//% include "device/last_key.cuh"

//% if kernel.mask == "window"
//% include "device/first_key.cuh"
//% endif

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
  const int q_blocks = ($(longest_q(kernel)) + kBlockQ - 1) / kBlockQ;
  const int first = blockIdx.x % q_blocks * kBlockQ;
  const i64 batch = blockIdx.x / q_blocks / heads, head = blockIdx.x / q_blocks % heads;
//% if kernel.varlen
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, batch);
  const int seq_q = sequence.seq_q, seq_kv = sequence.seq_kv;
  if (first >= seq_q) return;  // the grid is for the longest
  o += sequence.q * o_strides.seq;
  dO += sequence.q * do_strides.seq;
  const i64 dq_stride = i64(heads) * kHeadDim;
  dq += sequence.q * dq_stride + head * kHeadDim;
//% else
  const i64 dq_stride = kHeadDim;
  dq += (batch * heads + head) * seq_q * dq_stride;
//% endif
  o += batch * o_strides.batch + head * o_strides.head;
  dO += batch * do_strides.batch + head * do_strides.head;
  delta += $(head_rows(kernel));
  for (int row = threadIdx.x / kRowThreads; row < kBlockQ; row += kThreads / kRowThreads) {
    const i64 query = first + row;
    const bool valid = query < seq_q;
    const float product =
        row_product(o + query * o_strides.seq, dO + query * do_strides.seq, valid);
    if (valid && threadIdx.x % kRowThreads == 0) delta[query] = product;
  }
  const int rows = min(kBlockQ, seq_q - first);
  const Span span = {$(span_terms(kernel))};
  if (last_key_of(first + rows - 1, span) >= 0) return;
  dq += first * dq_stride;
  for (int i = threadIdx.x; i < rows * kHeadDim; i += kThreads) {
    dq[i / kHeadDim * dq_stride + i % kHeadDim] = 0;
  }
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
  Element* ds_tile = do_tile + kBlockQ * kDV;  // keys by queries$(", as P after it" if tile.p_in == "shared")
//% if tile.p_in == "shared"
  Element* p_tile = ds_tile + kBlockQ * kBlockKV;
//% endif
  float* lse_rows = reinterpret_cast<float*>(smem_raw + kTileElements * sizeof(Element));
  float* delta_rows = lse_rows + kBlockQ;

  const int kv_head = blockIdx.x % kv_heads;
  const i64 batch = blockIdx.x / kv_heads;
//% if kernel.varlen
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, batch);
  const int seq_q = sequence.seq_q, seq_kv = sequence.seq_kv;
//% endif
  const Span span = {$(span_terms(kernel))};
  const int group = heads / kv_heads;
//% if not kernel.varlen
  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ;
//% endif
  for (int first_key = 0; first_key < seq_kv; first_key += kBlockKV) {
    const int keys = min(kBlockKV, seq_kv - first_key);
    const i64 k_row = $("sequence.k + " if kernel.varlen)first_key;
    const Element* k_source =
        k + batch * k_strides.batch + kv_head * k_strides.head + k_row * k_strides.seq;
    const Element* v_source =
        v + batch * v_strides.batch + kv_head * v_strides.head + k_row * v_strides.seq;
    __syncthreads();  // dK and dV of the previous keys have left through the tiles of K and V
    copy_tile<kBlockKV, kD, kHeadDim>(k_tile, k_source, k_strides.seq, keys);
    copy_tile<kBlockKV, kDV, kHeadDimV>(v_tile, v_source, v_strides.seq, keys);
    Accumulator<kD> dk_acc;
    Accumulator<kDV> dv_acc;
    zero(dk_acc);
    zero(dv_acc);
    const int warp_key = first_key + warp_keys();

    // The tiles of queries that see any of these keys, head after head of those that share them.
    const int first_tile = max(0, first_query_of(first_key, span)) / kBlockQ;
    const int end_query = end_query_of(first_key + keys - 1, span);
    const int q_tiles = max(0, (end_query + kBlockQ - 1) / kBlockQ - first_tile);
    for (int t = 0; t < group * q_tiles; ++t) {
      const int head = kv_head * group + t / q_tiles;
      const int q_block = first_tile + t % q_tiles;
      const int query = q_block * kBlockQ;
      const int rows = min(kBlockQ, seq_q - query);
      const i64 row = $(head_rows(kernel)) + query;
      const i64 q_row = $("sequence.q + " if kernel.varlen)query;
      const Element* q_source =
          q + batch * q_strides.batch + head * q_strides.head + q_row * q_strides.seq;
      const Element* do_source =
          dO + batch * do_strides.batch + head * do_strides.head + q_row * do_strides.seq;
      copy_tile<kBlockQ, kD, kHeadDim>(q_tile, q_source, q_strides.seq, rows);
      copy_tile<kBlockQ, kDV, kHeadDimV>(do_tile, do_source, do_strides.seq, rows);
      for (int i = threadIdx.x; i < kBlockQ; i += kThreads) {
        lse_rows[i] = i < rows ? lse[row + i] : 0.f;
        delta_rows[i] = i < rows ? delta[row + i] : 0.f;
      }
      __syncthreads();  // they are there, and dS of the previous queries is done with

      const bool masked = crosses_mask(warp_key, query, span);
//% if kernel.bias_dtype
      const Bias* head_bias = bias + batch * bias_strides.batch + head * bias_strides.head;
//% endif
//% if hooked(kernel)
      const ScoreTerms terms = {$(score_terms(kernel))};
//% endif
#pragma unroll 1
      for (int step = warp_part() * kStepQ; step < kBlockQ; step += kStepQ * kSplit) {
        Scores<kStepQ> s$(", derivative" if kernel.softcap);
        Weights p, ds;
        scores<kD, kStepQ>(s, k_tile, q_tile + step * kD);
//% if kernel.softcap
        soft_slopes(derivative, s, terms);
//% endif
//% if hooked(kernel)
        finish_scores($(score_columns_call(kernel)));
//% endif
        weights(s, lse_rows + step, $(softmax_factor(kernel)));
        if (masked) mask_weights<kStepQ>(s, warp_key, query + step, span);
//% if kernel.softcap
        round_weights<kStepQ>(p, s, 0);
        damp(s, derivative);
//% endif
#pragma unroll
        for (int part = 0; part < kStepQ; part += kPartQ) {
          Scores<kPartQ> dp;
          scores<kDV, kPartQ>(dp, v_tile, do_tile + (step + part) * kDV);
          score_gradient(dp, s, delta_rows + step + part, part);
          if (masked) mask_weights<kPartQ>(dp, warp_key, query + step + part, span);
          round_weights<kPartQ>(ds, dp, part);
        }
//% if not kernel.softcap
        round_weights<kStepQ>(p, s, 0);
//% endif
        share_weights(ds_tile, ds, step);
//% if tile.p_in == "registers"
        accumulate_step<kDV>(dv_acc, p, do_tile + step * kDV);
        accumulate_step<kD>(dk_acc, ds, q_tile + step * kD);
//% else
        share_weights(p_tile, p, step);
//% endif
      }
//% if tile.p_in == "registers"
      __syncthreads();  // dS of all warps is there, and Q and dO are done with
//% else
      __syncthreads();  // P and dS of all warps are there
      accumulate_tile<kDV>(dv_acc, p_tile, do_tile);
      accumulate_tile<kD>(dk_acc, ds_tile, q_tile);
      __syncthreads();  // Q and dO are done with
//% endif

//% if kernel.varlen
      const i64 apart = heads;  // rows from a query of this head to the next
      const i64 dq_row = q_row * apart + head;
//% else
      const i64 apart = 1, dq_row = row;
//% endif
      const i64 dq_tile = $(dq_tile(kernel, "q_block"));
      const bool first = first_key <= $("first_key_of(query, span)" if kernel.mask == "window" else "0");
      const bool last = first_key + kBlockKV > last_key_of(query + rows - 1, span);
      update_query_gradient(dq_acc + dq_tile * (kBlockQ * kD), dq + dq_row * kHeadDim,
                            apart * kHeadDim, ds_tile, k_tile, scale, rows, first, last);
    }
    __syncthreads();  // the tiles of K and V are free for dK and dV
//% if kernel.varlen
    const i64 apart = kv_heads;  // rows from a key of this head to the next
    const i64 row = k_row * apart + kv_head;
//% else
    const i64 apart = 1;  // rows from a key of this head to the next
    const i64 row = (batch * kv_heads + kv_head) * seq_kv + k_row;
//% endif
    store_rows<kD, kHeadDim>(k_tile, dk_acc, scale, dk + row * kHeadDim, apart * kHeadDim, keys);
    store_rows<kDV, kHeadDimV>(v_tile, dv_acc, 1.f, dv + row * kHeadDimV, apart * kHeadDimV, keys);
  }
}

//% include "parts/main_bwd.cu"

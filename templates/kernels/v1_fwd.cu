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

//% include "device/types.cuh"

// ---- Constants ----------------------------------------------------------------------------------
//% include "parts/constants.cuh"
constexpr int kQElements = kBlockQ * (kD > kDV ? kD : kDV);  // Q, and O at the end

static_assert((kQElements + kBlockKV * (kD + kDV)) * sizeof(Element) == kSmemBytes,
              "shared memory as planned");

// ---- Instructions -------------------------------------------------------------------------------
//% include "ptx/ex2.cuh"
//% include "ptx/lg2.cuh"
//% if kernel.softcap
//% include "ptx/rcp.cuh"
//% endif
//% if kernel.bias_dtype == "fp16"
//% include "ptx/cvt_f32_f16.cuh"
//% endif
//% if kernel.dtype != "fp32"
//% include "ptx/smem_address.cuh"
//% include "ptx/ldmatrix_x4.cuh"
//% for name in matrix_instructions(kernel)
//% include "ptx/" ~ name ~ ".cuh"
//% endfor
//% endif

//% include "device/words.cuh"

//% include "device/tile.cuh"

//% include "device/copy_plain.cuh"

//% include "device/copy.cuh"

//% include "device/fragments.cuh"

//% if kernel.turing and kernel.dtype == "fp16"
//% include "device/turing.cuh"
//% endif

//% if kernel.dtype == "fp32"
//% include "device/matmul_fma.cuh"
//% else
//% include "device/matmul_mma.cuh"

//% include "device/values_" ~ ("e4m3" if kernel.dtype == "e4m3" else "mma") ~ ".cuh"
//% endif

//% if kernel.varlen
//% include "device/varlen.cuh"
//% endif

//% if hooked(kernel)
//% include "device/score.cuh"

//% include "device/score_rows.cuh"
//% endif

//% include "device/mask.cuh"

//% include "device/rows.cuh"

//% include "device/softmax.cuh"

//% include "device/merge.cuh"

//% include "device/store.cuh"

// ---- Kernel -------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
$(kernel.stem)(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* q_tile = reinterpret_cast<Element*>(smem_raw);
  Element* k_tile = q_tile + kQElements;
  Element* v_tile = k_tile + kBlockKV * kD;

  const int head = blockIdx.x % heads;
  const int kv_head = head / (heads / kv_heads);
  const i64 batch = blockIdx.x / heads;
//% if kernel.varlen
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, batch);
  const int seq_q = sequence.seq_q, seq_kv = sequence.seq_kv;
  if (seq_q == 0) return;
  q += sequence.q * q_strides.seq;
  k += sequence.k * k_strides.seq;
  v += sequence.k * v_strides.seq;
  o += sequence.q * o_strides.seq;
//% endif
//% if kernel.mask == "window"
  const Span span = {seq_q, seq_kv, window_left, window_right};
//% endif
//% if kernel.bias_dtype
  bias += batch * bias_strides.batch + head * bias_strides.head;
//% endif
//% if hooked(kernel)
  const ScoreTerms terms = {$(score_terms(kernel))};
//% endif
  q += batch * q_strides.batch + head * q_strides.head;
  k += batch * k_strides.batch + kv_head * k_strides.head;
  v += batch * v_strides.batch + kv_head * v_strides.head;
  o += batch * o_strides.batch + head * o_strides.head;
  const i64 head_rows = $(head_rows(kernel));  // before this head's, in m, l, O and LSE

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
//% if kernel.mask == "window"
      const int from = first_visible(i * kBlockQ, span);
      const int until = visible_keys(i * kBlockQ + rows - 1, span);
      const int keys = until > from ? until : 0;
      const int last = max(0, (keys - 1) / kBlockKV);  // the last tile of keys these queries see
      const int first = min(last, from / kBlockKV);  // the first of them
      const int first_step = max(0, from / kStepKV * kStepKV - first_key);
      if (j < first || j > last) continue;

//% else
      const int keys = visible_keys(i * kBlockQ + rows - 1, seq_q, seq_kv);
      const int last = max(0, (keys - 1) / kBlockKV);  // the last tile of keys these queries see
      if (j > last) continue;

//% endif

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
      for (int step = $("first_step" if kernel.mask == "window" else "0"); step < kBlockKV && first_key + step < keys; step += kStepKV) {
        Scores s;
        Weights p;
        scores(s, q_tile, k_tile + step * kD);
//% if hooked(kernel)
        finish_scores($(score_call(kernel, "first_key + step")));
//% endif
//% if kernel.mask == "window"
        if (crosses_mask(warp_query, first_key + step, span)) {
          mask_scores(s, warp_query, first_key + step, span);
        }
//% else
        if (first_key + step + kStepKV > visible_keys(warp_query, seq_q, seq_kv)) {
          mask_scores(s, warp_query, first_key + step, seq_q, seq_kv);
        }
//% endif
        weigh(p, s, o_tile, row, $(softmax_factor(kernel)));
        accumulate(o_tile, p, v_tile + step * kDV);
      }

      float* o_rows = o_acc + first_row * kHeadDimV;
//% if kernel.mask == "window" or hooked(kernel)
      const bool before = j == $("first" if kernel.mask == "window" else "0");
      merge(o_tile, row, o_rows, m + first_row, l + first_row, $(softmax_factor(kernel)), rows, before);
//% else
      merge(o_tile, row, o_rows, m + first_row, l + first_row, scale_log2, rows, j == 0);
//% endif
      if (j < last) {
        store_partial(o_tile, row, o_rows, m + first_row, l + first_row, rows);
      } else {
        store_lse(row, lse + first_row, $(softmax_factor(kernel)), rows);
        Output* o_target = o + first_query * o_strides.seq;
        __syncthreads();  // Q's tile is free for O
        store_output(reinterpret_cast<Output*>(smem_raw), o_tile, o_target, o_strides.seq, rows);
      }
    }
  }
}

//% include "parts/main.cu"

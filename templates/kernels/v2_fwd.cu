// FlashAttention-2, forward (Dao 2023, algorithm 1).
//
// One thread block per block of queries. It walks the keys and values once, from the last tile to
// the first so that the masked tiles come first, and keeps the output un-normalised in registers
// until the end. The softmax scale and log2(e) arrive as one factor; only tiles that cross the mask
// or the end of the keys run mask code.
//
//   paper   here                    paper   here
//   B_r     kBlockQ                 T_r     q_blocks
//   B_c     kBlockKV                T_c     kv_tiles
//   O~      o                       m, l    row.max, row.sum
//   S, P    s                       L       lse

//% include "device/types.cuh"

// ---- Constants ----------------------------------------------------------------------------------
//% include "parts/constants.cuh"
constexpr int kSlots = $(2 * tile.stages);  // ring of tiles in shared memory: K, V, K, V …
constexpr int kSlotElements = kBlockKV * (kD > kDV ? kD : kDV);
//% if kernel.dtype == "e4m3"
constexpr int kORow = kDV * int(sizeof(Output));  // bytes, as are those of Q
//% endif
//% set o_row = "kORow" if kernel.dtype == "e4m3" else "kDV"
constexpr int kQElements = kBlockQ * (kD > $(o_row) ? kD : $(o_row));  // Q, and O at the end

static_assert((kQElements + kSlots * kSlotElements) * sizeof(Element) == kSmemBytes,
              "shared memory as planned");

// ---- Instructions -------------------------------------------------------------------------------
//% if kernel.cp_async or kernel.dtype != "fp32"
//% include "ptx/smem_address.cuh"
//% endif
//% if kernel.cp_async
//% include "ptx/cp_async.cuh"
//% endif
//% include "ptx/ex2.cuh"
//% include "ptx/lg2.cuh"
//% if kernel.softcap
//% include "ptx/rcp.cuh"
//% endif
//% if kernel.bias_dtype == "fp16"
//% include "ptx/cvt_f32_f16.cuh"
//% endif
//% if kernel.dtype != "fp32"
//% include "ptx/ldmatrix_x4.cuh"
//% for name in matrix_instructions(kernel)
//% include "ptx/" ~ name ~ ".cuh"
//% endfor
//% endif

//% include "device/words.cuh"

//% include "device/tile.cuh"

//% include "device/copy_" ~ ("async" if kernel.cp_async else "plain") ~ ".cuh"

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

//% if kernel.scaled
//% include "device/score_factor.cuh"
//% endif

//% if hooked(kernel)
//% include "device/score.cuh"

//% include "device/score_rows.cuh"
//% endif

//% include "device/mask.cuh"

//% if kernel.longest_first
//% include "device/order.cuh"
//% endif

//% include "device/rows.cuh"

//% include "device/softmax" ~ ("_lazy" if kernel.lazy else "") ~ ".cuh"

//% include "device/finish.cuh"

//% include "device/store.cuh"

// ---- Kernel -------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
$(kernel.stem)(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* q_tile = reinterpret_cast<Element*>(smem_raw);

//% set any_head = "any_head" if kernel.longest_first else "blockIdx.x / q_blocks"
  // This block's queries. Under a causal mask the blocks with the most keys start first.
  const int q_blocks = ($(longest_q(kernel)) + kBlockQ - 1) / kBlockQ;
//% if kernel.longest_first
  const auto [any_head, turn] = sorted(blockIdx.x, q_blocks, gridDim.x / q_blocks, heads_together);
//% else
  const int turn = blockIdx.x % q_blocks;
//% endif
//% if kernel.mask == "window"
  const int first_query = turn * kBlockQ;
//% else
  const int first_query = (kCausal ? q_blocks - 1 - turn : turn) * kBlockQ;
//% endif
//% if kernel.varlen
  const int batch_index = $(any_head) / heads;
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, batch_index);
  const int seq_q = sequence.seq_q, seq_kv = sequence.seq_kv;
  if (first_query >= seq_q) return;  // the grid is for the longest
//% endif
  const int rows = min(kBlockQ, seq_q - first_query);
  const int head = $(any_head) % heads;
  const int kv_head = head / (heads / kv_heads);
  const i64 batch = $(any_head) / heads;
//% if kernel.varlen
  q += sequence.q * q_strides.seq;
  k += sequence.k * k_strides.seq;
  v += sequence.k * v_strides.seq;
//% endif
//% if kernel.bias_dtype
  bias += batch * bias_strides.batch + head * bias_strides.head;
//% endif
  q += batch * q_strides.batch + head * q_strides.head + first_query * q_strides.seq;
  k += batch * k_strides.batch + kv_head * k_strides.head;
  v += batch * v_strides.batch + kv_head * v_strides.head;

//% if kernel.scaled
  // Real values are stored * scale: Q's and K's go into the factor of Q K^T, V's into that of O.
  const float q_factor = q_scale[$(scale_of(kernel, "heads", "head"))];
  const float k_factor = k_scale[$(scale_of(kernel, "kv_heads", "kv_head"))];
  const float v_factor = v_scale[$(scale_of(kernel, "kv_heads", "kv_head"))];
  const float score_factor = normal_factor($(kernel.factors[0]) * q_factor * k_factor);

//% endif

  // The tiles that any of them sees, as a stream K, V, K, V … through the ring.
  const int last_query = first_query + rows - 1;
//% if kernel.mask == "window"
  const Span span = {seq_q, seq_kv, window_left, window_right};
  const int keys = max(0, visible_keys(last_query, span));
  const int first_tile = first_visible(first_query, span) / kBlockKV;
  const int kv_tiles = max(0, (keys + kBlockKV - 1) / kBlockKV - first_tile);
//% else
  const int keys = max(0, visible_keys(last_query, seq_q, seq_kv));
  const int kv_tiles = (keys + kBlockKV - 1) / kBlockKV;
//% endif
  const auto slot = [&](int t) { return q_tile + kQElements + t % kSlots * kSlotElements; };
  const auto load = [&](int t) {
    const i64 key = ($(last_tile(kernel)) - t / 2) * kBlockKV;
//% if kernel.paired
    if (t < 2 * kv_tiles) {  // K and V of a step: t is even
      const Element *k_source = k + key * k_strides.seq, *v_source = v + key * v_strides.seq;
      copy_tile<kBlockKV, kD, kHeadDim>(slot(t), k_source, k_strides.seq, seq_kv - key);
      copy_tile<kBlockKV, kDV, kHeadDimV>(slot(t + 1), v_source, v_strides.seq, seq_kv - key);
    }
//% else
    if (t < 2 * kv_tiles && t % 2 == 0) {
      const Element* source = k + key * k_strides.seq;
      copy_tile<kBlockKV, kD, kHeadDim>(slot(t), source, k_strides.seq, seq_kv - key);
    } else if (t < 2 * kv_tiles) {
      const Element* source = v + key * v_strides.seq;
      copy_tile<kBlockKV, kDV, kHeadDimV, kSwizzledV>(slot(t), source, v_strides.seq, seq_kv - key);
    }
//% endif
//% if kernel.cp_async
    ptx::cp_async_commit_group();  // an empty group keeps the count in step
//% endif
  };
//% if kernel.paired
  // Tiles t and t + 1 have arrived, and every warp is done with the two before, whose slots are then
  // filled again.
//% else
  // Tile t has arrived, and every warp is done with tile t - 1, whose slot is then filled again.
//% endif
  const auto advance = [&](int t) {
//% if kernel.cp_async
    ptx::cp_async_wait_group<$("kSlots / 2 - 2" if kernel.paired else "kSlots - 2")>();
//% endif
    __syncthreads();
    load(t + kSlots - $(2 if kernel.paired else 1));
  };

  copy_tile<kBlockQ, kD, kHeadDim>(q_tile, q, q_strides.seq, rows);
//% if kernel.paired
  for (int t = 0; t < kSlots - 2; t += 2) load(t);

//% else
  for (int t = 0; t < kSlots - 1; ++t) load(t);

//% endif
  Scores s;
  Weights p;
  Accumulator o_acc;
  RowState row;
  zero(o_acc);
  reset(row);
//% if hooked(kernel)
  const ScoreTerms terms = {$(score_terms(kernel))};
//% endif
  const int warp_query = first_query + threadIdx.x / 32 * kWarpRows;
  const int warp_last = min(warp_query + kWarpRows, seq_q) - 1;
//% if kernel.mask == "window"
  const int warp_keys = warp_query < seq_q ? visible_keys(warp_last, span) : 0;
  const int warp_first = first_visible(warp_query, span);
//% else
  const int warp_keys = warp_query < seq_q ? visible_keys(warp_last, seq_q, seq_kv) : 0;
//% endif
  for (int j = 0; j < kv_tiles; ++j) {
    const int key = ($(last_tile(kernel)) - j) * kBlockKV;
    const bool sees = $(warp_sees(kernel));  // the warp, of the tile
    advance(2 * j);
    if (sees) {
      scores(s, q_tile, slot(2 * j));
//% if hooked(kernel)
      finish_scores($(score_call(kernel, "key")));
//% endif
//% if kernel.mask == "window"
      if (crosses_mask(warp_query, key, span)) mask_scores(s, warp_query, key, span);
//% else
      if (key + kBlockKV > visible_keys(warp_query, seq_q, seq_kv)) {
        mask_scores(s, warp_query, key, seq_q, seq_kv);
      }
//% endif
      weigh(p, s, o_acc, row, $(softmax_factor(kernel)));
    }
//% if not kernel.paired
    advance(2 * j + 1);
//% endif
    if (sees) accumulate(o_acc, p, slot(2 * j + 1));
  }

//% if kernel.cp_async
  ptx::cp_async_wait_group<0>();
//% endif
  __syncthreads();  // Q's tile is free for O
  o += batch * o_strides.batch + head * o_strides.head + first_query * o_strides.seq;
//% if kernel.varlen
  o += sequence.q * o_strides.seq;
  lse += i64(head) * total_q + sequence.q + first_query;
//% else
  lse += (batch * heads + head) * seq_q + first_query;
//% endif
  finish(o_acc, row, lse, $(softmax_factor(kernel)), $("v_factor, " if kernel.scaled else "")rows);
  store_output(reinterpret_cast<Output*>(smem_raw), o_acc, o, o_strides.seq, rows);
}

//% include "parts/main.cu"

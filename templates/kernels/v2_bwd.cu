// FlashAttention-2, backward (Dao 2023, algorithm 2).
//
//% set second_pass = kernel.dq == "second_pass"
//% set ordered = kernel.dq == "ordered"
//% set shares_ds = not second_pass or tile.p_in == "shared"
//% set finishes = shares_ds and not (second_pass and tile.frees)
//% set windowed = kernel.mask == "window"
//% set turn = "turn(t)" if windowed else "turn"
//% set block = "block" if ordered else "blockIdx.x"
//% set any_head = "any_head" if kernel.longest_first else block ~ " / kv_tiles"
// Three kernels, launched one after the other with the same arguments:
//% if second_pass
//   prepare  D = rowsum(dO * O), one fp32 a row
//   main     one thread block per block of keys. It walks the queries that see them, of every head
//            that shares them, makes P again from Q, K and L, and keeps dK and dV in registers
//   queries  one thread block per block of queries. It walks the keys that they see, makes P and dS
//            once more, and keeps dQ in registers
//
// All sums have a fixed order, so every run gives the same bits. In the main kernel S and P stand on
// their side, keys by queries, so that they feed dV and dK as left operands.
//% else
//   prepare  D = rowsum(dO * O), one fp32 a row, and zeros for dQ
//   main     one thread block per block of keys. It walks the queries that see them, of every head
//            that shares them, makes P again from Q, K and L, keeps dK and dV in registers, and adds
//            its part of dQ in HBM, in fp32
//   finish   dQ, scaled and rounded
//
// dK and dV are sums in a fixed order. dQ is summed by atomic additions$(", in the order of the keys: see" if ordered else " in any order. S and P stand")
//% if ordered
// Turns. S and P stand on their side, keys by queries, so that they feed dV and dK from registers;
// only dS passes through shared memory, for dQ, a step later: one barrier a step is enough.
//% else
// on their side, keys by queries, so that they feed dV and dK from registers; only dS passes through
// shared memory, for dQ, a step later: one barrier a step is enough.
//% endif
//% endif
//% if tile.frees
//
// Here, instead, four warps share keys. Each has a quarter of the columns of dK and dV and of the
// queries of a tile, and P and dS pass through shared memory. dV and dK of a tile come first in the
// next step, a second barrier gives its slot back, and dQ is made while the slot fills.
//% endif
//
//   paper   here                    paper   here
//   B_r     kBlockQ                 T_r     q_tiles
//   B_c     kBlockKV                T_c     kv_tiles
//   S, P    s (transposed)          L       lse
//   dP, dS  dp (transposed)         D       delta
//
// P takes the place of S, and dS that of dP.

//% include "device/types.cuh"

// ---- Constants ----------------------------------------------------------------------------------
//% include "parts/constants_bwd.cuh"
constexpr int kSlotElements = kBlockQ * (kD + kDV);  // Q and dO of one tile
constexpr int kWeightElements = kBlockQ * kBlockKV;  // dS or P of one tile
//% if shares_ds
constexpr int kWeightTiles = $(weight_tiles(tile.sharing));  // two of dS$("" if tile.p_in == "registers" else ", one of P" if tile.frees else ", two of P")
//% else
constexpr int kWeightTiles = 0;  // P and dS stay in registers
//% endif
constexpr int kSharedElements =
    kBlockKV * (kD + kDV) + kSlots * kSlotElements + kWeightTiles * kWeightElements;

static_assert(kSharedElements * sizeof(Element) + 2 * kSlots * kBlockQ * sizeof(float) ==
                  kSmemBytes,
              "shared memory as planned");

// ---- Instructions -------------------------------------------------------------------------------
//% include "ptx/smem_address.cuh"
//% include "ptx/cp_async.cuh"
//% include "ptx/ex2.cuh"
//% if kernel.dtype != "fp32"
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
//% if second_pass
//# dQ leaves by plain stores
//% elif kernel.arch in ("sm_80", "sm_86", "sm_89")
//% include "ptx/red_add_f32.cuh"
//% else
//% include "ptx/red_add_f32x4.cuh"
//% endif
//% if ordered
//% include "ptx/atom_add_u32.cuh"
//% include "ptx/ld_acquire_u32.cuh"
//% include "ptx/red_release_add_u32.cuh"
//% endif

//% include "device/words.cuh"

//% include "device/tile.cuh"

//% include "device/copy_async.cuh"

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

//% if windowed and kernel.dq != "atomic"
//% include "device/first_key.cuh"
//% endif

//% if second_pass
//% include "device/last_key.cuh"

//% include "device/query_rows.cuh"
//% else
//% include "device/query_gradient.cuh"

//% include "device/add_query_gradient.cuh"
//% endif

//% if ordered
//% include "device/turns.cuh"
//% elif kernel.longest_first
//% include "device/order.cuh"
//% endif

//% include "device/store_rows.cuh"

//% include "device/row_products.cuh"

// ---- Kernels ------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void
$(kernel.stem)_prepare(
$(parameters(kernel))) {
  // clang-format on
  const int q_blocks = ($(longest_q(kernel)) + kBlockQ - 1) / kBlockQ;
  const int first = blockIdx.x % q_blocks * kBlockQ;
  const i64 batch = blockIdx.x / q_blocks / heads, head = blockIdx.x / q_blocks % heads;
//% if ordered
  if (threadIdx.x == 0) turns[1 + blockIdx.x] = 0;  // of this tile of dQ
  if (blockIdx.x == 0 && threadIdx.x == 1) turns[0] = 0;  // blocks of the main kernel that started
//% endif
//% if kernel.varlen
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, batch);
  const int seq_q = sequence.seq_q;
  if (first >= seq_q) return;  // the grid is for the longest
  o += sequence.q * o_strides.seq;
  dO += sequence.q * do_strides.seq;
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
//% if not second_pass
  const i64 tile = $(dq_tile(kernel, "first / kBlockQ"));
  float4* dq_tile = reinterpret_cast<float4*>(dq_acc + tile * (kBlockQ * kD));
  for (int i = threadIdx.x; i < kBlockQ * kD / 4; i += kThreads) {
    dq_tile[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
//% endif
}

// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
$(kernel.stem)(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* k_tile = reinterpret_cast<Element*>(smem_raw);
  Element* v_tile = k_tile + kBlockKV * kD;
  Element* slots = v_tile + kBlockKV * kDV;  // tiles of Q and dO
  Element* weight_tiles = slots + kSlots * kSlotElements;  // dS and perhaps P, keys by queries
  float* statistics = reinterpret_cast<float*>(weight_tiles + kWeightTiles * kWeightElements);

  // This block's keys. Under a causal mask the first ones are seen by the most queries.
  const int kv_tiles = ($(longest_k(kernel)) + kBlockKV - 1) / kBlockKV;
//% if ordered
  // Its place in the order of turns; without queries there are none.
  const int number = $(longest_q(kernel)) > 0 ? take_number(turns, smem_raw) : blockIdx.x;
  const int block = block_of(number, kv_tiles, gridDim.x / kv_tiles);
//% elif kernel.longest_first
  const auto [any_head, turn] = sorted(blockIdx.x, kv_tiles, gridDim.x / kv_tiles, heads_together);
//% endif
  const int first_key = $("turn" if kernel.longest_first else block ~ " % kv_tiles") * kBlockKV;
  const int kv_head = $(any_head) % kv_heads;
  const i64 batch = $(any_head) / kv_heads;
//% if kernel.varlen
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, batch);
  const int seq_q = sequence.seq_q, seq_kv = sequence.seq_kv;
  if (first_key >= seq_kv) return;  // the grid is for the longest
  q += sequence.q * q_strides.seq;
  k += sequence.k * k_strides.seq;
  v += sequence.k * v_strides.seq;
  dO += sequence.q * do_strides.seq;
//% endif
  const int keys = min(kBlockKV, seq_kv - first_key);
  k += batch * k_strides.batch + kv_head * k_strides.head + first_key * k_strides.seq;
  v += batch * v_strides.batch + kv_head * v_strides.head + first_key * v_strides.seq;
  q += batch * q_strides.batch;
  dO += batch * do_strides.batch;

  // The tiles of queries that see any of them, head after head of those that share the keys.
  const int group = heads / kv_heads;
  const Span span = {$(span_terms(kernel))};
//% if ordered or not kernel.varlen
  const int q_blocks = ($(longest_q(kernel)) + kBlockQ - 1) / kBlockQ;
//% endif
  const int first_tile = max(0, first_query_of(first_key, span)) / kBlockQ;
  const int end_query = end_query_of(first_key + keys - 1, span);
  const int q_tiles = max(0, (end_query + kBlockQ - 1) / kBlockQ - first_tile);
  const int steps = group * q_tiles;
  const auto head_at = [&](int t) { return kv_head * group + t / q_tiles; };
//% if ordered
  // A block begins with its last tile, which is no earlier than the last one of the keys before:
  // each reaches a tile a step after the one whose turn comes before.
  const int last_tile = first_tile + q_tiles - 1;
  const auto query_at = [&](int t) { return (last_tile - t % q_tiles) * kBlockQ; };
//% else
  const auto query_at = [&](int t) { return (first_tile + t % q_tiles) * kBlockQ; };
//% endif
  const auto q_slot = [&](int t) { return slots + t % kSlots * kSlotElements; };
  const auto do_slot = [&](int t) { return q_slot(t) + kBlockQ * kD; };
//% if shares_ds
  const auto ds_tile = [&](int t) { return weight_tiles + t % 2 * kWeightElements; };
//% endif
//% if tile.p_in == "shared"
  const auto p_tile = [&](int t) { return weight_tiles + $("2" if tile.frees else "(2 + t % 2)") * kWeightElements; };
//% endif
  const auto lse_slot = [&](int t) { return statistics + t % kSlots * 2 * kBlockQ; };
  const auto delta_slot = [&](int t) { return lse_slot(t) + kBlockQ; };
  const auto load = [&](int t) {
    if (t < steps) {
      const int head = head_at(t);
      const i64 query = query_at(t);
      const int rows = seq_q - int(query);
      const i64 row = $(head_rows(kernel)) + query;
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
//% if not second_pass
  const auto add_dq = [&](int t) {
    const int head = head_at(t);
    const i64 tile = $(dq_tile(kernel, "query_at(t) / kBlockQ"));
    add_query_gradient(dq_acc + tile * (kBlockQ * kD), ds_tile(t), k_tile);
  };

//% endif
//% if ordered
//% if windowed
  // So many blocks add to a tile before this one: those between its first query's first key and here.
  const auto turn = [&](int t) {
    return first_key / kBlockKV - first_key_of(query_at(t), span) / kBlockKV;
  };
//% else
  const int turn = first_key / kBlockKV;  // so many blocks add to a tile before this one
//% endif
  const auto counter = [&](int t) {
    return turns + 1 + (batch * heads + head_at(t)) * q_blocks + query_at(t) / kBlockQ;
  };
  bool in_turn = true;  // for the tile that is added to next
  const auto await_turn = [&](int t) {
    if (!in_turn) wait_for_turn(counter(t), $(turn));
  };
  const auto finish_turn = [&](int t) {
    if (t >= 0) end_turn(counter(t));
  };

//% endif
  copy_tile<kBlockKV, kD, kHeadDim>(k_tile, k, k_strides.seq, keys);
  copy_tile<kBlockKV, kDV, kHeadDimV>(v_tile, v, v_strides.seq, keys);
  load(0);

  Accumulator<kD> dk_acc;
  Accumulator<kDV> dv_acc;
  zero(dk_acc);
  zero(dv_acc);
  const int warp_key = first_key + warp_keys();
//% if tile.p_in == "shared"
  const auto add_dv_dk = [&](int t) {
    if (t < 0) return;
    accumulate_tile<kDV>(dv_acc, p_tile(t), do_slot(t));
    accumulate_tile<kD>(dk_acc, ds_tile(t), q_slot(t));
  };
//% endif
//% if finishes
  // What is left to do of tile t when all warps have left their part.
  const auto finish_tile = [&](int t) {
    if (t < 0) return;
//% if tile.p_in == "shared" and not tile.frees
    add_dv_dk(t);
//% endif
//% if not second_pass
    add_dq(t);
//% endif
  };
//% endif
  for (int t = 0; t < steps; ++t) {
//% if shares_ds
    // Tile t has arrived, and every warp has made S of tile t - 1 and left its $("dS" if tile.p_in == "registers" else "P and dS").
//% else
    // Tile t has arrived, and every warp is done with tile t - 1.
//% endif
    ptx::cp_async_wait_group<0>();
//% if ordered
    await_turn(t - 1);
//% endif
    __syncthreads();
//% if tile.frees
    add_dv_dk(t - 1);
    __syncthreads();  // the slot of tile t - 1 is free, and P's place
//% endif
    load(t + 1);
//% if ordered
    finish_turn(t - 2);
    in_turn = is_turn(counter(t), $(turn));
//% endif
//% if finishes
    finish_tile(t - 1);
//% endif
    const int query = query_at(t);
    const bool masked = crosses_mask(warp_key, query, span);
//% if kernel.bias != "none"
    const int head = head_at(t);
//% endif
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
      scores<kD, kStepQ>(s, k_tile, q_slot(t) + step * kD);
//% if kernel.softcap
      soft_slopes(derivative, s, terms);
//% endif
//% if hooked(kernel)
      finish_scores($(score_columns_call(kernel)));
//% endif
      weights(s, lse_slot(t) + step, $(softmax_factor(kernel)));
      if (masked) mask_weights<kStepQ>(s, warp_key, query + step, span);
//% if kernel.softcap
      round_weights<kStepQ>(p, s, 0);
      damp(s, derivative);
//% endif
#pragma unroll
      for (int part = 0; part < kStepQ; part += kPartQ) {
        Scores<kPartQ> dp;
        scores<kDV, kPartQ>(dp, v_tile, do_slot(t) + (step + part) * kDV);
        score_gradient(dp, s, delta_slot(t) + step + part, part);
        if (masked) mask_weights<kPartQ>(dp, warp_key, query + step + part, span);
        round_weights<kPartQ>(ds, dp, part);
      }
//% if not kernel.softcap
      round_weights<kStepQ>(p, s, 0);
//% endif
//% if shares_ds
      share_weights(ds_tile(t), ds, step);
//% endif
//% if tile.p_in == "registers"
      accumulate_step<kDV>(dv_acc, p, do_slot(t) + step * kDV);
      accumulate_step<kD>(dk_acc, ds, q_slot(t) + step * kD);
//% else
      share_weights(p_tile(t), p, step);
//% endif
    }
  }

  ptx::cp_async_wait_group<0>();
//% if ordered
  await_turn(steps - 1);
//% endif
//% if shares_ds
  __syncthreads();
//% endif
//% if ordered
  finish_turn(steps - 2);
//% endif
//% if tile.frees
  add_dv_dk(steps - 1);
//% endif
//% if finishes
  finish_tile(steps - 1);
//% endif
  __syncthreads();  // the tiles of K and V are free for dK and dV
//% if ordered
  finish_turn(steps - 1);
//% endif
//% if kernel.varlen
  const i64 apart = kv_heads;  // rows from a key of this head to the next
  const i64 row = (sequence.k + first_key) * apart + kv_head;
//% else
  const i64 apart = 1;  // rows from a key of this head to the next
  const i64 row = (batch * kv_heads + kv_head) * seq_kv + first_key;
//% endif
  store_rows<kD, kHeadDim>(k_tile, dk_acc, scale, dk + row * kHeadDim, apart * kHeadDim, keys);
  store_rows<kDV, kHeadDimV>(v_tile, dv_acc, 1.f, dv + row * kHeadDimV, apart * kHeadDimV, keys);
}

//% if second_pass
//% include "parts/second_pass.cu"
//% else
// clang-format off
extern "C" __global__ void
$(kernel.stem)_finish(
$(parameters(kernel))) {
  // clang-format on
  const int q_blocks = ($(longest_q(kernel)) + kBlockQ - 1) / kBlockQ;
  const int first = blockIdx.x % q_blocks * kBlockQ;
  const i64 batch = blockIdx.x / q_blocks / heads, head = blockIdx.x / q_blocks % heads;
  const int lane = threadIdx.x % 32;
//% if kernel.varlen
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, batch);
  const int seq_q = sequence.seq_q;
  if (first >= seq_q) return;
  const i64 stride = i64(heads) * kHeadDim;
  dq += sequence.q * stride + head * kHeadDim;
//% else
  const i64 stride = kHeadDim;
  dq += (batch * heads + head) * seq_q * stride;
//% endif
  const i64 tile = $(dq_tile(kernel, "first / kBlockQ"));
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
//% endif

//% include "parts/main_bwd.cu"

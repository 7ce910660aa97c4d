// The second pass: dQ alone. A thread block takes as many queries as the other kernel takes keys, and
// walks the keys that they see in tiles of as many as that kernel's tiles have queries: kBlockKV
// queries by kBlockQ keys. P and dS are made once more, and dQ stays in registers.
// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
$(kernel.stem)_queries(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* q_tile = reinterpret_cast<Element*>(smem_raw);
  Element* do_tile = q_tile + kBlockKV * kD;
  Element* slots = do_tile + kBlockKV * kDV;  // tiles of K and V
//% if tile.p_in == "shared"
  Element* ds_tiles = slots + kSlots * kSlotElements;  // queries by keys

//% endif
  // This block's queries. Under a causal mask the last ones see the most keys.
  const int q_blocks = ($(longest_q(kernel)) + kBlockKV - 1) / kBlockKV;
//% if kernel.longest_first
  const int together = heads_together * (heads / kv_heads);
  const auto [any_head, turn] = sorted(blockIdx.x, q_blocks, gridDim.x / q_blocks, together);
//% else
  const int turn = blockIdx.x % q_blocks, any_head = blockIdx.x / q_blocks;
//% endif
  const int first_query = (q_blocks - 1 - turn) * kBlockKV;
  const i64 batch = any_head / heads, head = any_head % heads;
  const i64 kv_head = head / (heads / kv_heads);
//% if kernel.varlen
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, batch);
  const int seq_q = sequence.seq_q, seq_kv = sequence.seq_kv;
  if (first_query >= seq_q) return;  // the grid is for the longest
  q += sequence.q * q_strides.seq;
  k += sequence.k * k_strides.seq;
  v += sequence.k * v_strides.seq;
  dO += sequence.q * do_strides.seq;
//% endif
  const int rows = min(kBlockKV, seq_q - first_query);
  const i64 first_row = $(head_rows(kernel)) + first_query;
  q += batch * q_strides.batch + head * q_strides.head + first_query * q_strides.seq;
  dO += batch * do_strides.batch + head * do_strides.head + first_query * do_strides.seq;
  k += batch * k_strides.batch + kv_head * k_strides.head;
  v += batch * v_strides.batch + kv_head * v_strides.head;

  // The tiles of keys that any of them sees.
  const Span span = {$(span_terms(kernel))};
  const int last_key = last_key_of(first_query + rows - 1, span);
//% if windowed
  const int first_tile = first_key_of(first_query, span) / kBlockQ;
  const int steps = max(0, (last_key + kBlockQ) / kBlockQ - first_tile);
  const auto key_at = [&](int t) { return (first_tile + t) * kBlockQ; };
//% else
  const int steps = max(0, last_key + kBlockQ) / kBlockQ;
  const auto key_at = [&](int t) { return t * kBlockQ; };
//% endif
  const auto k_slot = [&](int t) { return slots + t % kSlots * kSlotElements; };
  const auto v_slot = [&](int t) { return k_slot(t) + kBlockQ * kD; };
//% if tile.p_in == "shared"
  const auto ds_tile = [&](int t) { return ds_tiles + t % 2 * kWeightElements; };
//% endif
  const auto load = [&](int t) {
    if (t < steps) {
      const i64 key = key_at(t);
      const int left = seq_kv - int(key);
      copy_tile<kBlockQ, kD, kHeadDim>(k_slot(t), k + key * k_strides.seq, k_strides.seq, left);
      copy_tile<kBlockQ, kDV, kHeadDimV>(v_slot(t), v + key * v_strides.seq, v_strides.seq, left);
    }
    ptx::cp_async_commit_group();
  };

  copy_tile<kBlockKV, kD, kHeadDim>(q_tile, q, q_strides.seq, rows);
  copy_tile<kBlockKV, kDV, kHeadDimV>(do_tile, dO, do_strides.seq, rows);
  load(0);

  RowStatistics row_lse, row_delta;
  load_statistics(row_lse, lse + first_row, rows);
  load_statistics(row_delta, delta + first_row, rows);
  Accumulator<kD> dq_acc;
  zero(dq_acc);
//% if kernel.bias_dtype
  const Bias* head_bias = bias + batch * bias_strides.batch + head * bias_strides.head;
//% endif
//% if hooked(kernel)
  const ScoreTerms terms = {$(score_terms(kernel))};
//% endif
//% if tile.p_in == "shared"
  // What is left to do of tile t when all warps have left their part.
  const auto finish_tile = [&](int t) {
    if (t >= 0) accumulate_tile<kD>(dq_acc, ds_tile(t), k_slot(t));
  };
//% endif
  for (int t = 0; t < steps; ++t) {
    // Tile t has arrived, and every warp has made S of tile t - 1$(" and left its dS" if tile.p_in == "shared" else "").
    ptx::cp_async_wait_group<0>();
    __syncthreads();
//% if tile.frees
    finish_tile(t - 1);
    __syncthreads();  // the slot of tile t - 1 is free
//% endif
    load(t + 1);
//% if tile.p_in == "shared" and not tile.frees
    finish_tile(t - 1);
//% endif
    const int key = key_at(t);
    const bool masked = crosses_mask_of_rows(first_query, key, span);
#pragma unroll 1
    for (int step = warp_part() * kStepQ; step < kBlockQ; step += kStepQ * kSplit) {
      Scores<kStepQ> s$(", derivative" if kernel.softcap);
      Weights ds;
      scores<kD, kStepQ>(s, q_tile, k_slot(t) + step * kD);
//% if kernel.softcap
      soft_slopes(derivative, s, terms);
//% endif
//% if kernel.bias != "none"
      finish_scores_of_rows(s, terms, first_query, key + step, span);
//% elif kernel.softcap
      finish_scores(s, terms);
//% endif
      weights_of_rows(s, row_lse, $(softmax_factor(kernel)));
//% if kernel.softcap
      damp(s, derivative);
//% endif
#pragma unroll
      for (int part = 0; part < kStepQ; part += kPartQ) {
        Scores<kPartQ> dp;
        scores<kDV, kPartQ>(dp, do_tile, v_slot(t) + (step + part) * kDV);
        score_gradient_of_rows(dp, s, row_delta, part);
        if (masked) mask_rows(dp, first_query, key + step + part, span);
        round_weights<kPartQ>(ds, dp, part);
      }
//% if tile.p_in == "registers"
      accumulate_step<kD>(dq_acc, ds, k_slot(t) + step * kD);
//% else
      share_weights(ds_tile(t), ds, step);
//% endif
    }
  }

  ptx::cp_async_wait_group<0>();
  __syncthreads();  // Q has arrived, even where there was no step, and its tile is free for dQ
//% if tile.p_in == "shared"
  finish_tile(steps - 1);
//% endif
//% if kernel.varlen
  const i64 apart = heads;  // rows from a query of this head to the next
  const i64 dq_row = (sequence.q + first_query) * apart + head;
//% else
  const i64 apart = 1, dq_row = first_row;
//% endif
  store_rows<kD, kHeadDim>(q_tile, dq_acc, scale, dq + dq_row * kHeadDim, apart * kHeadDim, rows);
}

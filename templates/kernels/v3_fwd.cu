// FlashAttention-3, forward (Shah et al. 2024, algorithms 1 and 2).
//
// A block stays on its SM and works on one tile of queries after the other. One warpgroup, the producer,
// gives its registers away and loads by TMA; the others, the consumers, multiply on the tensor cores 64
//% if kernel.scaled
// rows each (wgmma). In e4m3 a consumer does one thing after the other: the scores of a tile of keys, their
// weights, the weighted values, which take the registers that the scores have left. Exponentials take
// longer than products here, and those of one consumer run beside the products of another.
//% else
// rows each (wgmma). A consumer's products run in the background: while it turns the scores of a tile of
//% if kernel.streams
// keys into weights, the values of the tile before are summed. The stream of tiles does not end with a
// tile of queries: the first scores of the next are computed while O leaves. Consumers take turns to start
// their products, so that the softmax of one runs under the products of another.
//% else
// keys into weights, the values of the tile before are summed. Shared memory has one place for Q: the
// next one comes there while O leaves. Consumers take turns to start their products, so that the softmax
// of one runs under the products of another.
//% endif
//% endif
//% if kernel.pack_gqa
//
// Heads that share keys are packed into one tile of rows, heads fastest: row r is query r / group of the
// group's head r % group. Few queries fill a tile so, and K and V are read once for all of these heads.
// What is called a query below is such a row, and a head is one of K and V.
//% endif
//
//   paper   here                    paper   here
//   B_r     kBlockQ                 T_r     q_blocks
//   B_c     kBlockKV                T_c     tiles.end - tiles.begin
//   s       kKeyStages, kStages     m, l    row.max, row.sum
//   O_i     o                       L_i     lse
//   S, P    s, p

//% include "device/types.cuh"

//% include "device/tensor_map.cuh"

// ---- Constants ----------------------------------------------------------------------------------
//% include "parts/constants_v3.cuh"

// Named barriers: 0 is __syncthreads.
constexpr int kConsumerBarrier = 1;  // and those after it: a consumer alone
//% if not kernel.scaled
constexpr int kTurnBarrier = 1 + kConsumers;  // a consumer's turn to start products
//% endif

// ---- Instructions -------------------------------------------------------------------------------
//% for name in ("smem_address", "thread_index", "mbarrier_init", "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_try_wait", "fence_mbarrier_init", "fence_proxy_async", "cp_async_bulk_commit_group", "cp_async_bulk_wait_group", "setmaxnreg_dec", "setmaxnreg_inc", "bar_sync", "wgmma_fence", "wgmma_commit_group", "wgmma_wait_group", "stmatrix_x4", "ex2", "lg2")
//% include "ptx/" ~ name ~ ".cuh"
//% endfor
//% if not kernel.scaled
//% include "ptx/bar_arrive.cuh"
//% endif
//% if kernel.softcap
//% include "ptx/rcp.cuh"
//% endif
//% if kernel.bias_dtype == "fp16"
//% include "ptx/cvt_f32_f16.cuh"
//% endif
//% for name in v3_instructions(kernel)
//% include "ptx/" ~ name ~ ".cuh"
//% endfor
//% with type = ptx_type(kernel.dtype), fresh = kernel.dtype == "e4m3"
//% if not kernel.keeps_q
//% with n = tile.block_kv, a = "shared"
//% include "ptx/wgmma.cuh"
//% endwith
//% endif
//% for columns in products_of_registers(kernel)
//% with n = columns, a = "registers"
//% include "ptx/wgmma.cuh"
//% endwith
//% endfor
//% endwith

//% include "device/mbarrier.cuh"

//% include "device/turn.cuh"

//% include "device/timeline.cuh"

//% if kernel.varlen
//% include "device/varlen.cuh"
//% endif

//% include "device/shared_v3.cuh"

//% include "device/fragments.cuh"

//% if kernel.scaled
//% include "device/score_factor.cuh"
//% endif

//% if hooked(kernel)
//% include "device/score.cuh"

//% include "device/score_rows.cuh"
//% endif

//% include "device/mask" ~ ("_groups" if kernel.pack_gqa) ~ ".cuh"

//% if kernel.mask != "window" and not kernel.pack_gqa
//% include "device/span.cuh"
//% endif

//% include "device/schedule.cuh"

//% include "device/load_v3.cuh"

//% include "device/matrix_descriptor.cuh"

//% include "device/rows.cuh"

//% include "device/chunk_address.cuh"

//% if kernel.scaled
//% include "device/weights_e4m3.cuh"
//% endif

//% if not kernel.bias_dtype
//% include "device/rescore" ~ ("_e4m3" if kernel.scaled) ~ ".cuh"
//% endif

//% include "device/matmul_wgmma.cuh"

//% include "device/settled_rows.cuh"

//% include "device/softmax_" ~ ("lazy_e4m3" if kernel.scaled else "in_place") ~ ".cuh"

//% include "device/store_tma.cuh"

//% if kernel.scaled
//% include "device/key_order.cuh"

//% include "device/" ~ ("quantise" if kernel.quantises else "transpose") ~ "_e4m3.cuh"
//% endif

//% if kernel.padded_tensors
//% include "device/pad_rows.cuh"
//% endif

//% if not kernel.scaled
// A consumer has started its products: the next one may. One alone takes no turns.
__device__ __forceinline__ void pass_turn() {
  const int next = threadIdx.x / 128 + 1 < kConsumers ? threadIdx.x / 128 + 1 : 0;
  if (kConsumers > 1) ptx::bar_arrive(kTurnBarrier + next, 256);
}

__device__ __forceinline__ void await_turn(int consumer) {
  if (kConsumers > 1) ptx::bar_sync(kTurnBarrier + consumer, 256);
}

//% endif
// ---- Kernel -------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
$(kernel.stem)(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  Shared& shared = *reinterpret_cast<Shared*>(smem_raw);
  const int warpgroup = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  // Of a tile of queries: by which its mask is aligned, where TMA finds it and its keys, those it visits.
//% if kernel.varlen
  const auto span_of = [&](const Work& work) {
    const int seq_q = work.sequence.seq_q, seq_kv = work.sequence.seq_kv;
    return Span{$(span_terms(kernel))};
  };
  const auto queries_of = [&](const Work& work) {
    return place_of(work.sequence.q, work.sequence.seq_q$(", work.batch" if kernel.scaled));
  };
  const auto keys_of = [&](const Work& work) {
    return place_of(work.sequence.k, work.sequence.seq_kv$(", work.batch" if kernel.scaled));
  };
//% else
  const auto span_of = [&](const Work&) { return Span{$(span_terms(kernel))}; };
  const auto queries_of = [](const Work& work) { return Place{0, work.batch}; };
  const auto keys_of = queries_of;
//% endif
  const auto tiles_of = [&](const Work& work) {
    return $("Tiles{work.end, work.begin}" if kernel.scaled and kernel.varlen else "key_tiles(work.first_query, span_of(work))");
  };

  if (warpgroup == kConsumers) {  // ---- Producer ----
    ptx::setmaxnreg_dec<kLoaderRegisters>();
    if (threadIdx.x % 128 != 0) return;
//% if kernel.scales == "block" and kernel.varlen
    Loader loader = {shared, &$(map_of(kernel, "k")), &vt_map, kv_heads, k_scale, v_scale};
//% elif kernel.scales == "block"
    const int tiles_kv = (seq_kv + kBlockKV - 1) / kBlockKV;
    Loader loader = {shared, &$(map_of(kernel, "k")), &vt_map, kv_heads, k_scale, v_scale, tiles_kv};
//% elif kernel.scaled
    Loader loader = {shared, &$(map_of(kernel, "k")), &vt_map, kv_heads};
//% else
    Loader loader = {shared, &$(map_of(kernel, "k")), &$(map_of(kernel, "v"))};
//% endif
    const Grid grid = {batch, $(grid_rows(kernel)), heads_together};
//% if kernel.varlen
    int next = 0;
//% endif
//% if not (kernel.varlen or kernel.scaled)
    const auto work_of = [&](int round) { return work_at(round, grid); };
//% else
    const auto work_of = [&](int$(" round" if not kernel.varlen)) {
//% if kernel.varlen
      $("Work" if kernel.scaled else "const Work") work = next_work(next, grid, cu_seqlens_q, cu_seqlens_k);
//% else
      $("Work" if kernel.scaled else "const Work") work = work_at(round, grid);
//% endif
//% if kernel.scales == "block"
      // Those of K and V come with their tiles.
//% if kernel.varlen
      const Place scaled = queries_of(work);
      const int q_blocks = scaled.blocks;
      const float* q_scales = q_scale + i64(scaled.block) * heads + work.head;
//% else
      const int q_blocks = (seq_q + kScaleBlock - 1) / kScaleBlock;
      const float* q_scales = q_scale + (i64(work.batch) * heads + work.head) * q_blocks;
//% endif
#pragma unroll
      for (int i = 0; i < kConsumers && work.head >= 0; ++i) {
        const int block = min(max(work.first_query + 64 * i, 0) / kScaleBlock, q_blocks - 1);
        work.score_factor[i] = normal_factor($(kernel.factors[0]) * q_scales[$("i64(block) * heads" if kernel.varlen else "block")]);
      }
//% elif kernel.scaled
      if (work.head >= 0) {
        // Real values are stored * scale: Q's and K's go into the factor of Q K^T, V's into that of O.
        [[maybe_unused]] const int kv_head = work.head / (heads / kv_heads);
        [[maybe_unused]] const i64 batch = work.batch;
        const float q_factor = q_scale[$(scale_of(kernel, "heads", "work.head"))];
        const float k_factor = k_scale[$(scale_of(kernel, "kv_heads", "kv_head"))];
        work.score_factor = normal_factor($(kernel.factors[0]) * q_factor * k_factor);
        work.value_factor = v_scale[$(scale_of(kernel, "kv_heads", "kv_head"))];
      }
//% endif
//% if kernel.scaled and kernel.varlen
      const Tiles tiles = key_tiles(work.first_query, span_of(work));
      work.end = tiles.end, work.begin = tiles.begin;
//% endif
      return work;
    };
//% endif
    load_all(loader, &$(map_of(kernel, "q")), $("group_log2" if kernel.pack_gqa else "group" if kernel.rescored else "heads / kv_heads"), work_of, queries_of, keys_of, tiles_of);
    return;
  }

  // ---- Consumer ----
  ptx::setmaxnreg_inc<kRegisters>();
//% if not kernel.scaled
  const bool leads = threadIdx.x % 128 == 0;
  if (warpgroup == kConsumers - 1) pass_turn();  // the first one's first turn
//% endif

  Scores s;
  Weights p;
  Accumulator o;
//% if kernel.keeps_q
  Queries q_rows;
//% endif
//% if kernel.scales == "block"
  float key_factor = 1.f;  // the scale of the tile at work
//% endif
  RowState row;
  u32 round = 0;
  int tile = 0, last_tile = 0;
  Tiles whole = {0, 0};
//% if kernel.bias == "alibi"
  float slope_log2 = 0.f;  // of the head
//% endif
  // The next tile of queries: false if there is none.
  const auto begin = [&] {
    const Turn at = turn<kQStages>(round);
    wait(&shared.full_q[at.slot], at.parity);
    const Work& work = shared.works[round % kWorks];
//% if kernel.keeps_q
    if (work.head >= 0) take_queries(q_rows, shared, at.slot, warpgroup);
//% endif
    const Tiles tiles = tiles_of(work);
    ++round;
    tile = tiles.end - 1, last_tile = tiles.begin;
    whole = whole_tiles(work.first_query + 64 * warpgroup, span_of(work));
//% if kernel.bias == "alibi"
    slope_log2 = work.head < 0 ? 0.f : slopes[work.head] * kLog2e;
//% endif
    return work.head >= 0;
  };
//% set begun = 2 if kernel.streams or kernel.scaled else 1
  const auto end = [&] {
    const Work$("&" if kernel.scales == "block") work = shared.works[(round - $(begun)) % kWorks];
//% if kernel.varlen
    const i64 rows = i64(work.head) * total_q + work.sequence.q + work.first_query;
//% elif kernel.pack_gqa
    const i64 first_head = i64(work.batch) * heads + (i64(work.head) << group_log2);
    const i64 rows = first_head * seq_q + (work.first_query >> group_log2);
//% else
    const i64 rows = (i64(work.batch) * heads + work.head) * seq_q + work.first_query;
//% endif
//% if kernel.scaled
    [[maybe_unused]] const float score_factor = work.score_factor$("[warpgroup]" if kernel.scales == "block");
    end_rows(row, lse + rows, $(softmax_factor(kernel)), own_rows(work, warpgroup, span_of(work)));
//% elif kernel.pack_gqa
    const Span span = span_of(work);
    end_rows(row, shared.factors, lse + rows, $(softmax_factor(kernel)), own_rows(work, warpgroup, span), span);
//% else
    end_rows(row, shared.factors, lse + rows, $(softmax_factor(kernel)), own_rows(work, warpgroup, span_of(work)));
//% endif
//% if not kernel.scaled
    reset(row);
//% endif
  };
  const auto store = [&] {
    const Work& work = shared.works[(round - $(begun)) % kWorks];
    store_output(shared, o, &$(map_of(kernel, "o")), work, queries_of(work), span_of(work).seq_q$(", group_log2" if kernel.pack_gqa)$(",\n                 (round - 2) % kQStages" if kernel.o_in_q));
  };
  const auto await_keys = [&](u32 n) { wait_for(shared.full_k, n); };
  const auto start = [&](u32 n) {  // the scores of the n-th tile of keys
//% if kernel.scales == "block"
    key_factor = normal_factor(shared.key_factors[n % kKeyStages]);
//% endif
//% if not kernel.scaled
    note(kAsked, n);
    await_keys(n);
    await_turn(warpgroup);
//% endif
    note(kBegan, n);
//% if kernel.keeps_q
    start_scores(s, q_rows, descriptor_of(shared.k[n % kKeyStages]));
//% else
    start_scores(s, descriptor_of(shared.q[(round - 1) % kQStages][warpgroup]),
                 descriptor_of(shared.k[n % kKeyStages]));
//% endif
  };
//% if kernel.scaled
  const auto factor_of_scores = [&] {
    const Work& work = shared.works[(round - 1) % kWorks];
    return work.score_factor$("[warpgroup]" if kernel.scales == "block");
  };
//% endif
  // From products to what softmax sees, for the keys from the tile's `column`-th on.
  const auto finish = [&](auto& s, int column) {
//% if kernel.scales == "block" and not unscaled(kernel) and not kernel.bias_dtype
    multiply(s, key_factor);
//% endif
//% if not hooked(kernel)
    if (is_among(tile, whole)) return;
//% endif
//% if kernel.scales == "block" and kernel.bias_dtype
    const float score_factor = normal_factor(factor_of_scores() * key_factor);
//% elif kernel.scaled
    [[maybe_unused]] const float score_factor = factor_of_scores();
//% endif
    const Work& work = shared.works[(round - 1) % kWorks];
    const Span span = span_of(work);
    const int warp_query = work.first_query + $("ptx::thread_index()" if kernel.scaled else "threadIdx.x") / 32 * kWarpRows;
    const int key = tile * kBlockKV + column;
//% if kernel.bias_dtype
    const i64 first_bias = work.batch * bias_strides.batch + work.head * bias_strides.head;
    const Bias* head_bias = bias + first_bias;
//% endif
//% if hooked(kernel)
    const ScoreTerms terms = {$(score_terms(kernel))};
    finish_scores($(score_call(kernel, "key")));
    if (is_among(tile, whole)) return;
//% endif
    mask_scores(s, warp_query, key, span);
  };
  const auto await_values = [&](u32 n) { wait_for(shared.full_v, n); };
//% if kernel.passes_by
  // Tiles of keys of which some row of the consumer sees keys; it passes by the others.
  const auto seen = [&] {
    const Work& work = shared.works[(round - 1) % kWorks];
    return seen_tiles(work.first_query + 64 * warpgroup, span_of(work));
  };
//% endif
//% if kernel.scaled
  // A warp needs its n-th tile of keys no more$("" if kernel.o_in_q else ", nor, after the last, those queries").
  const auto release = [&](u32 n) {
    const int slot = n % kStages;
    __syncwarp();  // all lanes have read what they read themselves
    if (threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive(&shared.empty_k[slot]);
    ptx::mbarrier_arrive(&shared.empty_v[slot]);
//% if not kernel.o_in_q
    if (tile == last_tile) ptx::mbarrier_arrive(&shared.empty_q[(round - 1) % kQStages]);
//% endif
  };
//% if kernel.o_in_q
  // The place of the queries before has parts of their O, and is given back when those have been read.
  bool owes = false;
  const auto give_back = [&] {
    if (owes && ptx::thread_index() % 128 == 0) {
      ptx::cp_async_bulk_wait_group_read<0>();
      ptx::mbarrier_arrive(&shared.empty_q[(round - 2) % kQStages]);
    }
    owes = false;
  };
//% endif
  // The n-th tile of keys.
  const auto add_tile = [&](u32 n) {
    start(n);
//% if kernel.o_in_q
    give_back();
//% endif
    [[maybe_unused]] const float score_factor = factor_of_scores();
    if constexpr (!kOneRound) await_values(n);  // under the scores
    finish_products<0>(s);
    note(kScored, n);
    finish(s, 0);
    float sum[2];
    const bool looks = $("true" if kernel.bias_dtype else "is_looked_at(whole.end - tile, tile == last_tile)");
    weigh(p, sum, s, o, row, $(softmax_factor(kernel)), looks$(", key_factor" if unscaled(kernel)));
    note(kWeighed, n);
    if constexpr (kOneRound) await_values(n);  // sums of one round are short: then this is faster
    const int slot = n % kStages;
//% if not kernel.bias_dtype
    const auto few_scores_of = [&](FewScores& few, int step) {
      const auto& q_rows = shared.q[(round - 1) % kQStages][warpgroup];
      few_scores(few, q_rows, shared.k[slot], 32 * step);
//% if unscaled(kernel)
      multiply(few, normal_factor(shared.key_factors[slot]));  // again, lest it be kept
//% endif
      finish(few, 32 * step);
    };
//% endif
    const auto check = [&](auto&...$(" t" if not kernel.bias_dtype)) {
//% if not kernel.bias_dtype
      if (__any_sync(~0u, fmaxf(sum[0], sum[1]) > kLargestWeight)) {  // no weight exceeds its sum
        const bool moves[2] = {has_largest(p, 0), has_largest(p, 1)};
        if (__any_sync(~0u, moves[0] || moves[1])) {
          lower(p, o, row, sum, moves, $(softmax_factor(kernel)), few_scores_of);
          (few_values(t, p, moves, shared.v[slot]), ...);
        }
      }
//% endif
      row.sum[0] += sum[0];
      row.sum[1] += sum[1];
    };
    const auto await_next = [&] {
      if (tile > last_tile) await_keys(n + 1);
    };
    add_values(o, p, descriptor_of(shared.v[slot])$(", shared.value_factors[slot]" if kernel.scales == "block"), check, await_next);
    release(n);
    note(kSummed, n);
  };
  u32 n = 0;
  // Tiles of keys from the first one on, of which none of the consumer's rows sees any.
  const auto pass_by = [&](int first) {
    for (; tile >= max(first, last_tile); --tile, ++n) {
//% if kernel.o_in_q
      give_back();
//% endif
      await_keys(n);
      await_values(n);
      release(n);
    }
  };
  // These show the compiler that a warp stays together.
  const auto begin_together = [&] {
    const bool works = __all_sync(~0u, begin());
    tile = uniform(tile);
    whole.end = uniform(whole.end);
//% if kernel.mask == "window"
    whole.begin = uniform(whole.begin);
//% endif
    return works;
  };
  for (bool more = begin_together(); more;) {
//% if kernel.mask == "window"
    const Tiles own = seen();
    const int first = max(own.begin, last_tile);
    pass_by(own.end);
//% else
    const int first = last_tile;
    pass_by(seen().end);
//% endif
    if (tile >= first) await_keys(n);
    reset(row);
    zero(o);
    ptx::wgmma_fence_registers(flat(o));  // or it is made zero twice
    for (bool ends = __all_sync(~0u, tile < first); !ends; ++n) {
      add_tile(n);
      --tile;
      ends = __all_sync(~0u, tile < first);
    }
//% if kernel.mask == "window"
    pass_by(last_tile);
//% endif
    more = begin_together();
    end();
    store();
//% if kernel.o_in_q
    owes = true;
//% endif
    note(kStored, n - 1);
  }
//% else
  const auto weigh_scores = [&](u32 n, const Late& late) {
    note(kScored, n);
//% if kernel.keeps_q
    if (leads) ptx::mbarrier_arrive(&shared.empty_k[n % kKeyStages]);
//% elif not kernel.tiles_stay
    if (leads) {
      ptx::mbarrier_arrive(&shared.empty_k[n % kKeyStages]);
      if (tile == last_tile) ptx::mbarrier_arrive(&shared.empty_q[(round - 1) % kQStages]);
    }
//% endif
    finish(s, 0);
//% if kernel.bias_dtype
    weigh(s, row, late, $(softmax_factor(kernel)));
//% else
    weigh(s, row, late, $(softmax_factor(kernel)), [&](FewScores& few, int column) {
//% if kernel.tiles_stay
      const auto& q_rows = shared.q[(round - 1) % kQStages][warpgroup];
      few_scores(few, q_rows, shared.k[n % kKeyStages], column);
//% else
//% set q, k = kernel.rescored
      const Work& work = shared.works[(round - 1) % kWorks];
      const Span span = span_of(work);
      few_scores(few, query_rows($(q), $(q)_strides, work, span), work.first_query,
                 key_rows($(k), $(k)_strides, work, span$(", group" if not kernel.pack_gqa)), tile * kBlockKV + column);
//% endif
      finish(few, column);
    });
//% endif
//% if kernel.tiles_stay
    if (ptx::thread_index() % 32 == 0) {  // asked again, lest it be kept
      ptx::mbarrier_arrive(&shared.empty_k[n % kKeyStages]);
      if (tile == last_tile) ptx::mbarrier_arrive(&shared.empty_q[(round - 1) % kQStages]);
    }
//% endif
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
    follow(row, o, late, $(softmax_factor(kernel)));
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
    follow(row, o, late, $(softmax_factor(kernel)));
    round_weights(p, s);
  };
  const auto last_values = [&] {
    start_values_of(n);
    end();
    finish_products<0>(o);
//% if not kernel.streams
    if (leads) ptx::mbarrier_arrive(&shared.empty_v[n % kStages]);
//% endif
    note(kSummed, n);
    store();
    note(kStored, n);
  };
//% if kernel.streams
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
//% else
//% if kernel.passes_by
  // Tiles of keys of which none of the consumer's rows sees any come first, and are passed by, all but the
  // last of all. V of one comes behind K of the next.
  const auto pass_by = [&] {
    const int last = max(uniform(seen().end) - 1, last_tile);
    bool passed = false;
    for (; tile > last; --tile, ++n) {
      await_keys(n);
      if (passed) await_values(n - 1);
      await_turn(warpgroup);  // and the warps for each other
      if (leads) ptx::mbarrier_arrive(&shared.empty_k[n % kKeyStages]);
      if (leads && passed) ptx::mbarrier_arrive(&shared.empty_v[(n - 1) % kStages]);
      pass_turn();
      passed = true;
    }
    return passed;
  };
//% endif
  // The next queries come where these were: meanwhile O leaves.
  while (__all_sync(~0u, begin())) {
//% if kernel.passes_by
    const bool passed = pass_by();
    if (passed) await_keys(n), await_values(n - 1);
    first_weights();  // its turn awaits all warps, too
    if (leads && passed) ptx::mbarrier_arrive(&shared.empty_v[(n - 1) % kStages]);
//% else
    first_weights();
//% endif
    for (bool ends = __all_sync(~0u, tile == last_tile); !ends; ++n) {
      --tile;
      next_weights(false);
      ends = __all_sync(~0u, tile == last_tile);
    }
    last_values();
    ++n;
  }
//% endif
//% endif
  if ($("ptx::thread_index() % 128 == 0" if kernel.scaled else "leads")) ptx::cp_async_bulk_wait_group_read<0>();
//% if not kernel.scaled
  if (warpgroup == 0) await_turn(0);  // the one that no one took
//% endif
}

//% include "parts/main_v3.cu"

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
//   s       kStages                 m, l    row.max, row.sum
//   O_i     o                       L_i     lse
//   S, P    s, p

//% include "device/types.cuh"

//% include "device/tensor_map.cuh"

// ---- Constants ----------------------------------------------------------------------------------
//% include "parts/constants_v3.cuh"

// Named barriers: 0 is __syncthreads.
constexpr int kTurnBarrier = 1;  // and those after it: a consumer's turn to start products
constexpr int kStoreBarrier = 1 + kConsumers;  // a consumer alone

// ---- Instructions -------------------------------------------------------------------------------
//% for name in ("smem_address", "thread_index", "mbarrier_init", "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_try_wait", "fence_mbarrier_init", "fence_proxy_async", "cp_async_bulk_tensor_4d", "cp_async_bulk_commit_group", "cp_async_bulk_wait_group", "setmaxnreg_dec", "setmaxnreg_inc", "bar_sync", "bar_arrive", "wgmma_fence", "wgmma_commit_group", "wgmma_wait_group", "stmatrix_x4", "ldmatrix_x2", "ldmatrix_x1", "ex2", "lg2")
//% include "ptx/" ~ name ~ ".cuh"
//% endfor
//% include "ptx/mma_m16n8k8_" ~ ptx_type(kernel.dtype) ~ ".cuh"
//% include "ptx/cvt_" ~ ptx_type(kernel.dtype) ~ "x2.cuh"
//% with type = ptx_type(kernel.dtype), n = tile.block_kv, a = "shared"
//% include "ptx/wgmma.cuh"
//% endwith
//% with type = ptx_type(kernel.dtype), n = padded(kernel.head_dim_v), a = "registers"
//% include "ptx/wgmma.cuh"
//% endwith

//% include "device/mbarrier.cuh"

//% include "device/turn.cuh"

//% include "device/shared_v3.cuh"

//% include "device/fragments.cuh"

//% include "device/mask.cuh"

//% include "device/schedule.cuh"

//% include "device/load_v3.cuh"

//% include "device/matrix_descriptor.cuh"

//% include "device/rows.cuh"

//% include "device/rescore.cuh"

//% include "device/matmul_wgmma.cuh"

//% include "device/softmax_in_place.cuh"

//% include "device/store_tma.cuh"

// A consumer has started its products: the next one may.
__device__ __forceinline__ void pass_turn(int consumer) {
  ptx::bar_arrive(kTurnBarrier + (consumer + 1) % kConsumers, 256);
}

// ---- Kernel -------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void __launch_bounds__(kThreads, 1)
$(kernel.stem)(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  Shared& shared = *reinterpret_cast<Shared*>(smem_raw);
  const int warpgroup = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();

  if (warpgroup == kConsumers) {  // ---- Producer ----
    ptx::setmaxnreg_dec<kLoaderRegisters>();
    if (threadIdx.x % 128 != 0) return;
    Loader loader = {shared, &k_map, &v_map};
    int before = 0, before_head = 0, before_batch = 0;  // the tile whose V is still to come
    for (int round = 0;; ++round) {
      const Turn at = turn<kQStages>(round);
      const Work work = work_at(round, batch, heads, seq_q, heads_together);
      wait(&shared.empty_q[at.slot], at.parity ^ 1);
      shared.works[round % kWorks] = work;
      if (work.first_query < 0) {
        ptx::mbarrier_arrive(&shared.full_q[at.slot]);
        break;
      }
      ptx::mbarrier_arrive_expect_tx(&shared.full_q[at.slot], sizeof(shared.q[0]));
#pragma unroll
      for (int i = 0; i < kConsumers; ++i) {
        const int query = work.first_query + 64 * i;
        load_slabs(shared.q[at.slot][i], &q_map, &shared.full_q[at.slot], query, work.head,
                   work.batch);
      }
      const int kv_head = work.head / (heads / kv_heads);
      const Tiles tiles = key_tiles(work.first_query, seq_q, seq_kv);
      for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
        loader.load_k(tile, kv_head, work.batch);
        if (loader.count_k > 1) loader.load_v(before, before_head, before_batch);
        before = tile, before_head = kv_head, before_batch = work.batch;
      }
    }
    if (loader.count_k > 0) loader.load_v(before, before_head, before_batch);
    return;
  }

  // ---- Consumer ----
  ptx::setmaxnreg_inc<kRegisters>();
  const bool leads = threadIdx.x % 128 == 0;
  if (warpgroup == kConsumers - 1) pass_turn(warpgroup);  // the first one's first turn

  Scores s;
  Weights p;
  Accumulator o;
  RowState row;
  int round = 0, tile = 0, last_tile = 0, whole = 0;
  // The next tile of queries: false if there is none.
  const auto begin = [&] {
    const Turn at = turn<kQStages>(round);
    wait(&shared.full_q[at.slot], at.parity);
    const int first_query = shared.works[round % kWorks].first_query;
    const Tiles tiles = key_tiles(first_query, seq_q, seq_kv);
    ++round;
    tile = tiles.end - 1, last_tile = tiles.begin;
    whole = visible_keys(first_query + 64 * warpgroup, seq_q, seq_kv) / kBlockKV;
    return first_query >= 0;
  };
  const auto end = [&] {
    const Work work = shared.works[(round - 2) % kWorks];
    const i64 rows = (i64(work.batch) * heads + work.head) * seq_q + work.first_query;
    end_rows(row, shared.inverse, lse + rows, scale_log2, seq_q - work.first_query);
  };
  const auto start = [&](int n) {  // the scores of the n-th tile of keys
    const Turn at = turn<kStages>(n);
    wait(&shared.full_k[at.slot], at.parity);
    ptx::bar_sync(kTurnBarrier + warpgroup, 256);
    start_scores(s, descriptor_of(shared.q[(round - 1) % kQStages][warpgroup]),
                 descriptor_of(shared.k[at.slot]));
  };
  const auto weigh_scores = [&](int n, bool fresh) {
    const auto& q_rows = shared.q[(round - 1) % kQStages][warpgroup];
    const auto& keys = shared.k[n % kStages];
    const auto mask = [&](auto& scores, int column) {
      const int first_query = shared.works[(round - 1) % kWorks].first_query;
      const int query = first_query + threadIdx.x / 32 * kWarpRows;
      mask_scores(scores, query, tile * kBlockKV + column, seq_q, seq_kv);
    };
    if (tile >= whole) mask(s, 0);
    weigh(s, o, row, scale_log2, fresh, [&](FewScores& few, int column) {
      few_scores(few, q_rows, keys, column);
      if (tile >= whole) mask(few, column);
    });
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(&shared.empty_k[n % kStages]);
      if (tile == last_tile) ptx::mbarrier_arrive(&shared.empty_q[(round - 1) % kQStages]);
    }
  };
  const auto start_values_of = [&](int n) {
    const Turn at = turn<kStages>(n);
    wait(&shared.full_v[at.slot], at.parity);
    start_values(o, p, descriptor_of(shared.v[at.slot]));
  };

  int n = 0;
  bool more = begin();
  if (more) {
    start(0);
    pass_turn(warpgroup);
    finish_products<0>(s);
    reset(row);
    zero(o);
    weigh_scores(0, true);
    round_weights(p, s);
  }
  while (more) {  // p holds the weights of tile n; whose scores are next?
    const bool ends = tile == last_tile;
    if (!ends) --tile;
    if (ends) {
      more = begin();
      if (__all_sync(~0u, !more)) break;  // a vote: the compiler sees that the warp stays together
    }
    start(n + 1);
    start_values_of(n);
    pass_turn(warpgroup);
    if (ends) {
      end();
      reset(row);
    }
    finish_products<1>(s);
    weigh_scores(n + 1, ends);
    finish_products<0>(o);
    if (leads) ptx::mbarrier_arrive(&shared.empty_v[n % kStages]);
    round_weights(p, s);
    if (ends) {
      store_output(shared, o, &o_map, shared.works[(round - 2) % kWorks], seq_q);
      zero(o);
    }
    ++n;
  }
  if (round > 1) {
    start_values_of(n);
    end();
    finish_products<0>(o);
    store_output(shared, o, &o_map, shared.works[(round - 2) % kWorks], seq_q);
  }
  if (leads) ptx::cp_async_bulk_wait_group_read<0>();
  if (warpgroup == 0) ptx::bar_sync(kTurnBarrier, 256);  // the turn that no one took
}

//% include "parts/main_v3.cu"

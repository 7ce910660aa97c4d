// ---- Loads --------------------------------------------------------------------------------------
// Where TMA finds the rows of a head: they count from `row` on, in the head of `batch`.
struct Place {
  int row, batch;
//% if kernel.varlen and kernel.scaled
  int block, blocks;  // of 128 rows: the first, of all packed ones, and how many
//% endif
};

//% if kernel.varlen
// To TMA every packed token ends a sequence of kEnd rows. So rows past the end of one are outside the
// tensor, and not those of the next: zeros where they are loaded, left out where stored. A step of the
// last dimension goes back by a row, and once round all addresses in kEnd of them: at kEnd it takes
// those rows off again, and the tensor's own address stays the base, which TMA wants to be there.
constexpr int kEnd = 1 << 30;
//% if kernel.scaled
// Blocks of 128 rows, the slabs of V, begin anew with every sequence: at one that no other reaches.
__device__ __forceinline__ Place place_of(int first_token, int tokens, int sequence) {
  const int first = first_token / kScaleBlock + sequence;
  return {kEnd - tokens, first_token + tokens, first, (tokens + kScaleBlock - 1) / kScaleBlock};
}

//% else
__device__ __forceinline__ Place place_of(int first_token, int tokens) {
  return {kEnd - tokens, first_token + tokens};
}

//% endif
//% endif
// One thread brings a tile, slab by slab; the barrier completes when all its bytes have come.
template <int kRows, int kTileSlabs>
__device__ __forceinline__ void load_slabs(SlabTile<kRows, kTileSlabs>& tile, const TensorMap* map,
                                           u64* full, int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < kTileSlabs; ++i) {
//% if kernel.varlen
    ptx::cp_async_bulk_tensor_5d(tile.slab[i], map, full, i * kSlabColumns, row, head, batch, kEnd);
//% else
    ptx::cp_async_bulk_tensor_4d(tile.slab[i], map, full, i * kSlabColumns, row, head, batch);
//% endif
  }
}

//% if kernel.pack_gqa
// The same of packed rows: of some queries all heads that share keys, side by side.
template <int kRows, int kTileSlabs>
__device__ __forceinline__ void load_packed(SlabTile<kRows, kTileSlabs>& tile, const TensorMap* map,
                                            u64* full, int query, int kv_head, int batch) {
#pragma unroll
  for (int i = 0; i < kTileSlabs; ++i) {
    ptx::cp_async_bulk_tensor_5d(tile.slab[i], map, full, i * kSlabColumns, 0, query, kv_head,
                                 batch);
  }
}

//% endif
//% if kernel.scaled
// The same of V transposed, a slab of it, whose rows may be more than a box can have.
//% set place = "head, slab" if kernel.varlen else "slab, head"
__device__ __forceinline__ void load_values(SlabTile<kRowsV, 1>& tile, const TensorMap* map,
                                            u64* full, int slab, int head) {
#pragma unroll
  for (int row = 0; row < kRowsV; row += kBoxRowsV) {
    ptx::cp_async_bulk_tensor_4d(tile.slab[0][row], map, full, 0, row, $(place));
  }
}

//% endif

struct Loader {  // its thread's view of the rings of K and V
  Shared& shared;
  const TensorMap* k_map;
  const TensorMap* v_map;
//% if kernel.scaled
  int kv_heads;
//% endif
//% if kernel.scales == "block"
  const float* k_scale;
  const float* v_scale;
//% endif
//% if kernel.scales == "block" and not kernel.varlen
  int tiles;
//% endif
  u32 count_k = 0, count_v = 0;
//% if kernel.varlen and kernel.scaled

  // The number of a tile of keys among all packed ones; beyond a sequence's last there is none, and what
  // TMA brings are zeros.
  __device__ __forceinline__ int block_of(int tile, const Place& keys) const {
    return tile < keys.blocks ? keys.block + tile : -1;
  }
//% endif
//% if kernel.scales == "block"

  // The scale factor of a tile of keys; beyond the last there is none.
  __device__ __forceinline__ float factor_of(const float* scales, int tile, int head,
                                             const Place& keys) const {
//% if kernel.varlen
    const int block = block_of(tile, keys);
    return block >= 0 ? scales[i64(block) * kv_heads + head] : 1.f;
//% else
    return tile < tiles ? scales[(i64(keys.batch) * kv_heads + head) * tiles + tile] : 1.f;
//% endif
  }
//% endif

  __device__ __forceinline__ void load_k(int tile, int head, const Place& keys) {
    const Turn at = turn<kKeyStages>(count_k++);
    wait(&shared.empty_k[at.slot], at.parity ^ 1);  // passes at once the first time round
//% if kernel.scales == "block"
    shared.key_factors[at.slot] = factor_of(k_scale, tile, head, keys);
//% endif
    ptx::mbarrier_arrive_expect_tx(&shared.full_k[at.slot], sizeof(shared.k[0]));
    load_slabs(shared.k[at.slot], k_map, &shared.full_k[at.slot], keys.row + tile * kBlockKV, head,
               keys.batch);
    note(kLoadK, count_k - 1);
  }

  __device__ __forceinline__ void load_v(int tile, int head, const Place& keys) {
    const Turn at = turn<kStages>(count_v++);
    wait(&shared.empty_v[at.slot], at.parity ^ 1);
//% if kernel.scales == "block"
    shared.value_factors[at.slot] = factor_of(v_scale, tile, head, keys);
//% endif
    ptx::mbarrier_arrive_expect_tx(&shared.full_v[at.slot], sizeof(shared.v[0]));
//% if kernel.scaled and kernel.varlen
    load_values(shared.v[at.slot], v_map, &shared.full_v[at.slot], block_of(tile, keys), head);
//% elif kernel.scaled
    load_values(shared.v[at.slot], v_map, &shared.full_v[at.slot], tile,
                keys.batch * kv_heads + head);
//% else
    load_slabs(shared.v[at.slot], v_map, &shared.full_v[at.slot], keys.row + tile * kBlockKV, head,
               keys.batch);
//% endif
    note(kLoadV, count_v - 1);
  }
};

// All that a block needs: for every tile of queries Q, then tile by tile K and V, until there is no work.
//% if not kernel.scaled
// V of a tile of keys comes behind K of the next one, as that is the order of use.
//% endif
template <typename WorkOf, typename QueriesOf, typename KeysOf, typename TilesOf>
__device__ __forceinline__ void load_all(Loader& loader, const TensorMap* q_map, int $("group_log2" if kernel.pack_gqa else "group"),
                                         const WorkOf& work_of, const QueriesOf& queries_of,
                                         const KeysOf& keys_of, const TilesOf& tiles_of) {
  Shared& shared = loader.shared;
//% if kernel.streams
  int before = 0, before_head = 0;  // the tile whose V is still to come
  Place before_keys = {0, 0};
//% endif
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
//% if kernel.pack_gqa
      const int query = (work.first_query + 64 * i) >> group_log2;
      load_packed(shared.q[at.slot][i], q_map, &shared.full_q[at.slot], query, work.head,
                  queries.batch);
//% else
      const int query = queries.row + work.first_query + 64 * i;
      load_slabs(shared.q[at.slot][i], q_map, &shared.full_q[at.slot], query, work.head,
                 queries.batch);
//% endif
    }
    note(kLoadQ, loader.count_k);
    const int kv_head = $("work.head" if kernel.pack_gqa else "work.head / group");
    const Tiles tiles = tiles_of(work);
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      loader.load_k(tile, kv_head, keys);
//% if kernel.scaled
      loader.load_v(tile, kv_head, keys);
//% elif kernel.streams
      if (loader.count_k > 1) loader.load_v(before, before_head, before_keys);
      before = tile, before_head = kv_head, before_keys = keys;
//% else
      if (tile + 1 < tiles.end) loader.load_v(tile + 1, kv_head, keys);
//% endif
    }
//% if not (kernel.scaled or kernel.streams)
    loader.load_v(tiles.begin, kv_head, keys);
//% endif
  }
//% if kernel.streams
  if (loader.count_k > 0) loader.load_v(before, before_head, before_keys);
//% endif
}

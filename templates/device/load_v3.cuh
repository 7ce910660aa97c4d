// ---- Loads --------------------------------------------------------------------------------------
// Where TMA finds the rows of a head: they count from `row` on, in the head of `batch`.
struct Place {
  int row, batch;
//% if kernel.varlen and kernel.scaled
  int block, blocks;  // of 128 rows: the first, of all packed ones, and how many
//% endif
};

//% if kernel.varlen
// To TMA every packed token ends a sequence as long as the longest. So rows past the end of one are
// outside the tensor, and not those of the next: zeros where they are loaded, left out where stored.
//% if kernel.scaled
// Blocks of 128 rows, the slabs of V, begin anew with every sequence: at one that no other reaches.
__device__ __forceinline__ Place place_of(int first_token, int tokens, int longest, int sequence) {
  const int first = first_token / kScaleBlock + sequence;
  return {longest - tokens, first_token + tokens, first, (tokens + kScaleBlock - 1) / kScaleBlock};
}

//% else
__device__ __forceinline__ Place place_of(int first_token, int tokens, int longest) {
  return {longest - tokens, first_token + tokens};
}

//% endif
//% endif
// One thread brings a tile, slab by slab; the barrier completes when all its bytes have come.
template <int kRows, int kTileSlabs>
__device__ __forceinline__ void load_slabs(SlabTile<kRows, kTileSlabs>& tile, const TensorMap* map,
                                           u64* full, int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < kTileSlabs; ++i) {
    ptx::cp_async_bulk_tensor_4d(tile.slab[i], map, full, i * kSlabColumns, row, head, batch);
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
  int count_k = 0, count_v = 0;
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
    const Turn at = turn<kStages>(count_k++);
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

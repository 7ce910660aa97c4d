// ---- Loads --------------------------------------------------------------------------------------
// Where TMA finds the rows of a head: they count from `row` on, in the head of `batch`.
struct Place {
  int row, batch;
};

//% if kernel.varlen
// To TMA every packed token ends a sequence as long as the longest. So rows past the end of one are
// outside the tensor, and not those of the next: zeros where they are loaded, left out where stored.
__device__ __forceinline__ Place place_of(int first_token, int tokens, int longest) {
  return {longest - tokens, first_token + tokens};
}

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
__device__ __forceinline__ void load_values(SlabTile<kRowsV, 1>& tile, const TensorMap* map,
                                            u64* full, int slab, int head) {
#pragma unroll
  for (int row = 0; row < kRowsV; row += kBoxRowsV) {
    ptx::cp_async_bulk_tensor_4d(tile.slab[0][row], map, full, 0, row, slab, head);
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
  int tiles;
//% endif
  int count_k = 0, count_v = 0;
//% if kernel.scales == "block"

  // The scale factor of a tile of keys; beyond the last there is none.
  __device__ __forceinline__ float factor_of(const float* scales, int tile, int head,
                                             const Place& keys) const {
    return tile < tiles ? scales[(i64(keys.batch) * kv_heads + head) * tiles + tile] : 1.f;
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
//% if kernel.scaled
    load_values(shared.v[at.slot], v_map, &shared.full_v[at.slot], tile,
                keys.batch * kv_heads + head);
//% else
    load_slabs(shared.v[at.slot], v_map, &shared.full_v[at.slot], keys.row + tile * kBlockKV, head,
               keys.batch);
//% endif
    note(kLoadV, count_v - 1);
  }
};

// ---- Shared memory ------------------------------------------------------------------------------
// A tile as TMA leaves it, and wgmma reads it.
template <int kRows, int kTileSlabs>
struct alignas(1024) SlabTile {
  Element slab[kTileSlabs][kRows][kSlabColumns];
};

struct Work {  // a tile of queries, of one head; first_query < 0: there is no more
  int first_query, head;
//% if kernel.varlen
  Sequence sequence;
//% else
  int batch;
//% endif
};

constexpr int kWorks = 4;  // that someone may still ask about: the loader is at most two ahead

struct Shared {
  SlabTile<64, kSlabs> q[kQStages][kConsumers];
  SlabTile<64, kPartSlabs> o[kConsumers];
  SlabTile<kBlockKV, kSlabs> k[kStages];
  SlabTile<kBlockKV, kSlabsV> v[kStages];
  u64 full_q[kQStages], empty_q[kQStages];  // barriers: a tile has arrived, all are done with it
  u64 full_k[kStages], empty_k[kStages];
  u64 full_v[kStages], empty_v[kStages];
  float inverse[kBlockQ];  // 1 / l of each row, from the end of its softmax to that of its products
  Work works[kWorks];
};

static_assert(sizeof(Shared) == kSmemBytes, "shared memory as planned");

// A warp arrives where it may read a tile again itself, a warpgroup where only its products do.
__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int i = 0; i < kQStages; ++i) {
    ptx::mbarrier_init(&shared.full_q[i], 1);
    ptx::mbarrier_init(&shared.empty_q[i], 4 * kConsumers);
  }
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(&shared.full_k[i], 1);
    ptx::mbarrier_init(&shared.full_v[i], 1);
    ptx::mbarrier_init(&shared.empty_k[i], 4 * kConsumers);
    ptx::mbarrier_init(&shared.empty_v[i], kConsumers);
  }
  ptx::fence_mbarrier_init();
}

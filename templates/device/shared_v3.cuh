// ---- Shared memory ------------------------------------------------------------------------------
// A tile as TMA leaves it, and wgmma reads it.
template <int kRows, int kTileSlabs>
struct alignas(1024) SlabTile {
  unsigned char slab[kTileSlabs][kRows][kSlabBytes];
};

struct Work {  // a tile of queries, of one head; head < 0: there is no more
  int first_query, head;
//% if kernel.varlen
  Sequence sequence;
//% endif
//% if kernel.scaled or not kernel.varlen
  int batch;
//% endif
//% if kernel.scaled and kernel.varlen
  int end, begin;  // its tiles of keys: consumers have no registers to find them
//% endif
//% if kernel.scales == "block"
  float score_factor[kConsumers];  // of Q, and softmax's scale; those of K come with its tiles
//% elif kernel.scaled
  float score_factor;  // makes real numbers of Q K^T, softmax's scale included
  float value_factor;  // and of V
//% endif
};

constexpr int kWorks = 4;  // that someone may still ask about: the loader is at most two ahead

struct Shared {
  SlabTile<64, kSlabs> q[kQStages][kConsumers];
  SlabTile<64, kPartSlabs> o[kConsumers];
  SlabTile<kBlockKV, kSlabs> k[kKeyStages];
//% if kernel.scaled
  SlabTile<kRowsV, kSlabsV> v[kStages];
//% else
  SlabTile<kBlockKV, kSlabsV> v[kStages];
//% endif
  u64 full_q[kQStages], empty_q[kQStages];  // barriers: a tile has arrived, all are done with it
  u64 full_k[kKeyStages], empty_k[kKeyStages];
  u64 full_v[kStages], empty_v[kStages];
//% if kernel.scales == "block"
  float key_factors[kStages], value_factors[kStages];  // of the tiles of K and V: their scales
//% elif not kernel.scaled
  // What O's rows are to be multiplied by: from the softmax of a tile of keys to the end of the products
  // beside it, where their references move in that tile; from the end of their softmax until O leaves, 1 / l.
  // Meanwhile the first tile of other rows is weighed, whose O is still to come.
  float factors[kBlockQ];
//% endif
  Work works[kWorks];
};

static_assert(sizeof(Shared) == kSmemBytes, "shared memory as planned");

//% if kernel.scaled
// Every warp arrives by itself$(", but a warpgroup as one where O has left the place of Q" if kernel.o_in_q).
//% else
//% if kernel.tiles_stay
// A warp arrives where it may read a tile again itself, a warpgroup where only its products do.
//% else
// A warpgroup arrives as one: only its products read these tiles$(", but for Q, which every warp takes" if kernel.keeps_q).
//% endif
//% endif
__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int i = 0; i < kQStages; ++i) {
    ptx::mbarrier_init(&shared.full_q[i], 1);
    ptx::mbarrier_init(&shared.empty_q[i], $("4 * " if kernel.warps_release_q)kConsumers);
  }
  for (int i = 0; i < kKeyStages; ++i) {
    ptx::mbarrier_init(&shared.full_k[i], 1);
    ptx::mbarrier_init(&shared.empty_k[i], $("4 * " if kernel.scaled or kernel.tiles_stay)kConsumers);
  }
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(&shared.full_v[i], 1);
    ptx::mbarrier_init(&shared.empty_v[i], $("4 * " if kernel.scaled)kConsumers);
  }
  ptx::fence_mbarrier_init();
}

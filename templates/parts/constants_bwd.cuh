constexpr int kHeadDim = $(kernel.head_dim);  // d, of Q and K
constexpr int kHeadDimV = $(kernel.head_dim_v);  // of V and O
constexpr int kD = $(padded(kernel.head_dim));  // as stored: whole 16-wide matrix steps, the rest zero
constexpr int kDV = $(padded(kernel.head_dim_v));
constexpr int kBlockQ = $(tile.block_q);  // B_r: queries of one tile
constexpr int kBlockKV = $(tile.block_kv);  // B_c: keys of one tile
constexpr int kWarps = $(tile.warps);
constexpr int kThreads = 32 * kWarps;
constexpr int kSplit = $(tile.sharing);  // warps that share keys, each with its columns of dK and dV
constexpr int kWarpKeys = kBlockKV / kWarps * kSplit;
constexpr int kSlots = $(tile.stages);  // tiles of Q and dO in shared memory
constexpr int kRowTiles = kWarpKeys / 16;
constexpr int kStepQ = $(tile.query_step);  // queries whose scores fit the registers beside dK and dV …
constexpr int kPartQ = $("16" if tile.frees else "kStepQ / kRowTiles");  // … and whose dP fits beside those
constexpr int kRegisters = $(tile.registers);  // of a thread: so many that as many blocks fit an SM as planned
constexpr int kSmemBytes = $(plan.smem_bytes);
//% if kernel.mask != "window"
constexpr bool kCausal = $("true" if kernel.mask == "causal" else "false");
//% endif
constexpr int kChunkElements = 16 / int(sizeof(Element));  // of the 16-byte unit of copies
//% if kernel.bias_dtype
constexpr float kInfinity = __builtin_huge_valf();
//% endif
constexpr float kLog2e = 1.442695041f;

static_assert(kRowTiles * 16 * kWarps == kBlockKV * kSplit, "every warp has whole 16-key tiles");
static_assert(kBlockQ % (kStepQ * kSplit) == 0, "whole steps of queries for every warp");

// The first of the keys that a warp has in a tile, and its place among those that share them.
__device__ __forceinline__ int warp_keys() { return threadIdx.x / 32 / kSplit * kWarpKeys; }
__device__ __forceinline__ int warp_part() { return threadIdx.x / 32 % kSplit; }

// Warps that share keys take turns at blocks of 16 columns: how many a warp has at most, and where
// the i-th of a warp's 8-column tiles begins.
__device__ constexpr int warp_blocks(int columns) { return (columns / 16 + kSplit - 1) / kSplit; }
__device__ __forceinline__ int warp_column(int i) {
  return (i / 2 * kSplit + warp_part()) * 16 + i % 2 * 8;
}

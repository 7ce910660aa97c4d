constexpr int kHeadDim = $(kernel.head_dim);  // d, of Q and K
constexpr int kHeadDimV = $(kernel.head_dim_v);  // of V and O
constexpr int kD = $(padded(kernel.head_dim, kernel.dtype));  // as stored: whole $(kernel.granule)-wide matrix steps, the rest zero
constexpr int kDV = $(padded(kernel.head_dim_v, kernel.dtype));
constexpr int kBlockQ = $(tile.block_q);  // B_r: queries of one tile
constexpr int kBlockKV = $(tile.block_kv);  // B_c: keys of one tile
constexpr int kStepKV = $(tile.keys_per_step);  // keys whose scores fit the registers at once
constexpr int kWarps = $(tile.warps);
constexpr int kThreads = 32 * kWarps;
//% if kernel.splits
constexpr int kWarpRows = kBlockQ;  // every warp has all rows, and its own keys of each tile
//% else
constexpr int kWarpRows = kBlockQ / kWarps;  // a warp owns whole rows, so softmax stays inside it
//% endif
constexpr int kRowTiles = kWarpRows / 16;
constexpr int kRegisters = $(tile.registers);  // of a thread: so many that as many blocks fit an SM as planned
constexpr int kSmemBytes = $(plan.smem_bytes);
//% if kernel.mask != "window"
constexpr bool kCausal = $("true" if kernel.mask == "causal" else "false");
//% endif
constexpr int kChunkElements = 16 / int(sizeof(Element));  // of the 16-byte unit of copies
//% if kernel.dtype == "e4m3"
constexpr float kWeightExponent = 8.f;  // weights are up to 2^8, as e4m3 ends at 448 and at 2^-9
//% endif
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
//% if hooked(kernel)
constexpr float kLog2e = 1.44269504f;
//% endif

//% if kernel.splits
static_assert(kRowTiles * 16 == kBlockQ, "whole 16-row tiles");
static_assert(kStepKV * kWarps == kBlockKV, "every warp has as many keys of a tile");
//% else
static_assert(kRowTiles * 16 * kWarps == kBlockQ, "every warp owns whole 16-row tiles");
//% endif
static_assert(kBlockKV % kStepKV == 0 && kStepKV % $(kernel.granule) == 0, "whole $(kernel.granule)-key matrix steps");

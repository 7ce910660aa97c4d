constexpr int kHeadDim = $(kernel.head_dim);  // d, of Q and K
constexpr int kHeadDimV = $(kernel.head_dim_v);  // of V and O
constexpr int kD = $(padded(kernel.head_dim));  // as multiplied: whole 16-wide matrix steps
constexpr int kDV = $(padded(kernel.head_dim_v));
constexpr int kBlockQ = $(tile.block_q);  // B_r: queries of one tile
constexpr int kBlockKV = $(tile.block_kv);  // B_c: keys of one tile
constexpr int kStepKV = kBlockKV;  // keys whose scores fit the registers at once
constexpr int kConsumers = $(tile.warps // 4);  // warpgroups that compute, 64 queries each
constexpr int kThreads = 128 * (kConsumers + 1);  // and one that loads
constexpr int kWarpRows = 16;  // a warp owns whole rows, so softmax stays inside it
constexpr int kRowTiles = 1;
constexpr int kStages = $(tile.stages);  // tiles of K in shared memory, and of V
constexpr int kQStages = $(q_stages(kernel));  // tiles of Q
constexpr int kOutputParts = $(output_parts(kernel));  // O leaves a tile in so many parts, to save shared memory
constexpr int kRegisters = $(tile.registers);  // of a thread that computes
constexpr int kLoaderRegisters = $(loader_registers(tile));  // of one that loads
constexpr int kSmemBytes = $(plan.smem_bytes);
//% if kernel.mask != "window"
constexpr bool kCausal = $("true" if kernel.mask == "causal" else "false");
//% endif
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
//% if hooked(kernel)
constexpr float kLog2e = 1.44269504f;
//% endif

// A tile in shared memory is slabs of 64 columns: rows of 128 bytes, in which TMA and wgmma permute
// the 16-byte chunks (the 128-byte swizzle). What lies beyond the tensor is zero.
constexpr int kSlabColumns = 64;
constexpr int kSlabs = (kD + kSlabColumns - 1) / kSlabColumns;  // of Q and K
constexpr int kSlabsV = (kDV + kSlabColumns - 1) / kSlabColumns;  // of V and O
constexpr int kPartSlabs = kSlabsV / kOutputParts;

static_assert(kConsumers * 64 == kBlockQ && 1 <= kConsumers && kConsumers <= 3, "64 rows each");
static_assert(kBlockKV % 16 == 0 && kBlockKV <= 256, "whole matrix steps, one instruction wide");
static_assert(kSlabsV % kOutputParts == 0, "whole slabs of O");
static_assert(128 * (kConsumers * kRegisters + kLoaderRegisters) <= 65536, "one block fits an SM");
static_assert(kD - kHeadDim < 16 && kDV - kHeadDimV < 16, "columns of zeros only to the next step");

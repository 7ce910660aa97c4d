constexpr int kHeadDim = $(kernel.head_dim);  // d, of Q and K
constexpr int kHeadDimV = $(kernel.head_dim_v);  // of V and O
constexpr int kGranule = $(kernel.granule);  // columns, or keys, of a matrix step: 32 bytes
constexpr int kD = $(padded(kernel.head_dim, kernel.dtype));  // as multiplied: whole matrix steps
constexpr int kDV = $(padded(kernel.head_dim_v, kernel.dtype));
constexpr int kBlockQ = $(tile.block_q);  // B_r: queries of one tile
constexpr int kBlockKV = $(tile.block_kv);  // B_c: keys of one tile
constexpr int kStepKV = kBlockKV;  // keys whose scores fit the registers at once
constexpr int kConsumers = $(tile.warps // 4);  // warpgroups that compute, 64 queries each
constexpr int kThreads = 128 * (kConsumers + 1);  // and one that loads
constexpr int kBlocks = $(V3_BLOCKS[tile.warps // 4]);  // on an SM
constexpr int kWarpRows = 16;  // a warp owns whole rows, so softmax stays inside it
constexpr int kRowTiles = 1;
constexpr int kStages = $(tile.stages);  // tiles of V in shared memory
constexpr int kKeyStages = $(tile.stages + layout(kernel).more_keys);  // of K
constexpr int kQStages = $(layout(kernel).q_stages);  // of Q
constexpr int kOutputParts = $(layout(kernel).parts);  // O leaves a tile in so many parts, to save shared memory
constexpr int kPartsAtOnce = $("kOutputParts" if kernel.o_in_q else 1);
constexpr int kRegisters = $(tile.registers);  // of a thread that computes
constexpr int kLoaderRegisters = $(loader_registers(tile));  // of one that loads
constexpr int kSmemBytes = $(plan.smem_bytes);
//% if kernel.mask != "window"
constexpr bool kCausal = $("true" if kernel.mask == "causal" else "false");
//% endif
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
//% if kernel.scaled
constexpr float kWeightExponent = 5.f;  // a row's reference has the weight 2^5
//% endif
//% if hooked(kernel)
constexpr float kLog2e = 1.44269504f;
//% endif

// A tile in shared memory is slabs of rows of 128 bytes, in which TMA and wgmma permute the 16-byte
// chunks (the 128-byte swizzle). What lies beyond the tensor is zero.
constexpr int kSlabBytes = 128;
constexpr int kSlabColumns = kSlabBytes / int(sizeof(Element));
constexpr int kSlabs = (kD + kSlabColumns - 1) / kSlabColumns;  // of Q and K
constexpr int kColumnsO = kSlabBytes / int(sizeof(Output));  // of a slab of O
constexpr int kSlabsO = (kDV + kColumnsO - 1) / kColumnsO;
constexpr int kPartSlabs = kSlabsO / kOutputParts;
//% if kernel.scaled
// V is transposed: its rows are columns of V and a row of ones, up to the next 8 that wgmma takes. So the
// last column of O has the sums of the weights as they were rounded.
constexpr int kRowsV = kDV + 8;
constexpr int kBoxRowsV = $(value_box_rows(kernel.head_dim_v));  // that TMA brings at once
constexpr int kColumnsAtOnce = $(value_columns(kernel) | first);  // of P V
constexpr bool kOneRound = kRowsV == kColumnsAtOnce;
constexpr int kSlabsV = kBlockKV / kSlabColumns;
//% if kernel.scales == "block" or kernel.varlen
constexpr int kScaleBlock = $(SCALE_BLOCK);  // rows of Q, K or V $("with a scale factor" if kernel.scales == "block" else "that no sequences share")
//% endif
//% else
constexpr int kSlabsV = kSlabsO;
//% endif

static_assert(kConsumers * 64 == kBlockQ && 1 <= kConsumers && kConsumers <= 3, "64 rows each");
static_assert(kBlockKV % kGranule == 0 && kBlockKV <= 256, "whole steps, one instruction wide");
static_assert(kSlabsO % kOutputParts == 0, "whole slabs of O");
//% if kernel.scaled
static_assert(kSlabsV * kSlabColumns == kBlockKV, "whole slabs of keys");
//% if kernel.scales != "block" and kernel.varlen
static_assert(kBlockKV == kScaleBlock, "a tile of keys is a slab of V");
//% endif
//% if kernel.scales == "block"
static_assert(kBlockKV == kScaleBlock, "a tile of keys has one scale factor");
static_assert(kScaleBlock % 64 == 0, "a consumer's queries have one");
//% endif
//% endif
static_assert(128 * (kConsumers * kRegisters + kLoaderRegisters) * kBlocks <= 65536, "they fit");
static_assert(kD - kHeadDim < kGranule && kDV - kHeadDimV < kGranule, "zeros to the next step");

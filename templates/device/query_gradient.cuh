// ---- dQ -----------------------------------------------------------------------------------------
// A tile of dQ is cut into units of kUnitRows queries by kUnitCols columns, dealt out to the warps.
// In HBM it lies as the lanes hold it, unit by unit, so that a warp's additions are contiguous; only
// `finish` puts it in order.
constexpr int kUnitRows = kBlockQ % 32 == 0 ? 32 : 16;
constexpr int kUnitCols = kD % 32 == 0 && kBlockQ * kD >= 32 * kUnitRows * kWarps ? 32 : 16;
constexpr int kUnits = kBlockQ / kUnitRows * (kD / kUnitCols);
constexpr int kUnitElements = kUnitRows * kUnitCols;
constexpr int kFragments = kUnitElements / 128;  // of a lane, four elements each
using QueryGradient = float[kUnitRows / 16][kUnitCols / 8][4];

__device__ __forceinline__ int unit_query(int unit) { return unit / (kD / kUnitCols) * kUnitRows; }
__device__ __forceinline__ int unit_column(int unit) { return unit % (kD / kUnitCols) * kUnitCols; }

//% if kernel.dtype == "fp32"
//% include "device/query_gradient_fma.cuh"
//% else
//% include "device/query_gradient_mma.cuh"
//% endif

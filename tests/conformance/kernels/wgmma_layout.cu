// A warpgroup multiplies tiles with rows of kSpan bytes, under the swizzle of that span (16: none): a's
// rows from kRow on by b's from kRow on, and both again with their rows, not the depth, contiguous.
//% include "device/integers.cuh"

//% include "device/tensor_map.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/mbarrier_init.cuh"
//% include "ptx/mbarrier_arrive.cuh"
//% include "ptx/mbarrier_expect_tx.cuh"
//% include "ptx/mbarrier_try_wait.cuh"
//% include "ptx/fence_mbarrier_init.cuh"
//% include "ptx/cp_async_bulk_tensor_2d.cuh"
//% include "ptx/wgmma_fence.cuh"
//% include "ptx/wgmma_commit_group.cuh"
//% include "ptx/wgmma_wait_group.cuh"
//% with n = 96, a = "shared"
//% include "ptx/wgmma.cuh"
//% endwith
//% include "device/mbarrier.cuh"
//% include "device/matrix_descriptor.cuh"

constexpr int kSpan = $(span), kEach = kSpan / 2, kN = 96, kRow = $(row);
constexpr int kDepth = kEach > 32 ? kEach : 32, kRows = 104, kSteps = kDepth / 16;
constexpr Swizzle kSwizzle = Swizzle::$(swizzle);
constexpr int kTile = 16384;  // bytes of shared memory for each of the four
constexpr bool kPlain = kSwizzle == Swizzle::kNone;

// A tile of `rows` rows comes as slabs, each a span wide.
__device__ __forceinline__ void load(unsigned char* tile, const TensorMap* map, u64* full, int rows,
                                     int width) {
  for (int slab = 0; slab * kEach < width; ++slab) {
    ptx::mbarrier_expect_tx(full, rows * kSpan);
    ptx::cp_async_bulk_tensor_2d(tile + slab * rows * kSpan, map, full, slab * kEach, 0);
  }
}

// The depth is contiguous: a step is 32 bytes within a span, or two slabs without a swizzle.
__device__ __forceinline__ u64 along(u32 tile, int step) {
  const int slab = step * 16 / kEach, within = step * 16 % kEach * 2;
  const u32 start = tile + slab * kRows * kSpan + within + kRow * kSpan;
  return matrix_descriptor(start, kRows * kSpan, 8 * kSpan, kSwizzle);
}

// The rows are contiguous: a step is 16 rows of the slabs; without a swizzle both offsets change
// their roles.
__device__ __forceinline__ u64 across(u32 tile, int step) {
  const u32 start = tile + step * 16 * kSpan, slab = kDepth * kSpan, eight = 8 * kSpan;
  return matrix_descriptor(start, kPlain ? eight : slab, kPlain ? slab : eight, kSwizzle);
}

template <int kForm>
__device__ __forceinline__ void multiply(float* d, u32 smem) {
  float sum[kN / 2];
  for (int i = 0; i < kN / 2; ++i) sum[i] = 0.f;
  ptx::wgmma_fence_registers(sum);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const u64 left = kForm == 0 ? along(smem, step) : across(smem + 2 * kTile, step);
    const u64 right = kForm == 0 ? along(smem + kTile, step) : across(smem + 3 * kTile, step);
    ptx::wgmma_m64k16_bf16<kForm, kForm>(sum, left, right, step > 0);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_registers(sum);
  for (int i = 0; i < kN / 2; ++i) d[threadIdx.x * (kN / 2) + i] = sum[i];
}

extern "C" __global__ void __launch_bounds__(128)
    wgmma_layout(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                 const __grid_constant__ TensorMap at, const __grid_constant__ TensorMap bt,
                 float* d) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
    load(smem_raw, &a, &full, kRows, kDepth);
    load(smem_raw + kTile, &b, &full, kRows, kDepth);
    load(smem_raw + 2 * kTile, &at, &full, kDepth, 64);
    load(smem_raw + 3 * kTile, &bt, &full, kDepth, kN);
    ptx::mbarrier_arrive(&full);
  }
  __syncthreads();
  wait(&full, 0);
  multiply<0>(d, ptx::smem_address(smem_raw));
  multiply<1>(d + 128 * (kN / 2), ptx::smem_address(smem_raw));
}

// A warpgroup multiplies a (64 x kDepth) by the transpose of b (256 x kDepth), and by bt (kDepth x
// 256), which is the same with the columns contiguous: a once from shared memory and once from
// registers, and for each number of columns as many of b's rows. Each block does one of those.
//% include "device/integers.cuh"

//% include "device/tensor_map.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/mbarrier_init.cuh"
//% include "ptx/mbarrier_arrive_expect_tx.cuh"
//% include "ptx/mbarrier_try_wait.cuh"
//% include "ptx/fence_mbarrier_init.cuh"
//% include "ptx/cp_async_bulk_tensor_2d.cuh"
//% include "ptx/wgmma_fence.cuh"
//% include "ptx/wgmma_commit_group.cuh"
//% include "ptx/wgmma_wait_group.cuh"
//% for n in columns
//% for a in ("shared", "registers")
//% include "ptx/wgmma.cuh"
//% endfor
//% endfor
//% include "device/mbarrier.cuh"
//% include "device/matrix_descriptor.cuh"

constexpr int kRowBytes = 128, kDepth = kRowBytes / $(size), kSteps = 4;
constexpr int kA = 0, kB = 64 * kRowBytes, kBT = kB + 256 * kRowBytes;  // bytes of shared memory
constexpr int kSlab = kDepth * kRowBytes;  // of bt: kDepth rows of 64 columns
constexpr int kForms = $(forms);

template <int kN, int kForm>
__device__ __forceinline__ void multiply(float* d, const u32* a, u32 smem) {
  float sum[kN / 2];
  u32 r[kSteps][4];
  for (int i = 0; i < kN / 2; ++i) sum[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) r[i / 4][i % 4] = a[threadIdx.x * 4 * kSteps + i];
  ptx::wgmma_fence_registers(sum);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const u64 left = matrix_descriptor(smem + kA + step * 32, 16, 1024, Swizzle::k128);
    const u64 right = matrix_descriptor(smem + kB + step * 32, 16, 1024, Swizzle::k128);
    if constexpr (kForm == 0) ptx::wgmma_m64k$(depth)_$(type)(sum, left, right, step > 0);
    if constexpr (kForm == 1) ptx::wgmma_m64k$(depth)_$(type)(sum, r[step], right, true);
//% if forms == 4
    const u64 across = matrix_descriptor(smem + kBT + step * 2048, kSlab, 1024, Swizzle::k128);
    if constexpr (kForm == 2) ptx::wgmma_m64k$(depth)_$(type)<0, 1>(sum, left, across, step > 0);
    if constexpr (kForm == 3) ptx::wgmma_m64k$(depth)_$(type)<1>(sum, r[step], across, true);
//% endif
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_registers(sum);
  for (int i = 0; i < kN / 2; ++i) d[threadIdx.x * (kN / 2) + i] = sum[i];
}

extern "C" __global__ void __launch_bounds__(128)
    wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
          const __grid_constant__ TensorMap bt_map, const u32* a, float* d) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&full, kBT + (kForms == 4 ? 4 * kSlab : 0));
    ptx::cp_async_bulk_tensor_2d(smem_raw + kA, &a_map, &full, 0, 0);
    ptx::cp_async_bulk_tensor_2d(smem_raw + kB, &b_map, &full, 0, 0);
    for (int slab = 0; kForms == 4 && slab < 4; ++slab) {
      ptx::cp_async_bulk_tensor_2d(smem_raw + kBT + slab * kSlab, &bt_map, &full, slab * 64, 0);
    }
  }
  __syncthreads();
  wait(&full, 0);
  const u32 smem = ptx::smem_address(smem_raw);
//% set place = namespace(block=0, first=0)
//% for n in columns
//% for form in range(forms)
  if (blockIdx.x == $(place.block)) multiply<$(n), $(form)>(d + $(place.first), a, smem);
//% set place.block = place.block + 1
//% set place.first = place.first + 64 * n
//% endfor
//% endfor
}

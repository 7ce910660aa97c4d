// ---- Products on the tensor cores ---------------------------------------------------------------
// A warpgroup multiplies 64 rows in the background: what it reads and writes, registers too, is not to
// be touched until it has waited. A slab's rows are 128 bytes, its groups of 8 rows 1024 bytes apart.
constexpr u32 kGroupBytes = 1024;

using Weights = u32[1][kBlockKV / 16][4];  // rounded, left operands of 16 keys each

// The descriptor of the same matrix so many bytes further on; its upper half does not change.
__device__ __forceinline__ u64 further(u64 descriptor, u32 bytes) {
  return descriptor >> 32 << 32 | u32(u32(descriptor) + (bytes >> 4));
}

template <int kRows, int kTileSlabs>
__device__ __forceinline__ u64 descriptor_of(const SlabTile<kRows, kTileSlabs>& tile) {
  const u32 address = ptx::smem_address(&tile);
  return matrix_descriptor(address, sizeof(tile.slab[0]), kGroupBytes, Swizzle::k128);
}

template <int kTiles>
__device__ __forceinline__ float (&flat(float (&x)[1][kTiles][4]))[4 * kTiles] {
  return reinterpret_cast<float (&)[4 * kTiles]>(x);
}

// Starts s = Q K^T: both lie with the head dimension contiguous, 16 columns are 32 bytes of a row.
__device__ __forceinline__ void start_scores(Scores& s, u64 q, u64 k) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const u32 column = step % 4 * 32, slab = step / 4;
    const u64 left = further(q, slab * 64 * 128 + column);
    const u64 right = further(k, slab * kBlockKV * 128 + column);
    ptx::wgmma_m64k16_$(ptx_type(kernel.dtype))(flat(s), left, right, step > 0);
  }
  ptx::wgmma_commit_group();
}

// Starts o += P V: P in registers, V with its rows the depth, 16 of them 2048 bytes.
__device__ __forceinline__ void start_values(Accumulator& o, const Weights& p, u64 v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockKV / 16; ++step) {
    ptx::wgmma_m64k16_$(ptx_type(kernel.dtype))<1>(flat(o), p[0][step], further(v, step * 16 * 128), true);
  }
  ptx::wgmma_commit_group();
}

// Waits for all products but the last kLeft started; their results may be read then.
template <int kLeft, int kTiles>
__device__ __forceinline__ void finish_products(float (&result)[1][kTiles][4]) {
  ptx::wgmma_wait_group<kLeft>();
  ptx::wgmma_fence_registers(flat(result));
}

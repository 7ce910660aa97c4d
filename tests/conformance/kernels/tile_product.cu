// One warp multiplies a (16 x 64) by the transpose of b (16 x 64) and by v (64 x 16) through shared
// memory: what ldmatrix loads must be what mma multiplies.
//% include "device/integers.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/ldmatrix_x4.cuh"
//% include "ptx/mma_m16n8k16_" ~ type ~ ".cuh"

constexpr int kDepth = 64;

// A 16 x 16 tile from the warp's registers.
__device__ __forceinline__ void store(float* tile, const float (&sum)[2][4]) {
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) {
    const int row = lane / 4 + i % 4 / 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    tile[row * 16 + column] = sum[i / 4][i % 4];
  }
}

extern "C" __global__ void tile_product(const u16* a, const u16* b, const u16* v, float* ab,
                                        float* av) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  u16* a_tile = reinterpret_cast<u16*>(smem_raw);
  u16* b_tile = a_tile + 16 * kDepth;
  u16* v_tile = b_tile + 16 * kDepth;
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * kDepth; i += 32) {
    a_tile[i] = a[i];
    b_tile[i] = b[i];
    v_tile[i] = v[i];
  }
  __syncthreads();
  const u16* a_row = a_tile + lane % 16 * kDepth + lane / 16 * 8;
  const u16* b_row = b_tile + (lane / 16 * 8 + lane % 8) * kDepth + lane / 8 % 2 * 8;
  const u16* v_row = v_tile + lane % 16 * 16 + lane / 16 * 8;
  float ab_sum[2][4] = {}, av_sum[2][4] = {};
  for (int depth = 0; depth < kDepth; depth += 16) {
    u32 x[4], y[4], z[4];
    ptx::ldmatrix_x4(x, ptx::smem_address(a_row + depth));
    ptx::ldmatrix_x4(y, ptx::smem_address(b_row + depth));
    ptx::ldmatrix_x4_trans(z, ptx::smem_address(v_row + depth * 16));
    for (int n = 0; n < 2; ++n) {
      ptx::mma_m16n8k16_$(type)(ab_sum[n], x, y[2 * n], y[2 * n + 1]);
      ptx::mma_m16n8k16_$(type)(av_sum[n], x, z[2 * n], z[2 * n + 1]);
    }
  }
  store(ab, ab_sum);
  store(av, av_sum);
}

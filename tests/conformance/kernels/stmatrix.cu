// One warp stores fragments to rows of a tile, each form of the instruction after the other.
//% include "device/integers.cuh"

//% include "ptx/smem_address.cuh"
//% include "ptx/stmatrix_x1.cuh"
//% include "ptx/stmatrix_x2.cuh"
//% include "ptx/stmatrix_x4.cuh"

constexpr int kRowBytes = 16, kRows = 32;

extern "C" __global__ void stmatrix(const u32* registers, const int* rows, u32* tiles) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  u32* tile = reinterpret_cast<u32*>(smem_raw);
  const int lane = threadIdx.x;
  const u32 row = ptx::smem_address(smem_raw) + rows[lane] * kRowBytes;
  u32 r1[1], r2[2], r4[4];
  for (int i = 0; i < 4; ++i) r4[i] = registers[lane * 4 + i];
  r1[0] = r2[0] = r4[0];
  r2[1] = r4[1];
  for (int form = 0; form < 6; ++form) {
    for (int i = lane; i < kRows * kRowBytes / 4; i += 32) tile[i] = 0;
    __syncwarp();
    if (form == 0) ptx::stmatrix_x1(row, r1);
    if (form == 1) ptx::stmatrix_x2(row, r2);
    if (form == 2) ptx::stmatrix_x4(row, r4);
    if (form == 3) ptx::stmatrix_x1_trans(row, r1);
    if (form == 4) ptx::stmatrix_x2_trans(row, r2);
    if (form == 5) ptx::stmatrix_x4_trans(row, r4);
    __syncwarp();
    for (int i = lane; i < kRows * kRowBytes / 4; i += 32) {
      tiles[form * (kRows * kRowBytes / 4) + i] = tile[i];
    }
    __syncwarp();
  }
}

//% include "device/weights_e4m3.cuh"

// o += P V. A matrix load transposes pairs of bytes: it gives a lane columns 2g and 2g + 1 of keys
// 2t and 2t + 1. Two of them, 8 keys apart, hold those four keys of either column. So even and odd
// columns are multiplied apart, and of every 16 columns a lane has the sums of 4t to 4t + 3.
//
// Tensor cores may keep fewer bits of an e4m3 sum than fp32 has: each tile of keys has sums of its
// own, which are then added in fp32.
constexpr bool kSwizzledV = true;

__device__ __forceinline__ void accumulate(Accumulator& o, const Weights& p,
                                           const Element* v_tile) {
  constexpr int kRowBytes = kDV * int(sizeof(Element));
  const u32 v_first = ptx::smem_address(chunk_at<kDV>(v_tile, threadIdx.x % 32, 0));
#pragma unroll
  for (int n = 0; n < kDV; n += 16) {
    if (n % 32 == 0) __syncwarp();  // the next loads wait, or all columns' would fill the registers
    float even[kRowTiles][1][4], odd[kRowTiles][1][4];
    zero(even);
    zero(odd);
#pragma unroll
    for (int key = 0; key < kStepKV; key += 32) {
      u32 v[4];
      ptx::ldmatrix_x4_trans(v, along_row<kDV>(v_first, n / 16) + key * kRowBytes);
      const u32 even_low = __byte_perm(v[0], v[1], 0x6420);
      const u32 even_high = __byte_perm(v[2], v[3], 0x6420);
      const u32 odd_low = __byte_perm(v[0], v[1], 0x7531);
      const u32 odd_high = __byte_perm(v[2], v[3], 0x7531);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        $(mma(kernel))(even[i][0], p[i][key / 32], even_low, even_high);
        $(mma(kernel))(odd[i][0], p[i][key / 32], odd_low, odd_high);
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) {
      const int tile = i / 4, half = i / 2 % 2, pair = i % 2;
      float* sum = &o[tile][n / 8 + pair][2 * half];
      sum[0] += even[tile][0][2 * half + pair];
      sum[1] += odd[tile][0][2 * half + pair];
    }
  }
}

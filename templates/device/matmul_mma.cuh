// ---- Matrix products on the tensor cores --------------------------------------------------------
// Each warp owns kRowTiles x 16 rows. Lane 4 g + t holds rows g and g + 8 of each, and of every 8
// columns 2t and 2t + 1. The scores come out in that layout; P goes in in the same registers.

// s = Q K^T for the warp's rows and kStepKV keys. Long rows are not unrolled whole: the loads of all
// steps at once would not fit the registers.
constexpr int kDepthUnroll = kD > 128 ? 4 : 8;

__device__ __forceinline__ void scores(Scores& s, const Element* q_tile, const Element* k_tile) {
  constexpr int kRowBytes = kD * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const int row = $("" if kernel.splits else "threadIdx.x / 32 * kWarpRows + ")lane % 16;
  const int key = lane / 16 * 8 + lane % 8;
  const u32 q_first = ptx::smem_address(chunk_at<kD>(q_tile, row, lane / 16));
  const u32 k_first = ptx::smem_address(chunk_at<kD>(k_tile, key, lane / 8 % 2));
  zero(s);
#pragma unroll kDepthUnroll
  for (int depth = 0; depth < kD; depth += 16) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::ldmatrix_x4(a[i], along_row<kD>(q_first, depth / 8) + 16 * i * kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kStepKV; n += 16) {
      u32 b[4];
      ptx::ldmatrix_x4(b, along_row<kD>(k_first, depth / 8) + n * kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(s[i][n / 8], a[i], b[0], b[1]);
        ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(s[i][n / 8 + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// The weights, rounded, as the left operand of P V: each lane already holds the right ones.
using Weights = u32[kRowTiles][kStepKV / 16][4];

__device__ __forceinline__ void round_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepKV / 4; ++i) {
    const int tile = i / (kStepKV / 4), step = i / 4 % (kStepKV / 16), part = i % 4;
    const float (&pair)[4] = s[tile][2 * step + part / 2];
    p[tile][step][part] = ptx::cvt_$(ptx_type(kernel.dtype))x2(pair[part % 2 * 2], pair[part % 2 * 2 + 1]);
  }
}

// o += P V.
constexpr bool kSwizzledV = true;

__device__ __forceinline__ void accumulate(Accumulator& o, const Weights& p,
                                           const Element* v_tile) {
  constexpr int kRowBytes = kDV * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const u32 v_first = ptx::smem_address(chunk_at<kDV>(v_tile, lane % 16, lane / 16));
#pragma unroll
  for (int key = 0; key < kStepKV; key += 16) {
#pragma unroll
    for (int n = 0; n < kDV; n += 16) {
      u32 b[4];
      ptx::ldmatrix_x4_trans(b, along_row<kDV>(v_first, n / 8) + key * kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(o[i][n / 8], p[i][key / 16], b[0], b[1]);
        ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(o[i][n / 8 + 1], p[i][key / 16], b[2], b[3]);
      }
    }
  }
}

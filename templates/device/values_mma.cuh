// The weights, rounded, as the left operand of P V: each lane already holds the right ones.
using Weights = u32[kRowTiles][kStepKV / 16][4];

__device__ __forceinline__ void round_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepKV / 4; ++i) {
    const int tile = i / (kStepKV / 4), step = i / 4 % (kStepKV / 16), part = i % 4;
    const float (&pair)[4] = s[tile][2 * step + part / 2];
    p[tile][step][part] = $(cvt(kernel, kernel.dtype))(pair[part % 2 * 2], pair[part % 2 * 2 + 1]);
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
        $(mma(kernel))(o[i][n / 8], p[i][key / 16], b[0], b[1]);
        $(mma(kernel))(o[i][n / 8 + 1], p[i][key / 16], b[2], b[3]);
      }
    }
  }
}

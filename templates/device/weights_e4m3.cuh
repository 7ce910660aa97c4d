// The weights, rounded, as the left operand of P V: four keys a register. Of 16 keys a lane holds
// 2t, 2t + 1, 2t + 8 and 2t + 9, and takes them for 4t to 4t + 3: the order of a sum is free, and V
// is read in the same one.
using Weights = u32[kRowTiles][kStepKV / 32][4];
//% if kernel.algo != "v3"

__device__ __forceinline__ void round_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepKV / 8; ++i) {
    const int tile = i / (kStepKV / 8), step = i / 4 % (kStepKV / 32), part = i % 4;
    const int n = 4 * step + part / 2 * 2, row = part % 2 * 2;
    const float (&first)[4] = s[tile][n];
    const float (&later)[4] = s[tile][n + 1];  // 8 keys later
    const u32 low = ptx::cvt_e4m3x2(first[row], first[row + 1]);
    const u32 high = ptx::cvt_e4m3x2(later[row], later[row + 1]);
    p[tile][step][part] = low | high << 16;
  }
}
//% endif

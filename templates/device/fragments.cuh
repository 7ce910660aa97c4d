// A thread's part of the scores and of the output: [16 rows][8 columns][row g: 2, row g + 8: 2].
using Scores = float[kRowTiles][kStepKV / 8][4];
//% if kernel.algo == "v3" and kernel.scaled
using Accumulator = float[kRowTiles][kRowsV / 8][4];
//% else
using Accumulator = float[kRowTiles][kDV / 8][4];
//% endif

template <int kTiles>
__device__ __forceinline__ void zero(float (&fragment)[kRowTiles][kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) fragment[i / kTiles][i % kTiles][r] = 0.f;
  }
}

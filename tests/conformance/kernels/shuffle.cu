// One warp shuffles by every form, in segments of every width. lanes[step][lane] may differ from
// lane to lane and lie outside the segment; deltas[step] is one for the warp.
//% include "device/integers.cuh"

constexpr int kSteps = $(steps);

// shuffled[form][step][lane]
template <int kWidth>
__device__ __forceinline__ void segments(const u32* x, const int* lanes, const int* deltas,
                                         u32* shuffled) {
  const int lane = threadIdx.x;
  const u32 own = x[lane];
  for (int step = 0; step < kSteps; ++step) {
    const int delta = deltas[step];
    u32* to = shuffled + step * 32 + lane;
    to[0 * kSteps * 32] = __shfl_sync(~0u, own, lanes[step * 32 + lane], kWidth);
    to[1 * kSteps * 32] = __shfl_up_sync(~0u, own, delta, kWidth);
    to[2 * kSteps * 32] = __shfl_down_sync(~0u, own, delta, kWidth);
    to[3 * kSteps * 32] = __shfl_xor_sync(~0u, own, delta, kWidth);
  }
}

extern "C" __global__ void shuffle(const u32* x, const int* lanes, const int* deltas,
                                   u32* shuffled) {
  constexpr int kOfWidth = 4 * kSteps * 32;
  segments<32>(x, lanes, deltas, shuffled);
  segments<16>(x, lanes, deltas, shuffled + kOfWidth);
  segments<8>(x, lanes, deltas, shuffled + 2 * kOfWidth);
  segments<4>(x, lanes, deltas, shuffled + 3 * kOfWidth);
  segments<2>(x, lanes, deltas, shuffled + 4 * kOfWidth);
}

// One warp a block votes; a number that is not 0 is a yes.
//% include "device/integers.cuh"

extern "C" __global__ void vote(const int* votes, u32* ballot, u32* all, u32* any) {
  const int lane = blockIdx.x * blockDim.x + threadIdx.x;
  ballot[lane] = __ballot_sync(~0u, votes[lane]);
  all[lane] = __all_sync(~0u, votes[lane]) != 0;
  any[lane] = __any_sync(~0u, votes[lane]) != 0;
}

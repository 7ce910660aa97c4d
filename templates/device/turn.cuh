// A number that is the same in all lanes, where the compiler cannot see that it is: what is computed from
// it goes to the registers that a warp shares, whence wgmma takes its descriptors.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// The place of the n-th tile in a ring of tiles, and the parity of the phase in which it is there.
struct Turn {
  int slot;
  u32 parity;
};

template <int kSlots>
__device__ __forceinline__ Turn turn(u32 n) {
  return {int(n % kSlots), n / kSlots % 2};
}

// Waits until it is there.
template <int kSlots>
__device__ __forceinline__ void wait_for(u64 (&full)[kSlots], u32 n) {
  const Turn at = turn<kSlots>(n);
  wait(&full[at.slot], at.parity);
}

// ---- Turns --------------------------------------------------------------------------------------
// Blocks add to a tile of dQ one after the other, in the order of their keys, so that its sum has the
// same bits in every run. A counter says how many turns the tile has seen. One thread asks for the
// block's turn before a barrier, another ends it after a later one: between the two all may add.
//
// A block waits only for blocks of lower numbers, and numbers are given out as blocks start. So it
// waits for what runs or is done, whatever the order in which the hardware starts blocks.

__device__ __forceinline__ int take_number(u32* started, unsigned char* shared) {
  u32* place = reinterpret_cast<u32*>(shared);
  if (threadIdx.x == 0) *place = ptx::atom_add_u32(started, 1);
  __syncthreads();
  const int number = int(*place);
  __syncthreads();  // its place is free
  return number;
}

// The number of a block of keys if all blocks of a head came before those of the next, from its
// number in the order of turns: there kAbreast heads go side by side. Of one head few blocks run at
// once then, and only those wait for each other: each a step behind the one before it.
constexpr int kAbreast = $(abreast);

__device__ __forceinline__ int block_of(int number, int kv_tiles, int all_heads) {
  const int first_head = number / (kAbreast * kv_tiles) * kAbreast;
  const int abreast = min(kAbreast, all_heads - first_head);
  const int rest = number - first_head * kv_tiles;
  return (first_head + rest % abreast) * kv_tiles + rest / abreast;
}

// Whether it is this block's turn, as far as the thread that asks knows; the others trust it.
__device__ __forceinline__ bool is_turn(const u32* counter, int turn) {
  return threadIdx.x != kThreads - 1 || ptx::ld_acquire_u32(counter) == u32(turn);
}

__device__ __forceinline__ void wait_for_turn(const u32* counter, int turn) {
#ifdef FASIM_DEBUG
  for (u32 asked = 0; !is_turn(counter, turn); ++asked) {
    if (asked == 1u << 24) __trap();
  }
#else
  while (!is_turn(counter, turn)) {
  }
#endif
}

// After a barrier behind the block's additions.
__device__ __forceinline__ void end_turn(u32* counter) {
  if (threadIdx.x == 0) ptx::red_release_add_u32(counter, 1);
}

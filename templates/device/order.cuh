// ---- Order --------------------------------------------------------------------------------------
// Under a causal mask the tiles of a head differ in length, and blocks start in the order of their
// numbers. So that a launch ends with short ones, heads come in groups, and of a group the longest
// tiles of all heads start first. Those that fill no group come before the others: their end is in the
// middle of the launch.

struct Sorted {  // the head of a block, of all sequences, and its tile, the longest is the first
//% if kernel.dtype == "fp32"
  u32 head, tile;  // here there is no register for a sign
//% else
  int head, tile;
//% endif
};

__device__ __forceinline__ Sorted sorted(int number, int tiles, int all_heads, int together) {
  const int head = number / tiles, rest = all_heads % together;
  const int first_head = head < rest ? 0 : rest + (head - rest) / together * together;
  const int members = head < rest ? rest : together;
  const int place = number - first_head * tiles;
  return {first_head + place % members, place / members};
}

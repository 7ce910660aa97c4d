// ---- Schedule -----------------------------------------------------------------------------------
// A block works on many tiles of queries, one after the other. The heads come in groups; in a group the
// tiles with the most keys come first, those of all its heads together, so that their K and V are in
// L2 for all who read them. Every other round hands the tiles out in reverse order: who had the longest
// of the round before has the shortest of this one.
__device__ __forceinline__ Work work_at(int round, int batch, int heads, int seq_q, int group) {
  const int blocks = gridDim.x, q_blocks = (seq_q + kBlockQ - 1) / kBlockQ;
  const int all_heads = batch * heads;
  const int turn = round * blocks + (round % 2 ? blocks - 1 - int(blockIdx.x) : int(blockIdx.x));
  if (turn >= all_heads * q_blocks) return {-1, 0, 0};
  const int first_head = turn / (group * q_blocks) * group;
  const int members = min(group, all_heads - first_head);
  const int place = turn - first_head * q_blocks;
  const int head = first_head + place % members;
  return {(q_blocks - 1 - place / members) * kBlockQ, head % heads, head / heads};
}

struct Tiles {  // of keys: one past the last, and the first, that a tile of queries visits
  int end, begin;
};

// Where no query sees a key, one beyond the last: its loads bring zeros, its mask hides them.
__device__ __forceinline__ Tiles key_tiles(int first_query, int seq_q, int seq_kv) {
  const int keys = visible_keys(min(first_query + kBlockQ, seq_q) - 1, seq_q, seq_kv);
  const int beyond = seq_kv / kBlockKV + 1;
  return keys > 0 ? Tiles{(keys + kBlockKV - 1) / kBlockKV, 0} : Tiles{beyond + 1, beyond};
}

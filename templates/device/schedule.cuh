// ---- Schedule -----------------------------------------------------------------------------------
// A block works on many tiles of queries, one after the other. The heads come in groups; in a group the
// tiles with the most keys come first, those of all its heads together, so that their K and V are in
// L2 for all who read them. Every other round hands the tiles out in reverse order: who had the longest
// of the round before has the shortest of this one. The host knows groups after which all end together.
struct Grid {  // of tiles of queries$(", as many for every sequence as for the longest" if kernel.varlen)
  int batch, heads, queries;
  int heads_together;  // of a group
};

//% if kernel.varlen
__device__ __forceinline__ Work work_at(int round, const Grid& grid, const int* cu_seqlens_q,
                                        const int* cu_seqlens_k) {
//% else
__device__ __forceinline__ Work work_at(int round, const Grid& grid) {
//% endif
  const int blocks = gridDim.x, q_blocks = (grid.queries + kBlockQ - 1) / kBlockQ;
  const int all_heads = grid.batch * grid.heads, group = grid.heads_together;
  const int turn = round * blocks + (round % 2 ? blocks - 1 - int(blockIdx.x) : int(blockIdx.x));
  if (turn >= all_heads * q_blocks) return {0, -1};
  const int first_head = turn / (group * q_blocks) * group;
  const int members = min(group, all_heads - first_head);
  const int place = turn - first_head * q_blocks;
  const int head = first_head + place % members;
//% if kernel.ragged_first
  // Where tiles have rows to spare, the first has them, which sees the fewest keys: those of consumers that
  // begin before the first query. What TMA finds there are zeros.
  const int spare = (q_blocks * kBlockQ - grid.queries) / 64 * 64;
  const int first_query = (q_blocks - 1 - place / members) * kBlockQ - spare;
//% else
  const int first_query = (q_blocks - 1 - place / members) * kBlockQ;
//% endif
//% if kernel.varlen
  const Sequence sequence = sequence_at(cu_seqlens_q, cu_seqlens_k, head / grid.heads);
  return {first_query, head % grid.heads, sequence$(", head / grid.heads" if kernel.scaled)};
//% else
  return {first_query, head % grid.heads, head / grid.heads};
//% endif
}

//% if kernel.varlen
// The first tile of a sequence long enough to have it.
__device__ __forceinline__ Work next_work(int& round, const Grid& grid, const int* cu_seqlens_q,
                                          const int* cu_seqlens_k) {
  Work work;
  do {
    work = work_at(round++, grid, cu_seqlens_q, cu_seqlens_k);
  } while (work.head >= 0 && work.first_query >= work.sequence.seq_q);
  return work;
}

//% endif
struct Tiles {  // of keys: one past the last, and the first
  int end, begin;
};

// Those that a tile of queries visits. Where no query sees a key, one beyond the last: its loads bring
// zeros, its mask hides them.
__device__ __forceinline__ Tiles key_tiles(int first_query, const Span& span) {
  const int keys = visible_keys(min(first_query + kBlockQ, span.seq_q) - 1, span);
  const int beyond = span.seq_kv / kBlockKV + 1;
//% if kernel.mask == "window"
  const int begin = first_visible(first_query, span) / kBlockKV;
//% else
  const int begin = 0;
//% endif
  const int end = keys > 0 ? (keys + kBlockKV - 1) / kBlockKV : 0;
  return end > begin ? Tiles{end, begin} : Tiles{beyond + 1, beyond};
}

//% if kernel.passes_by
// Those of which some row of a consumer, from `query` on, sees keys.
__device__ __forceinline__ Tiles seen_tiles(int query, const Span& span) {
  const int last = min(query + 63, span.seq_q - 1);
  const int keys = $("query < 0 || " if kernel.ragged_first)last < query ? 0 : max(visible_keys(last, span), 0);
//% if kernel.mask == "window"
  return {(keys + kBlockKV - 1) / kBlockKV, first_visible(query, span) / kBlockKV};
//% else
  return {(keys + kBlockKV - 1) / kBlockKV, 0};
//% endif
}

//% endif
// The rows of a tile, from its first on, that a consumer answers for.
__device__ __forceinline__ int own_rows(const Work& work, int consumer, const Span& span) {
//% if kernel.ragged_first
  if (work.first_query + 64 * consumer < 0) return 0;
//% endif
  return span.seq_q - work.first_query;
}

// Those of which all rows of a consumer, from `query` on, see all keys.
__device__ __forceinline__ Tiles whole_tiles(int query, const Span& span) {
//% if kernel.mask == "window"
  const int first = first_visible(query + 63, span);
  return {visible_keys(query, span) / kBlockKV, (first + kBlockKV - 1) / kBlockKV};
//% else
  return {visible_keys(query, span) / kBlockKV, 0};
//% endif
}

//% if kernel.mask == "window"
__device__ __forceinline__ bool is_among(int tile, const Tiles& tiles) {
  return tile < tiles.end && tile >= tiles.begin;
}
//% else
__device__ __forceinline__ bool is_among(int tile, const Tiles& tiles) { return tile < tiles.end; }
//% endif

// ---- Scores, again ------------------------------------------------------------------------------
// 16 rows of one warp against 8 keys, by the instructions that a warp can issue alone: for the rare tile
//% if kernel.tiles_stay
// whose scores were overwritten with weights that turned out too large.
//% else
// whose scores were overwritten with weights that turned out too large. Its rows and keys have left shared
// memory by then, as the next ones are not to wait for a softmax: they are read where TMA found them.
//% endif
using FewScores = float[1][1][4];

//% if kernel.tiles_stay
__device__ __forceinline__ void few_scores(FewScores& s, const SlabTile<64, kSlabs>& q,
                                           const SlabTile<kBlockKV, kSlabs>& k, int column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][0][i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < kD / 8; ++step) {
    u32 a[2], b[1];
    ptx::ldmatrix_x2(a, chunk_address(q, 16 * warp + lane % 16, step));
    ptx::ldmatrix_x1(b, chunk_address(k, column + lane % 8, step));
    ptx::mma_m16n8k8_$(ptx_type(kernel.dtype))(s[0][0], a, b[0]);
  }
}
//% else
struct HeadRows {  // in global memory
  const Element* first;
  i64 stride;
  int count;
//% if kernel.pack_gqa
  i64 head_stride = 0;  // of packed rows, heads fastest
  int group_log2 = 0;
//% endif

  // A row's pairs of columns from one on; none past the last row.
  __device__ __forceinline__ const u32* pairs_of(int row, int first_pair) const {
//% if kernel.pack_gqa
    const int head = row & ((1 << group_log2) - 1);
    const Element* at = first + (row >> group_log2) * stride + head * head_stride;
//% else
    const Element* at = first + row * stride;
//% endif
    return row < count ? reinterpret_cast<const u32*>(at) + first_pair : nullptr;
  }
};

//% set first = "work.sequence." if kernel.varlen else "work.batch"
//% set outer = "seq" if kernel.varlen else "batch"
//% if kernel.pack_gqa
// Those of the heads that share keys.
__device__ __forceinline__ HeadRows query_rows(const Element* q, const Strides& strides,
                                               const Work& work, const Span& span) {
  const i64 head = (i64(work.head) << span.group_log2) * strides.head;
  return {q + work.batch * strides.batch + head, strides.seq, span.seq_q, strides.head,
          span.group_log2};
}

//% else
__device__ __forceinline__ HeadRows query_rows(const Element* q, const Strides& strides,
                                               const Work& work, const Span& span) {
  const i64 head = work.head * strides.head;
  return {q + $(first)$("q" if kernel.varlen) * strides.$(outer) + head, strides.seq, span.seq_q};
}

//% endif
//% if not kernel.pack_gqa
// The group is a parameter of the kernel: a quotient of two would be kept in a register all along.
//% endif
__device__ __forceinline__ HeadRows key_rows(const Element* k, const Strides& strides,
                                             const Work& work, const Span& span$(", int group" if not kernel.pack_gqa)) {
  const i64 head = $("work.head" if kernel.pack_gqa else "work.head / group") * strides.head;
  return {k + $(first)$("k" if kernel.varlen) * strides.$(outer) + head, strides.seq, span.seq_kv};
}

// The warp's rows of a tile of queries, which begins at `query`, against the keys from `key` on. A row is
// whole steps of 8 columns: TMA takes no others.
__device__ __forceinline__ void few_scores(FewScores& s, const HeadRows& queries, int query,
                                           const HeadRows& keys, int key) {
  const u32 thread = ptx::thread_index(), lane = thread % 32;  // asked again, lest it be kept
  const int row = query + thread / 32 * kWarpRows + lane / 4;
  const u32* const upper = queries.pairs_of(row, lane % 4);
  const u32* const lower = queries.pairs_of(row + 8, lane % 4);
  const u32* const pairs = keys.pairs_of(key + lane / 4, lane % 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][0][i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < (kHeadDim + 7) / 8; ++step) {
    const u32 a[2] = {upper ? upper[4 * step] : 0, lower ? lower[4 * step] : 0};
    const u32 b = pairs ? pairs[4 * step] : 0;
    ptx::mma_m16n8k8_$(ptx_type(kernel.dtype))(s[0][0], a, b);
  }
}
//% endif

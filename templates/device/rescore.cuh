// ---- Scores, again ------------------------------------------------------------------------------
// 16 rows of one warp against 8 keys, by the instructions that a warp can issue alone: for the rare tile
// whose scores were overwritten with weights that turned out too large. Its rows and keys have left shared
// memory by then, as the next ones are not to wait for a softmax: they are read where TMA found them.
using FewScores = float[1][1][4];

struct HeadRows {  // in global memory
  const Element* first;
  i64 stride;
  int count;
//% if kernel.pack_gqa
  i64 head_stride = 0;  // of packed rows, heads fastest
  int group_log2 = 0;
//% endif

  // Two columns of a row, or zeros past the last one.
  __device__ __forceinline__ u32 pair_at(int row, int pair) const {
//% if kernel.pack_gqa
    const int head = row & ((1 << group_log2) - 1);
    const Element* at = first + (row >> group_log2) * stride + head * head_stride;
//% else
    const Element* at = first + row * stride;
//% endif
    return row < count ? reinterpret_cast<const u32*>(at)[pair] : 0;
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
  const int lane = threadIdx.x % 32, row = query + threadIdx.x / 32 * kWarpRows + lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][0][i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < (kHeadDim + 7) / 8; ++step) {
    const int pair = 4 * step + lane % 4;
    const u32 a[2] = {queries.pair_at(row, pair), queries.pair_at(row + 8, pair)};
    const u32 b = keys.pair_at(key + lane / 4, pair);
    ptx::mma_m16n8k8_$(ptx_type(kernel.dtype))(s[0][0], a, b);
  }
}

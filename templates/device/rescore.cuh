// ---- Scores, again ------------------------------------------------------------------------------
// 16 rows of one warp against 8 keys, by the instructions that a warp can issue alone: for the rare tile
// whose scores were overwritten with weights that turned out too large. Its keys have left shared memory
// by then, as the next ones are not to wait for a softmax: they are read where TMA found them.
using FewScores = float[1][1][4];

struct KeyRows {  // of a head, in global memory
  const Element* first;
  i64 stride;
  int count;
};

//% if kernel.varlen
__device__ __forceinline__ KeyRows key_rows(const Element* k, const Strides& strides,
                                            const Work& work) {
  const i64 first = work.sequence.k * strides.seq + work.kv_head * strides.head;
  return {k + first, strides.seq, work.sequence.seq_kv};
}

//% else
__device__ __forceinline__ KeyRows key_rows(const Element* k, const Strides& strides,
                                            const Work& work, int seq_kv) {
  const i64 first = work.batch * strides.batch + work.kv_head * strides.head;
  return {k + first, strides.seq, seq_kv};
}

//% endif
// Against the keys from `first` on; past the last one are zeros. A row is whole steps of 8 columns: TMA
// takes no others.
__device__ __forceinline__ void few_scores(FewScores& s, const SlabTile<64, kSlabs>& q,
                                           const KeyRows& keys, int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, key = first + lane / 4;
  const u32* row = reinterpret_cast<const u32*>(keys.first + key * keys.stride) + lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][0][i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < (kHeadDim + 7) / 8; ++step) {
    const u32 b = key < keys.count ? row[4 * step] : 0;
    u32 a[2];
    ptx::ldmatrix_x2(a, chunk_address(q, 16 * warp + lane % 16, step));
    ptx::mma_m16n8k8_$(ptx_type(kernel.dtype))(s[0][0], a, b);
  }
}

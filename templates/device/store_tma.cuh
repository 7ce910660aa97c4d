// ---- Output -------------------------------------------------------------------------------------
//% if kernel.scaled
// Ends the softmax of a tile with the log-sum-exp of its rows, -inf where one saw no key.
__device__ __forceinline__ void end_rows(const RowState& row, float* lse, float scale_log2,
                                         int rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(row.sum[half]);
    if (threadIdx.x % 4 != 0 || tile_row(half) >= rows) continue;
    lse[tile_row(half)] = log_sum_exp(row.max[half], sum, scale_log2);
  }
}
//% else
// Ends the softmax of a tile: log-sum-exp, and 1 / l for the products to come. A row that saw no key
// gives -inf, and 0.
__device__ __forceinline__ void end_rows(const RowState& row, float* inverse, float* lse,
                                         float scale_log2, int rows$(", const Span& span" if kernel.pack_gqa)) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(row.sum[half]);
    if (threadIdx.x % 4 != 0) continue;
    inverse[tile_row(half)] = sum == 0.f ? 0.f : 1.f / sum;
//% if kernel.pack_gqa
    if (tile_row(half) >= rows) continue;
    lse[lse_place(tile_row(half), span)] = log_sum_exp(row.max[half], sum, scale_log2);
//% else
    if (tile_row(half) < rows) lse[tile_row(half)] = log_sum_exp(row.max[half], sum, scale_log2);
//% endif
  }
  __syncwarp();
}
//% endif

//% if kernel.o_in_q
// Where a part of O lies on its way: one has a place of its own, the others that of the queries, which are
// no longer needed.
__device__ __forceinline__ SlabTile<64, kPartSlabs>& place_of_part(Shared& shared, int part,
                                                                   u32 consumer, int slot) {
  if (part == 0) return shared.o[consumer];
  auto& first_slab = shared.q[slot][consumer].slab[(part - 1) * kPartSlabs];
  return reinterpret_cast<SlabTile<64, kPartSlabs>&>(first_slab);
}

//% endif
// O divided by l, through shared memory to where it belongs, by TMA: the next tile's products may start
// while it leaves. TMA leaves out what lies beyond the tensor.
__device__ __forceinline__ void store_output(Shared& shared, const Accumulator& o,
                                             const TensorMap* o_map, const Work& work,
                                             const Place& queries, int seq_q$(", int group_log2" if kernel.pack_gqa)$(", int slot" if kernel.o_in_q)) {
  const u32 thread = ptx::thread_index();  // asked again, lest addresses be kept all along
  const u32 consumer = thread / 128, lane = thread % 32, row = thread % 128 / 32 * 16 + lane % 16;
//% if kernel.scaled
  float inverse[2];  // of the sums of rounded weights, which the first lane of a quad has
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = __shfl_sync(~0u, o[0][kDV / 8][2 * half], lane / 4 * 4);
    inverse[half] = sum == 0.f ? 0.f : $("1.f" if kernel.scales == "block" else "work.value_factor") / sum;
  }
//% else
  const int first_row = thread / 32 * kWarpRows + lane / 4;
  const float inverse[2] = {shared.factors[first_row], shared.factors[first_row + 8]};
//% endif
  const bool leads = thread % 128 == 0;
#pragma unroll
  for (int first = 0; first < kOutputParts; first += kPartsAtOnce) {
    if (leads) ptx::cp_async_bulk_wait_group_read<0>();  // what lay here before has been read
    ptx::bar_sync(kConsumerBarrier + consumer, 128);
#pragma unroll
    for (int step = 0; step < kPartsAtOnce * kPartSlabs * 4; ++step) {
      const int column = first * kPartSlabs * 8 + 2 * step;  // in units of 8
      if (column * 8 >= kDV) break;
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = o[0][column + i / 2];
        const float x = pair[i % 2 * 2] * inverse[i % 2], y = pair[i % 2 * 2 + 1] * inverse[i % 2];
        pairs[i] = ptx::cvt_$(ptx_type(kernel.out_dtype))x2(x, y);
      }
//% if kernel.o_in_q
      const auto& tile = place_of_part(shared, step / (kPartSlabs * 4), consumer, slot);
      const u32 chunk = 2 * (step % (kPartSlabs * 4)) + lane / 16;
      ptx::stmatrix_x4(chunk_address(tile, row, chunk), pairs);
//% else
      ptx::stmatrix_x4(chunk_address(shared.o[consumer], row, 2 * step + lane / 16), pairs);
//% endif
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(kConsumerBarrier + consumer, 128);
    const int query = work.first_query + consumer * 64;
    if (leads && $("query >= 0 && " if kernel.ragged_first)query < seq_q) {
#pragma unroll
      for (int i = 0; i < kPartsAtOnce * kPartSlabs; ++i) {
        const int slab = first * kPartSlabs + i;
//% if kernel.o_in_q
        const auto& part = place_of_part(shared, i / kPartSlabs, consumer, slot);
        const auto& from = part.slab[i % kPartSlabs];
//% else
        const auto& from = shared.o[consumer].slab[i];
//% endif
//% if kernel.pack_gqa
        ptx::cp_async_bulk_tensor_5d_store(o_map, from, slab * kColumnsO, 0, query >> group_log2,
                                           work.head, queries.batch);
//% elif kernel.varlen
        ptx::cp_async_bulk_tensor_5d_store(o_map, from, slab * kColumnsO, queries.row + query,
                                           work.head, queries.batch, kEnd);
//% else
        ptx::cp_async_bulk_tensor_4d_store(o_map, from, slab * kColumnsO, queries.row + query,
                                           work.head, queries.batch);
//% endif
      }
      ptx::cp_async_bulk_commit_group();
    }
  }
}

#ifdef FASIM_MAIN
// One launch on pseudo-random inputs, timed: enough to profile this file by itself.
// usage: a.out [batch [heads [kv_heads [seq_q [seq_kv]]]]]
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

//% include "parts/main_arrays.cuh"

//% if kernel.pack_gqa
// Of Q and O a box has all `group` heads that share keys, and as many queries as fill its rows.
//% elif kernel.varlen
// For every token the map has a sequence of kEnd rows that ends there; its last dimension takes those
// rows off, modulo 2^64.
//% endif
// The driver's encoder, found through the runtime: nothing needs to be linked.
template <typename T>
//% if kernel.varlen and kernel.scaled
TensorMap encoded(T* array, i64 batch, i64 heads, i64 seq, i64 width, int rows,
                  bool packed = true) {
//% else
TensorMap encoded(T* array, i64 batch, i64 heads, i64 seq, i64 width, int rows$(", i64 group = 0" if kernel.pack_gqa)) {
//% endif
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (!encode) {
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode),
                                     12000, cudaEnableDefault, &found);
  }
//% if kernel.pack_gqa
  const auto either = [&](i64 packed, i64 plain) { return group ? packed : plain; };
  const i64 row = width * i64(sizeof(T)), head = row * seq;
  const cuuint32_t rank = either(5, 4);
  const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(either(group, seq)),
                              cuuint64_t(either(seq, heads)),
                              cuuint64_t(group ? heads / group : batch), cuuint64_t(batch)};
  const cuuint64_t strides[] = {cuuint64_t(either(head, row)), cuuint64_t(either(row, head)),
                                cuuint64_t(head * either(group, heads)), cuuint64_t(head * heads)};
  const cuuint32_t box[] = {kSlabBytes / sizeof(T), cuuint32_t(either(group, rows)),
                            cuuint32_t(group ? rows / group : 1), 1, 1};
  const cuuint32_t ones[] = {1, 1, 1, 1, 1};
//% elif kernel.varlen and kernel.scaled
  const cuuint32_t rank = packed ? 5 : 4;
  const cuuint64_t ends = packed ? batch * seq + 1 : batch;
  const cuuint64_t row = width * sizeof(T), token = packed ? row * heads : row;
  const cuuint64_t head = packed ? row : row * seq;
  const cuuint64_t strides[] = {token, head, packed ? token : head * heads, (1ull << 34) - token};
  const cuuint64_t length = packed ? kEnd : seq;
//% elif kernel.varlen
  const cuuint64_t ends = batch * seq + 1, length = kEnd;
  const cuuint64_t row = width * sizeof(T), token = row * heads;
  const cuuint64_t strides[] = {token, row, token, (1ull << 34) - token};
//% else
  const cuuint64_t ends = batch;
  const cuuint64_t row = width * sizeof(T), strides[] = {row, row * seq, row * seq * heads};
//% endif
//% if kernel.varlen
  const cuuint64_t sizes[] = {cuuint64_t(width), length, cuuint64_t(heads), ends, kEnd + 1};
  const cuuint32_t box[] = {kSlabBytes / sizeof(T), cuuint32_t(rows), 1, 1, 1};
  const cuuint32_t ones[] = {1, 1, 1, 1, 1};
//% elif not kernel.pack_gqa
  const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(seq), cuuint64_t(heads), ends};
  const cuuint32_t box[] = {kSlabBytes / sizeof(T), cuuint32_t(rows), 1, 1}, ones[] = {1, 1, 1, 1};
//% endif
  auto type = CU_TENSOR_MAP_DATA_TYPE_$("BFLOAT16" if kernel.out_dtype == "bf16" else "FLOAT16");
//% if kernel.scaled
  if (sizeof(T) == 1) type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
//% endif
  CUtensorMap map;
  if (encode(&map, type, $("rank" if kernel.pack_gqa or kernel.varlen and kernel.scaled else 5 if kernel.varlen else 4), array, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
    std::printf("rows of %lld elements are not multiples of 16 bytes\n", width);
    std::exit(1);
  }
  TensorMap result;
  std::memcpy(&result, &map, sizeof(result));
  return result;
}

//% set copies_in = kernel.padded_tensors not in ((), ("o",))
int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }

int main(int argc, char** argv) {
  const auto size = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int batch = size(1, 1), heads = size(2, 16), kv_heads = size(3, heads$(" / 4" if kernel.pack_gqa));
  const int seq_q = size(4, 4096), seq_kv = size(5, seq_q);
  const i64 rows = i64(batch) * heads * seq_q, keys = i64(batch) * kv_heads * seq_kv;
//% if kernel.rescored
  const int group = heads / kv_heads;
//% endif
//% if kernel.pack_gqa
  int group_log2 = 0;
  while (1 << group_log2 < group) ++group_log2;
  if (group > 64 || 1 << group_log2 != group) {
    std::printf("groups of %d heads do not fill 64 rows\n", group);
    return 1;
  }
//% endif
//% include "parts/main_options.cuh"
  Output* $("O" if "o" in kernel.padded_tensors else "o") = device_array<Output>(rows * kHeadDimV);
  float* lse = device_array<float>(rows);
//% if kernel.quantises
  const Input* q = input(rows * kHeadDim, 1);
  const Input* k = input(keys * kHeadDim, 2);
  const Strides q_strides = contiguous(heads, seq_q, kHeadDim);
  const Strides k_strides = contiguous(kv_heads, seq_kv, kHeadDim);
//% set width = "kWide" if kernel.head_dim % 16 else "kHeadDim"
  Element* q8 = device_array<Element>(rows * $(width));
  Element* k8 = device_array<Element>(keys * $(width));
  const int q_parts = batch * heads * blocks_of(seq_q);
  const int k_parts = batch * kv_heads * blocks_of(seq_kv);
//% set more_q = " + batch * heads" if kernel.varlen else ""
//% set more_k = " + batch * kv_heads" if kernel.varlen else ""
  const int v_parts = batch * kv_heads * blocks_of(seq_kv > 0 ? seq_kv : 1);
  const int parts = q_parts + k_parts + v_parts;
  float* q_scale = device_array<float>(q_parts$(more_q));
  float* k_scale = device_array<float>(k_parts$(more_k));
  float* v_scale = device_array<float>(v_parts$(more_k));
  const TensorMap q8_map = encoded(q8, batch, heads, seq_q, $(width), 64);
  const TensorMap k8_map = encoded(k8, batch, kv_heads, seq_kv, $(width), kBlockKV);
//% elif "q" in kernel.padded_tensors
  constexpr int kWide = $(16 if kernel.scaled else 8) * kChunks<kHeadDim>;
  const Element *q = input(rows * kHeadDim, 1), *k = input(keys * kHeadDim, 2);
  const Strides q_strides = contiguous(heads, seq_q, kHeadDim);
  const Strides k_strides = contiguous(kv_heads, seq_kv, kHeadDim);
  Element* q_padded = device_array<Element>(rows * kWide);
  Element* k_padded = device_array<Element>(keys * kWide);
//% if kernel.rescored
  const Strides q_padded_strides = contiguous(heads, seq_q, kWide);
  const Strides k_padded_strides = contiguous(kv_heads, seq_kv, kWide);
//% endif
  const TensorMap q_padded_map = encoded(q_padded, batch, heads, seq_q, kWide, 64);
  const TensorMap k_padded_map = encoded(k_padded, batch, kv_heads, seq_kv, kWide, kBlockKV);
//% else
  Element *q = input(rows * kHeadDim, 1), *k = input(keys * kHeadDim, 2);
//% if kernel.rescored
  const Strides q_strides = contiguous(heads, seq_q, kHeadDim);
  const Strides k_strides = contiguous(kv_heads, seq_kv, kHeadDim);
//% endif
  const TensorMap q_map = encoded(q, batch, heads, seq_q, kHeadDim, 64$(", group" if kernel.pack_gqa));
  const TensorMap k_map = encoded(k, batch, kv_heads, seq_kv, kHeadDim, kBlockKV);
//% endif
//% if kernel.quantises and kernel.scales != "block"
  float* most = device_array<float>(parts);
  const int factors = $("3" if kernel.scales == "tensor" else "batch * (heads + 2 * kv_heads)");
//% endif
//% if kernel.scaled
  const $("Input" if kernel.quantises else "Element")* v = input(keys * kHeadDimV, 3);
  const Strides v_strides = contiguous(kv_heads, seq_kv, kHeadDimV);
//% if not (kernel.varlen and kernel.quantises)
  const int slabs = (seq_kv + kSlabColumns - 1) / kSlabColumns;
  const int all_slabs = batch * kv_heads * slabs;
//% endif
//% if kernel.varlen
  const int packed_slabs = batch * seq_kv / kSlabColumns + batch;
  Element* vt = device_array<Element>(i64(packed_slabs) * kv_heads * (kDV + 1) * kSlabColumns);
  const TensorMap vt_map =
      encoded(vt, packed_slabs, kv_heads, kDV + 1, kSlabColumns, kBoxRowsV, false);
//% else
  Element* vt = device_array<Element>(i64(all_slabs) * (kDV + 1) * kSlabColumns);
  const TensorMap vt_map = encoded(vt, batch * kv_heads, slabs, kDV + 1, kSlabColumns, kBoxRowsV);
//% endif
//% elif "v" in kernel.padded_tensors
  constexpr int kWideV = 8 * kChunks<kHeadDimV>;
  const Element* v = input(keys * kHeadDimV, 3);
  const Strides v_strides = contiguous(kv_heads, seq_kv, kHeadDimV);
  Element* v_padded = device_array<Element>(keys * kWideV);
  Output* o_padded = device_array<Output>(rows * kWideV);
  const TensorMap v_padded_map = encoded(v_padded, batch, kv_heads, seq_kv, kWideV, kBlockKV);
  const TensorMap o_padded_map = encoded(o_padded, batch, heads, seq_q, kWideV, 64);
//% else
  const TensorMap v_map =
      encoded(input(keys * kHeadDimV, 3), batch, kv_heads, seq_kv, kHeadDimV, kBlockKV);
//% endif
//% if kernel.scaled and "o" in kernel.padded_tensors
  constexpr int kWideO = 8 * kChunksO;
  Output* o_padded = device_array<Output>(rows * kWideO);
  const TensorMap o_padded_map = encoded(o_padded, batch, heads, seq_q, kWideO, 64);
//% endif
//% if "o" not in kernel.padded_tensors
  const TensorMap o_map = encoded(o, batch, heads, seq_q, kHeadDimV, 64$(", group" if kernel.pack_gqa));
//% endif
//% if kernel.padded_tensors
  const auto blocks_for = [](i64 chunks) { return int((chunks + kPadders - 1) / kPadders); };
//% endif
//% if copies_in
  i64 to_pad = 0;
//% for name, columns, _, _ in padded_copies(kernel)
  to_pad += $("rows" if name == "q" else "keys") * kChunks<$(columns)>;
//% endfor
//% endif
//% if kernel.scaled and not kernel.quantises
  const int slab_blocks = (all_slabs * kSlabTransposers + kTransposers - 1) / kTransposers;
//% endif
  int blocks = 132;
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  blocks *= kBlocks;
//% if kernel.pack_gqa
  const int q_blocks = (seq_q * group + kBlockQ - 1) / kBlockQ, all_heads = batch * kv_heads;
  const int tiles = all_heads * q_blocks;
//% else
  const int q_blocks = (seq_q + kBlockQ - 1) / kBlockQ, tiles = batch * heads * q_blocks;
//% endif
  const int grid = blocks < tiles ? blocks : tiles;
//% if kernel.mask == "full"
  const int heads_together = $(kernel.few_together);
//% else
  const int rounds = 2 * blocks / greatest_common_divisor(2 * blocks, q_blocks);
  const int heads_together = $("rounds < all_heads ? rounds : all_heads" if kernel.pack_gqa else "rounds < batch * heads ? rounds : batch * heads");
//% endif
  const auto kernel = $(kernel.stem);
//% for name, _ in quantising(kernel)
  const auto $(name) = $(kernel.stem)_$(name);
//% endfor
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  float ms = 0;
  for (int run = 0; run < 2; ++run) {  // the second one counts
    cudaEventRecord(start);
//% for name, grid in quantising(kernel)
//% set line = "    " ~ name ~ "<<<" ~ grid ~ ", kQuantisers, kQuantiserBytes>>>("
$(line)$(call(kernel, line)));
//% endfor
//% if kernel.scaled and not kernel.quantises
    $(kernel.stem)_transpose<<<slab_blocks, kTransposers>>>($(call(kernel, "    " ~ kernel.stem ~ "_transpose<<<slab_blocks, kTransposers>>>(")));
//% endif
//% if copies_in
    $(kernel.stem)_pad<<<blocks_for(to_pad), kPadders>>>($(call(kernel, "    " ~ kernel.stem ~ "_pad<<<blocks_for(to_pad), kPadders>>>(")));
//% endif
    kernel<<<grid, kThreads, kSmemBytes>>>($(call(kernel)));
//% if "o" in kernel.padded_tensors
    const int unpad_grid = blocks_for(rows * $("kChunksO" if kernel.scaled else "kChunks<kHeadDimV>"));
    $(kernel.stem)_unpad<<<unpad_grid, kPadders>>>($(call(kernel, "    " ~ kernel.stem ~ "_unpad<<<unpad_grid, kPadders>>>(")));
//% endif
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    cudaEventElapsedTime(&ms, start, stop);
  }
  std::printf("%s, %.3f ms\n", cudaGetErrorString(cudaGetLastError()), ms);
}
#endif

#ifdef FASIM_MAIN
// One launch on pseudo-random inputs, timed: enough to profile this file by itself.
// usage: a.out [batch [heads [kv_heads [seq_q [seq_kv$(" [splits]" if kernel.splits else "")]]]]]
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

//% include "parts/main_arrays.cuh"

int main(int argc, char** argv) {
  const auto size = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int batch = size(1, 1), heads = size(2, 16), kv_heads = size(3, heads);
  const int seq_q = size(4, 4096), seq_kv = size(5, seq_q);
  const i64 rows = i64(batch) * heads * seq_q, keys = i64(batch) * kv_heads * seq_kv;
  const Strides q_strides = contiguous(heads, seq_q, kHeadDim);
  const Strides k_strides = contiguous(kv_heads, seq_kv, kHeadDim);
  const Strides v_strides = contiguous(kv_heads, seq_kv, kHeadDimV);
  const Strides o_strides = contiguous(heads, seq_q, kHeadDimV);
//% include "parts/main_options.cuh"
  Element* q = input(rows * kHeadDim, 1);
  Element* k = input(keys * kHeadDim, 2);
  Element* v = input(keys * kHeadDimV, 3);
  Output* o = device_array<Output>(rows * kHeadDimV);
  float* lse = device_array<float>(rows);
//% if kernel.algo == "v1"
  float* o_acc = device_array<float>(rows * kHeadDimV);
  float* m = device_array<float>(rows);
  float* l = device_array<float>(rows);
  const int grid = batch * heads;
//% elif kernel.splits
  const int row_blocks = (heads / kv_heads * seq_q + kBlockQ - 1) / kBlockQ;
  const int splits = size(6, 32);
  float* o_part = device_array<float>(rows * splits * kHeadDimV);
  float* m_part = device_array<float>(rows * splits);
  float* l_part = device_array<float>(rows * splits);
  const int grid = batch * kv_heads * row_blocks * splits;
//% else
  const int grid = batch * heads * ((seq_q + kBlockQ - 1) / kBlockQ);
//% endif
  const auto kernel = $(kernel.stem);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  float ms = 0;
  for (int run = 0; run < 2; ++run) {  // the second one counts
    cudaEventRecord(start);
    kernel<<<grid, kThreads, kSmemBytes>>>($(call(kernel)));
//% if kernel.splits
    $(kernel.stem)_combine<<<rows, 32>>>($(call(kernel, "    " ~ kernel.stem ~ "_combine<<<rows, 32>>>(")));
//% endif
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    cudaEventElapsedTime(&ms, start, stop);
  }
  std::printf("%s, %.3f ms\n", cudaGetErrorString(cudaGetLastError()), ms);
}
#endif

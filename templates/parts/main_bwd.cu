#ifdef FASIM_MAIN
// One backward pass on pseudo-random inputs, timed: enough to profile this file by itself. L is 0
// and O what it is, so the gradients mean nothing.
// usage: a.out [batch [heads [kv_heads [seq_q [seq_kv]]]]]
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
  const Strides do_strides = o_strides;
  const float scale = 1.f / sqrtf(kHeadDim);
  const int q_grid = batch * heads * ((seq_q + kBlockQ - 1) / kBlockQ);
//% if kernel.algo == "v1"
  const int kv_grid = batch * kv_heads;
//% else
  const int kv_grid = batch * kv_heads * ((seq_kv + kBlockKV - 1) / kBlockKV);
//% endif
//% include "parts/main_options.cuh"
  Element* q = input(rows * kHeadDim, 1);
  Element* k = input(keys * kHeadDim, 2);
  Element* v = input(keys * kHeadDimV, 3);
  Element* o = input(rows * kHeadDimV, 4);
  Element* dO = input(rows * kHeadDimV, 5);
  float* lse = device_array<float>(rows);
  float* delta = device_array<float>(rows);
//% if kernel.dq != "second_pass"
  const i64 dq_tiles = q_grid$(" + batch * heads" if kernel.varlen);
  float* dq_acc = device_array<float>(dq_tiles * kBlockQ * kD);
//% endif
//% if kernel.dq == "ordered"
  u32* turns = device_array<u32>(1 + q_grid);
//% endif
  Element* dq = device_array<Element>(rows * kHeadDim);
  Element* dk = device_array<Element>(keys * kHeadDim);
  Element* dv = device_array<Element>(keys * kHeadDimV);
  const auto prepare = $(kernel.stem)_prepare;
  const auto kernel = $(kernel.stem);
//% if kernel.last_stage
  const auto $(kernel.last_stage) = $(kernel.stem)_$(kernel.last_stage);
//% endif
//% if kernel.dq == "second_pass"
  const int queries_grid = batch * heads * ((seq_q + kBlockKV - 1) / kBlockKV);
  cudaFuncSetAttribute(queries, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
//% endif
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  const auto launch = [&](auto entry, int grid, int smem_bytes) {
    // clang-format off
    entry<<<grid, kThreads, smem_bytes>>>(
        $(call(kernel, "        ")));
    // clang-format on
  };
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  float ms = 0;
  for (int run = 0; run < 2; ++run) {  // the second one counts
    cudaEventRecord(start);
    launch(prepare, q_grid, 0);
    launch(kernel, kv_grid, kSmemBytes);
//% if kernel.last_stage == "finish"
    launch(finish, q_grid, 0);
//% elif kernel.last_stage == "queries"
    launch(queries, queries_grid, kSmemBytes);
//% endif
    cudaEventRecord(stop);
    cudaEventSynchronize(stop);
    cudaEventElapsedTime(&ms, start, stop);
  }
  std::printf("%s, %.3f ms\n", cudaGetErrorString(cudaGetLastError()), ms);
}
#endif

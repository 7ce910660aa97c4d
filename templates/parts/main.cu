#ifdef FASIM_MAIN
// One launch on pseudo-random inputs, timed: enough to profile this file by itself.
// usage: a.out [batch [heads [kv_heads [seq_q [seq_kv$(" [splits]" if kernel.splits else "")]]]]]
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

__global__ void fill(Element* x, i64 n, u32 seed) {
  const i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x;
  const u32 hash = (u32(i) * 2654435761u ^ seed) * 2246822519u;
  const float value = float(hash >> 8) / (1 << 23) - 1.f;
//% if kernel.dtype == "fp32"
  if (i < n) x[i] = value;
//% elif kernel.dtype == "e4m3"
  if (i < n) x[i] = Element(ptx::cvt_e4m3x2(value, value));
//% else
  if (i < n) x[i] = u16($(cvt(kernel, kernel.dtype))(value, value));
//% endif
}

template <typename T>
T* device_array(i64 n) {
  T* array = nullptr;
  cudaMalloc(&array, n * sizeof(T) + 16);
  return array;
}

Element* input(i64 n, u32 seed) {
  Element* array = device_array<Element>(n);
  fill<<<(n + 255) / 256, 256>>>(array, n, seed);
  return array;
}

//% if kernel.option_inputs
// An array whose values are computed on the host.
template <typename T, typename Value>
T* made(i64 n, Value value) {
  T* host = static_cast<T*>(std::malloc(n * sizeof(T)));
  for (i64 i = 0; i < n; ++i) host[i] = value(i);
  T* array = device_array<T>(n);
  cudaMemcpy(array, host, n * sizeof(T), cudaMemcpyHostToDevice);
  std::free(host);
  return array;
}

//% endif
//% if kernel.varlen
Strides contiguous(i64 heads, i64, i64 head_dim) { return {0, head_dim, heads * head_dim}; }

//% else
Strides contiguous(i64 heads, i64 seq, i64 head_dim) {
  return {heads * seq * head_dim, seq * head_dim, head_dim};
}

//% endif
int main(int argc, char** argv) {
  const auto size = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int batch = size(1, 1), heads = size(2, 16), kv_heads = size(3, heads);
  const int seq_q = size(4, 4096), seq_kv = size(5, seq_q);
  const i64 rows = i64(batch) * heads * seq_q, keys = i64(batch) * kv_heads * seq_kv;
  const Strides q_strides = contiguous(heads, seq_q, kHeadDim);
  const Strides k_strides = contiguous(kv_heads, seq_kv, kHeadDim);
  const Strides v_strides = contiguous(kv_heads, seq_kv, kHeadDimV);
  const Strides o_strides = contiguous(heads, seq_q, kHeadDimV);
//% if kernel.softcap
  const float softcap = 50.f;
  const float softcap_scale = 1.f / (softcap * sqrtf(kHeadDim));
  const float softcap_log2 = 1.442695041f * softcap;
//% else
  const float scale_log2 = 1.442695041f / sqrtf(kHeadDim);
//% endif
//% if kernel.mask == "window"
  const int window_left = 1023, window_right = 0;
//% endif
//% if kernel.bias == "alibi"
  const auto slope = [&](i64 h) { return exp2f(-8.f * (h + 1) / heads); };
  const float* slopes = made<float>(heads, slope);
//% elif kernel.bias_dtype
  const Bias* bias = made<Bias>(i64(seq_q) * seq_kv, [](i64) { return Bias(0); });
  const Strides bias_strides = {0, 0, seq_kv};
//% endif
//% if kernel.scaled
  const auto one = [](i64) { return 1.f; };
  const float* q_scale = made<float>(i64(batch) * heads, one);
  const float* k_scale = made<float>(i64(batch) * kv_heads, one);
  const float* v_scale = made<float>(i64(batch) * kv_heads, one);
//% endif
//% if kernel.varlen
  const int longest_q = seq_q, total_q = batch * seq_q;
  const int* cu_seqlens_q = made<int>(batch + 1, [&](i64 i) { return int(i * seq_q); });
  const int* cu_seqlens_k = made<int>(batch + 1, [&](i64 i) { return int(i * seq_kv); });
//% endif
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

//% set given = kernel.in_dtype or kernel.dtype
//% set Given = "Input" if kernel.in_dtype else "Element"
__global__ void fill($(Given)* x, i64 n, u32 seed) {
  const i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x;
  const u32 hash = (u32(i) * 2654435761u ^ seed) * 2246822519u;
  const float value = float(hash >> 8) / (1 << 23) - 1.f;
//% if given == "fp32"
  if (i < n) x[i] = value;
//% elif given == "e4m3"
  if (i < n) x[i] = Element(ptx::cvt_e4m3x2(value, value));
//% else
  if (i < n) x[i] = u16($(cvt(kernel, given))(value, value));
//% endif
}

template <typename T>
T* device_array(i64 n) {
  T* array = nullptr;
  cudaMalloc(&array, n * sizeof(T) + 16);
  cudaMemset(array, 0, n * sizeof(T) + 16);
  return array;
}

$(Given)* input(i64 n, u32 seed) {
  $(Given)* array = device_array<$(Given)>(n);
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

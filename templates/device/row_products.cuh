// ---- Before and after ---------------------------------------------------------------------------
//% if kernel.dtype == "fp32"
__device__ __forceinline__ float to_float(Element x) { return x; }

//% elif kernel.dtype == "fp16"
__device__ __forceinline__ float to_float(Element x) { return ptx::cvt_f32_f16(x); }
//% else
__device__ __forceinline__ float to_float(Element x) { return __uint_as_float(u32(x) << 16); }

//% endif
// kRowThreads lanes share a row, kRowElements each at a time.
constexpr int kRowElements = copy_bytes(kHeadDimV) / int(sizeof(Element));
constexpr int kRowThreads = min_power_of_two(kHeadDimV / kRowElements, 32);

// The sum over two rows' products, 0 where not valid. All lanes of a row get it.
__device__ __forceinline__ float row_product(const Element* x, const Element* y, bool valid) {
  using Word = typename WordOf<copy_bytes(kHeadDimV)>::type;
  float sum = 0.f;
  for (int first = threadIdx.x % kRowThreads * kRowElements; valid && first < kHeadDimV;
       first += kRowThreads * kRowElements) {
    alignas(16) Element a[kRowElements], b[kRowElements];
    *reinterpret_cast<Word*>(a) = *reinterpret_cast<const Word*>(x + first);
    *reinterpret_cast<Word*>(b) = *reinterpret_cast<const Word*>(y + first);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) sum = fmaf(to_float(a[i]), to_float(b[i]), sum);
  }
#pragma unroll
  for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  return sum;
}

// A pair of dQ, as far as the row reaches.
//% if kernel.dtype == "fp32"
__device__ __forceinline__ void store_two(Element* row, int column, float x, float y) {
  if (column < kHeadDim) row[column] = x;
  if (column + 1 < kHeadDim) row[column + 1] = y;
}

//% else
__device__ __forceinline__ void store_two(Element* row, int column, float x, float y) {
  const u32 pair = ptx::cvt_$(ptx_type(kernel.dtype))x2(x, y);
  if constexpr (kHeadDim % 2 == 0) {
    if (column < kHeadDim) *reinterpret_cast<u32*>(row + column) = pair;
  } else {
    if (column < kHeadDim) row[column] = Element(pair);
    if (column + 1 < kHeadDim) row[column + 1] = Element(pair >> 16);
  }
}
//% endif

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

__device__ __forceinline__ float dot(const float (&a)[4], float x, float y, float z, float w) {
  return fmaf(a[3], w, fmaf(a[2], z, fmaf(a[1], y, a[0] * x)));
}

template <int kCols>
__device__ __forceinline__ float4 load_chunk(const float* tile, int row, int chunk) {
  return *reinterpret_cast<const float4*>(chunk_at<kCols>(tile, row, chunk));
}

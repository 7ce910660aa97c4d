// ---- Tiles in shared memory ---------------------------------------------------------------------
// A tile is row-major with no padding. Its 16-byte chunks are permuted inside a row, differently in
// neighbouring rows, so that the 8 rows one matrix load touches lie in 8 different bank groups.

// Chunks that are permuted among themselves: the largest of 8, 4, 2 that divides a row.
__device__ constexpr int swizzle_group(int chunks) {
  return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;
}

template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int kGroup = swizzle_group(kChunks);
  return chunk ^ (row / (8 / kGroup) % kGroup);
}

// The 16-byte chunk of a tile of kCols columns.
template <int kCols, bool kSwizzled = true, typename T>
__device__ __forceinline__ T* chunk_at(T* tile, int row, int chunk) {
  constexpr int kElements = 16 / int(sizeof(T));
  const int place = kSwizzled ? swizzled<kCols / kElements>(row, chunk) : chunk;
  return tile + row * kCols + place * kElements;
}

// The shared address `chunks` further along a row than chunk 0, or an even number further than chunk
// 1, at address `first`.
template <int kCols>
__device__ __forceinline__ u32 along_row(u32 first, int chunks) {
  constexpr int kGroup = swizzle_group(kCols / kChunkElements);
  return (first ^ chunks % kGroup * 16) + chunks / kGroup * kGroup * 16;
}

// Fills a tile of kRows x kCols from rows of global memory, all threads together. What lies beyond
// `rows` or kValidCols becomes zero, so padding never reaches a product.
template <int kRows, int kCols, int kValidCols, bool kSwizzled = true>
__device__ __forceinline__ void copy_tile(Element* tile, const Element* source, i64 stride,
                                          int rows) {
  constexpr int kBytes = copy_bytes(kValidCols);
  constexpr int kElements = kBytes / int(sizeof(Element));
  constexpr int kRowThreads = min_power_of_two(kCols / kElements, kThreads);
  constexpr int kColumnSteps = (kCols / kElements + kRowThreads - 1) / kRowThreads;
  constexpr int kRowsInFlight = kColumnSteps < kCopiesInFlight ? kCopiesInFlight / kColumnSteps : 1;
  const int first_col = threadIdx.x % kRowThreads * kElements;
  const int first_row = threadIdx.x / kRowThreads;
  source += first_row * stride;
#pragma unroll kRowsInFlight
  for (int row = first_row; row < kRows; row += kThreads / kRowThreads) {
#pragma unroll
    for (int col = first_col; col < kCols; col += kRowThreads * kElements) {
      Element* chunk = chunk_at<kCols, kSwizzled>(tile, row, col / kChunkElements);
      const bool valid = row < rows && col < kValidCols;
      copy<kBytes>(chunk + col % kChunkElements, source + col, valid);
    }
    source += kThreads / kRowThreads * stride;
  }
}

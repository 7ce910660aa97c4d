// Rows that are copied at once by as many threads each as they have copies: neighbours copy neighbours,
// and a row's cache lines are asked for once. So many that the permutation of chunks only alternates;
// 0 where a quarter of the threads or more would be left over.
__device__ constexpr int whole_rows(int copies, int chunks) {
//% if kernel.odd_rows
  // Long rows are shared by four threads or eight, where those divide them: pieces of 64 or 128 bytes
  // at constant addresses, and nobody idle.
  if (copies > 16 && copies % 4 == 0) return 0;
//% endif
  const int period = 8 / swizzle_group(chunks);
  const int rows = kThreads / copies / period * period;
  return 4 * rows * copies > 3 * kThreads ? rows : 0;
}

// Fills a tile of kRows x kCols from rows of global memory, all threads together. What lies beyond
// `rows` or kValidCols becomes zero, so padding never reaches a product. Of a whole tile nothing need
// be asked, and its addresses are constants apart. Where rows are not copied whole, as many threads
// share one as divide its copies, so that all have as many.
template <int kRows, int kCols, int kValidCols, bool kSwizzled = true>
__device__ __forceinline__ void copy_tile(Element* tile, const Element* source, i64 stride,
                                          int rows) {
  constexpr int kBytes = copy_bytes(kValidCols);
  constexpr int kElements = kBytes / int(sizeof(Element));
  constexpr bool kUnrolled = kCols == kValidCols && sizeof(Element) < 4;  // fp32 has no registers
  constexpr int kCopies = kCols / kElements;  // of a row
  constexpr int kWhole = kUnrolled ? whole_rows(kCopies, kCols / kChunkElements) : 0;
  constexpr int kRowThreads = kWhole > 0 ? kCopies : power_of_two_in(kCopies, kThreads);
  constexpr int kRowStep = kWhole > 0 ? kWhole : kThreads / kRowThreads;
  constexpr int kColStep = kRowThreads * kElements;
  constexpr int kRowSteps = (kRows + kRowStep - 1) / kRowStep, kColSteps = kCols / kColStep;
  const int first_col = threadIdx.x % kRowThreads * kElements;
  const int first_row = threadIdx.x / kRowThreads;
  if (kRowStep * kRowThreads < kThreads && first_row >= kRowStep) return;  // left over
  source += first_row * stride + first_col;
  const auto at = [&](int row, int col) {
    return chunk_at<kCols, kSwizzled>(tile, row, col / kChunkElements) + col % kChunkElements;
  };
  if (kUnrolled && rows >= kRows) {
#pragma unroll
    for (int i = 0; i < kRowSteps * kColSteps; ++i) {
      const int row = i / kColSteps * kRowStep, col = i % kColSteps * kColStep;
      if (row + kRowStep <= kRows || first_row + row < kRows) {  // all but the last rows: known now
        copy<kBytes>(at(first_row + row, first_col + col), source + col, true);
      }
      if ((i + 1) % kColSteps == 0) source += kRowStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < kRows; row += kRowStep) {
#pragma unroll
    for (int i = 0; i < kColSteps; ++i) {
      const int col = first_col + i * kColStep;
      const bool valid = row < rows && col < kValidCols;
      copy<kBytes>(at(row, col), source + i * kColStep, valid);
    }
    source += kRowStep * stride;
  }
}

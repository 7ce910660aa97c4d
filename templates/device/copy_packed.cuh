// Fills the query tile with packed rows: row r of all is query r / group of the group's head
// r % group. What lies beyond `rows` or kHeadDim becomes zero.
__device__ __forceinline__ void copy_packed(Element* tile, const Element* q, const Strides& strides,
                                            int group, int first_row, int rows) {
  constexpr int kBytes = copy_bytes(kHeadDim);
  constexpr int kElements = kBytes / int(sizeof(Element));
  constexpr int kCopies = kD / kElements;
  for (int i = threadIdx.x; i < kBlockQ * kCopies; i += kThreads) {
    const int row = i / kCopies, col = i % kCopies * kElements;
    const i64 head = (first_row + row) % group, query = (first_row + row) / group;
    const Element* source = q + head * strides.head + query * strides.seq + col;
    Element* chunk = chunk_at<kD>(tile, row, col / kChunkElements);
    copy<kBytes>(chunk + col % kChunkElements, source, row < rows && col < kHeadDim);
  }
}

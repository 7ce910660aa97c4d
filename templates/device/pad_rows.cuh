// ---- Rows of whole 16 bytes ---------------------------------------------------------------------
// TMA takes no others. So a kernel before the main one copies rows to wider ones, with zeros at their ends,
// and one after it copies those of O back. A thread moves 16 bytes of a wider row.
constexpr int kPadders = 128;  // threads of a block

template <int kColumns>
constexpr int kChunks = (kColumns + 7) / 8;  // of a row

//% if kernel.varlen
// The n-th row, if every sequence had as many as the longest: its place among the packed ones, where each
// token has one for every head; -1 if there is none.
__device__ __forceinline__ i64 packed_row(i64 n, int heads, int longest, const int* cu_seqlens) {
  const i64 sequence = n / heads / longest, token = cu_seqlens[sequence] + n / heads % longest;
  return token < cu_seqlens[sequence + 1] ? token * heads + n % heads : -1;
}

__device__ __forceinline__ i64 offset_of(i64 row, const Strides& strides, int heads, int) {
  return row / heads * strides.seq + row % heads * strides.head;
}
//% else
__device__ __forceinline__ i64 offset_of(i64 row, const Strides& strides, int heads, int seq) {
  const i64 head = row / seq;
  return head / heads * strides.batch + head % heads * strides.head + row % seq * strides.seq;
}
//% endif

template <int kColumns>
__device__ __forceinline__ void pad_chunk(Element* wide, const Element* x, i64 row, int chunk) {
  u32 words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (8 * chunk + i < kColumns) words[i / 2] |= u32(x[8 * chunk + i]) << i % 2 * 16;
  }
  const uint4 padded = make_uint4(words[0], words[1], words[2], words[3]);
  reinterpret_cast<uint4*>(wide)[row * kChunks<kColumns> + chunk] = padded;
}

// clang-format off
extern "C" __global__ void __launch_bounds__(kPadders)
$(kernel.stem)_pad(
$(parameters(kernel))) {
  // clang-format on
  i64 number = blockIdx.x * i64(kPadders) + threadIdx.x;
//% for name, columns, heads, seq in padded_copies(kernel)
  const i64 $(name)_chunks = i64(batch) * $(heads) * $(seq) * kChunks<$(columns)>;
  if (number < $(name)_chunks) {
    const i64 row = $(row_of(kernel, "number / kChunks<" ~ columns ~ ">", name));
//% if kernel.varlen
    if (row < 0) return;
//% endif
    const Element* x = $(name) + offset_of(row, $(name)_strides, $(heads), $(seq));
    return pad_chunk<$(columns)>($(name)_padded, x, row, number % kChunks<$(columns)>);
  }
  number -= $(name)_chunks;
//% endfor
}
//% if "o" in kernel.padded_tensors

// clang-format off
extern "C" __global__ void __launch_bounds__(kPadders)
$(kernel.stem)_unpad(
$(parameters(kernel))) {
  // clang-format on
  const i64 number = blockIdx.x * i64(kPadders) + threadIdx.x;
  if (number >= i64(batch) * heads * $(longest_q(kernel)) * kChunks<kHeadDimV>) return;
  const i64 row = $(row_of(kernel, "number / kChunks<kHeadDimV>", "o"));
//% if kernel.varlen
  if (row < 0) return;
//% endif
  const int chunk = number % kChunks<kHeadDimV>;
  const uint4 x = reinterpret_cast<const uint4*>(o_padded)[row * kChunks<kHeadDimV> + chunk];
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = 8 * chunk + i;
    if (column < kHeadDimV) O[row * kHeadDimV + column] = u16(words[i / 2] >> i % 2 * 16);
  }
}
//% endif

// ---- Rows of whole 16 bytes ---------------------------------------------------------------------
// TMA takes no others. So a kernel before the main one copies rows to wider ones, with zeros at their ends,
// and one after it copies those of O back. A thread moves 16 bytes of a wider row.
//% set chunk = 16 if kernel.dtype == "e4m3" else 8
//% set size = 16 // chunk
//% set output_chunks = "kChunksO" if kernel.dtype == "e4m3" else "kChunks<kHeadDimV>"
constexpr int kPadders = 128;  // threads of a block

template <int kColumns>
constexpr int kChunks = (kColumns + $(chunk - 1)) / $(chunk);  // of a row

//% if kernel.dtype == "e4m3" and "o" in kernel.padded_tensors
constexpr int kChunksO = (kHeadDimV + 7) / 8;  // of one of O, in 16 bits

//% endif
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
  for (int i = 0; i < $(chunk); ++i) {
    if ($(chunk) * chunk + i < kColumns) words[i / $(4 // size)] |= u32(x[$(chunk) * chunk + i]) << i % $(4 // size) * $(8 * size);
  }
  const uint4 padded = make_uint4(words[0], words[1], words[2], words[3]);
  reinterpret_cast<uint4*>(wide)[row * kChunks<kColumns> + chunk] = padded;
}

//% if kernel.padded_tensors != ("o",)
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
//% endif
//% if "o" in kernel.padded_tensors

// clang-format off
extern "C" __global__ void __launch_bounds__(kPadders)
$(kernel.stem)_unpad(
$(parameters(kernel))) {
  // clang-format on
  const i64 number = blockIdx.x * i64(kPadders) + threadIdx.x;
  if (number >= i64(batch) * heads * $(longest_q(kernel)) * $(output_chunks)) return;
  const i64 row = $(row_of(kernel, "number / " ~ output_chunks, "o"));
//% if kernel.varlen
  if (row < 0) return;
//% endif
  const int chunk = number % $(output_chunks);
  const uint4 x = reinterpret_cast<const uint4*>(o_padded)[row * $(output_chunks) + chunk];
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = 8 * chunk + i;
    if (column < kHeadDimV) O[row * kHeadDimV + column] = u16(words[i / 2] >> i % 2 * 16);
  }
}
//% endif

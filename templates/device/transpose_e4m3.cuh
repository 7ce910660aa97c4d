// ---- V, transposed ------------------------------------------------------------------------------
// wgmma takes bytes only with the depth contiguous: for P V that is the keys. So V is laid out anew, in
// slabs of 128 keys: a row for each column of V, zeros up to kDV of them, then one of ones, with the keys
// in the order of key_at. Keys beyond the last are zeros. A thread takes a square of V into its registers,
// all of it at once, and writes it turned: no shared memory, and no thread waits for another.
constexpr int kTransposers = 64;  // threads of a block; those of a slab may be fewer, or more
constexpr int kTransposingBlocks = 8;  // on an SM
constexpr int kSquare = 16;  // keys of a thread, of which the order begins anew, and columns
constexpr int kSquares = kSlabColumns / kSquare;  // that make whole rows of a slab
constexpr int kSlabTransposers = kDV / kSquare * kSquares;
constexpr int kAbreast = kDV % 64 == 0 ? 4 : 2;  // threads that read the same keys: whole sectors

// Bytes i of four words, in the order of the words, as word i.
__device__ __forceinline__ void transpose_bytes(u32 (&x)[4]) {
  const u32 low01 = __byte_perm(x[0], x[1], 0x5140), low23 = __byte_perm(x[2], x[3], 0x5140);
  const u32 high01 = __byte_perm(x[0], x[1], 0x7362), high23 = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(low01, low23, 0x5410);
  x[1] = __byte_perm(low01, low23, 0x7632);
  x[2] = __byte_perm(high01, high23, 0x5410);
  x[3] = __byte_perm(high01, high23, 0x7632);
}

//% if kernel.head_dim_v % 16
// Columns of a row, of which so many are there, the others zeros: in words of four columns if rows are
// whole words, else byte by byte.
using Piece = $("Element" if kernel.head_dim_v % 4 else "u32");

__device__ __forceinline__ void load_columns(u32 (&x)[4], const Element* row, int count) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = 0;
#pragma unroll
  for (int i = 0; i < kSquare; i += int(sizeof(Piece))) {
    const u32 piece = i < count ? *reinterpret_cast<const Piece*>(row + i) : 0;
    x[i / 4] |= piece << i % 4 * 8;
  }
}
//% else
// Columns of a row, or zeros if there are none: rows are whole squares, and so aligned to 16 bytes.
__device__ __forceinline__ void load_columns(u32 (&x)[4], const Element* row, int count) {
  uint4 loaded = make_uint4(0, 0, 0, 0);
  if (count > 0) loaded = *reinterpret_cast<const uint4*>(row);
  x[0] = loaded.x;
  x[1] = loaded.y;
  x[2] = loaded.z;
  x[3] = loaded.w;
}
//% endif

// clang-format off
extern "C" __global__ void __launch_bounds__(kTransposers, kTransposingBlocks)
$(kernel.stem)_transpose(
$(parameters(kernel))) {
  // clang-format on
  const u32 thread = blockIdx.x * kTransposers + threadIdx.x, place = thread % kSlabTransposers;
  const int slab = thread / kSlabTransposers, key = place / kAbreast % kSquares * kSquare;
  const int column = (place / kAbreast / kSquares * kAbreast + place % kAbreast) * kSquare;
//% if kernel.varlen
  const int slabs = (longest_k + kSlabColumns - 1) / kSlabColumns;
  if (slab >= batch * kv_heads * slabs) return;
  const int head = slab / slabs, first_key = slab % slabs * kSlabColumns;
  const int sequence = head / kv_heads, kv_head = head % kv_heads;
  const int first_token = cu_seqlens_k[sequence];
  const int seq_kv = cu_seqlens_k[sequence + 1] - first_token;
  if (first_key >= seq_kv) return;
  v += first_token * v_strides.seq + kv_head * v_strides.head;
  const i64 slab_number = first_token / kScaleBlock + sequence + first_key / kSlabColumns;
  Element* to = vt + (slab_number * kv_heads + kv_head) * (kDV + 1) * kSlabColumns;
//% else
  const int slabs = (max(seq_kv, 1) + kSlabColumns - 1) / kSlabColumns;
  if (slab >= batch * kv_heads * slabs) return;
  const int head = slab / slabs, first_key = slab % slabs * kSlabColumns;
  v += head / kv_heads * v_strides.batch + head % kv_heads * v_strides.head;
  Element* to = vt + i64(slab) * (kDV + 1) * kSlabColumns;
//% endif
  v += (first_key + key) * v_strides.seq + column;
  to += column * kSlabColumns + key;
  const int keys_left = seq_kv - first_key - key, columns_left = kHeadDimV - column;
  u32 words[kSquare][4];  // of four columns
#pragma unroll
  for (int j = 0; j < kSquare; ++j) {
    const bool inside = key_at(j) < keys_left;
    load_columns(words[j], v + key_at(j) * v_strides.seq, inside ? columns_left : 0);
  }
#pragma unroll
  for (int i = 0; i < kSquare / 4; ++i) {
    u32 keys[kSquare / 4][4];  // four of a column, of four columns
#pragma unroll
    for (int j = 0; j < kSquare; ++j) keys[j / 4][j % 4] = words[j][i];
#pragma unroll
    for (int j = 0; j < kSquare / 4; ++j) transpose_bytes(keys[j]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<uint4*>(to + (4 * i + j) * kSlabColumns) =
          make_uint4(keys[0][j], keys[1][j], keys[2][j], keys[3][j]);
    }
  }
  constexpr u32 kOnes = 0x38383838;  // the last row
  if (column == 0) {
    *reinterpret_cast<uint4*>(to + kDV * kSlabColumns) = make_uint4(kOnes, kOnes, kOnes, kOnes);
  }
}

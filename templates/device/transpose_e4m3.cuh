// ---- V, transposed ------------------------------------------------------------------------------
// wgmma takes bytes only with the depth contiguous: for P V that is the keys. So V is laid out anew, a row
// for each column of it, zeros up to kDV of them, then one of ones, with the keys in the order of key_at.
// Keys beyond the last are zeros.
constexpr int kTransposers = 128;  // threads of a block
constexpr int kKeysAtOnce = 32;  // keys, and 4 columns, of a thread

// Bytes i of four words, in the order of the words, as word i.
__device__ __forceinline__ void transpose_bytes(u32 (&x)[4]) {
  const u32 low01 = __byte_perm(x[0], x[1], 0x5140), low23 = __byte_perm(x[2], x[3], 0x5140);
  const u32 high01 = __byte_perm(x[0], x[1], 0x7362), high23 = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(low01, low23, 0x5410);
  x[1] = __byte_perm(low01, low23, 0x7632);
  x[2] = __byte_perm(high01, high23, 0x5410);
  x[3] = __byte_perm(high01, high23, 0x7632);
}

// clang-format off
extern "C" __global__ void __launch_bounds__(kTransposers)
$(kernel.stem)_transpose(
$(parameters(kernel))) {
  // clang-format on
  constexpr int kColumnGroups = kDV / 4 + 1;
  const i64 slabs = (i64(max(seq_kv, 1)) + kSlabColumns - 1) / kSlabColumns;
  const i64 keys = slabs * kSlabColumns;  // of a row
  const i64 all = i64(batch) * kv_heads * (keys / kKeysAtOnce) * kColumnGroups;
  const i64 index = blockIdx.x * i64(kTransposers) + threadIdx.x;
  if (index >= all) return;
  const int column = index % kColumnGroups * 4;
  const i64 first_key = index / kColumnGroups % (keys / kKeysAtOnce) * kKeysAtOnce;
  const i64 head = index / kColumnGroups / (keys / kKeysAtOnce);
  v += head / kv_heads * v_strides.batch + head % kv_heads * v_strides.head + column;
  u32 rows[4][kKeysAtOnce / 4];
#pragma unroll
  for (int i = 0; i < kKeysAtOnce / 4; ++i) {
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const i64 key = first_key + key_at(4 * i + j);
      const bool inside = key < seq_kv && column < kHeadDimV;
      words[j] = inside ? *reinterpret_cast<const u32*>(v + key * v_strides.seq) : 0;
    }
    transpose_bytes(words);
    if (column == kDV) words[0] = 0x38383838;  // ones
#pragma unroll
    for (int j = 0; j < 4; ++j) rows[j][i] = words[j];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (column + j > kDV) break;
    Element* row = vt + (head * (kDV + 1) + column + j) * keys + first_key;
#pragma unroll
    for (int i = 0; i < kKeysAtOnce / 16; ++i) {
      const u32* words = rows[j] + 4 * i;
      reinterpret_cast<uint4*>(row)[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

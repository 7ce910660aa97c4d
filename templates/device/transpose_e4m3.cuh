// ---- V, transposed ------------------------------------------------------------------------------
// wgmma takes bytes only with the depth contiguous: for P V that is the keys. So V is laid out anew, in
// slabs of 128 keys: a row for each column of V, zeros up to kDV of them, then one of ones, with the keys
// in the order of key_at. Keys beyond the last are zeros. A thread block makes a slab.
constexpr int kTransposers = 128;  // threads of a block
constexpr int kKeyWords = kSlabBytes / 4;  // of four keys, in a row of a slab

// Bytes i of four words, in the order of the words, as word i.
__device__ __forceinline__ void transpose_bytes(u32 (&x)[4]) {
  const u32 low01 = __byte_perm(x[0], x[1], 0x5140), low23 = __byte_perm(x[2], x[3], 0x5140);
  const u32 high01 = __byte_perm(x[0], x[1], 0x7362), high23 = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(low01, low23, 0x5410);
  x[1] = __byte_perm(low01, low23, 0x7632);
  x[2] = __byte_perm(high01, high23, 0x5410);
  x[3] = __byte_perm(high01, high23, 0x7632);
}

// Where a word of four keys lies in shared memory: neighbours that write the same keys of other columns,
// or read other keys of the same column, meet in no bank.
__device__ __forceinline__ int word_at(int column, int word) {
  return column * kKeyWords + (word ^ column / 4 % kKeyWords);
}

//% if kernel.head_dim_v % 4
// Up to four columns of a row that may begin at any byte.
__device__ __forceinline__ u32 load_columns(const Element* row, int columns) {
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= i < columns ? u32(row[i]) << 8 * i : 0;
  return word;
}

//% endif
// clang-format off
extern "C" __global__ void __launch_bounds__(kTransposers)
$(kernel.stem)_transpose(
$(parameters(kernel))) {
  // clang-format on
  __shared__ u32 slab[kDV * kKeyWords];
  constexpr int kColumnWords = kDV / 4;
//% if kernel.varlen
  const int slabs = (longest_k + kSlabColumns - 1) / kSlabColumns;
  const int head = blockIdx.x / slabs, first_key = blockIdx.x % slabs * kSlabColumns;
  const int sequence = head / kv_heads, kv_head = head % kv_heads;
  const int first_token = cu_seqlens_k[sequence];
  const int seq_kv = cu_seqlens_k[sequence + 1] - first_token;
  if (first_key >= seq_kv) return;
  v += first_token * v_strides.seq + kv_head * v_strides.head;
  const i64 slab_number = first_token / kScaleBlock + sequence + first_key / kSlabColumns;
  const i64 place = slab_number * kv_heads + kv_head;
//% else
  const int slabs = (max(seq_kv, 1) + kSlabColumns - 1) / kSlabColumns;
  const int head = blockIdx.x / slabs, first_key = blockIdx.x % slabs * kSlabColumns;
  v += head / kv_heads * v_strides.batch + head % kv_heads * v_strides.head;
//% endif
#pragma unroll
  for (int i = 0; i < kColumnWords * kKeyWords / kTransposers; ++i) {
    const int n = i * kTransposers + threadIdx.x;
    const int column = n % kColumnWords * 4, word = n / kColumnWords;
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const i64 key = first_key + key_at(4 * word + j);
      const bool inside = key < seq_kv && column < kHeadDimV;
//% if kernel.head_dim_v % 4
      words[j] = inside ? load_columns(v + key * v_strides.seq + column, kHeadDimV - column) : 0;
//% else
      words[j] = inside ? *reinterpret_cast<const u32*>(v + key * v_strides.seq + column) : 0;
//% endif
    }
    transpose_bytes(words);
#pragma unroll
    for (int j = 0; j < 4; ++j) slab[word_at(column + j, word)] = words[j];
  }
  __syncthreads();
  u32* rows = reinterpret_cast<u32*>(vt) + $("place" if kernel.varlen else "i64(blockIdx.x)") * (kDV + 1) * kKeyWords;
#pragma unroll 4
  for (int n = threadIdx.x; n < kDV * kKeyWords; n += kTransposers) {
    rows[n] = slab[word_at(n / kKeyWords, n % kKeyWords)];
  }
  if (threadIdx.x < kKeyWords) rows[kDV * kKeyWords + threadIdx.x] = 0x38383838;  // ones
}

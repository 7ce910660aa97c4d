// ---- Q, K and V, quantised ----------------------------------------------------------------------
// Real values are stored * scale: the largest magnitude that shares a scale factor becomes 448, the largest
// number of e4m3. Infinities saturate there, NaN stays NaN, and neither counts for the factor. A thread
// block takes kBlockRows rows of one head of Q, K or V into its registers: each is read once and written
// once, V transposed, as the main kernel multiplies it.
//% if kernel.incoherent
// Q and K are rotated first (incoherent processing, section 3.3 of the paper): every column gets a sign,
// then a Hadamard transform spreads each element over its row. Both rotated, Q K^T is what it was.
//% endif
//% set wide = kernel.head_dim % 16 != 0
//% set width = "kWide" if wide else "kHeadDim"
//% set ends_q = "cu_seqlens_q" if kernel.varlen else "seq_q"
//% set ends_k = "cu_seqlens_k" if kernel.varlen else "seq_kv"
//% set ragged = kernel.head_dim % 8 != 0 or kernel.head_dim_v % 8 != 0
using Input = u16;  // $(kernel.in_dtype)

constexpr int kBlockRows = 128;
constexpr int kQuantisers = $(kernel.quantisers);  // threads of a block
// On an SM: some load while others compute. Without a rotation two are enough, and need not spill.
constexpr int kQuantisingBlocks = kQuantisers > 256 ? 1 : $(3 if kernel.incoherent else 2);
constexpr int kEight = 8;  // elements of a 16-byte load
constexpr int kQuantiserBytes = kDV * kBlockRows + 64;  // a tile of V, and a number of each warp
//% if wide
constexpr int kWide = (kHeadDim + 15) / 16 * 16;  // columns of Q and K in e4m3, zeros at their ends
//% endif
constexpr float kLargest = 448.f;
constexpr float kSmallestScale = 1.17549435e-38f;  // of zeros, whose scale has a reciprocal too

//% if kernel.in_dtype == "fp16"
__device__ __forceinline__ float to_float(u16 x) { return ptx::cvt_f32_f16(x); }
//% else
__device__ __forceinline__ float to_float(u16 x) { return __uint_as_float(u32(x) << 16); }
//% endif

//% if ragged
// Eight elements of a row that may begin anywhere, of which so many are there, the others zeros; those
// that have a bit in `flips` change their sign.
__device__ __forceinline__ void load_eight(float (&x)[kEight], const Input* from, int count,
                                           u32 flips = 0) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const u32 loaded = i < count ? from[i] : 0;
    x[i] = to_float(u16(loaded ^ (flips >> i & 1) << 15));
  }
}

//% else
// Eight elements of a row, or zeros; those that have a bit in `flips` change their sign.
__device__ __forceinline__ void load_eight(float (&x)[kEight], const Input* from, bool inside,
                                           u32 flips = 0) {
  uint4 loaded = make_uint4(0, 0, 0, 0);
  if (inside) loaded = *reinterpret_cast<const uint4*>(from);
  const u32 pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
  const u32 spread = flips | flips << 15;  // the bits of a pair 16 apart, as its signs are
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const u32 pair = pairs[i / 2] ^ (spread << (15 - i / 2 * 2) & 0x80008000u);
    x[i] = to_float(u16(pair >> 16 * (i % 2)));
  }
}

//% endif
__device__ __forceinline__ u32 four_e4m3(float a, float b, float c, float d) {
  return ptx::cvt_e4m3x2(a, b) | u32(ptx::cvt_e4m3x2(c, d)) << 16;
}

//% if kernel.incoherent
// The signs of 32 columns, a bit each: drawn once, the same in every kernel.
__device__ __forceinline__ u32 signs_of(int word) {
  const u32 signs[] = {$(signs(kernel))};
  return signs[word];
}

//% endif
// A thread's share of rows of Q or K: kLanes neighbours take a row in turns, eight columns at a time.
template <int kWidth>
struct RowShare {
  static constexpr int kLanes = kWidth % 32 == 0 ? 4 : 2;
  static constexpr int kAtOnce = kQuantisers / kLanes;  // rows of all threads
  static constexpr int kRows = (kBlockRows + kAtOnce - 1) / kAtOnce;
  static constexpr int kChunks = kWidth / kEight / kLanes;
  static constexpr float kUnit = $(unit(kernel));  // what a 1 in x stands for
  float x[kRows][kChunks][kEight];

  __device__ __forceinline__ int row(int i) const { return i * kAtOnce + threadIdx.x / kLanes; }
  __device__ __forceinline__ int chunk(int j) const { return j * kLanes + threadIdx.x % kLanes; }
//% if kernel.incoherent
  __device__ __forceinline__ u32 flips(int j) const {
    return signs_of(j * kLanes / 4) >> chunk(j) % 4 * 8 & 0xff;
  }
//% else
  __device__ __forceinline__ u32 flips(int) const { return 0; }
//% endif
};

template <int kWidth>
__device__ __forceinline__ void load_rows(RowShare<kWidth>& share, const Input* from, i64 stride,
                                          int rows) {
#pragma unroll
  for (int i = 0; i < share.kRows; ++i) {
#pragma unroll
    for (int j = 0; j < share.kChunks; ++j) {
      const int row = share.row(i), column = share.chunk(j) * kEight;
//% if ragged
      const int count = row < rows ? kHeadDim - column : 0;
      load_eight(share.x[i][j], from + row * stride + column, count, share.flips(j));
//% elif wide
      const bool inside = row < rows && column < kHeadDim;
      load_eight(share.x[i][j], from + row * stride + column, inside, share.flips(j));
//% else
      load_eight(share.x[i][j], from + row * stride + column, row < rows, share.flips(j));
//% endif
    }
  }
}

template <int kWidth>
__device__ __forceinline__ void store_rows(const RowShare<kWidth>& share, Element* to, int rows,
                                           float inverse$(", int step" if kernel.varlen)) {
#pragma unroll
  for (int i = 0; i < share.kRows; ++i) {
#pragma unroll
    for (int j = 0; j < share.kChunks; ++j) {
      if (share.row(i) >= rows) continue;
      float x[kEight];
#pragma unroll
      for (int n = 0; n < kEight; ++n) x[n] = share.x[i][j][n] * inverse;
      Element* place = to + share.row(i) * $("step" if kernel.varlen else "kWidth") + share.chunk(j) * kEight;
      *reinterpret_cast<uint2*>(place) =
          make_uint2(four_e4m3(x[0], x[1], x[2], x[3]), four_e4m3(x[4], x[5], x[6], x[7]));
    }
  }
}
//% if kernel.incoherent

template <int kChunks>
using Row = float[kChunks][kEight];  // of a thread: n / kEight, n % kEight is its n-th element

// A stage of the transform: numbers whose places differ in one bit become their sum and difference.
template <int kChunks>
__device__ __forceinline__ void transform_within(Row<kChunks>& x, int apart) {
#pragma unroll
  for (int n = 0; n < kChunks * kEight; ++n) {
    if (n & apart) continue;
    float& low = x[n / kEight][n % kEight];
    float& high = x[(n + apart) / kEight % kChunks][(n + apart) % kEight];
    const float difference = low - high;
    low += high;
    high = difference;
  }
}

// The same where the bit tells neighbours apart.
template <int kChunks>
__device__ __forceinline__ void transform_across(Row<kChunks>& x, int apart) {
  const float sign = threadIdx.x & apart ? -1.f : 1.f;
#pragma unroll
  for (int n = 0; n < kChunks * kEight; ++n) {
    float& mine = x[n / kEight][n % kEight];
    mine = fmaf(sign, mine, __shfl_xor_sync(~0u, mine, apart));
  }
}

// Rows become their Hadamard transforms, every number sqrt(d) times what a rotation makes of it. Of a
// column's bits the lowest three are a thread's, the next its neighbours', the others its chunks'.
template <int kWidth>
__device__ __forceinline__ void rotate(RowShare<kWidth>& share) {
#pragma unroll
  for (int i = 0; i < share.kRows; ++i) {
    Row<share.kChunks>& x = share.x[i];
//% if wide
    // The whole row is one thread's.
#pragma unroll
    for (int apart = 1; apart < kHeadDim; apart *= 2) transform_within<share.kChunks>(x, apart);
//% else
#pragma unroll
    for (int apart = 1; apart < kEight; apart *= 2) transform_within<share.kChunks>(x, apart);
#pragma unroll
    for (int apart = 1; apart < share.kLanes; apart *= 2) transform_across<share.kChunks>(x, apart);
#pragma unroll
    for (int apart = kEight; apart < share.kChunks * kEight; apart *= 2) {
      transform_within<share.kChunks>(x, apart);
    }
//% endif
  }
}
//% endif

// A thread's share of a block of V: four keys that are neighbours in V transposed, eight columns of each.
struct ValueShare {
  static constexpr int kAtOnce = kQuantisers / kBlockRows * 4;  // groups of eight columns
  static constexpr int kGroups = (kDV / kEight + kAtOnce - 1) / kAtOnce;
  static constexpr float kUnit = 1.f;
  float x[kGroups][4][kEight];

  __device__ __forceinline__ int place() const { return threadIdx.x / 4 % 32 * 4; }
  __device__ __forceinline__ int column(int i) const {
    return (i * kAtOnce + threadIdx.x / kBlockRows * 4 + threadIdx.x % 4) * kEight;
  }
};

__device__ __forceinline__ void load_values(ValueShare& share, const Input* from, i64 stride,
                                            int rows) {
#pragma unroll
  for (int i = 0; i < share.kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = key_at(share.place() + j), column = share.column(i);
//% if ragged
      load_eight(share.x[i][j], from + key * stride + column, key < rows ? kHeadDimV - column : 0);
//% else
      load_eight(share.x[i][j], from + key * stride + column, key < rows && column < kHeadDimV);
//% endif
    }
  }
}

// A tile of V transposed in shared memory: rows of 128 keys, whose 16-byte chunks are permuted so that
// the words of four keys and those of eight columns meet in no bank.
__device__ __forceinline__ int transposed_at(int column, int place) {
  return column * kBlockRows + ((place / 16) ^ (column / kEight % 4 * 2)) * 16 + place % 16;
}

__device__ __forceinline__ void store_values(const ValueShare& share, unsigned char* tile,
                                             Element* to, float inverse) {
#pragma unroll
  for (int i = 0; i < share.kGroups; ++i) {
    if (share.column(i) >= kDV) continue;
#pragma unroll
    for (int n = 0; n < kEight; ++n) {
      const auto x = [&](int j) { return share.x[i][j][n] * inverse; };
      *reinterpret_cast<u32*>(tile + transposed_at(share.column(i) + n, share.place())) =
          four_e4m3(x(0), x(1), x(2), x(3));
    }
  }
  __syncthreads();
  for (int n = threadIdx.x; n < kDV * (kBlockRows / 16); n += kQuantisers) {
    const int column = n / 8, place = n % 8 * 16;
    *reinterpret_cast<uint4*>(to + column * kBlockRows + place) =
        *reinterpret_cast<const uint4*>(tile + transposed_at(column, place));
  }
  constexpr u32 kOnes = 0x38383838;  // the last row
  if (threadIdx.x < kBlockRows / 16) {
    *reinterpret_cast<uint4*>(to + kDV * kBlockRows + threadIdx.x * 16) =
        make_uint4(kOnes, kOnes, kOnes, kOnes);
  }
}

// The largest magnitude of some numbers that is `below` a limit: NaN never is.
template <int kRows, int kColumns>
__device__ __forceinline__ float largest_below(const float (&x)[kRows][kColumns][kEight],
                                               float below) {
  float found = 0.f;
#pragma unroll
  for (int n = 0; n < kRows * kColumns * kEight; ++n) {
    const float magnitude = fabsf(x[n / kEight / kColumns][n / kEight % kColumns][n % kEight]);
    if (magnitude < below) found = fmaxf(found, magnitude);
  }
  return found;
}

// The largest finite one: asked of each number only where there is an infinity.
template <int kRows, int kColumns>
__device__ __forceinline__ float largest(const float (&x)[kRows][kColumns][kEight]) {
  float found = 0.f;
#pragma unroll
  for (int n = 0; n < kRows * kColumns * kEight; ++n) {
    found = fmaxf(found, fabsf(x[n / kEight / kColumns][n / kEight % kColumns][n % kEight]));
  }
  return found < kInfinity ? found : largest_below(x, kInfinity);
}

// The largest number of all threads; `warps` has room for one of each warp.
__device__ __forceinline__ float largest_of_block(float x, float* warps) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kQuantisers / 32; ++i) x = fmaxf(x, warps[i]);
  return x;
}

__device__ __forceinline__ float scale_for(float most) {
  return fmaxf(most / kLargest, kSmallestScale);
}

// What a thread block takes: a block of rows of one head of Q, of K or of V.
struct Part {
  int tensor;  // 0, 1 or 2
  int head;  // of the whole batch
  int block;
};

struct Rows {
  const Input* from;
  i64 stride;
  int count;
//% if kernel.varlen
  i64 place;  // of the first among the packed ones, where each token has one for every head
  i64 block;  // theirs among all packed ones and heads, and where it is a slab of V
//% endif
};

__host__ __device__ __forceinline__ int blocks_of(int seq) {
  return (seq + kBlockRows - 1) / kBlockRows;
}

//% if kernel.varlen
// In the order of their numbers, if every sequence were as long as the longest.
//% else
// In the order of their numbers; V has a block where there are no keys, too.
//% endif
__device__ __forceinline__ Part part_of(int index, int q_heads, int kv_heads, int seq_q,
                                        int seq_kv) {
  const int of_q = q_heads * blocks_of(seq_q), of_k = kv_heads * blocks_of(seq_kv);
  const int tensor = index < of_q ? 0 : index < of_q + of_k ? 1 : 2;
  index -= tensor == 0 ? 0 : tensor == 1 ? of_q : of_q + of_k;
  const int blocks = blocks_of(tensor == 0 ? seq_q : max(seq_kv, 1));
  const int head = u32(index) / u32(blocks);
  return {tensor, head, index - head * blocks};
}

//% if kernel.varlen
// Past the end of a sequence there are none, or fewer.
__device__ __forceinline__ Rows rows_of(const Part& part, const Input* x, const Strides& strides,
                                        int heads, const int* cu_seqlens) {
  const int sequence = u32(part.head) / u32(heads), head = part.head - sequence * heads;
  const int begin = cu_seqlens[sequence], tokens = cu_seqlens[sequence + 1] - begin;
  const i64 first = i64(part.block) * kBlockRows, token = begin + first;
  const i64 block = begin / kBlockRows + sequence + part.block;
  x += head * strides.head + token * strides.seq;
  return {x, strides.seq, int(min(i64(kBlockRows), tokens - first)), token * heads + head,
          block * heads + head};
}

//% else
__device__ __forceinline__ Rows rows_of(const Part& part, const Input* x, const Strides& strides,
                                        int heads, int seq) {
  const i64 first = i64(part.block) * kBlockRows;
  const int batch = u32(part.head) / u32(heads), head = part.head - batch * heads;
  x += batch * strides.batch + head * strides.head + first * strides.seq;
  return {x, strides.seq, int(min(i64(kBlockRows), seq - first))};
}

//% endif
template <int kWidth>
__device__ __forceinline__ void load(RowShare<kWidth>& share, const Rows& rows) {
  load_rows(share, rows.from, rows.stride, rows.count);
//% if kernel.incoherent
  rotate(share);
//% endif
}

__device__ __forceinline__ void load(ValueShare& share, const Rows& rows) {
  load_values(share, rows.from, rows.stride, rows.count);
}

//% if kernel.scales == "block"
// The factor of the block's own largest magnitude, left behind for the main kernel.
template <typename Share>
__device__ __forceinline__ float scale_of(const Share& share, float* scale, float* warps,
                                          int rows) {
  const float found = scale_for(largest_of_block(largest(share.x) * share.kUnit, warps));
  if (threadIdx.x == 0 && rows > 0) *scale = found;
  return found;
}

// Where the factor of a part is.
//% if kernel.varlen
__device__ __forceinline__ i64 scale_at(const Part&, const Rows& rows) { return rows.block; }
//% else
__device__ __forceinline__ i64 scale_at(const Part& part, int seq) {
  return i64(part.head) * blocks_of(seq) + part.block;
}
//% endif
//% else
// The factor that the kernel before found.
template <typename Share>
__device__ __forceinline__ float scale_of(const Share&, const float* scale, float*, int) {
  return *scale;
}

//% if kernel.scales == "head"
__device__ __forceinline__ i64 scale_at(const Part& part, $("const Rows&" if kernel.varlen else "int")) { return part.head; }
//% else
__device__ __forceinline__ i64 scale_at(const Part&, $("const Rows&" if kernel.varlen else "int")) { return 0; }
//% endif

// The largest magnitude of every block of rows, in the order of the blocks.
// clang-format off
extern "C" __global__ void __launch_bounds__(kQuantisers, kQuantisingBlocks)
$(kernel.stem)_largest(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  const Part part = part_of(blockIdx.x, batch * heads, batch * kv_heads, $(longest_q(kernel)), $(longest_k(kernel)));
  const bool of_q = part.tensor == 0;
  float found;
  if (part.tensor < 2) {
    RowShare<$(width)> share;
    load(share, of_q ? rows_of(part, q, q_strides, heads, $(ends_q))
                     : rows_of(part, k, k_strides, kv_heads, $(ends_k)));
    found = largest(share.x) * share.kUnit;
  } else {
    ValueShare share;
    load(share, rows_of(part, v, v_strides, kv_heads, $(ends_k)));
    found = largest(share.x) * share.kUnit;
  }
  found = largest_of_block(found, reinterpret_cast<float*>(smem_raw));
  if (threadIdx.x == 0) most[blockIdx.x] = found;
}

// Every scale factor, from the largest magnitudes of the blocks that share it.
// clang-format off
extern "C" __global__ void __launch_bounds__(kQuantisers)
$(kernel.stem)_scales(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  const int q_heads = batch * heads, k_heads = batch * kv_heads;
//% if kernel.scales == "tensor"
  const Part part = {int(blockIdx.x), 0, 0};
  const int sharing = part.tensor == 0 ? q_heads : k_heads;
//% else
  const Part part = part_of(blockIdx.x, q_heads, k_heads, 1, 1);
  const int sharing = 1;
//% endif
//% if kernel.varlen
  const int seq = part.tensor == 0 ? longest_q : longest_k;
//% else
  const int seq = part.tensor == 0 ? seq_q : part.tensor == 1 ? seq_kv : max(seq_kv, 1);
//% endif
  const int count = sharing * blocks_of(seq);
  if (part.tensor > 0) most += q_heads * blocks_of($(longest_q(kernel)));
  if (part.tensor > 1) most += k_heads * blocks_of($(longest_k(kernel)));
  float found = 0.f;
  for (int i = threadIdx.x; i < count; i += kQuantisers) {
    found = fmaxf(found, most[i64(part.head) * count + i]);
  }
  found = largest_of_block(found, reinterpret_cast<float*>(smem_raw));
  float* scale = part.tensor == 0 ? q_scale : part.tensor == 1 ? k_scale : v_scale;
  if (threadIdx.x == 0) scale[part.head] = scale_for(found);
}
//% endif

// clang-format off
extern "C" __global__ void __launch_bounds__(kQuantisers, kQuantisingBlocks)
$(kernel.stem)_quantise(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  float* warps = reinterpret_cast<float*>(smem_raw + kDV * kBlockRows);
  const Part part = part_of(blockIdx.x, batch * heads, batch * kv_heads, $(longest_q(kernel)), $(longest_k(kernel)));
//% if not kernel.varlen
  const i64 first = i64(part.block) * kBlockRows;
//% endif
  const bool of_q = part.tensor == 0;
  if (part.tensor < 2) {
    const Rows rows = of_q ? rows_of(part, q, q_strides, heads, $(ends_q))
                           : rows_of(part, k, k_strides, kv_heads, $(ends_k));
//% if kernel.varlen
    if (rows.count <= 0) return;
//% else
    const int seq = of_q ? seq_q : seq_kv;
//% endif
    float* scale = (of_q ? q_scale : k_scale) + scale_at(part, $("rows" if kernel.varlen else "seq"));
    RowShare<$(width)> share;
    load(share, rows);
    const float inverse = 1.f / scale_of(share, scale, warps, rows.count) * share.kUnit;
//% if kernel.varlen
    Element* to = (of_q ? q8 : k8) + rows.place * $(width);
    store_rows(share, to, rows.count, inverse, (of_q ? heads : kv_heads) * $(width));
//% else
    Element* to = (of_q ? q8 : k8) + (i64(part.head) * seq + first) * $(width);
    store_rows(share, to, rows.count, inverse);
//% endif
  } else {
    const Rows rows = rows_of(part, v, v_strides, kv_heads, $(ends_k));
//% if kernel.varlen
    if (rows.count <= 0) return;
//% endif
    ValueShare share;
    load(share, rows);
    float* scale = v_scale + scale_at(part, $("rows" if kernel.varlen else "seq_kv"));
    const float inverse = 1.f / scale_of(share, scale, warps, rows.count) * share.kUnit;
//% if not kernel.varlen
    const i64 slab = i64(part.head) * blocks_of(max(seq_kv, 1)) + part.block;
//% endif
    store_values(share, smem_raw, vt + $("rows.block" if kernel.varlen else "slab") * (kDV + 1) * kBlockRows, inverse);
  }
}

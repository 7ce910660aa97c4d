// ---- Matrix products on the tensor cores --------------------------------------------------------
// Scores stand on their side: each warp owns kRowTiles x 16 keys, and lane 4 g + t holds keys g and
// g + 8 of each, and of every 8 queries 2t and 2t + 1. So P and dS go into the products that make
// dV and dK in the registers they came out in.
template <int kQueries>
using Scores = float[kRowTiles][kQueries / 8][4];
using Weights = u32[kStepQ / 16][kRowTiles][4];  // rounded, left operands of 16 queries each

// The warp's columns of dK or dV.
template <int kCols>
using Accumulator = float[kRowTiles][2 * warp_blocks(kCols)][4];

template <int kRows, int kTiles>
__device__ __forceinline__ void zero(float (&fragment)[kRows][kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRows * kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) fragment[i / kTiles][i % kTiles][r] = 0.f;
  }
}

// s = K Q^T, or V dO^T: the warp's keys against kQueries rows of queries. Beside 32 keys' dK and dV,
// or half of them, the loads of all steps at once would not fit the registers.
constexpr int kDepthUnroll = kRowTiles == 1 ? 8 : 2 * kSplit;

template <int kCols, int kQueries>
__device__ __forceinline__ void scores(Scores<kQueries>& s, const Element* keys,
                                       const Element* queries) {
  constexpr int kRowBytes = kCols * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  const int key = warp_keys() + lane % 16;
  const int query = lane / 16 * 8 + lane % 8;
  const u32 a_first = ptx::smem_address(chunk_at<kCols>(keys, key, lane / 16));
  const u32 b_first = ptx::smem_address(chunk_at<kCols>(queries, query, lane / 8 % 2));
  zero(s);
#pragma unroll kDepthUnroll
  for (int depth = 0; depth < kCols; depth += 16) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::ldmatrix_x4(a[i], along_row<kCols>(a_first, depth / 8) + 16 * i * kRowBytes);
    }
#pragma unroll
    for (int n = 0; n < kQueries; n += 16) {
      u32 b[4];
      ptx::ldmatrix_x4(b, along_row<kCols>(b_first, depth / 8) + n * kRowBytes);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(s[i][n / 8], a[i], b[0], b[1]);
        ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(s[i][n / 8 + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// The values, rounded, as a left operand from query `first` on: each lane already holds the right
// ones.
template <int kQueries>
__device__ __forceinline__ void round_weights(Weights& p, const Scores<kQueries>& s, int first) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kQueries / 4; ++i) {
    const int tile = i / (kQueries / 4), step = i / 4 % (kQueries / 16), part = i % 4;
    const float (&pair)[4] = s[tile][2 * step + part / 2];
    p[first / 16 + step][tile][part] = ptx::cvt_$(ptx_type(kernel.dtype))x2(pair[part % 2 * 2], pair[part % 2 * 2 + 1]);
  }
}

// sum += P^T dO, or dS^T Q, over 16 queries: weights times the warp's columns of their rows, whose
// first chunk lies at `rows`.
template <int kCols>
__device__ __forceinline__ void accumulate(Accumulator<kCols>& sum, const u32 (&p)[kRowTiles][4],
                                           u32 rows) {
#pragma unroll
  for (int n = 0; n < warp_blocks(kCols); ++n) {
    if (kCols / 16 % kSplit && warp_column(2 * n) >= kCols) break;
    u32 b[4];
    ptx::ldmatrix_x4_trans(b, along_row<kCols>(rows, 2 * kSplit * n));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(sum[i][2 * n], p[i], b[0], b[1]);
      ptx::mma_m16n8k16_$(ptx_type(kernel.dtype))(sum[i][2 * n + 1], p[i], b[2], b[3]);
    }
  }
}

// Where a lane's rows begin in a tile of queries, at the warp's columns.
template <int kCols>
__device__ __forceinline__ u32 columns_of(const Element* queries) {
  const int lane = threadIdx.x % 32;
  const int chunk = warp_column(0) / 8 + lane / 16;
  return ptx::smem_address(chunk_at<kCols>(queries, lane % 16, chunk));
}

//% if tile.p_in == "registers"
// sum += P^T dO, or dS^T Q, over a step of queries, from registers.
template <int kCols>
__device__ __forceinline__ void accumulate_step(Accumulator<kCols>& sum, const Weights& p,
                                                const Element* queries) {
  const u32 rows = columns_of<kCols>(queries);
#pragma unroll
  for (int i = 0; i < kStepQ / 16; ++i) {
    accumulate<kCols>(sum, p[i], rows + 16 * i * kCols * int(sizeof(Element)));
  }
}

//% else
// sum += P^T dO, or dS^T Q, over a tile of queries: weights as all warps left them, keys by queries.
template <int kCols>
__device__ __forceinline__ void accumulate_tile(Accumulator<kCols>& sum, const Element* weights,
                                                const Element* queries) {
  const int lane = threadIdx.x % 32;
  const u32 rows = columns_of<kCols>(queries);
  const u32 first =
      ptx::smem_address(chunk_at<kBlockQ>(weights, warp_keys() + lane % 16, lane / 16));
#pragma unroll 2
  for (int query = 0; query < kBlockQ; query += 16) {
    u32 p[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const u32 row = 16 * i * kBlockQ * int(sizeof(Element));
      ptx::ldmatrix_x4(p[i], along_row<kBlockQ>(first, query / 8) + row);
    }
    accumulate<kCols>(sum, p, rows + query * kCols * int(sizeof(Element)));
  }
}

//% endif
// Weights for the other warps: rows are keys, columns the queries of a tile, from `query` on these.
__device__ __forceinline__ void share_weights(Element* tile, const Weights& weights, int query) {
  const int lane = threadIdx.x % 32;
  const int key = warp_keys() + lane / 4;
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 4; ++i) {
    const int row_tile = i / (kStepQ / 4), step = i / 4 % (kStepQ / 16), part = i % 4;
    const int row = key + 16 * row_tile + part % 2 * 8;
    Element* chunk = chunk_at<kBlockQ>(tile, row, query / 8 + 2 * step + part / 2);
    *reinterpret_cast<u32*>(chunk + lane % 4 * 2) = weights[step][row_tile][part];
  }
}

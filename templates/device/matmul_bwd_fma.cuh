// ---- Matrix products in fp32, by fused multiply-add ---------------------------------------------
// The layout is that of the tensor cores. Scores stand on their side: each warp owns kRowTiles x 16
// keys, and lane 4 g + t holds keys g and g + 8 of each, and of every 8 queries 2t and 2t + 1.
template <int kQueries>
using Scores = float[kRowTiles][kQueries / 8][4];
using Weights = Scores<kStepQ>;

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

//% include "device/dots.cuh"

template <int kCols, typename T>
__device__ __forceinline__ T* element_at(T* tile, int row, int column) {
  return chunk_at<kCols>(tile, row, column / 4) + column % 4;
}

template <int kCols>
__device__ __forceinline__ float2 load_pair(const float* tile, int row, int column) {
  return *reinterpret_cast<const float2*>(element_at<kCols>(tile, row, column));
}

// Two neighbours of a row += four weights times four rows, which are summed before they meet the
// long sum: a quarter of its roundings.
__device__ __forceinline__ void add_dots(float* sum, const float (&w)[4], const float2 (&x)[4]) {
  sum[0] += dot(w, x[0].x, x[1].x, x[2].x, x[3].x);
  sum[1] += dot(w, x[0].y, x[1].y, x[2].y, x[3].y);
}

// s = K Q^T, or V dO^T: the warp's keys against kQueries rows of queries.
template <int kCols, int kQueries>
__device__ __forceinline__ void scores(Scores<kQueries>& s, const float* keys,
                                       const float* queries) {
  const int lane = threadIdx.x % 32;
  zero(s);
#pragma unroll 1
  for (int chunk = 0; chunk < kCols / 4; ++chunk) {
    float4 k[2 * kRowTiles];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      k[i] = load_chunk<kCols>(keys, warp_keys() + lane / 4 + 8 * i, chunk);
    }
#pragma unroll
    for (int n = 0; n < kQueries / 4; ++n) {
      const int query = n / 2 * 8 + lane % 4 * 2 + n % 2;
      const float4 q = load_chunk<kCols>(queries, query, chunk);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        float& sum = s[i / 2][n / 2][i % 2 * 2 + n % 2];
        sum = dot(k[i], q, sum);
      }
    }
  }
}

template <int kQueries>
__device__ __forceinline__ void round_weights(Weights& p, const Scores<kQueries>& s, int first) {
#pragma unroll
  for (int i = 0; i < kRowTiles * kQueries / 2; ++i) {
    const int tile = i / (kQueries / 2), n = i / 4 % (kQueries / 8);
    p[tile][first / 8 + n][i % 4] = s[tile][n][i % 4];
  }
}

// sum += P^T dO, or dS^T Q, over four queries from `query` on: weights times the warp's columns of
// their rows.
template <int kCols>
__device__ __forceinline__ void accumulate(Accumulator<kCols>& sum,
                                           const float (&weight)[2 * kRowTiles][4],
                                           const float* queries, int query) {
#pragma unroll
  for (int n = 0; n < 2 * warp_blocks(kCols); ++n) {
    if (kCols / 16 % kSplit && warp_column(n) >= kCols) break;
    float2 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = load_pair<kCols>(queries, query + i, warp_column(n) + threadIdx.x % 4 * 2);
    }
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) add_dots(&sum[i / 2][n][i % 2 * 2], weight[i], x);
  }
}

// sum += P^T dO, or dS^T Q, over a tile of queries: weights as all warps left them, keys by queries.
template <int kCols>
__device__ __forceinline__ void accumulate_tile(Accumulator<kCols>& sum, const float* weights,
                                                const float* queries) {
#pragma unroll 1
  for (int query = 0; query < kBlockQ; query += 4) {
    float weight[2 * kRowTiles][4];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int key = warp_keys() + 8 * i + threadIdx.x % 32 / 4;
      *reinterpret_cast<float4*>(weight[i]) = load_chunk<kBlockQ>(weights, key, query / 4);
    }
    accumulate<kCols>(sum, weight, queries, query);
  }
}

// Weights for the other warps: rows are keys, columns the queries of a tile, from `query` on these.
__device__ __forceinline__ void share_weights(float* tile, const Weights& weights, int query) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles * kStepQ / 4; ++i) {
    const int row_tile = i / (kStepQ / 4), n = i / 2 % (kStepQ / 8), half = i % 2;
    const int row = warp_keys() + 16 * row_tile + 8 * half + lane / 4;
    const float* pair = &weights[row_tile][n][2 * half];
    float* to = element_at<kBlockQ>(tile, row, query + 8 * n + lane % 4 * 2);
    *reinterpret_cast<float2*>(to) = make_float2(pair[0], pair[1]);
  }
}

// Attention as Hopper wants it, as small as it can be and still break in every way: one warpgroup
// brings tiles by TMA, two multiply and normalise 64 rows each, a block walks over several query
// tiles. bf16, d 128, not causal. PV of a tile is in flight while the next scores are normalised.
//% include "device/integers.cuh"

//% include "device/tensor_map.cuh"

//% for name in wrappers
//% include "ptx/" ~ name ~ ".cuh"
//% endfor
//% with type = "bf16", n = 128
//% for a in ("shared", "registers")
//% include "ptx/wgmma.cuh"
//% endfor
//% endwith
//% include "device/mbarrier.cuh"
//% include "device/matrix_descriptor.cuh"

constexpr int kD = 128, kBlockQ = 128, kBlockKV = 128, kStages = 2;
constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kSlab = 128 * 128;  // bytes of 128 rows of 64 columns
constexpr int kTile = 2 * kSlab;
constexpr float kInfinity = __builtin_huge_valf();

struct Barriers {
  u64 full_q, empty_q;
  u64 full_k[kStages], empty_k[kStages];
  u64 full_v[kStages], empty_v[kStages];
};

// Shared memory: Q, and O at the end; then the stages of K, and those of V.
__device__ __forceinline__ unsigned char* k_stage(unsigned char* smem, int stage) {
  return smem + kTile * (1 + stage);
}
__device__ __forceinline__ unsigned char* v_stage(unsigned char* smem, int stage) {
  return smem + kTile * (1 + kStages + stage);
}

// A tile of 128 rows comes as two slabs.
__device__ __forceinline__ void load(unsigned char* tile, const TensorMap* map, u64* full, int row,
                                     int head) {
  ptx::mbarrier_arrive_expect_tx(full, kTile);
  ptx::cp_async_bulk_tensor_3d(tile, map, full, 0, row, head);
  ptx::cp_async_bulk_tensor_3d(tile + kSlab, map, full, 64, row, head);
}

// s = Q K^T for 64 rows.
__device__ __forceinline__ void scores(float (&s)[64], u32 q, u32 k) {
  ptx::wgmma_fence_registers(s);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const u32 at = step / 4 * kSlab + step % 4 * 32;
    const u64 left = matrix_descriptor(q + at, 16, 1024, Swizzle::k128);
    const u64 right = matrix_descriptor(k + at, 16, 1024, Swizzle::k128);
    ptx::wgmma_m64k16_bf16(s, left, right, step > 0);
  }
  ptx::wgmma_commit_group();
}

// o += P V.
__device__ __forceinline__ void accumulate(float (&o)[64], const u32 (&p)[8][4], u32 v) {
  ptx::wgmma_fence_registers(o);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockKV / 16; ++step) {
    const u64 right = matrix_descriptor(v + step * 2048, kSlab, 1024, Swizzle::k128);
    ptx::wgmma_m64k16_bf16<1>(o, p[step], right, true);
  }
  ptx::wgmma_commit_group();
}

struct Rows {  // two for each lane
  float max[2], sum[2];
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// s becomes weights; `rescale` is what older sums and O are to be multiplied by.
__device__ __forceinline__ void normalise(float (&s)[64], Rows& rows, float (&rescale)[2], int keys,
                                          float scale_log2) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if (i / 4 * 8 + column + i % 2 >= keys) s[i] = -kInfinity;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = rows.max[half];
#pragma unroll
    for (int i = 0; i < 32; ++i) max = fmaxf(max, s[i / 2 * 4 + 2 * half + i % 2]);
    max = quad_max(max);
    rescale[half] = ptx::ex2((rows.max[half] - max) * scale_log2);
    rows.max[half] = max;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& x = s[i / 2 * 4 + 2 * half + i % 2];
      x = ptx::ex2((x - max) * scale_log2);
      sum += x;
    }
    rows.sum[half] = rows.sum[half] * rescale[half] + sum;
  }
}

__device__ __forceinline__ void round_weights(u32 (&p)[8][4], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i / 4][i % 4] = ptx::cvt_bf16x2(s[2 * i], s[2 * i + 1]);
}

// This warpgroup's 64 rows of O through its part of Q's tile.
__device__ __forceinline__ void store(unsigned char* tile, const TensorMap* map, float (&o)[64],
                                      const float (&inverse)[2], int consumer, int row, int head) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const u32 base = ptx::smem_address(tile);
  const int r = warp * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = inverse[i % 2];
      pairs[i] = ptx::cvt_bf16x2(o[8 * j + 2 * i] * factor, o[8 * j + 2 * i + 1] * factor);
    }
    const int chunk = 2 * j + lane / 16;
    const u32 at = base + chunk / 8 * kSlab + r * 128 + ((chunk % 8) ^ (r % 8)) * 16;
    ptx::stmatrix_x4(at, pairs);
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(1 + consumer, 128);
  if (threadIdx.x % 128 == 0) {
    ptx::cp_async_bulk_tensor_3d_store(map, tile, 0, row, head);
    ptx::cp_async_bulk_tensor_3d_store(map, tile + kSlab, 64, row, head);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
  }
}

// Stage and parity of the n-th tile that passes through a ring.
struct Turn {
  int stage;
  u32 parity;
};
__device__ __forceinline__ Turn turn_of(int n) { return {n % kStages, u32(n / kStages % 2)}; }

__device__ __forceinline__ void produce(unsigned char* smem, Barriers& barriers, const TensorMap* q,
                                        const TensorMap* k, const TensorMap* v, int tiles, int rows,
                                        int keys) {
  int n = 0, m = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++m) {
    const int row_tiles = (rows + kBlockQ - 1) / kBlockQ, head = tile / row_tiles;
    wait(&barriers.empty_q, (m & 1) ^ 1);
    load(smem, q, &barriers.full_q, tile % row_tiles * kBlockQ, head);
    for (int key = 0; key < keys; key += kBlockKV, ++n) {
      const Turn turn = turn_of(n);
      wait(&barriers.empty_k[turn.stage], turn.parity ^ 1);
      load(k_stage(smem, turn.stage), k, &barriers.full_k[turn.stage], key, head);
      wait(&barriers.empty_v[turn.stage], turn.parity ^ 1);
      load(v_stage(smem, turn.stage), v, &barriers.full_v[turn.stage], key, head);
    }
  }
}

__device__ __forceinline__ void consume(unsigned char* smem, Barriers& barriers, const TensorMap* o_map,
                                        float* lse, int consumer, int tiles, int rows, int keys,
                                        float scale_log2) {
  const bool leader = threadIdx.x % 128 == 0;
  unsigned char* q_tile = smem + consumer * 64 * 128;
  const u32 q = ptx::smem_address(q_tile);
  int n = 0, m = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++m) {
    const int row_tiles = (rows + kBlockQ - 1) / kBlockQ, head = tile / row_tiles;
    const int row = tile % row_tiles * kBlockQ + consumer * 64;
    float s[64], o[64];
    u32 p[8][4];
    Rows state = {{-kInfinity, -kInfinity}, {0.f, 0.f}};
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0.f;
    wait(&barriers.full_q, m & 1);
    Turn turn = turn_of(n);
    wait(&barriers.full_k[turn.stage], turn.parity);
    scores(s, q, ptx::smem_address(k_stage(smem, turn.stage)));
    ptx::wgmma_wait_group<0>();
    if (leader) ptx::mbarrier_arrive(&barriers.empty_k[turn.stage]);
    for (int key = 0; key < keys; key += kBlockKV, ++n) {
      float rescale[2];
      normalise(s, state, rescale, keys - key, scale_log2);
      ptx::wgmma_wait_group<0>();  // of the tile before
      if (leader && key > 0) ptx::mbarrier_arrive(&barriers.empty_v[turn_of(n - 1).stage]);
      round_weights(p, s);
#pragma unroll
      for (int i = 0; i < 64; ++i) o[i] *= rescale[i / 2 % 2];
      const Turn now = turn_of(n), next = turn_of(n + 1);
      const bool more = key + kBlockKV < keys;
      if (more) {
        wait(&barriers.full_k[next.stage], next.parity);
        scores(s, q, ptx::smem_address(k_stage(smem, next.stage)));
      }
      wait(&barriers.full_v[now.stage], now.parity);
      accumulate(o, p, ptx::smem_address(v_stage(smem, now.stage)));
      if (more) {
        ptx::wgmma_wait_group<1>();
        if (leader) ptx::mbarrier_arrive(&barriers.empty_k[next.stage]);
      }
    }
    ptx::wgmma_wait_group<0>();
    if (leader) ptx::mbarrier_arrive(&barriers.empty_v[turn_of(n - 1).stage]);
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      inverse[half] = ptx::rcp(sum);
      const int r = row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
      if (r < rows && threadIdx.x % 4 == 0) {
        lse[head * rows + r] = state.max[half] * scale_log2 + ptx::lg2(sum);
      }
    }
    store(q_tile, o_map, o, inverse, consumer, row, head);
    if (leader) ptx::mbarrier_arrive(&barriers.empty_q);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                     const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                     float* lse, int heads, int rows, int keys, float scale_log2) {
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  __shared__ Barriers barriers;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barriers.full_q, 1);
    ptx::mbarrier_init(&barriers.empty_q, kConsumers);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&barriers.full_k[i], 1);
      ptx::mbarrier_init(&barriers.empty_k[i], kConsumers);
      ptx::mbarrier_init(&barriers.full_v[i], 1);
      ptx::mbarrier_init(&barriers.empty_v[i], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int tiles = heads * ((rows + kBlockQ - 1) / kBlockQ);
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == 0) produce(smem_raw, barriers, &q, &k, &v, tiles, rows, keys);
  } else {
    ptx::setmaxnreg_inc<240>();
    const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    consume(smem_raw, barriers, &o, lse, consumer, tiles, rows, keys, scale_log2);
  }
}

// FlashAttention-2, forward, for few queries against many keys: split keys (Flash-Decoding, Dao,
// Haziza, Massa and Sizov 2023).
//
// Few queries make few thread blocks, and few rows keep few warps busy: what is left to divide are
// the keys, twice. `splits` blocks share the tiles of keys that a block of queries sees; in a block
// each warp scores its own keys of every tile against all the rows. Both leave a row in parts: an
// output that is not normalised, a maximum, a sum. The warps' are merged in shared memory, those
// of the blocks by a second kernel, a warp a row. Heads that share keys and values are packed into
// one tile of rows, so K and V are read once for all of them.
//
//   paper   here                    paper   here
//   B_r     kBlockQ packed rows     T_r     row_blocks
//   B_c     kBlockKV                T_c     kv_tiles, of them this split's: tiles
//   O~      o_part                  m, l    m_part, l_part
//   S, P    s, p                    L       lse

//% include "device/types.cuh"

// ---- Constants ----------------------------------------------------------------------------------
//% include "parts/constants.cuh"
constexpr int kSlots = $(2 * tile.stages);  // ring of tiles in shared memory: K, V, K, V …
constexpr int kSlotElements = kBlockKV * (kD > kDV ? kD : kDV);
constexpr int kQElements = kBlockQ * (kD > kDV ? kD : kDV);

static_assert((kQElements + kSlots * kSlotElements) * sizeof(Element) == kSmemBytes,
              "shared memory as planned");

// ---- Instructions -------------------------------------------------------------------------------
//% include "ptx/smem_address.cuh"
//% include "ptx/cp_async.cuh"
//% include "ptx/ex2.cuh"
//% include "ptx/lg2.cuh"
//% if kernel.dtype != "fp32"
//% include "ptx/ldmatrix_x4.cuh"
//% for name in matrix_instructions(kernel)
//% include "ptx/" ~ name ~ ".cuh"
//% endfor
//% endif

//% include "device/words.cuh"

//% include "device/tile.cuh"

//% include "device/copy_async.cuh"

//% include "device/copy.cuh"

//% include "device/copy_packed.cuh"

//% include "device/fragments.cuh"

//% if kernel.dtype == "fp32"
//% include "device/matmul_fma.cuh"
//% else
//% include "device/matmul_mma.cuh"

//% include "device/values_" ~ ("e4m3" if kernel.dtype == "e4m3" else "mma") ~ ".cuh"
//% endif

//% include "device/rows.cuh"

//% include "device/softmax.cuh"

//% include "device/mask_packed.cuh"

//% include "device/parts.cuh"

static_assert(kWarps * kBlockQ * kPartColumns * sizeof(float) <= kSmemBytes,
              "the warps' parts fit where Q and the ring were");

//% include "device/combine.cuh"

// ---- Kernels ------------------------------------------------------------------------------------
// clang-format off
extern "C" __global__ void __maxnreg__(kRegisters)
$(kernel.stem)(
$(parameters(kernel))) {
  // clang-format on
  extern __shared__ __align__(128) unsigned char smem_raw[];
  Element* q_tile = reinterpret_cast<Element*>(smem_raw);

  // This block's rows: neighbours walk the same keys.
  const int group = heads / kv_heads;
  const int row_blocks = (group * seq_q + kBlockQ - 1) / kBlockQ;
  const int first_row = blockIdx.x % row_blocks * kBlockQ;
  const int rows = min(kBlockQ, group * seq_q - first_row);
  const int split = blockIdx.x / row_blocks % splits;
  const int kv_head = blockIdx.x / row_blocks / splits % kv_heads;
  const i64 batch = blockIdx.x / row_blocks / splits / kv_heads;
  q += batch * q_strides.batch + i64(kv_head) * group * q_strides.head;
  k += batch * k_strides.batch + kv_head * k_strides.head;
  v += batch * v_strides.batch + kv_head * v_strides.head;

  // Its share of the tiles that any of them sees, as a stream K, V, K, V … through the ring.
  const int last_query = (first_row + rows - 1) / group;
  const int keys = max(0, visible_keys(last_query, seq_q, seq_kv));
  const i64 kv_tiles = (keys + kBlockKV - 1) / kBlockKV;
  const int first_tile = kv_tiles * split / splits;
  const int tiles = kv_tiles * (split + 1) / splits - first_tile;
  const auto slot = [&](int t) { return q_tile + kQElements + t % kSlots * kSlotElements; };
  const auto load = [&](int t) {
    const i64 key = i64(first_tile + t / 2) * kBlockKV;
    if (t < 2 * tiles && t % 2 == 0) {
      const Element* source = k + key * k_strides.seq;
      copy_tile<kBlockKV, kD, kHeadDim>(slot(t), source, k_strides.seq, seq_kv - key);
    } else if (t < 2 * tiles) {
      const Element* source = v + key * v_strides.seq;
      copy_tile<kBlockKV, kDV, kHeadDimV, kSwizzledV>(slot(t), source, v_strides.seq, seq_kv - key);
    }
    ptx::cp_async_commit_group();  // an empty group keeps the count in step
  };
  // Tile t has arrived, and every warp is done with tile t - 1, whose slot is then filled again.
  const auto advance = [&](int t) {
    ptx::cp_async_wait_group<kSlots - 2>();
    __syncthreads();
    load(t + kSlots - 1);
  };

  copy_packed(q_tile, q, q_strides, group, first_row, rows);
  for (int t = 0; t < kSlots - 1; ++t) load(t);

  Scores s;
  Weights p;
  Accumulator o_acc;
  RowState row;
  zero(o_acc);
  reset(row);
  const int warp = threadIdx.x / 32;
  const RowLimits limits = row_limits(first_row, group, seq_q, seq_kv);
  const int unmasked = visible_keys(first_row / group, seq_q, seq_kv);
  for (int j = 0; j < tiles; ++j) {
    const int key = (first_tile + j) * kBlockKV + warp * kStepKV;
    advance(2 * j);
    scores(s, q_tile, slot(2 * j) + warp * kStepKV * kD);
    if (key + kStepKV > unmasked) mask_scores(s, limits, key);
    weigh(p, s, o_acc, row, scale_log2);
    advance(2 * j + 1);
    accumulate(o_acc, p, slot(2 * j + 1) + warp * kStepKV * kDV);
  }

  ptx::cp_async_wait_group<0>();
  __syncthreads();  // Q and the ring are free for the parts
  float* parts = reinterpret_cast<float*>(smem_raw);
  store_part(parts + warp * kBlockQ * kPartColumns, o_acc, row);
  __syncthreads();
  for (int r = warp; r < rows; r += kWarps) {
    const i64 head = kv_head * group + (first_row + r) % group;
    const i64 query = (first_row + r) / group;
    const i64 part = ((batch * heads + head) * seq_q + query) * splits + split;
    merge_warps(parts + r * kPartColumns, scale_log2, o_part + part * kHeadDimV, m_part + part,
                l_part + part);
  }
}

// One block an SM is enough: so the compiler takes the registers to have many loads in flight.
// clang-format off
extern "C" __global__ void __launch_bounds__(32, 1)
$(kernel.stem)_combine(
$(parameters(kernel))) {
  // clang-format on
  const int lane = threadIdx.x;
  const i64 row = blockIdx.x;
  const i64 query = row % seq_q, head = row / seq_q % heads, batch = row / seq_q / heads;
  o += batch * o_strides.batch + head * o_strides.head + query * o_strides.seq;
  o_part += row * splits * kHeadDimV;
  m_part += row * splits;
  l_part += row * splits;

  float max = -kInfinity;
  for (int split = lane; split < splits; split += 32) max = fmaxf(max, m_part[split]);
  max = warp_max(max);
  float sum = 0.f;
  float sums[kLaneColumns] = {};
  for (int first = 0; first < splits; first += 32) {
    float weight = 0.f;
    if (first + lane < splits) {
      weight = ptx::ex2((m_part[first + lane] - reference_of(max)) * scale_log2);
      sum += weight * l_part[first + lane];
    }
    add_parts(sums, o_part + first * kHeadDimV, weight, splits - first);
  }
  sum = warp_sum(sum);
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    if (32 * c + lane < kHeadDimV) o[32 * c + lane] = rounded(sums[c] * inverse);
  }
  if (lane == 0) lse[row] = log_sum_exp(max, sum, scale_log2);
}

//% include "parts/main.cu"

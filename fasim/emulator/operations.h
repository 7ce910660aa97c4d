// What each instruction does. PTX ISA 9.0, section 9.7, names the fragments and the rounding.
#pragma once
#include <cmath>

#include "calls.h"
#include "engine.h"
#include "memory.h"
#include "products.h"
#include "tma.h"
#include "warp.h"
#include "wgmma.h"

namespace emulator {

inline u32 at_line(u32 line) { return kLine | line; }

// ---- Shuffles and votes. PTX ISA: shfl.sync, vote.sync

struct ShuffleOperands {
  Shuffle how;
  u64 value;
  u64 result;
  int by;
  int width;
};

// The lane that another lane reads from: itself where that would lie outside its segment. Only xor
// may reach into an earlier segment.
inline u32 source_lane(u32 lane, const ShuffleOperands& operands) {
  const int width = operands.width, by = operands.by;
  const int first = int(lane) & ~(width - 1), last = first + width - 1;
  const int from = operands.how == kFrom   ? first + (by & (width - 1))
                   : operands.how == kUp   ? int(lane) - by
                   : operands.how == kDown ? int(lane) + by
                                           : int(lane) ^ by;
  const int least = operands.how == kXor ? 0 : first;
  return u32(from >= least && from <= last ? from : int(lane));
}

inline void act_shuffle(Worker& worker, Warp& warp, const Group& group) {
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(group.arrived >> lane & 1)) continue;
    auto& mine = *static_cast<ShuffleOperands*>(const_cast<void*>(group.operands[lane]));
    const u32 from = source_lane(lane, mine);
    if (!(group.arrived >> from & 1)) {
      worker.fail(&worker.thread(32 * warp.index + lane), "lanes diverge", group.call.place,
                  "it reads lane %u, which takes no part in the shuffle", from);
    }
    mine.result = static_cast<const ShuffleOperands*>(group.operands[from])->value;
  }
  ++worker.operation(kShuffle).count;
}

struct VoteOperands {
  Vote how;
  bool predicate;
  u32 result;
};

inline void act_vote(Worker& worker, Warp&, const Group& group) {
  u32 ballot = 0;
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(group.arrived >> lane & 1)) continue;
    ballot |= u32(static_cast<const VoteOperands*>(group.operands[lane])->predicate) << lane;
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(group.arrived >> lane & 1)) continue;
    auto& mine = *static_cast<VoteOperands*>(const_cast<void*>(group.operands[lane]));
    const u32 all = ballot == group.arrived, any = ballot != 0;
    mine.result = mine.how == kBallot ? ballot : mine.how == kAll ? all : any;
  }
  ++worker.operation(kVote).count;
}

// ---- Order

struct BarrierOperands {
  u32 id;
  u32 threads;
  bool sleep;
};

inline void act_barrier(Worker& worker, Warp& warp, const Group& group) {
  const u32 lane = u32(std::countr_zero(group.arrived));
  const auto& operands = *static_cast<const BarrierOperands*>(group.operands[lane]);
  ++worker.operation(kBarrier).count;
  worker.arrive(warp, group.arrived, operands.id, operands.threads, operands.sleep,
                group.call.place);
}

inline void act_syncwarp(Worker& worker, Warp& warp, const Group& group) {
  ++worker.operation(kSyncwarp).count;
  worker.sync_lanes(warp, group.arrived);
}

// ---- ldmatrix. Lane i of 8 m + r gives the address of row r of matrix m; lane 4 g + t receives
// columns 2t, 2t + 1 of row g, transposed: rows 2t, 2t + 1 of column g.

struct LdmatrixOperands {
  u32* r;
  u32 matrices;
  bool transposed;
  u32 row;
};

inline void act_ldmatrix(Worker& worker, Warp& warp, const Group& group) {
  const auto of = [&](u32 lane) -> const LdmatrixOperands& {
    return *static_cast<const LdmatrixOperands*>(group.operands[lane]);
  };
  const u32 matrices = of(0).matrices;
  u16 rows[4][8][8];
  u32 addresses[32], ideal = 0;
  for (u32 lane = 0; lane < 8 * matrices; ++lane) {
    addresses[lane] = of(lane).row;
    worker.load_row(worker.thread(32 * warp.index + lane), addresses[lane], 16, group.call.place);
    std::memcpy(rows[lane / 8][lane % 8], worker.from_window(addresses[lane]), 16);
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    const u32 g = lane / 4, t = lane % 4 * 2;
    for (u32 m = 0; m < matrices; ++m) {
      const u16 low = of(0).transposed ? rows[m][t][g] : rows[m][g][t];
      const u16 high = of(0).transposed ? rows[m][t + 1][g] : rows[m][g][t + 1];
      of(lane).r[m] = low | u32(high) << 16;
    }
  }
  Operation& operation = worker.operation(kLdmatrix);
  const u32 rows_given = matrices == 4 ? ~0u : (1u << 8 * matrices) - 1;
  const u32 needed = wavefronts(addresses, rows_given, 16, ideal);
  ++operation.count;
  operation.bytes += 128 * matrices;
  operation.wavefronts += needed;
  operation.conflicts += needed - ideal;
}

// ---- stmatrix: the same the other way round

struct StmatrixOperands {
  const u32* r;
  u32 matrices;
  bool transposed;
  u32 row;
};

inline void act_stmatrix(Worker& worker, Warp& warp, const Group& group) {
  const auto of = [&](u32 lane) -> const StmatrixOperands& {
    return *static_cast<const StmatrixOperands*>(group.operands[lane]);
  };
  const u32 matrices = of(0).matrices;
  u16 rows[4][8][8];
  for (u32 lane = 0; lane < 32; ++lane) {
    const u32 g = lane / 4, t = lane % 4 * 2;
    for (u32 m = 0; m < matrices; ++m) {
      const u32 pair = of(lane).r[m];
      (of(0).transposed ? rows[m][t][g] : rows[m][g][t]) = u16(pair);
      (of(0).transposed ? rows[m][t + 1][g] : rows[m][g][t + 1]) = u16(pair >> 16);
    }
  }
  u32 addresses[32], ideal = 0;
  for (u32 lane = 0; lane < 8 * matrices; ++lane) {
    addresses[lane] = of(lane).row;
    worker.store_row(worker.thread(32 * warp.index + lane), addresses[lane], 16, group.call.place);
    std::memcpy(worker.from_window(addresses[lane]), rows[lane / 8][lane % 8], 16);
  }
  Operation& operation = worker.operation(kStmatrix);
  const u32 rows_given = matrices == 4 ? ~0u : (1u << 8 * matrices) - 1;
  const u32 needed = wavefronts(addresses, rows_given, 16, ideal);
  ++operation.count;
  operation.bytes += 128 * matrices;
  operation.wavefronts += needed;
  operation.conflicts += needed - ideal;
}

// ---- Products of a warpgroup

inline void act_wgmma(Worker& worker, Warp& warp, const Group& group) {
  worker.keep_step(warp, group.call, "wgmma.mma_async");
  worker.meet_warpgroup(warp, group);
}
inline void act_wgmma_fence(Worker& worker, Warp& warp, const Group& group) {
  worker.keep_step(warp, group.call, "wgmma.fence");
  worker.order_registers(warp);
}
inline void act_wgmma_commit(Worker& worker, Warp& warp, const Group& group) {
  worker.keep_step(warp, group.call, "wgmma.commit_group");
  worker.commit_products(warp);
}
inline void act_wgmma_wait(Worker& worker, Warp& warp, const Group& group) {
  worker.keep_step(warp, group.call, "wgmma.wait_group");
  worker.wait_products(warp, *static_cast<const u32*>(group.operands[0]), group.call.place);
}

struct RegisterOperands {
  u32 registers;
  bool more;
};

inline void act_setmaxnreg(Worker& worker, Warp& warp, const Group& group) {
  const auto& operands = *static_cast<const RegisterOperands*>(group.operands[0]);
  worker.keep_step(warp, group.call, "setmaxnreg");
  worker.set_registers(warp, operands.registers, operands.more, group.call.place);
}

inline void act_elect(Worker& worker, Warp&, const Group&) { ++worker.operation(kVote).count; }

// ---- mma.sync, m16n8. Hopper does e4m3 as two halves in f16, and adds the accumulator last.

struct MmaOperands {
  float* d;
  const u32* a;
  const u32* b;
};

// A lane's registers of A cover rows g and g + 8, of B column g; register r of a row begins at
// column count * (4 r + t). Of C it holds columns 2t, 2t + 1 of both rows.
template <Type kType, u32 kDepth>
void gather(Operands<kDepth>& all, const Group& group) {
  using P = Packed<kType>;
  constexpr u32 kRegisters = kDepth / (4 * P::kCount);
  for (u32 lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const MmaOperands*>(group.operands[lane]);
    const u32 g = lane / 4, t = lane % 4;
    for (u32 r = 0; r < kRegisters; ++r) {
      for (u32 i = 0; i < P::kCount; ++i) {
        const u32 k = P::kCount * (4 * r + t) + i;
        all.a[g][k] = P::value(mine.a[2 * r], i);
        all.a[g + 8][k] = P::value(mine.a[2 * r + 1], i);
        all.b[k][g] = P::value(mine.b[r], i);
      }
    }
    for (u32 r = 0; r < 4; ++r) all.c[g + r / 2 * 8][2 * t + r % 2] = mine.d[r];
  }
}

template <u32 kDepth>
void scatter(const Operands<kDepth>& all, const Group& group) {
  for (u32 lane = 0; lane < 32; ++lane) {
    float* d = static_cast<const MmaOperands*>(group.operands[lane])->d;
    for (u32 r = 0; r < 4; ++r) d[r] = all.c[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2];
  }
}

template <Type kType, u32 kDepth>
void act_mma(Worker& worker, Warp&, const Group& group) {
  Operands<kDepth> all;
  gather<kType>(all, group);
  multiply(all, kType == kF16 ? -14 : -126);
  scatter(all, group);
  ++worker.operation(kMma).count;
}

// The first half are columns 0, 1 of every four, the second columns 2, 3.
inline void act_mma_e4m3(Worker& worker, Warp&, const Group& group) {
  Operands<32> all;
  gather<kE4m3>(all, group);
  Operands<16> half{};
  for (u32 second = 0; second < 2; ++second) {
    for (u32 k = 0; k < 16; ++k) {
      const u32 from = k / 2 * 4 + 2 * second + k % 2;
      for (u32 row = 0; row < 16; ++row) half.a[row][k] = all.a[row][from];
      std::copy_n(all.b[from], 8, half.b[k]);
    }
    multiply(half, -14);
  }
  for (u32 i = 0; i < 16 * 8; ++i) {
    float& c = all.c[i / 8][i % 8];
    c = plain_nan(half.c[i / 8][i % 8] + c);
  }
  scatter(all, group);
  ++worker.operation(kMma).count;
}

template <u32 kDepth>
auto mma_of(Type type) {
  return type == kF16 ? act_mma<kF16, kDepth> : act_mma<kBf16, kDepth>;
}

// ---- The calls of the kernel

#define HERE __builtin_return_address(0)

inline Dim3 dim3_of(Index i) { return {i.x, i.y, i.z}; }

Dim3 thread_index() { return dim3_of(Worker::here().thread().position); }
Dim3 block_index() { return dim3_of(Worker::here().block_index()); }
Dim3 block_dim() {
  const u32* size = Worker::here().launch().request.block;
  return {size[0], size[1], size[2]};
}
Dim3 grid_dim() {
  const u32* size = Worker::here().launch().request.grid;
  return {size[0], size[1], size[2]};
}

unsigned long long clock64() { return Worker::here().tick(); }

void barrier(unsigned id, unsigned threads, bool sleep, unsigned line) {
  const BarrierOperands operands{id, threads, sleep};
  Worker::here().together({kBarrier, HERE, kLiving, at_line(line), act_barrier}, &operands);
}

void syncwarp(unsigned mask, unsigned line) {
  Worker::here().together({kSyncwarp, HERE, mask, at_line(line), act_syncwarp}, nullptr);
}

unsigned long long shuffle(Shuffle how, unsigned mask, unsigned long long value, int by, int width,
                           unsigned line) {
  ShuffleOperands operands{how, value, 0, by, width};
  Worker::here().together({kShuffle, HERE, mask, at_line(line), act_shuffle}, &operands);
  return operands.result;
}

unsigned vote(Vote how, unsigned mask, bool predicate, unsigned line) {
  VoteOperands operands{how, predicate, 0};
  Worker::here().together({kVote, HERE, mask, at_line(line), act_vote}, &operands);
  return operands.result;
}

unsigned smem_address(const void* pointer, unsigned line) {
  return Worker::here().window(pointer, at_line(line));
}

void cp_async(void* smem, const void* global, unsigned bytes, bool valid, unsigned line) {
  Worker::here().copy(smem, global, bytes, valid, at_line(line));
}

void cp_async_commit_group(unsigned line) { Worker::here().commit(at_line(line)); }

void cp_async_wait_group(unsigned groups, unsigned line) {
  Worker::here().wait(groups, at_line(line));
}

void ldmatrix(unsigned* r, unsigned matrices, bool transposed, unsigned row, unsigned line) {
  const LdmatrixOperands operands{r, matrices, transposed, row};
  Worker::here().together({kLdmatrix, HERE, ~0u, at_line(line), act_ldmatrix}, &operands);
}

void mma(Type type, unsigned depth, float* d, const unsigned* a, const unsigned* b, unsigned line) {
  const MmaOperands operands{d, a, b};
  const auto act = type == kE4m3 ? act_mma_e4m3 : depth == 8 ? mma_of<8>(type) : mma_of<16>(type);
  Worker::here().together({kMma, HERE, ~0u, at_line(line), act}, &operands);
}

void stmatrix(unsigned row, const unsigned* r, unsigned matrices, bool transposed, unsigned line) {
  const StmatrixOperands operands{r, matrices, transposed, row};
  Worker::here().together({kStmatrix, HERE, ~0u, at_line(line), act_stmatrix}, &operands);
}

void wgmma(const ProductOperands& operands, unsigned line) {
  Worker::here().together({kWgmma, HERE, ~0u, at_line(line), act_wgmma}, &operands);
}

void wgmma_fence(unsigned line) {
  Worker::here().together({kWgmma, HERE, ~0u, at_line(line), act_wgmma_fence}, nullptr);
}

void wgmma_commit_group(unsigned line) {
  Worker::here().together({kWgmma, HERE, ~0u, at_line(line), act_wgmma_commit}, nullptr);
}

void wgmma_wait_group(unsigned groups, unsigned line) {
  Worker::here().together({kWait, HERE, ~0u, at_line(line), act_wgmma_wait}, &groups);
}

void setmaxnreg(unsigned registers, bool more, unsigned line) {
  const RegisterOperands operands{registers, more};
  Worker::here().together({kWait, HERE, ~0u, at_line(line), act_setmaxnreg}, &operands);
}

bool elect_sync(unsigned line) {
  Worker& worker = Worker::here();
  worker.together({kVote, HERE, ~0u, at_line(line), act_elect}, nullptr);
  return worker.thread().lane() == 0;
}

// ---- Barriers in shared memory and TMA

void mbarrier_init(const void* mbarrier, unsigned count, unsigned line) {
  Worker::here().init_mbarrier(mbarrier, count, at_line(line));
}

void mbarrier_arrive(const void* mbarrier, unsigned arrivals, long long bytes, unsigned line) {
  Worker::here().arrive_at(mbarrier, arrivals, bytes, at_line(line));
}

bool mbarrier_try_wait(const void* mbarrier, unsigned parity, unsigned) {
  return Worker::here().try_wait(mbarrier, parity, place_of(HERE));  // who calls the loop around it
}

void fence_mbarrier_init(unsigned) { Worker::here().fence_mbarriers(); }

void fence_proxy_async(unsigned) { Worker::here().fence_proxy(); }

void load_box(void* smem, const void* map, const void* mbarrier, const int* at, unsigned rank,
              unsigned line) {
  Worker::here().load_box(smem, map, mbarrier, at, rank, at_line(line));
}

void store_box(const void* map, const void* smem, const int* at, unsigned rank, bool adds,
               unsigned line) {
  Worker::here().store_box(map, smem, at, rank, adds, at_line(line));
}

void load_bulk(void* smem, const void* global, unsigned bytes, const void* mbarrier,
               unsigned line) {
  Worker::here().load_bulk(smem, global, bytes, mbarrier, at_line(line));
}

void store_bulk(void* global, const void* smem, unsigned bytes, bool adds, unsigned line) {
  Worker::here().store_bulk(global, smem, bytes, adds, at_line(line));
}

void bulk_commit_group(unsigned) { Worker::here().commit_stores(); }

void bulk_wait_group(unsigned groups, bool only_read, unsigned) {
  Worker::here().wait_stores(groups, only_read);
}

// ---- Numbers of one thread

inline float flushed(float x) {  // .ftz: a subnormal number counts as zero
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x;
}

inline void count_one(Kind kind, unsigned line) {
  Worker& worker = Worker::here();
  worker.keep_going(at_line(line));
  ++worker.operation(kind).count;
  worker.trace(kind, at_line(line));
}

float ex2(float x, unsigned line) {
  count_one(kEx2, line);
  return flushed(std::exp2(flushed(x)));
}

float lg2(float x, unsigned line) {
  count_one(kLg2, line);
  return std::log2(x);
}

float rcp(float x, unsigned line) {
  count_one(kRcp, line);
  return flushed(1 / flushed(x));
}

unsigned cvt_pair(Type type, float low, float high, unsigned line) {
  count_one(kCvt, line);
  if (type == kE4m3) return E4m3::encode(low, true) | E4m3::encode(high, true) << 8;
  if (type == kBf16) return Bfloat::encode(low) | Bfloat::encode(high) << 16;
  return Half::encode(low, false) | Half::encode(high, false) << 16;
}

float cvt_from(Type type, unsigned code, unsigned line) {
  count_one(kCvt, line);
  return type == kF16 ? Half::value(u16(code)) : Bfloat::value(u16(code));
}

unsigned cvt_f16x2_e4m3x2(unsigned pair, unsigned line) {
  count_one(kCvt, line);
  const auto half = [](u32 code) { return Half::encode(E4m3::decode(code), false); };
  return half(pair & 0xff) | half(pair >> 8 & 0xff) << 16;
}

// ---- Atomics. PTX ISA: atom, red; relaxed, they order nothing else; ld.acquire, red.release

void before_addition(const float* address, u32 count, unsigned line) {
  Worker::here().update(address, count * sizeof(float), at_line(line));
  Worker::here().in_order(address, count, at_line(line));
}

float atom_add(float* global, float x, unsigned line) {
  before_addition(global, 1, line);
  return add_to(global, x);
}
void atom_add_x4(float* global, const float (&x)[4], unsigned line) {
  before_addition(global, 4, line);
  for (int i = 0; i < 4; ++i) add_to(global + i, x[i]);
}
unsigned atom_add(unsigned* global, unsigned x, unsigned line) {
  Worker::here().update(global, sizeof x, at_line(line));
  Worker::here().count_move();
  return add_to(global, x);
}

unsigned ld_acquire(const unsigned* global, unsigned line) {
  return Worker::here().load_acquire(global, at_line(line));
}
void red_release_add(unsigned* global, unsigned x, unsigned line) {
  Worker::here().add_release(global, x, at_line(line));
}

void trap(unsigned line) {
  Worker& worker = Worker::here();
  worker.fail(&worker.thread(), "trap", at_line(line), "the kernel gave up");
}

#undef HERE

}  // namespace emulator

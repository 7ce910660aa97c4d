// Matrix products of a warpgroup, its registers, and what must be waited for.
// PTX ISA: wgmma.mma_async, wgmma.fence, wgmma.commit_group, wgmma.wait_group, setmaxnreg
//
// A product is made when its group is waited for, no sooner: until then its sums are poison, its
// operands in shared memory are being read, and registers that it needs are held.
#pragma once
#include "engine.h"
#include "memory.h"
#include "products.h"
#include "tma.h"

namespace emulator {

constexpr u32 kWarpgroup = 128;  // threads

// ---- Matrices in shared memory. PTX ISA: matrix-descriptor, strides and canonical layouts

struct Layout {
  u32 start, leading, stride, base, swizzle;

  explicit Layout(u64 descriptor)
      : start(u32(descriptor & 0x3fff) << 4),
        leading(u32(descriptor >> 16 & 0x3fff) << 4),
        stride(u32(descriptor >> 32 & 0x3fff) << 4),
        base(u32(descriptor >> 49 & 7)),
        swizzle(u32(descriptor >> 62)) {}

  u32 span() const { return kSwizzleSpan[swizzle]; }

  // The 16-byte chunk that begins with depth 16 c bytes of row (or column) n.
  u32 along_depth(u32 n, u32 c) const {
    const u32 step = swizzle ? 16 : leading;
    return swizzled(start + n / 8 * stride + n % 8 * span() + c * step, swizzle, base);
  }

  // ... that begins with row (or column) n, a multiple of 8, at depth k, where those are contiguous.
  u32 across_depth(u32 n, u32 k) const {
    const u32 each = span() / 2;  // elements of 16 bits in a span
    if (!swizzle) return start + k / 8 * leading + n / 8 * stride + k % 8 * 16;
    const u32 at = start + n / each * leading + k / 8 * stride + k % 8 * span() + n % each * 2;
    return swizzled(at, swizzle, base);
  }
};

// Calls f(address, n, k) for each chunk of an operand of `rows` rows (or columns): it holds depths k
// and on of row n; or, transposed, rows n and on at depth k.
template <typename F>
void for_each_chunk(const Layout& layout, u32 rows, bool transposed, Type type, F f) {
  const u32 each = type == kE4m3 ? 16 : 8, depth = 2 * each;
  if (!transposed) {
    for (u32 n = 0; n < rows; ++n) {
      for (u32 c = 0; c < 2; ++c) f(layout.along_depth(n, c), n, c * each);
    }
    return;
  }
  for (u32 k = 0; k < depth; ++k) {
    for (u32 n = 0; n < rows; n += 8) f(layout.across_depth(n, k), n, k);
  }
}

// ---- Arithmetic

// Rows of both operands as numbers, the right one in blocks of 8 columns.
template <Type kType, typename Find>
struct Matrices {
  static constexpr u32 kDepth = kType == kE4m3 ? 32 : 16;
  float a[64][kDepth];
  float b[32][kDepth][8];

  Matrices(const Product& product, Find find) {
    const ProductKind& kind = product.kind;
    if (kind.a_in_registers) {
      from_registers(product.a);
    } else {
      gather(Layout(kind.a), 64, kind.transpose_a, find,
             [this](u32 n, u32 k, float x) { a[n][k] = x; });
    }
    gather(Layout(kind.b), kind.columns, kind.transpose_b, find,
           [this](u32 n, u32 k, float x) { b[n / 8][k][n % 8] = x; });
  }

 private:
  using P = Packed<kType>;

  template <typename Set>
  static void gather(const Layout& layout, u32 rows, bool given, Find find, Set set) {
    const bool transposed = kType != kE4m3 && given;  // bytes cannot be
    for_each_chunk(layout, rows, transposed, kType, [&](u32 address, u32 n, u32 k) {
      u32 words[4];
      std::memcpy(words, find(address), 16);
      for (u32 i = 0; i < 4 * P::kCount; ++i) {
        const float x = P::value(words[i / P::kCount], i % P::kCount);
        transposed ? set(n + i, k, x) : set(n, k + i, x);
      }
    });
  }

  // As for mma: warp w holds rows 16 w to 16 w + 15.
  void from_registers(const std::vector<u32>& registers) {
    for (u32 i = 0; i < 4 * kWarpgroup; ++i) {
      const u32 thread = i / 4, g = thread % 32 / 4, t = thread % 4, r = i % 4;
      for (u32 e = 0; e < P::kCount; ++e) {
        a[thread / 32 * 16 + g + r % 2 * 8][P::kCount * (4 * (r / 2) + t) + e] =
            P::value(registers[i], e);
      }
    }
  }
};

// Where element (row, column) of 64 x 2 count sums lies: by thread, in the order of its registers.
inline u32 place_of(u32 row, u32 column, u32 count) {
  const u32 thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return thread * count + column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
}

template <Type kType, typename Find>
void multiply_as(const Product& product, float* sums, Find find) {
  using M = Matrices<kType, Find>;
  constexpr int kLowest = kType == kF16 ? -14 : kType == kE4m3 ? -6 : -126;
  const ProductKind& kind = product.kind;
  const auto found = std::make_unique<const M>(product, find);  // too large for a fiber's stack
  const M& given = *found;
  Operands<M::kDepth, 64> all;
  std::memcpy(all.a, given.a, sizeof all.a);
  for (u32 n = 0; n < kind.columns / 8; ++n) {
    std::memcpy(all.b, given.b[n], sizeof all.b);
    for (u32 i = 0; i < 64 * 8; ++i) {
      const float* sum = sums + place_of(i / 8, 8 * n + i % 8, kind.columns / 2);
      all.c[i / 8][i % 8] = kind.add ? *sum : 0.f;
    }
    multiply(all, kLowest, kType == kE4m3 ? kBitsKeptE4m3 : kBitsKept);
    for (u32 i = 0; i < 64 * 8; ++i) {
      sums[place_of(i / 8, 8 * n + i % 8, kind.columns / 2)] = all.c[i / 8][i % 8];
    }
  }
}

// sums = A B, or sums += A B. `find` leads from a shared address to memory.
template <typename Find>
void multiply(const Product& product, float* sums, Find find) {
  switch (product.kind.type) {
    case kF16:
      return multiply_as<kF16>(product, sums, find);
    case kBf16:
      return multiply_as<kBf16>(product, sums, find);
    case kE4m3:
      return multiply_as<kE4m3>(product, sums, find);
  }
}

// ---- In step. PTX ISA, .aligned: all threads in the warpgroup execute the same instruction

// The warps of a warpgroup need not come at the same time, but each to the same instructions one after
// the other. A warp that waits by itself, say, is noticed at the next.
inline void Worker::keep_step(Warp& warp, const Call& call, const char* name) {
  const u32 index = warp.index / 4, number = warp.steps++;
  Warpgroup& group = warpgroups_[index];
  if (number - group.over == group.steps.size()) {
    group.steps.push_back({call.site, name, call.place, warp.index, 0});
  }
  Step& step = group.steps[number - group.over];
  if (step.site != call.site) {
    fail(&lane(warp, ~0u), "warps diverge", call.place,
         "of the instructions for a whole warpgroup, %s here is number %u of warp %u; that of warp "
         "%u "
         "is %s @%08x%s",
         name, number + 1, warp.index, step.warp, step.name, step.place,
         step.place == call.place ? ", at another call of the function" : "");
  }
  const u32 members = std::min(4u, launch_->warps() - 4 * index);
  for (u32 w = 4 * index; w < 4 * index + members; ++w) {
    if (warps_[w].alive || warps_[w].steps > number) continue;
    fail(&lane(warp, ~0u), "warps diverge", call.place,
         "%s is for a whole warpgroup, and warp %u has exited without it", name, w);
  }
  if (++step.count < members) return;
  group.steps.pop_front();
  ++group.over;
}

// At the end of a warp.
inline void Worker::check_steps(const Thread& thread) {
  const Warp& warp = warp_of(thread);
  const Warpgroup& group = warpgroups_[warp.index / 4];
  if (warp.steps == group.over + group.steps.size()) return;
  const Step& step = group.steps[warp.steps - group.over];
  fail(&thread, "warps diverge", step.place,
       "%s is for a whole warpgroup: warp %u executed it, and warp %u exits without it", step.name,
       step.warp, warp.index);
}

// ---- Issue

// The warps of a warpgroup meet at a product; the last to come issues it.
inline void Worker::meet_warpgroup(Warp& warp, const Group& lanes) {
  const u32 index = warp.index / 4, bit = 1u << warp.index % 4;
  Warpgroup& group = warpgroups_[index];
  if (kWarpgroup * (index + 1) > launch_->threads()) {
    fail(&lane(warp, ~0u), "lanes diverge", lanes.call.place, "a warpgroup is four whole warps");
  }
  group.place = lanes.call.place;
  std::copy_n(lanes.operands, 32, group.operands + warp.index % 4 * 32);
  group.arrived |= bit;
  if (group.arrived != 15) return sleep(warp);
  group.arrived = 0;
  issue(group, index);
  for (u32 w = 0; w < 4; ++w) rouse(warps_[4 * index + w]);
}

inline ProductKind kind_of(const void* operands) {
  const auto& one = *static_cast<const ProductOperands*>(operands);
  return {one.type,         one.columns, one.transpose_a,  one.transpose_b,
          one.a != nullptr, one.add,     one.a_descriptor, one.b_descriptor};
}

inline void Worker::issue(Warpgroup& group, u32 index) {
  const ProductKind kind = kind_of(group.operands[0]);
  const u32 first = kWarpgroup * index, place = group.place;
  Product product{kind, warps_[4 * index].product_group, 0, {}};
  for (u32 t = 0; t < kWarpgroup; ++t) {
    Thread& thread = threads_[first + t];
    const auto& mine = *static_cast<const ProductOperands*>(group.operands[t]);
    if (kind_of(&mine) != kind || warp_of(thread).product_group != product.group) {
      fail(&thread, "lanes diverge", place,
           "threads of a warpgroup give other descriptors, or have closed other groups before");
    }
    check_registers(thread, mine.d, kind.columns / 2 * 4, place);
    if (mine.a) check_registers(thread, mine.a, 16, place);
  }
  const Access by = access(group, index, product.group, place);
  if (!kind.a_in_registers) check_operand(by, first, kind, true);
  check_operand(by, first, kind, false);
  product.accumulator = accumulator_of(group, index, product);
  for (u32 t = 0; t < kWarpgroup; ++t) {
    const auto& mine = *static_cast<const ProductOperands*>(group.operands[t]);
    hold(threads_[first + t], mine.d, kind.columns / 2 * 4, product.group, place, true);
    if (!mine.a) continue;
    hold(threads_[first + t], mine.a, 16, product.group, place, false);
    product.a.insert(product.a.end(), mine.a, mine.a + 4);
  }
  Operation& operation = counts.operations[kWgmma];
  operation.count += kind.columns / 8;
  operation.bytes += 32 * (kind.columns + (kind.a_in_registers ? 0 : 64));
  group.products.push_back(std::move(product));
}

// The products of a warpgroup are an agent of the async proxy, which knows what all threads know.
inline Access Worker::access(Warpgroup& group, u32 index, u32 epoch, u32 place) {
  return {Access::kNobody, agents().products(index),  epoch, place, agents(), false, true,
          nullptr,         common_clock(group, index)};
}

inline Clock* Worker::common_clock(Warpgroup& group, u32 index) {
  std::vector<Clock*> sources;
  for (u32 t = 0; t < kWarpgroup; ++t) {
    Clock* clock = threads_[kWarpgroup * index + t].clock;
    if (std::find(sources.begin(), sources.end(), clock) == sources.end()) sources.push_back(clock);
  }
  if (sources == group.sources) return group.common;
  forget(group);
  group.common = clocks_.copy(sources[0]);
  for (Clock* clock : sources) {
    clocks_.meet(group.common, clock);
    ++clock->references;  // or another could come to stand at its address
  }
  clocks_.seal(group.common);
  group.sources = std::move(sources);
  return group.common;
}

inline void Worker::forget(Warpgroup& group) {
  for (Clock* clock : group.sources) clocks_.drop(clock);
  if (group.common) clocks_.drop(group.common);
  group.sources.clear();
  group.common = nullptr;
}

// ---- Operands in shared memory

inline void Worker::check_operand(const Access& by, u32 first, const ProductKind& kind, bool left) {
  Thread& thread = threads_[first];
  const Layout layout(left ? kind.a : kind.b);
  const char* name = left ? "A" : "B";
  const u32 rows = left ? 64 : kind.columns;
  const bool transposed = left ? kind.transpose_a : kind.transpose_b;
  check_strides(thread, layout, rows, transposed, name, by.place);
  u32 agent = Access::kNobody, epoch = 0;
  for_each_chunk(layout, rows, transposed, kind.type, [&](u32 address, u32, u32) {
    const i64 offset = from_address(address);
    if (offset < 0 || beyond(u64(offset), 16)) {
      fail(&thread, "out of bounds", by.place,
           "operand %s reads shared address %u, outside the launch's shared memory", name, address);
    }
    const Conflict conflict = shared_shadow_.read(by, u64(offset), 16);
    if (conflict.what) race(thread, conflict, by, "shared", dynamic_, false);
    const u32 writer = shared_shadow_.agent_at(u64(offset));
    const u32 time = shared_shadow_.epoch_at(u64(offset));
    if (agent == Access::kNobody) {
      agent = writer, epoch = time;
      check_swizzle(thread, u64(offset), agent, epoch, layout.swizzle, name, by.place);
    }
    const bool boxes = by.agents.is_mbarrier(agent) || by.agents.is_mbarrier(writer);
    if (!boxes || (agent == writer && epoch == time)) return;
    fail(&thread, "operand outside its tile", by.place,
         "operand %s begins in one tile and also reads [[shared+%zu]], which belongs to another: "
         "start %u, leading %u, stride %u, %u rows",
         name, std::size_t(offset) - dynamic_, layout.start, layout.leading, layout.stride, rows);
  });
}

// A swizzle repeats after 8 rows, so whatever is used of the offsets is a multiple of those.
inline void Worker::check_strides(const Thread& thread, const Layout& layout, u32 rows,
                                  bool transposed, const char* name, u32 place) {
  const u32 repeats = 8 * layout.span();
  const bool strides = transposed || rows > 8;
  const bool leads = transposed && 2 * rows > layout.span();
  if (!layout.swizzle) return;
  if ((!strides || (layout.stride && layout.stride % repeats == 0)) &&
      (!leads || (layout.leading && layout.leading % repeats == 0))) {
    return;
  }
  fail(&thread, "descriptor mismatch", place,
       "operand %s has leading offset %u and stride %u; its swizzle of %u bytes repeats every %u",
       name, layout.leading, layout.stride, layout.span(), repeats);
}

inline void Worker::check_swizzle(const Thread& thread, std::size_t offset, u32 agent, u32 epoch,
                                  u32 swizzle, const char* name, u32 place) {
  for (const Fill& fill : fills_) {
    if (offset < fill.begin || offset >= fill.end) continue;
    if (fill.agent != agent || fill.epoch != epoch || fill.swizzle == kUnknownSwizzle) continue;
    if (fill.swizzle == swizzle) continue;
    fail(&thread, "swizzle mismatch", place,
         "operand %s is described with a swizzle of %u bytes, and TMA wrote it with %u @%08x "
         "(16: none)",
         name, kSwizzleSpan[swizzle], kSwizzleSpan[fill.swizzle], fill.place);
  }
}

// ---- Registers

// What the kernel does to a thread's own memory: it may be registers that a product needs.
inline void Worker::touch_own(const u8* address, u32 size, bool write, u32 place) {
  if (!moment_) return;
  Thread& thread = *current_;
  const std::size_t word = u64(address) % kRegion / 4;
  if (write) {
    for (u32 i = 0; i < std::max(1u, size / 4); ++i) written_[word + i] = moment_;
  }
  if (address >= thread.held_end || address + size <= thread.held_begin) return;
  for (const Held& held : thread.held) {
    if (address >= held.end || address + size <= held.begin) continue;
    if (held.sums) {
      fail(&thread, "accumulator in flight", place,
           "it %s register %u of the product @%08x, whose group nobody waited for",
           write ? "writes" : "reads", u32(address - held.begin) / 4, held.place);
    }
    if (!write) continue;
    fail(&thread, "operand in flight", place,
         "it writes register %u of operand A of the product @%08x, whose group nobody waited for",
         u32(address - held.begin) / 4, held.place);
  }
}

// wgmma.fence: products from here on see what the warp did to its registers.
inline void Worker::order_registers(Warp& warp) {
  ++moment_;
  for (u32 t = 0; t < 32; ++t) threads_[32 * warp.index + t].ordered = moment_;
}

inline void Worker::check_registers(Thread& thread, const void* registers, u32 bytes, u32 place) {
  const std::size_t first = u64(registers) % kRegion / 4;
  for (u32 i = 0; i < bytes / 4; ++i) {
    if (thread.ordered && written_[first + i] < thread.ordered) continue;
    fail(&thread, "missing wgmma fence", place,
         "register %u of the product was written, and no wgmma.fence followed", i);
  }
}

inline void Worker::hold(Thread& thread, const void* registers, u32 bytes, u32 group, u32 place,
                         bool sums) {
  const u8* begin = static_cast<const u8*>(registers);
  for (Held& held : thread.held) {
    if (held.begin != begin || held.sums != sums) continue;
    held.group = group, held.place = place;
    return;
  }
  if (thread.held.empty()) thread.held_begin = thread.held_end = begin;
  thread.held.push_back({begin, begin + bytes, group, place, sums});
  thread.held_begin = std::min(thread.held_begin, begin);
  thread.held_end = std::max(thread.held_end, begin + bytes);
}

inline void Worker::let_go(Thread& thread) {
  const u32 done = thread.done.products;
  std::erase_if(thread.held, [done](const Held& held) { return held.group <= done; });
  if (thread.held.empty()) thread.held_begin = thread.held_end = nullptr;
}

// ---- Sums

// The sums that a product adds to: those of a product in flight with the same registers, or what
// the registers hold now.
inline u32 Worker::accumulator_of(Warpgroup& group, u32 index, const Product& product) {
  const auto d_of = [&](u32 t) {
    return static_cast<const ProductOperands*>(group.operands[t])->d;
  };
  const u32 count = product.kind.columns / 2;
  u32 free = u32(group.sums.size());
  for (u32 i = 0; i < group.sums.size(); ++i) {
    Accumulator& sums = group.sums[i];
    if (!sums.count) free = i;
    if (!sums.count || sums.registers[0] != d_of(0)) continue;
    if (sums.count != count || sums.taken) {
      fail(&threads_[kWarpgroup * index], "accumulator in flight", group.place,
           "the product @%08x, of another shape or not waited for by all warps, adds to these "
           "registers",
           sums.place);
    }
    sums.group = product.group;
    return i;
  }
  if (free == group.sums.size()) group.sums.emplace_back();
  Accumulator& sums = group.sums[free];
  sums.count = count, sums.group = product.group, sums.taken = 0, sums.place = group.place;
  sums.sums.resize(kWarpgroup * count);
  for (u32 t = 0; t < kWarpgroup; ++t) {
    sums.registers[t] = d_of(t);
    std::copy_n(d_of(t), count, sums.sums.data() + t * count);
    std::memset(d_of(t), 0xff, 4 * count);
  }
  return free;
}

inline void Worker::commit_products(Warp& warp) { ++warp.product_group; }

inline void Worker::wait_products(Warp& warp, u32 groups, u32 place) {
  const u32 newest = warp.product_group - 1;
  if (newest < groups) return;
  const u32 up_to = newest - groups;
  Warpgroup& group = warpgroups_[warp.index / 4];
  make_sums(group, up_to);
  for (u32 t = 0; t < 32; ++t) {
    Thread& thread = threads_[32 * warp.index + t];
    thread.done.products = std::max(thread.done.products, up_to);
    let_go(thread);
  }
  take_back(group, warp, up_to, place);
}

inline void Worker::make_sums(Warpgroup& group, u32 up_to) {
  auto product = group.products.begin();
  for (; product != group.products.end() && product->group <= up_to; ++product) {
    Accumulator& sums = group.sums[product->accumulator];
    multiply(*product, sums.sums.data(), [this](u32 address) { return from_window(address); });
  }
  group.products.erase(group.products.begin(), product);
}

// Finished sums return to the registers of a warp, where they must not have been touched.
inline void Worker::take_back(Warpgroup& group, Warp& warp, u32 up_to, u32 place) {
  const u32 bit = 1u << warp.index % 4;
  for (Accumulator& sums : group.sums) {
    if (!sums.count || sums.group > up_to || (sums.taken & bit)) continue;
    for (u32 t = 0; t < 32; ++t) {
      const u32 at = warp.index % 4 * 32 + t;
      const auto poison = [](float x) { return std::bit_cast<u32>(x) == ~0u; };
      if (!std::all_of(sums.registers[at], sums.registers[at] + sums.count, poison)) {
        fail(&threads_[32 * warp.index + t], "accumulator in flight", place,
             "registers of the product @%08x were written before it was waited for", sums.place);
      }
      std::copy_n(sums.sums.data() + at * sums.count, sums.count, sums.registers[at]);
    }
    sums.taken |= bit;
    if (sums.taken == 15) sums.count = 0;
  }
}

// ---- The block's registers. PTX ISA: setmaxnreg

inline void Worker::set_registers(Warp& warp, u32 registers, bool more, u32 place) {
  const bool wrong = more ? registers < warp.registers : registers > warp.registers;
  if (wrong) {
    fail(&lane(warp, ~0u), "register pool overdrawn", place,
         "setmaxnreg.%s to %u registers, and its threads have %u", more ? "inc" : "dec", registers,
         warp.registers);
  }
  if (more) {
    warp.wanted = registers, warp.wanted_place = place;
    sleep(warp);
  } else {
    spare_registers_ += 32 * (warp.registers - registers);
    warp.registers = registers;
  }
  grant_registers();
}

inline void Worker::grant_registers() {
  for (Warp& warp : warps_) {
    const u32 need = warp.wanted ? 32 * (warp.wanted - warp.registers) : 0;
    if (!warp.wanted || need > spare_registers_) continue;
    spare_registers_ -= need;
    warp.registers = std::exchange(warp.wanted, 0);
    rouse(warp);
  }
}

}  // namespace emulator

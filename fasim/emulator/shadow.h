// The shadow of a stretch of memory: for each of its bytes who wrote it last and who has read it.
#pragma once
#include <sys/mman.h>

#include <bit>
#include <new>

#include "clock.h"

namespace emulator {

// Zeroed memory that takes up no room before it is touched.
template <typename T>
class Sparse {
 public:
  Sparse() = default;
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  ~Sparse() { release(); }

  void resize(std::size_t count) {
    release();
    bytes_ = std::max<std::size_t>(count * sizeof(T), 1);
    const auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(memory);
  }

  T& operator[](std::size_t i) { return data_[i]; }
  T* at(std::size_t i) { return data_ + i; }

 private:
  void release() {
    if (data_) munmap(data_, bytes_);
    data_ = nullptr;
  }

  T* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// How far a thread's own work in the background is known to it to be done, and what of its work the
// async proxy sees.
struct Progress {
  u32 copies, reads, stores, products;  // groups
  u32 fenced, fenced_copies;
};

// Who accesses, as far as the shadow must know: a thread of a warp with its clock (kNobody: many
// threads, with what all of them know), and the agent and epoch under which the access is filed (the
// thread's own, or those of its work in the background). `async` is the proxy of TMA and wgmma.
struct Access {
  static constexpr u32 kNobody = ~0u;

  u32 thread;
  u32 agent;
  u32 epoch;
  u32 place;
  Agents agents;
  bool atomic;
  bool async;
  const Progress* own;
  const Clock* clock;

  u32 warp() const { return thread / 32; }
  u32 lane() const { return thread % 32; }

  bool knows(u32 other, u32 time) const {
    if (other == thread || clock->seen[other] >= time) return true;
    return own && own_time(other) >= time;
  }

  // Whether what a generic agent wrote has passed a proxy fence.
  bool sees(u32 other, u32 time) const {
    if (clock->fenced[other] >= time) return true;
    if (!own) return false;
    return other == thread ? own->fenced >= time
                           : other == agents.copies(thread) && own->fenced_copies >= time;
  }

 private:
  u32 own_time(u32 other) const {
    if (other == agents.copies(thread)) return own->copies;
    if (other == agents.reads(thread)) return own->reads;
    if (other == agents.stores(thread)) return own->stores;
    return other == agents.products(thread / 128) ? own->products : 0;
  }
};

// An earlier access that a new one is not ordered after.
struct Conflict {
  enum What { kNone, kUninitialised, kWrite, kRead, kUnfenced } what = kNone;
  u32 agent = 0;
  u32 place = 0;
  std::size_t offset = 0;
};

class Shadow {
 public:
  void resize(std::size_t bytes, u32 warps) {
    bytes_ = bytes;
    warps_ = warps;
    writers_.resize(bytes);
    write_places_.resize(bytes / 4 + 1);
    readers_.resize(bytes * slots());
    read_places_.resize((bytes / 4 + 1) * slots());
  }

  // Everything before `floor` is forgotten. Bytes that `known` does not name hold nothing.
  void begin(u32 floor, const u8* known) {
    floor_ = floor;
    known_ = known;
    used_ = 0;
  }

  // Adds what was written to what is known.
  void learn(u8* known) {
    for (std::size_t i = 0; i < bytes_; ++i) known[i] |= epoch_at(i) >= floor_;
  }

  bool written(std::size_t offset, u32 size) {
    for (u32 i = 0; i < size; ++i) {
      if (epoch_at(offset + i) < floor_ && !given(offset + i)) return false;
    }
    return true;
  }

  u32 epoch_at(std::size_t offset) { return epoch_of(writers_[offset]); }
  u32 agent_at(std::size_t offset) { return agent_of(writers_[offset]); }

  Conflict read(const Access& by, std::size_t offset, u32 size) {
    const u64* cell = writers_.at(offset);
    for (u32 i = 0; i < size; ++i) {
      if (i && cell[i] == cell[i - 1]) continue;
      if (epoch_of(cell[i]) < floor_) {
        if (!given(offset + i)) return {Conflict::kUninitialised, 0, 0, offset + i};
      } else if (const auto what = unseen_writer(by, cell[i])) {
        return {what, agent_of(cell[i]), write_places_[(offset + i) / 4], offset + i};
      }
    }
    const u32 slot = slot_of(by);
    u64* readers = readers_.at(slot * bytes_ + offset);
    const u64 mark = u64(by.epoch) << 32, reader = reader_of(by);
    for (u32 i = 0; i < size; ++i) {
      const bool joins = slot < warps_ && epoch_of(readers[i]) == by.epoch;
      readers[i] = (joins ? readers[i] : mark) | reader;
    }
    use(slot);
    place(read_places_.at(slot * (bytes_ / 4 + 1)), offset, size, by.place);
    return {};
  }

  Conflict write(const Access& by, std::size_t offset, u32 size) {
    u64* cell = writers_.at(offset);
    for (u32 i = 0; i < size; ++i) {
      if (i && cell[i] == cell[i - 1]) continue;
      const auto what = epoch_of(cell[i]) >= floor_ ? unseen_writer(by, cell[i]) : Conflict::kNone;
      if (what) return {what, agent_of(cell[i]), write_places_[(offset + i) / 4], offset + i};
    }
    u64 slots = __atomic_load_n(&used_, __ATOMIC_RELAXED);
    for (; slots; slots &= slots - 1) {
      const Conflict conflict = unseen_reader(by, u32(std::countr_zero(slots)), offset, size);
      if (conflict.what) return conflict;
    }
    const u64 mark = u64(by.epoch) << 32 | u64(by.agent) << 16 | u64(by.atomic);
    for (u32 i = 0; i < size; ++i) cell[i] = mark;
    place(write_places_.at(0), offset, size, by.place);
    return {};
  }

 private:
  bool given(std::size_t offset) const { return known_ && known_[offset]; }
  static u32 epoch_of(u64 cell) { return u32(cell >> 32); }
  static u32 agent_of(u64 cell) { return u32(cell >> 16) & 0xffff; }

  // Readers have a slot for each warp, one for each warpgroup's products, and one for bulk stores.
  u32 slots() const { return warps_ + kWarpgroups + 1; }

  u32 slot_of(const Access& by) const {
    if (by.agents.is_reads(by.agent)) return warps_ + kWarpgroups;
    return by.async ? warps_ + by.agent - by.agents.products(0) : by.warp();
  }

  // Blocks on several system threads share the shadow of an array.
  void use(u32 slot) {
    const u64 bit = u64(1) << slot;
    if (~__atomic_load_n(&used_, __ATOMIC_RELAXED) & bit) {
      __atomic_fetch_or(&used_, bit, __ATOMIC_RELAXED);
    }
  }

  // In a reader's cell: lanes of a warp; nothing, as the slot says who it is; or a thread.
  static u64 reader_of(const Access& by) {
    if (by.agents.is_reads(by.agent)) return by.thread;
    return by.async ? 0 : u64(1) << by.lane();
  }

  static Conflict::What unseen_writer(const Access& by, u64 cell) {
    const u32 agent = agent_of(cell), epoch = epoch_of(cell);
    if (by.atomic && (cell & 1)) return Conflict::kNone;
    if (!by.knows(agent, epoch)) return Conflict::kWrite;
    const bool crosses = by.async && by.agents.generic(agent);
    return crosses && !by.sees(agent, epoch) ? Conflict::kUnfenced : Conflict::kNone;
  }

  Conflict unseen_reader(const Access& by, u32 slot, std::size_t offset, u32 size) {
    const u64* readers = readers_.at(slot * bytes_ + offset);
    for (u32 i = 0; i < size; ++i) {
      const u32 epoch = epoch_of(readers[i]);
      if (epoch < floor_ || (i && readers[i] == readers[i - 1])) continue;
      const u32 agent = unknown_reader(by, slot, epoch, u32(readers[i]));
      if (agent == Access::kNobody) continue;
      return {Conflict::kRead, agent, read_places_[slot * (bytes_ / 4 + 1) + (offset + i) / 4],
              offset + i};
    }
    return {};
  }

  // One of the readers in a cell that the access does not know.
  u32 unknown_reader(const Access& by, u32 slot, u32 epoch, u32 readers) const {
    if (slot >= warps_) {
      const u32 agent = slot == warps_ + kWarpgroups ? by.agents.reads(readers)
                                                     : by.agents.products(slot - warps_);
      return by.knows(agent, epoch) ? Access::kNobody : agent;
    }
    if (by.clock->floor[slot] >= epoch) return Access::kNobody;
    for (; readers; readers &= readers - 1) {
      const u32 reader = 32 * slot + u32(std::countr_zero(readers));
      if (!by.knows(reader, epoch)) return reader;
    }
    return Access::kNobody;
  }

  static void place(u32* places, std::size_t offset, u32 size, u32 place) {
    for (std::size_t i = offset / 4; i <= (offset + size - 1) / 4; ++i) places[i] = place;
  }

  std::size_t bytes_ = 0;
  u32 warps_ = 0;
  u32 floor_ = 0;
  u64 used_ = 0;  // slots of readers
  const u8* known_ = nullptr;
  Sparse<u64> writers_;  // by byte: epoch, agent, whether atomic
  Sparse<u32> write_places_;  // by word
  Sparse<u64> readers_;  // by slot and byte: epoch, who read in it
  Sparse<u32> read_places_;  // by slot and word
};

}  // namespace emulator

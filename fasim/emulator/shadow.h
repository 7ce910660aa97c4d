// The shadow of a stretch of memory: for each of its bytes who wrote it last and who has read it.
#pragma once
#include <sys/mman.h>

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

// Who accesses, as far as the shadow must know: a thread of a warp with its clock, and the agent
// and epoch under which the access is filed (the thread's own, or those of its copies).
struct Access {
  u32 thread;
  u32 agent;
  u32 epoch;
  u32 place;
  u32 copies_done;  // groups of its own copies that it waited for
  u32 threads;  // of the block
  bool atomic;
  const Clock* clock;

  u32 warp() const { return thread / 32; }
  u32 lane() const { return thread % 32; }

  bool knows(u32 other, u32 time) const {
    if (other == thread) return true;
    if (other == threads + thread) return copies_done >= time;
    return clock->seen[other] >= time;
  }
};

// An earlier access that a new one is not ordered after.
struct Conflict {
  enum What { kNone, kUninitialised, kWrite, kRead } what = kNone;
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
    readers_.resize(bytes * warps);
    read_places_.resize((bytes / 4 + 1) * warps);
  }

  // Everything before `floor` is forgotten. Bytes that `known` does not name hold nothing.
  void begin(u32 floor, const u8* known) {
    floor_ = floor;
    known_ = known;
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

  Conflict read(const Access& by, std::size_t offset, u32 size) {
    const u64* cell = writers_.at(offset);
    for (u32 i = 0; i < size; ++i) {
      if (i && cell[i] == cell[i - 1]) continue;
      if (epoch_of(cell[i]) < floor_) {
        if (!given(offset + i)) return {Conflict::kUninitialised, 0, 0, offset + i};
      } else if (!written_before(by, cell[i])) {
        return {Conflict::kWrite, agent_of(cell[i]), write_places_[(offset + i) / 4], offset + i};
      }
    }
    u64* readers = readers_.at(by.warp() * bytes_ + offset);
    const u64 mark = u64(by.epoch) << 32, lane = u64(1) << by.lane();
    for (u32 i = 0; i < size; ++i) {
      readers[i] = (epoch_of(readers[i]) == by.epoch ? readers[i] : mark) | lane;
    }
    place(read_places_.at(by.warp() * (bytes_ / 4 + 1)), offset, size, by.place);
    return {};
  }

  Conflict write(const Access& by, std::size_t offset, u32 size) {
    u64* cell = writers_.at(offset);
    for (u32 i = 0; i < size; ++i) {
      if (i && cell[i] == cell[i - 1]) continue;
      if (epoch_of(cell[i]) >= floor_ && !written_before(by, cell[i])) {
        return {Conflict::kWrite, agent_of(cell[i]), write_places_[(offset + i) / 4], offset + i};
      }
    }
    for (u32 warp = 0; warp < warps_; ++warp) {
      const Conflict conflict = unseen_reader(by, warp, offset, size);
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

  static bool written_before(const Access& by, u64 cell) {
    if (by.atomic && (cell & 1)) return true;
    return by.knows(agent_of(cell), epoch_of(cell));
  }

  Conflict unseen_reader(const Access& by, u32 warp, std::size_t offset, u32 size) {
    const u64* readers = readers_.at(warp * bytes_ + offset);
    for (u32 i = 0; i < size; ++i) {
      const u32 epoch = epoch_of(readers[i]);
      if (epoch < floor_ || by.clock->floor[warp] >= epoch) continue;
      for (u32 lanes = u32(readers[i]); lanes; lanes &= lanes - 1) {
        const u32 reader = 32 * warp + u32(std::countr_zero(lanes));
        if (by.knows(reader, epoch)) continue;
        const u32 where = read_places_[warp * (bytes_ / 4 + 1) + (offset + i) / 4];
        return {Conflict::kRead, reader, where, offset + i};
      }
    }
    return {};
  }

  static void place(u32* places, std::size_t offset, u32 size, u32 place) {
    for (std::size_t i = offset / 4; i <= (offset + size - 1) / 4; ++i) places[i] = place;
  }

  std::size_t bytes_ = 0;
  u32 warps_ = 0;
  u32 floor_ = 0;
  const u8* known_ = nullptr;
  Sparse<u64> writers_;  // by byte: epoch, agent, whether atomic
  Sparse<u32> write_places_;  // by word
  Sparse<u64> readers_;  // by warp and byte: epoch, lanes that read in it
  Sparse<u32> read_places_;  // by warp and word
};

}  // namespace emulator

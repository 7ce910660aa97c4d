// Global memory: the arrays of a launch, each with its bounds, its rows and its shadow.
#pragma once
#include <cstdio>

#include "abi.h"
#include "shadow.h"

namespace emulator {

// Which blocks touched a byte. Blocks of a launch are not ordered, so two of them may meet in a
// byte only to read it, or through atomics.
class Owners {
 public:
  void resize(std::size_t bytes) {
    writers_.resize(bytes);
    readers_.resize(bytes);
  }

  // The other block that this access races with, -1 if none; kMany if there are several.
  i64 read(std::size_t offset, u32 size, u32 block) {
    for (u32 i = 0; i < size; ++i) {
      const u32 writer = load(writers_[offset + i]);
      if (writer && writer != block + 1 && writer != (kAtomic | (block + 1))) return who(writer);
      mark(readers_[offset + i], block + 1, kMany);
    }
    return -1;
  }

  i64 write(std::size_t offset, u32 size, u32 block, bool atomic) {
    for (u32 i = 0; i < size; ++i) {
      const u32 writer = load(writers_[offset + i]), reader = load(readers_[offset + i]);
      const bool mine = !writer || (writer & ~kAtomic) == block + 1;
      if (!mine && !(atomic && (writer & kAtomic))) return who(writer);
      if (reader && reader != block + 1) return who(reader);
      const u32 flag = atomic && (!writer || (writer & kAtomic)) ? kAtomic : 0;
      mark(writers_[offset + i], flag | (block + 1), flag | kMany);
    }
    return -1;
  }

  struct Name {
    char text[32];
  };
  static Name name(i64 block) {
    Name name;
    std::snprintf(name.text, sizeof name.text, block == kMany ? "another block" : "block %lld",
                  static_cast<long long>(block));
    return name;
  }

  static constexpr u32 kMany = 0x7fffffff;

 private:
  static constexpr u32 kAtomic = 0x80000000;

  static u32 load(const u32& cell) { return __atomic_load_n(&cell, __ATOMIC_RELAXED); }
  static i64 who(u32 cell) {
    const u32 block = cell & ~kAtomic;
    return block == kMany ? kMany : block - 1;
  }
  static void mark(u32& cell, u32 one, u32 many) {
    const u32 old = load(cell);
    const bool same = old == 0 || (old & ~kAtomic) == (one & ~kAtomic);
    const u32 next = same ? one : many;
    if (old != next) __atomic_store_n(&cell, next, __ATOMIC_RELAXED);
  }

  Sparse<u32> writers_;  // by byte: 0, block + 1, or kMany; kAtomic if only atomics wrote
  Sparse<u32> readers_;
};

struct Array : ArrayView {
  int index = 0;
  Shadow shadow;  // of a writable array
  Owners owners;

  explicit Array(const ArrayView& view, int number, u32 warps) : ArrayView(view), index(number) {
    if (!writable) return;
    shadow.resize(bytes, warps);
    shadow.begin(1, known);
    owners.resize(bytes);
  }

  bool holds(const u8* address) const { return address >= base && address < base + bytes; }

  // Whether bytes [offset, offset + size) lie in one row.
  bool in_row(i64 offset, u32 size) const {
    for (int d = 0; d < kOuter; ++d) {
      if (count[d] <= 1) continue;
      const i64 i = offset / step[d];
      offset -= (i < count[d] ? i : count[d] - 1) * step[d];
    }
    return offset + size <= row_bytes;
  }
};

}  // namespace emulator

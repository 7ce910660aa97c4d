// What the blocks of a launch know of each other. CUDA orders them in no way but one: what a thread
// did or knew before it released a counter is known to whoever acquires the counter later.
// PTX ISA, memory consistency model: release and acquire patterns; additions in between pass on what
// was released before them.
#pragma once
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "numbers.h"

namespace emulator {

// A release by a thread of a block: how far it knew each thread of the block.
struct Release {
  u64 block;
  std::vector<u32> seen;  // epochs, by thread
};
using Releases = std::vector<std::shared_ptr<const Release>>;

// Releases that a block learned of: which of its threads did, and when.
struct Learned {
  u32 thread, epoch;
  Releases releases;
};

// Who added to a word of floats last.
struct Adder {
  u64 block;
  u32 thread, epoch, place;
};

class Order {
 public:
  using Lock = std::lock_guard<std::mutex>;
  std::mutex mutex;

  // ---- Blocks, numbered as they start. A block may wait for those that started before it, as they
  // run or are done; others may never start while it waits.

  u64 start() {
    const Lock lock(mutex);
    running_.insert(next_);
    return next_++;
  }
  void end(u64 number) {
    const Lock lock(mutex);
    running_.erase(number);
  }
  bool oldest(u64 number) {
    const Lock lock(mutex);
    return *running_.begin() == number;
  }

  // ---- Counters and sums; to be called with the mutex held

  Releases& releases(const void* counter) { return releases_[counter]; }

  // Files an addition to a word and returns the one before it.
  Adder add(const void* word, const Adder& adder) {
    const auto [found, first] = adders_.try_emplace(word, adder);
    return first ? adder : std::exchange(found->second, adder);
  }

 private:
  u64 next_ = 0;
  std::set<u64> running_;
  std::unordered_map<const void*, Releases> releases_;
  std::unordered_map<const void*, Adder> adders_;
};

// The n-th of `count` blocks to start, an order drawn from the seed: hardware promises none. Seed 0
// takes them as they are numbered, which is what GPUs usually do.
inline u64 nth_block(u64 n, u64 count, u64 seed) {
  if (seed == 0 || count < 3) return seed % 2 ? count - 1 - n : n;
  const auto divides = [&](u64 a) {
    u64 b = count;
    while (b) a = std::exchange(b, a % b);
    return a > 1;
  };
  u64 step = (seed * 0x9e3779b97f4a7c15u >> 33) % count;
  while (step == 0 || divides(step)) step = (step + 1) % count;
  return (n * step + seed) % count;
}

}  // namespace emulator

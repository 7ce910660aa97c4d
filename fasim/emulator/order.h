// What the blocks of a launch know of each other. CUDA orders them in no way but one: what a thread
// did or knew before it released a counter is known to whoever acquires the counter later.
// PTX ISA, memory consistency model: release and acquire patterns; additions in between pass on what
// was released before them.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
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

  // ---- Blocks, numbered as they start. A block may wait for those that have started, as they run or
  // are done; the others may never start while it waits.

  u64 start() {
    const Lock lock(mutex);
    running_[next_] = {};
    return next_++;
  }
  void end(u64 number) {
    const Lock lock(mutex);
    running_.erase(number);
  }

  // A block asked a counter again, in vain. Whether that is so for all that run, time after time, since
  // a counter was moved last.
  bool hopeless(u64 number) {
    const Lock lock(mutex);
    Wait& wait = running_[number];
    if (wait.moves != moves_) wait = {moves_, 0};
    ++wait.times;
    return std::all_of(running_.begin(), running_.end(), [&](const auto& block) {
      return block.second.moves == moves_ && block.second.times > kPatience;
    });
  }

  // ---- Counters and sums; to be called with the mutex held

  Releases& releases(const void* counter) { return releases_[counter]; }
  void moved() { ++moves_; }

  // Files an addition to a word and returns the one before it.
  Adder add(const void* word, const Adder& adder) {
    const auto [found, first] = adders_.try_emplace(word, adder);
    return first ? adder : std::exchange(found->second, adder);
  }

 private:
  static constexpr u32 kPatience = 1000;  // questions, between which a block's other warps may run

  struct Wait {
    u64 moves;  // that there had been when the block asked in vain
    u32 times;
  };

  u64 next_ = 0, moves_ = 1;
  std::map<u64, Wait> running_;
  std::unordered_map<const void*, Releases> releases_;
  std::unordered_map<const void*, Adder> adders_;
};

// The n-th of `count` blocks to start, an order drawn from the seed: hardware promises none. Seed 0
// takes them as they are numbered, which is what GPUs usually do, as do all where there are but two.
inline u64 nth_block(u64 n, u64 count, u64 seed) {
  if (seed == 0 || count < 3) return n;
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

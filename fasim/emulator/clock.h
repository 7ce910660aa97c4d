// Vector clocks: what a thread knows to have happened.
//
// Whatever can act on memory by itself is an agent: threads, their copies in the background, the
// matrix products of a warpgroup, and TMA for each mbarrier that it reports to. An agent's time is a
// number that only grows: for a thread the epoch of its warp, which moves on at every release; for
// copies, stores and products the number of their group; for an mbarrier its phase. A thread knows
// an access if its clock has reached the access's epoch in the entry of its agent.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "numbers.h"

namespace emulator {

constexpr u32 kMostThreads = 1024;
constexpr u32 kWarpgroups = 8;
constexpr u32 kMbarriers = 64;  // of a block, at most

// The agents of a block of so many threads, by number.
struct Agents {
  u32 threads = 0;

  u32 copies(u32 thread) const { return threads + thread; }  // cp.async
  u32 reads(u32 thread) const { return 2 * threads + thread; }  // of its bulk stores
  u32 stores(u32 thread) const { return 3 * threads + thread; }  // bulk, to global memory
  u32 products(u32 warpgroup) const { return 4 * threads + warpgroup; }
  u32 mbarrier(u32 index) const { return 4 * threads + kWarpgroups + index; }
  u32 count() const { return 4 * threads + kWarpgroups + kMbarriers; }

  bool generic(u32 agent) const { return agent < 2 * threads; }  // it accesses memory as threads do
  bool is_copy(u32 agent) const { return agent / threads == 1; }
  bool is_reads(u32 agent) const { return agent / threads == 2; }
  bool is_stores(u32 agent) const { return agent / threads == 3; }
  bool is_mbarrier(u32 agent) const { return agent >= mbarrier(0); }
};

struct Clock {
  u32 seen[4 * kMostThreads + kWarpgroups + kMbarriers];  // by agent
  u32 fenced[2 * kMostThreads];  // by generic agent: what the async proxy sees of it
  u32 floor[32];  // by warp: the least of its threads' entries
  int references = 0;
};

// Clocks of one size, used again. A clock is never changed after a thread got hold of it, so all
// threads that leave a barrier share one.
class Clocks {
 public:
  void resize(u32 threads) { agents_ = {threads}; }

  Clock* make(u32 time) {
    if (free_.empty()) free_.push_back(std::make_unique<Clock>());
    Clock* clock = free_.back().release();
    free_.pop_back();
    std::fill_n(clock->seen, agents_.count(), time);
    std::fill_n(clock->fenced, 2 * agents_.threads, time);
    std::fill_n(clock->floor, 32, time);
    clock->references = 1;
    return clock;
  }

  Clock* copy(const Clock* from) {
    Clock* clock = make(0);
    merge(clock, from);
    return clock;
  }

  void merge(Clock* into, const Clock* from) {
    combine(into, from, [](u32 a, u32 b) { return std::max(a, b); });
  }

  // What both know.
  void meet(Clock* into, const Clock* from) {
    combine(into, from, [](u32 a, u32 b) { return std::min(a, b); });
  }

  // To be called once all is merged: how far each warp is known as a whole.
  void seal(Clock* clock) {
    for (u32 t = 0; t < agents_.threads; ++t) {
      u32& floor = clock->floor[t / 32];
      floor = t % 32 ? std::min(floor, clock->seen[t]) : clock->seen[t];
    }
  }

  void assign(Clock*& holder, Clock* clock) {
    ++clock->references;
    if (holder) drop(holder);
    holder = clock;
  }

  void drop(Clock* clock) {
    if (--clock->references == 0) free_.emplace_back(clock);
  }

 private:
  template <typename F>
  void combine(Clock* into, const Clock* from, F two) {
    const u32 agents = agents_.count(), generic = 2 * agents_.threads;
    for (u32 i = 0; i < agents; ++i) into->seen[i] = two(into->seen[i], from->seen[i]);
    for (u32 i = 0; i < generic; ++i) into->fenced[i] = two(into->fenced[i], from->fenced[i]);
  }

  Agents agents_;
  std::vector<std::unique_ptr<Clock>> free_;
};

}  // namespace emulator

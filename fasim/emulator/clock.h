// Vector clocks: what a thread knows to have happened.
//
// Whatever can act on memory by itself is an agent: thread t of a block of n is agent t, and its
// cp.async copies are agent n + t. An agent's time is a number that only grows: for a thread the
// epoch of its warp, which moves on at every release; for copies the number of their group. A
// thread knows an access if its clock has reached the access's epoch in the entry of its agent.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "numbers.h"

namespace emulator {

struct Clock {
  u32 seen[2 * 1024];  // by agent
  u32 floor[32];  // by warp: the least of its threads' entries
  int references = 0;
};

// Clocks of one size, used again. A clock is never changed after a thread got hold of it, so all
// threads that leave a barrier share one.
class Clocks {
 public:
  void resize(u32 threads) { threads_ = threads; }

  Clock* make(u32 time) {
    if (free_.empty()) free_.push_back(std::make_unique<Clock>());
    Clock* clock = free_.back().release();
    free_.pop_back();
    std::fill_n(clock->seen, 2 * threads_, time);
    std::fill_n(clock->floor, 32, time);
    clock->references = 1;
    return clock;
  }

  void merge(Clock* into, const Clock* from) {
    for (u32 i = 0; i < 2 * threads_; ++i) into->seen[i] = std::max(into->seen[i], from->seen[i]);
  }

  // To be called once all is merged: how far each warp is known as a whole.
  void seal(Clock* clock) {
    for (u32 t = 0; t < threads_; ++t) {
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
  u32 threads_ = 0;
  std::vector<std::unique_ptr<Clock>> free_;
};

}  // namespace emulator

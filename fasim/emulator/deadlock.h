// Nobody can go on: who waits where, and for what.
#pragma once
#include "engine.h"
#include "warp.h"

namespace emulator {

class Worker::Deadlock {
 public:
  explicit Deadlock(Worker& worker) : worker_(worker) {
    for (u32 id = 0; id < kBarriers; ++id) barrier(id, worker.barriers_[id]);
    for (const Mbarrier& mbarrier : worker.mbarriers_) waiters(mbarrier);
    for (u32 w = 0; w < kWarpgroups; ++w) warpgroup(w, worker.warpgroups_[w]);
    for (const Warp& warp : worker.warps_) lanes(warp);
    if (length_ >= 2) text_[length_ - 2] = 0;
  }

  void tell() {
    const auto alive = [](const Warp& warp) { return warp.alive != 0; };
    const auto first = std::find_if(worker_.warps_.begin(), worker_.warps_.end(), alive);
    worker_.note(&worker_.threads_[32 * first->index], rule_, place_, "nobody can go on: %s",
                 text_);
  }

 private:
  template <typename... T>
  void say(const char* format, T... values) {
    const std::size_t room = sizeof text_ - length_;
    const int more = std::snprintf(text_ + length_, room, format, values...);
    length_ += std::min<std::size_t>(std::size_t(more), room - 1);
  }

  void say_warps(const u32 (&lanes)[32]) {
    for (const Warp& warp : worker_.warps_) {
      if (lanes[warp.index]) say(", warp %u", warp.index);
    }
  }

  void barrier(u32 id, const Barrier& barrier) {
    if (!barrier.used) return;
    place_ = barrier.place;
    say("barrier %u @%08x has %u of %u threads", id, place_, barrier.arrived,
        barrier.threads ? barrier.threads : worker_.launch_->threads());
    say_warps(barrier.lanes);
    say("; ");
  }

  void waiters(const Mbarrier& mbarrier) {
    u32 lanes = 0;
    for (const u32 some : mbarrier.lanes) lanes |= some;
    if (!lanes) return;
    place_ = mbarrier.wait_place;
    say("%s is in phase %u, parity %u, and misses %u of %u arrivals and %lld bytes, awaited @%08x",
        worker_.name(mbarrier).text, mbarrier.phase, mbarrier.phase & 1, mbarrier.pending,
        mbarrier.count, static_cast<long long>(mbarrier.bytes), place_);
    say_warps(mbarrier.lanes);
    say("; ");
    if (!mbarrier.pending) rule_ = "transaction mismatch";
  }

  void warpgroup(u32 index, const Warpgroup& group) {
    if (!group.arrived) return;
    place_ = group.place;
    say("of warpgroup %u only", index);
    for (u32 w = 0; w < 4; ++w) {
      if (group.arrived >> w & 1) say(" warp %u", 4 * index + w);
    }
    say(" came to the product @%08x; ", place_);
  }

  void lanes(const Warp& warp) {
    for (const Group& group : warp.groups) {
      say("lanes %08x of warp %u wait for lanes %08x @%08x; ", group.arrived, warp.index,
          wanted(warp, group) & ~group.arrived, group.call.place);
    }
    if (!warp.alive) say("warp %u has exited; ", warp.index);
    if (!warp.wanted) return;
    rule_ = "register pool overdrawn";
    place_ = warp.wanted_place;
    say("warp %u asks for %u registers a thread instead of %u, %u more, and the block has %u; ",
        warp.index, warp.wanted, warp.registers, 32 * (warp.wanted - warp.registers),
        worker_.spare_registers_);
  }

  Worker& worker_;
  char text_[3500] = {};
  std::size_t length_ = 0;
  const char* rule_ = "deadlock";
  u32 place_ = 0;
};

inline void Worker::deadlock() { Deadlock(*this).tell(); }

}  // namespace emulator

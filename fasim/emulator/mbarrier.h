// Barriers in shared memory. PTX ISA: mbarrier
//
// A phase is complete when its arrivals and its bytes have come. What those who arrived knew is known
// to those who waited; what TMA wrote in a phase is filed under the mbarrier's agent and that phase.
#pragma once
#include "engine.h"
#include "memory.h"

namespace emulator {

constexpr i64 kMostBytes = (1 << 20) - 1;  // that a phase can wait for

inline std::size_t Worker::shared_offset(const void* pointer, u32 bytes, u32 place) {
  const std::size_t offset = static_cast<const u8*>(pointer) - shared_base_;
  if (offset >= shared_bytes_ || beyond(offset, bytes)) {
    fail(current_, "out of bounds", place,
         "%u bytes at [[shared+%" PRId64
         "]] are not in the %u bytes of dynamic shared memory of this launch",
         bytes, i64(offset) - i64(dynamic_), launch_->request.smem_bytes);
  }
  return offset;
}

inline void Worker::init_mbarrier(const void* pointer, u32 count, u32 place) {
  Thread& thread = *current_;
  keep_going(place);
  const std::size_t offset = shared_offset(pointer, 8, place);
  if (count == 0) fail(&thread, "arrival mismatch", place, "an mbarrier that waits for nobody");
  shared(thread, offset, 8, true, place);
  const auto same = [&](const Mbarrier& m) { return m.offset == offset; };
  auto found = std::find_if(mbarriers_.begin(), mbarriers_.end(), same);
  if (found == mbarriers_.end()) {
    if (mbarriers_.size() == kMbarriers) {
      fail(&thread, "too many mbarriers", place, "the emulator has %u of a block", kMbarriers);
    }
    found = mbarriers_.emplace(mbarriers_.end());
    found->index = u32(mbarriers_.size()) - 1;
    found->first = epoch_;
  } else {
    const u32 next = found->epoch() + 1, index = found->index;
    forget(*found);
    *found = Mbarrier{};
    found->first = next, found->index = index;
  }
  found->offset = offset;
  found->count = found->pending = count;
  found->maker = thread.index, found->made = warp_of(thread).epoch, found->place = place;
  found->arrived = clocks_.make(0);
}

// For a message: static variables lie before the dynamic shared memory, at negative offsets.
inline Worker::Name Worker::name(const Mbarrier& mbarrier) const {
  Name name;
  std::snprintf(name.text, sizeof name.text,
                "the mbarrier at [[shared+%" PRId64 "]] (initialised @%08x)",
                i64(mbarrier.offset) - i64(dynamic_), mbarrier.place);
  return name;
}

inline void Worker::forget(Mbarrier& mbarrier) {
  for (auto& [before, after] : mbarrier.joined) clocks_.drop(before), clocks_.drop(after);
  mbarrier.joined.clear();
  if (mbarrier.arrived) clocks_.drop(mbarrier.arrived);
  if (mbarrier.complete) clocks_.drop(mbarrier.complete);
  mbarrier.arrived = mbarrier.complete = nullptr;
}

// TMA may report to what this thread initialised so far.
inline void Worker::fence_mbarriers() {
  for (Mbarrier& mbarrier : mbarriers_) mbarrier.fenced |= mbarrier.maker == current_->index;
}

inline Mbarrier& Worker::mbarrier_at(const void* pointer, u32 place) {
  Thread& thread = *current_;
  const std::size_t offset = shared_offset(pointer, 8, place);
  for (Mbarrier& mbarrier : mbarriers_) {
    if (mbarrier.offset != offset) continue;
    if (access(thread, place).knows(mbarrier.maker, mbarrier.made)) return mbarrier;
    fail(&thread, "race", place, "it uses %s, the work of thread %u; no barrier stands between",
         name(mbarrier).text, mbarrier.maker);
  }
  fail(&thread, "mbarrier not initialised", place, "it uses [[shared+%" PRId64 "]] as an mbarrier",
       i64(offset) - i64(dynamic_));
}

// Some arrivals of the current thread, and bytes that the phase is to wait for besides (negative:
// that have come).
inline void Worker::arrive_at(const void* pointer, u32 arrivals, i64 bytes, u32 place) {
  Thread& thread = *current_;
  keep_going(place);
  Mbarrier& mbarrier = mbarrier_at(pointer, place);
  if (arrivals > mbarrier.pending) {
    fail(&thread, "arrival mismatch", place, "phase %u of %s has its %u arrivals already",
         mbarrier.phase, name(mbarrier).text, mbarrier.count);
  }
  mbarrier.bytes += bytes;
  if (mbarrier.bytes > kMostBytes || mbarrier.bytes < -kMostBytes) {
    fail(&thread, "transaction mismatch", place,
         "phase %u of %s waits for %" PRId64 " bytes; %" PRId64 " is the most", mbarrier.phase,
         name(mbarrier).text, mbarrier.bytes, kMostBytes);
  }
  mbarrier.pending -= arrivals;
  if (arrivals) release(mbarrier.arrived, warp_of(thread), thread.bit());
  settle(mbarrier, place);
  if (fault.rule[0]) stop();
}

// Completes the phase if all has come. It may run while no thread does: so it only notes a fault.
inline void Worker::settle(Mbarrier& mbarrier, u32 place) {
  if (mbarrier.pending || mbarrier.bytes > 0) return;
  if (mbarrier.bytes < 0 || mbarrier.in_flight) {
    return note(
        nullptr, "transaction mismatch", place,
        "phase %u of %s was to wait for fewer bytes than its copies bring: it has all of them, "
        "%" PRId64 " too many, and %u copies are in flight",
        mbarrier.phase, name(mbarrier).text, -mbarrier.bytes, mbarrier.in_flight);
  }
  mbarrier.arrived->seen[agents().mbarrier(mbarrier.index)] = mbarrier.epoch();
  clocks_.seal(mbarrier.arrived);
  for (auto& [before, after] : mbarrier.joined) clocks_.drop(before), clocks_.drop(after);
  mbarrier.joined.clear();
  if (mbarrier.complete) clocks_.drop(mbarrier.complete);
  mbarrier.complete = mbarrier.arrived;
  mbarrier.arrived = clocks_.copy(mbarrier.complete);
  mbarrier.pending = mbarrier.count;
  ++mbarrier.phase;
  for (Warp& warp : warps_) {
    if (mbarrier.lanes[warp.index]) wake(warp, std::exchange(mbarrier.lanes[warp.index], 0));
  }
}

// Whether the phase of that parity is complete. It sleeps until then, but may give up any time.
inline bool Worker::try_wait(const void* pointer, u32 parity, u32 place) {
  Thread& thread = *current_;
  keep_going(place);
  Mbarrier& mbarrier = mbarrier_at(pointer, place);
  const auto passes = [&] { return (mbarrier.phase & 1) != (parity & 1); };
  if (!passes()) {
    if (random_.below(16) == 0) return false;
    Warp& warp = warp_of(thread);
    mbarrier.lanes[warp.index] |= thread.bit();
    mbarrier.wait_place = place;
    warp.ready &= ~thread.bit();
    park();
    if (!passes()) return false;
  }
  acquire_from(mbarrier, thread);
  ++operation(kMbarrier).count;
  if (launch_->request.trace) tracer.meet(thread.warp(), kMbarrier);
  trace(kMbarrier, place);
  return true;
}

// Threads that knew the same know the same afterwards, so they share a clock.
inline void Worker::acquire_from(Mbarrier& mbarrier, Thread& thread) {
  thread.waited |= u64(1) << mbarrier.index;
  Clock* before = thread.clock;
  if (!mbarrier.complete || before == mbarrier.complete) return;
  for (const auto& [old, merged] : mbarrier.joined) {
    if (old == before) return clocks_.assign(thread.clock, merged);
    if (merged == before) return;
  }
  Clock* merged = clocks_.copy(before);
  clocks_.merge(merged, mbarrier.complete);
  clocks_.seal(merged);
  ++before->references;
  mbarrier.joined.emplace_back(before, merged);
  clocks_.assign(thread.clock, merged);
}

}  // namespace emulator

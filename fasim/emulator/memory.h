// What every access to memory must obey, and the copies that land later.
#pragma once
#include <cinttypes>

#include "engine.h"

extern thread_local emulator::u8 smem_raw[];  // the dynamic shared memory of a kernel

namespace emulator {

template <typename T>
T add_to(T* address, T x) {
  T old, sum;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    sum = old + x;
  } while (
      !__atomic_compare_exchange(address, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

inline Access Worker::access(const Thread& thread, u32 place) {
  return {thread.index, thread.index, warp_of(thread).epoch, place,       agents(),
          false,        false,        &thread.done,          thread.clock};
}

inline void Worker::keep_going(u32 place) {
  if (++touches_ % 65536) return;
  while (*launch_->request.stop) park();
  if (touches_ < launch_->request.budget) return;
  fail(current_, "no end", place,
       "%" PRIu64
       " memory accesses and the block is not done: does this "
       "loop end?",
       touches_);
}

// A load or store of the current thread.
inline void Worker::touch(const void* pointer, u32 size, bool write, u32 place) {
  const auto* address = static_cast<const u8*>(pointer);
  Thread& thread = *current_;
  keep_going(place);
  if (in_shared(address)) {
    const std::size_t offset = address - shared_base_;
    shared(thread, offset, size, write, place);
    const u32 where = u32(offset - dynamic_) + window_;
    warp_of(thread).instructions.add(
        thread.lane(), {place, where, u16(size), u16(write ? kSharedStore : kSharedLoad)});
    return;
  }
  Array& array = global(thread, address, size, place);
  if (write) {
    write_array(thread, array, address, size, access(thread, place), false);
  } else {
    read_array(thread, array, address, size, place);
  }
  const Kind kind = write ? kGlobalStore : kGlobalLoad;
  warp_of(thread).instructions.add(thread.lane(), {place, 0, u16(size), u16(kind)});
  trace(kind, place, array.index, address - array.base, size, 0);
}

// ---- Shared memory

// Whether the bytes are not those of static variables, which lie before or after the dynamic array,
// nor of the part of it that the launch has.
inline bool Worker::beyond(std::size_t offset, u32 size) const {
  const bool dynamic = offset >= dynamic_ && offset < dynamic_ + kMostShared;
  return offset + size > shared_bytes_ ||
         (dynamic && offset + size > dynamic_ + launch_->request.smem_bytes);
}

inline void Worker::check_shared(Thread& thread, std::size_t offset, u32 size, u32 place) {
  if (beyond(offset, size)) {
    fail(&thread, "out of bounds", place,
         "[[shared+%zu]] is %" PRId64
         " bytes beyond the %u bytes "
         "of dynamic shared memory of this launch",
         offset - dynamic_, i64(offset + size - dynamic_) - launch_->request.smem_bytes,
         launch_->request.smem_bytes);
  }
  if (offset < dynamic_ && offset + kSystemBytes >= dynamic_) {
    fail(&thread, "out of bounds", place, "[[shared+%" PRId64 "]] lies before shared memory",
         i64(offset) - i64(dynamic_));
  }
  const u32 window = u32(offset - dynamic_) + window_;
  if (window % size) {
    fail(&thread, "misaligned access", place,
         "%u bytes at [[shared+%zu]], which is no multiple of "
         "%u",
         size, offset - dynamic_, size);
  }
}

inline void Worker::shared(Thread& thread, std::size_t offset, u32 size, bool write, u32 place) {
  check_shared(thread, offset, size, place);
  Warp& warp = warp_of(thread);
  if (write && thread.done.fenced == warp.epoch) ++warp.epoch;  // it was fenced before this write
  const Access by = access(thread, place);
  const Conflict conflict =
      write ? shared_shadow_.write(by, offset, size) : shared_shadow_.read(by, offset, size);
  if (conflict.what) race(thread, conflict, by, "shared", dynamic_, write);
}

inline u32 Worker::window(const void* pointer, u32 place) {
  const std::size_t offset = static_cast<const u8*>(pointer) - shared_base_;
  if (offset > shared_bytes_) {
    fail(current_, "out of bounds", place,
         "a shared address is asked of a pointer that does not "
         "point to shared memory");
  }
  return u32(offset - dynamic_) + window_;
}

// Static variables may lie before the window's dynamic part: the difference has a sign.
inline i64 Worker::from_address(u32 address) const {
  return i64(dynamic_) + std::int32_t(address - window_);
}

inline u8* Worker::from_window(u32 address) const { return shared_base_ + from_address(address); }

// A row of a matrix, at an address of the shared window, for the whole warp.
inline void Worker::load_row(Thread& thread, u32 address, u32 size, u32 place) {
  shared(thread, row_offset(thread, address, size, place), size, false, place);
}

inline std::size_t Worker::row_offset(Thread& thread, u32 address, u32 size, u32 place) {
  const i64 offset = from_address(address);
  if (offset < 0 || std::size_t(offset) + size > shared_bytes_) {
    fail(&thread, "out of bounds", place, "shared address %u lies outside shared memory", address);
  }
  return std::size_t(offset);
}

inline void Worker::store_row(Thread& thread, u32 address, u32 size, u32 place) {
  shared(thread, row_offset(thread, address, size, place), size, true, place);
}

// ---- Global memory

inline Array& Worker::global(const Thread& thread, const u8* address, u32 size, u32 place) {
  Array& array = array_of(thread, address, size, place);
  if (u64(address) % size) {
    fail(&thread, "misaligned access", place,
         "%u bytes at [[%s+%" PRId64
         "]], which is no "
         "multiple of %u",
         size, array.name, i64(address - array.base), size);
  }
  return array;
}

// The array in which these bytes lie, in one of its rows.
inline Array& Worker::array_of(const Thread& thread, const u8* address, u32 size, u32 place) {
  if (!recent_ || !recent_->holds(address)) {
    recent_ = nullptr;
    for (Array& array : launch_->arrays) {
      if (array.holds(address)) recent_ = &array;
    }
    if (!recent_) stray(thread, address, size, place);
  }
  Array& array = *recent_;
  const i64 offset = address - array.base;
  if (offset + size > array.bytes) stray(thread, address, size, place);
  if (!array.in_row(offset, size)) {
    fail(&thread, "out of bounds", place,
         "%u bytes at [[%s+%" PRId64
         "]] lie between the rows of "
         "%s",
         size, array.name, offset, array.name);
  }
  return array;
}

inline void Worker::stray(const Thread& thread, const u8* address, u32 size, u32 place) {
  const Array* nearest = nullptr;
  i64 distance = INT64_MAX;
  for (const Array& array : launch_->arrays) {
    const i64 beyond = address + size - (array.base + array.bytes);
    const i64 away = address < array.base ? array.base - address : beyond;
    if (away < distance) nearest = &array, distance = away;
  }
  if (!nearest)
    fail(&thread, "out of bounds", place,
         "%u bytes of global memory: the launch has no "
         "array",
         size);
  fail(&thread, "out of bounds", place,
       "%u bytes in no array: [[%s+%" PRId64 "]] would lie %" PRId64 " bytes %s it", size,
       nearest->name, i64(address - nearest->base), distance,
       address < nearest->base ? "before" : "beyond");
}

inline void Worker::read_array(const Thread& thread, Array& array, const u8* address, u32 size,
                               u32 place) {
  counts.reads[array.index] += size;
  if (!array.writable) return;
  const std::size_t offset = address - array.base;
  const i64 other = array.owners.read(offset, size, u32(block_));
  const Access by = access(thread, place);
  if (other >= 0) {
    fail(&thread, "race", place,
         "it reads %u bytes at [[%s+%zu]] that %s writes; blocks are not "
         "ordered",
         size, array.name, offset, Owners::name(other).text);
  }
  const Conflict conflict = array.shadow.read(by, offset, size);
  if (conflict.what) race(thread, conflict, by, array.name, 0, false);
}

inline void Worker::write_array(const Thread& thread, Array& array, const u8* address, u32 size,
                                Access by, bool atomic) {
  const u32 place = by.place;
  counts.writes[array.index] += size;
  const std::size_t offset = address - array.base;
  if (!array.writable) {
    fail(&thread, "write to an input", place, "it writes %u bytes at [[%s+%zu]]", size, array.name,
         offset);
  }
  const i64 other = array.owners.write(offset, size, u32(block_), atomic);
  by.atomic = atomic;
  if (other >= 0) {
    fail(&thread, "race", place,
         "it writes %u bytes at [[%s+%zu]] that %s uses; blocks are not "
         "ordered",
         size, array.name, offset, Owners::name(other).text);
  }
  const Conflict conflict = array.shadow.write(by, offset, size);
  if (conflict.what) race(thread, conflict, by, array.name, 0, true);
}

// An atomic: it reads what is there, and races with nothing but plain accesses.
inline void Worker::update(const void* pointer, u32 size, u32 place) {
  Thread& thread = *current_;
  const auto* address = static_cast<const u8*>(pointer);
  Operation& atomic = operation(kAtomic);
  ++atomic.count;
  atomic.bytes += size;
  if (in_shared(address)) return update_shared(thread, address - shared_base_, size, place);
  Array& array = global(thread, address, size, place);
  if (!array.writable || !array.shadow.written(address - array.base, size)) {
    fail(&thread, "uninitialised read", place, "an atomic adds to [[%s+%zu]], which nobody wrote",
         array.name, std::size_t(address - array.base));
  }
  write_array(thread, array, address, size, access(thread, place), true);
}

inline void Worker::update_shared(Thread& thread, std::size_t offset, u32 size, u32 place) {
  check_shared(thread, offset, size, place);
  if (!shared_shadow_.written(offset, size)) {
    fail(&thread, "uninitialised read", place,
         "an atomic adds to [[shared+%zu]], which nobody wrote", offset - dynamic_);
  }
  Access by = access(thread, place);
  by.atomic = true;
  const Conflict conflict = shared_shadow_.write(by, offset, size);
  if (conflict.what) race(thread, conflict, by, "shared", dynamic_, true);
}

// ---- Order between blocks

// The current thread asks a counter again, so it waits, for other warps or other blocks.
inline void Worker::wait_for_others(const Thread& thread, u32 place) {
  if (launch_->failed) {
    given_up_ = true;
  } else if (launch_->order.hopeless(number_)) {
    fail(&thread, "deadlock", place,
         "it waits for a counter that no running block moves; one that has not started may never "
         "start while this one waits");
  } else {
    std::this_thread::yield();
  }
  park();
}

// How often a block asks is a matter of time: of the questions one after another to one counter the
// first is counted.
inline u32 Worker::load_acquire(const u32* counter, u32 place) {
  Thread& thread = *current_;
  const auto* address = reinterpret_cast<const u8*>(counter);
  keep_going(place);
  Array& array = global(thread, address, sizeof *counter, place);
  const std::size_t offset = address - array.base;
  if (array.writable && !array.shadow.written(offset, sizeof *counter)) {
    fail(&thread, "uninitialised read", place, "it reads [[%s+%zu]], which nobody wrote",
         array.name, offset);
  }
  const bool again = thread.asked == counter;
  if (!again) counts.reads[array.index] += sizeof *counter;
  if (again && thread.answer == __atomic_load_n(counter, __ATOMIC_RELAXED)) {
    wait_for_others(thread, place);
  }
  const Order::Lock lock(launch_->order.mutex);
  learned_.push_back({thread.index, warp_of(thread).epoch, launch_->order.releases(counter)});
  thread.asked = counter;
  return thread.answer = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

inline void Worker::count_move() {
  const Order::Lock lock(launch_->order.mutex);
  launch_->order.moved();
}

inline void Worker::add_release(u32* counter, u32 x, u32 place) {
  Thread& thread = *current_;
  Warp& warp = warp_of(thread);
  update(counter, sizeof *counter, place);
  std::vector<u32> seen(thread.clock->seen, thread.clock->seen + launch_->threads());
  seen[thread.index] = warp.epoch++;
  const Order::Lock lock(launch_->order.mutex);
  launch_->order.releases(counter).push_back(
      std::make_shared<const Release>(Release{block_, std::move(seen)}));
  launch_->order.moved();
  __atomic_fetch_add(counter, x, __ATOMIC_RELEASE);
}

// Whether an addition happened before whatever the thread does now.
inline bool Worker::knows(const Thread& thread, const Adder& adder) const {
  const auto knows = [&](u32 other, u32 epoch) {
    return other == thread.index || thread.clock->seen[other] >= epoch;
  };
  if (adder.block == block_) return knows(adder.thread, adder.epoch);
  for (auto learned = learned_.rbegin(); learned != learned_.rend(); ++learned) {
    if (!knows(learned->thread, learned->epoch)) continue;
    for (const auto& release : learned->releases) {
      const bool covers = release->seen[adder.thread] >= adder.epoch;
      if (release->block == adder.block && covers) return true;
    }
  }
  return false;
}

// A sum of floats depends on the order of its additions. Where it must not, each must have happened
// before the next, not just have come earlier this time.
inline void Worker::in_order(const void* words, u32 count, u32 place) {
  if (!launch_->request.ordered || in_shared(words)) return;
  Thread& thread = *current_;
  const Adder mine = {block_, thread.index, warp_of(thread).epoch, place};
  for (u32 i = 0; i < count; ++i) {
    const auto* word = static_cast<const u8*>(words) + 4 * i;
    Adder last;
    {
      const Order::Lock lock(launch_->order.mutex);
      last = launch_->order.add(word, mine);
    }
    if (knows(thread, last)) continue;
    const Array& array = global(thread, word, 4, place);
    fail(&thread, "unordered addition", place,
         "it adds to [[%s+%zu]], as did thread %u of block %llu @%08x; nothing orders the two, so "
         "their sum may differ from run to run",
         array.name, std::size_t(word - array.base), last.thread,
         static_cast<unsigned long long>(last.block), last.place);
  }
}

// ---- What is wrong

inline void Worker::race(const Thread& thread, const Conflict& conflict, const Access& access,
                         const char* space, std::size_t base, bool write) {
  const bool products = access.thread == Access::kNobody;
  const char* what = products ? "a product reads" : write ? "it writes" : "it reads";
  const i64 offset = i64(conflict.offset) - i64(base);  // static variables lie before the dynamic
  if (conflict.what == Conflict::kUninitialised) {
    fail(&thread, "uninitialised read", access.place, "%s [[%s+%" PRId64 "]], which nobody wrote",
         what, space, offset);
  }
  const auto says = [&](const char* rule, const char* format, auto... more) {
    char told[500];
    std::snprintf(told, sizeof told, format, more...);
    fail(&thread, rule, access.place, "%s [[%s+%" PRId64 "]]%s", what, space, offset, told);
  };
  const Agents all = agents();
  const u32 agent = conflict.agent, place = conflict.place;
  const bool is_copy = all.is_copy(agent);
  if (conflict.what == Conflict::kUnfenced) {
    says("missing proxy fence",
         ", which thread %u wrote @%08x; that thread executed no fence.proxy.async afterwards",
         is_copy ? agent - all.copies(0) : agent, place);
  }
  if (all.is_mbarrier(agent)) {
    const Mbarrier& mbarrier = mbarriers_[agent - all.mbarrier(0)];
    const u32 phase = shared_shadow_.epoch_at(conflict.offset) - mbarrier.first;
    const bool before = has_waited(access, mbarrier);
    says(before ? "wrong phase" : "copy in flight",
         ", which TMA writes @%08x in phase %u of %s: %s", place, phase, name(mbarrier).text,
         before ? "it has waited there, but for an earlier one" : "it has not waited there");
  }
  if (all.is_reads(agent) || all.is_stores(agent)) {
    says("store in flight", ", which a bulk store of thread %u @%08x %s", agent % all.threads,
         place, all.is_reads(agent) ? "still reads" : "writes: nobody waited for it");
  }
  if (!all.generic(agent)) {
    says(access.async ? "stage still read" : "operand in flight",
         ", which a product of warpgroup %u @%08x reads; nothing tells that it is done",
         agent - all.products(0), place);
  }
  const Thread& other = threads_[is_copy ? agent - all.copies(0) : agent];
  if (is_copy && shared_shadow_.epoch_at(conflict.offset) > other.done.copies) {
    says("copy in flight",
         " while the cp.async of thread %u @%08x is in flight: nobody waited for its group",
         other.index, place);
  }
  if (access.async && write) {
    says("stage still read", ", which thread %u %s @%08x; nothing tells that it is done",
         other.index, conflict.what == Conflict::kRead ? "reads" : "writes", place);
  }
  says("race", ", which %sthread %u %s @%08x; no barrier stands between",
       is_copy ? "a cp.async of " : "", other.index,
       conflict.what == Conflict::kRead ? "read" : "wrote", place);
  stop();
}

// Whether who accesses has waited at the mbarrier for any phase.
inline bool Worker::has_waited(const Access& access, const Mbarrier& mbarrier) const {
  const bool one = access.thread != Access::kNobody;
  const u32 first = one ? access.thread : 128 * (access.agent - access.agents.products(0));
  for (u32 t = first; t < first + (one ? 1 : 128); ++t) {
    if (threads_[t].waited >> mbarrier.index & 1) return true;
  }
  return false;
}

// ---- cp.async. PTX ISA: cp.async, "non-blocking ... no ordering guarantee until waited for"

// Nothing is in place before the wait: the destination is poisoned, and the bytes are fetched when
// the group lands, as late as the rules allow.
inline void Worker::copy(void* to, const void* from, u32 size, bool valid, u32 place) {
  Thread& thread = *current_;
  auto* target = static_cast<u8*>(to);
  const auto* source = static_cast<const u8*>(from);
  const std::size_t offset = target - shared_base_;
  if (offset + size > shared_bytes_) {
    fail(&thread, "out of bounds", place, "cp.async writes outside shared memory");
  }
  check_shared(thread, offset, size, place);
  Access by = access(thread, place);
  by.agent = by.agents.copies(thread.index);
  by.epoch = thread.group;
  const Conflict conflict = shared_shadow_.write(by, offset, size);
  if (conflict.what) race(thread, conflict, by, "shared", dynamic_, true);
  std::memset(target, 0xff, size);
  const u32 where = u32(offset - dynamic_) + window_;
  warp_of(thread).instructions.add(thread.lane(), {place, where, u16(size), u16(kCpAsync)});
  if (valid) {
    Array& array = global(thread, source, size, place);
    read_array(thread, array, source, size, place);
    trace(kCpAsync, place, array.index, source - array.base, size, u32(offset - dynamic_));
  }
  thread.copies.push_back({thread.group, target, valid ? source : nullptr, size});
}

inline void Worker::commit(u32) { ++current_->group; }

// Lets all but the newest `groups` closed groups land. PTX ISA: cp.async.wait_group
inline void Worker::wait(u32 groups, u32) {
  Thread& thread = *current_;
  const u32 newest = thread.group - 1;
  if (newest >= groups && newest - groups > thread.done.copies) land(thread, newest - groups);
}

inline void Worker::land(Thread& thread, u32 group) {
  while (!thread.copies.empty() && thread.copies.front().group <= group) {
    const Copy& copy = thread.copies.front();
    if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
    if (!copy.from) std::memset(copy.to, 0, copy.bytes);
    thread.copies.pop_front();
  }
  thread.done.copies = group;
}

}  // namespace emulator

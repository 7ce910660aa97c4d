// Lanes that act together, barriers, and who may run next.
#pragma once
#include "engine.h"
#include "memory.h"

namespace emulator {

// ---- Lanes that act together
// PTX ISA, .sync and .aligned: all lanes of the mask execute the same instruction.

inline u32 wanted(const Warp& warp, const Group& group) {
  return group.call.mask == kLiving ? warp.alive : group.call.mask & warp.alive;
}

// The current lane waits for the others of the call's mask; the last to come acts for all.
inline void Worker::together(const Call& call, const void* operands) {
  Thread& thread = *current_;
  Warp& warp = warp_of(thread);
  keep_going(call.place);
  if (call.mask != kLiving && !(call.mask & thread.bit())) {
    fail(&thread, "lanes diverge", call.place,
         "lane %u calls it with mask %08x, which leaves "
         "itself out",
         thread.lane(), call.mask);
  }
  Group& group = join(warp, call);
  group.arrived |= thread.bit();
  group.operands[thread.lane()] = operands;
  if (group.arrived == wanted(warp, group)) {
    complete(warp, group);
    if (!(warp.barrier & thread.bit())) return;
  } else {
    warp.ready &= ~thread.bit();
    hopeless(warp);
  }
  park();
}

inline Group& Worker::join(Warp& warp, const Call& call) {
  for (Group& group : warp.groups) {
    const bool same = group.call.site == call.site && group.call.kind == call.kind;
    if (same && group.call.mask == call.mask) return group;
  }
  return warp.groups.emplace_back(call);
}

inline bool takes_whole_warp(Kind kind) {
  return kind == kMma || kind == kLdmatrix || kind == kStmatrix || kind == kWgmma || kind == kWait;
}

inline void Worker::complete(Warp& warp, Group& group) {
  const Group done = group;
  const bool whole = done.call.mask == ~0u && takes_whole_warp(done.call.kind);
  if (whole && ~done.arrived) {
    fail(&lane(warp, done.arrived), "lanes diverge", done.call.place,
         "it takes the whole warp, and "
         "lane %u has exited",
         u32(std::countr_zero(~done.arrived)));
  }
  warp.groups.erase(warp.groups.begin() + (&group - warp.groups.data()));
  wake(warp, done.arrived);
  if (done.arrived == warp.alive) warp.instructions.count(counts.operations);
  if (launch_->request.trace) tracer.meet(warp.index, done.call.kind);
  trace(done.call.kind, done.call.place);
  done.call.act(*this, warp, done);
}

inline void Worker::wake(Warp& warp, u32 lanes) {
  warp.ready |= lanes;
  ready_ |= 1u << warp.index;
}

inline void Worker::sleep(Warp& warp, u32 lanes) {
  warp.barrier |= lanes;
  warp.ready &= ~lanes;
  if (!warp.ready) ready_ &= ~(1u << warp.index);
}

inline void Worker::rouse(Warp& warp, u32 lanes) {
  warp.barrier &= ~lanes;
  if (lanes) wake(warp, lanes);
}

// Fails if no group of waiting lanes can ever be complete.
inline void Worker::hopeless(Warp& warp) {
  u32 waiting = 0;
  for (const Group& group : warp.groups) waiting |= group.arrived;
  if (waiting != warp.alive) return;
  const Group& group = warp.groups[0];
  const u32 missing = u32(std::countr_zero(wanted(warp, group) & ~group.arrived));
  u32 where = group.call.place;
  for (const Group& other : warp.groups) {
    if (other.arrived >> missing & 1) where = other.call.place;
  }
  fail(&lane(warp, group.arrived), "lanes diverge", group.call.place,
       "it waits for lane %u of its "
       "warp, which waits @%08x",
       missing, where);
}

// After a lane exited: a group that waited for it may be complete now.
inline void Worker::settle(Warp& warp) {
  const auto done = [&](const Group& group) { return group.arrived == wanted(warp, group); };
  for (;;) {
    const auto group = std::find_if(warp.groups.begin(), warp.groups.end(), done);
    if (group == warp.groups.end()) break;
    complete(warp, *group);
  }
  if (warp.alive) hopeless(warp);
}

// The first of some lanes.
inline Thread& Worker::lane(const Warp& warp, u32 lanes) {
  return threads_[32 * warp.index + u32(std::countr_zero(lanes))];
}

// ---- Order between threads

inline void Worker::release(Clock* clock, Warp& warp, u32 lanes) {
  const Clock* merged = nullptr;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const Thread& thread = lane(warp, rest);
    if (thread.clock != merged) clocks_.merge(clock, thread.clock);
    merged = thread.clock;
  }
  for (; lanes; lanes &= lanes - 1) {
    const Thread& thread = lane(warp, lanes);
    publish(clock, thread, warp.epoch);
  }
  ++warp.epoch;
}

// What a thread knows of itself and of its own work in the background.
inline void Worker::publish(Clock* clock, const Thread& thread, u32 epoch) {
  const Agents all = agents();
  const u32 t = thread.index;
  clock->seen[t] = epoch;
  clock->seen[all.copies(t)] = thread.done.copies;
  clock->seen[all.reads(t)] = thread.done.reads;
  clock->seen[all.stores(t)] = thread.done.stores;
  u32& products = clock->seen[all.products(t / 128)];
  products = std::max(products, thread.done.products);
  clock->fenced[t] = thread.done.fenced;
  clock->fenced[all.copies(t)] = thread.done.fenced_copies;
}

inline void Worker::acquire(Clock* clock, Warp& warp, u32 lanes) {
  for (; lanes; lanes &= lanes - 1) {
    clocks_.assign(lane(warp, lanes).clock, clock);
  }
}

// PTX ISA: bar.warp.sync "guarantees memory ordering among participating threads".
inline void Worker::sync_lanes(Warp& warp, u32 lanes) {
  Clock* clock = clocks_.make(0);
  release(clock, warp, lanes);
  clocks_.seal(clock);
  acquire(clock, warp, lanes);
  clocks_.drop(clock);
}

// ---- Barriers of the block. PTX ISA: barrier{.cta}

// The lanes of a warp arrive together; `threads` 0 stands for all of the block.
inline void Worker::arrive(Warp& warp, u32 lanes, u32 id, u32 threads, bool sleep, u32 place) {
  const Thread* thread = &lane(warp, lanes);
  if (id >= kBarriers) {
    fail(thread, "barrier mismatch", place, "barrier %u: there are %u", id, kBarriers);
  }
  if (threads % 32 || threads > 32 * launch_->warps()) {
    fail(thread, "barrier mismatch", place,
         "barrier %u is to wait for %u threads: not whole warps "
         "of this block",
         id, threads);
  }
  Barrier& barrier = barriers_[id];
  if (barrier.used && barrier.threads != threads) {
    fail(thread, "barrier mismatch", place,
         "barrier %u is to wait for %u threads here and for %u "
         "@%08x (0: for all)",
         id, threads, barrier.threads, barrier.place);
  }
  if (!barrier.used) barrier.clock = clocks_.make(0);
  barrier.used = true;
  barrier.threads = threads;
  barrier.place = place;
  barrier.arrived += 32;
  release(barrier.clock, warp, lanes);
  if (sleep) {
    barrier.lanes[warp.index] |= lanes;
    this->sleep(warp, lanes);
  }
  if (filled(barrier)) open(barrier);
}

inline bool Worker::filled(const Barrier& barrier) const {
  if (!barrier.used) return false;
  if (barrier.threads) return barrier.arrived >= barrier.threads;
  u32 alive = 0;
  for (const Warp& warp : warps_) alive += warp.alive ? 32 : 0;
  return barrier.arrived >= alive;
}

inline void Worker::open(Barrier& barrier) {
  clocks_.seal(barrier.clock);
  for (Warp& warp : warps_) {
    const u32 lanes = barrier.lanes[warp.index];
    acquire(barrier.clock, warp, lanes);
    rouse(warp, lanes);
  }
  clocks_.drop(barrier.clock);
  barrier = Barrier{};
}

// ---- Threads and blocks

inline void Worker::park() {
  Context& mine = current_->context;
  switch_fiber(&mine, scheduler_);
}

inline void Worker::enter() {
  Worker& worker = here();
  const Request& request = worker.launch_->request;
  request.kernel(request.arguments);
  worker.leave();
}

inline void Worker::leave() {
  Thread& thread = *current_;
  Warp& warp = warp_of(thread);
  if (!thread.copies.empty()) {
    fail(&thread, "copy in flight", 0,
         "it exits before its cp.async copies have landed: %zu are "
         "in flight",
         thread.copies.size());
  }
  if (!thread.stores.empty()) {
    fail(&thread, "store in flight", thread.stores.front().place,
         "it exits before its bulk store has read shared memory");
  }
  if (!thread.held.empty()) {
    fail(&thread, "accumulator in flight", thread.held.front().place,
         "it exits before this product was waited for");
  }
  warp.alive &= ~thread.bit();
  warp.ready &= ~thread.bit();
  settle(warp);
  if (!warp.alive) {
    check_steps(thread);
    check_landed();
    warp.instructions.count(counts.operations);
    for (Barrier& barrier : barriers_) {
      if (filled(barrier)) open(barrier);
    }
  }
  park();
}

inline void Worker::check_landed() {
  const auto dead = [](const Warp& warp) { return !warp.alive; };
  if (landings_.empty() || !std::all_of(warps_.begin(), warps_.end(), dead)) return;
  fail(current_, "copy in flight", landings_.back().place,
       "the block ends before its shared memory has received this copy of TMA");
}

inline void Worker::resume(Thread& thread) {
  current_ = &thread;
  switch_fiber(&scheduler_, thread.context);
}

// Runs warps in an order drawn from the seed, each until its lanes wait or it is left for another.
// Copies of TMA land now and then, as the seed has it, and at the latest when nobody can go on.
inline void Worker::schedule() {
  while (!fault.rule[0] && !given_up_ && !*launch_->request.stop) {
    const bool early = !landings_.empty() && random_.below(16) >= lateness_;
    if ((early || !ready_) && land_one()) continue;
    if (!ready_) return;
    run_warp();
  }
}

inline void Worker::run_warp() {
  u32 choice = ready_;
  for (u32 skip = random_.below(u32(std::popcount(ready_))); skip; --skip) choice &= choice - 1;
  Warp& warp = warps_[u32(std::countr_zero(choice))];
  do {
    const u32 lanes = warp.ready, first = random_.below(32);
    for (u32 i = 0; i < 32 && !fault.rule[0]; ++i) {
      const u32 lane = (first + i) % 32;
      if (lanes & warp.ready & 1u << lane) resume(threads_[32 * warp.index + lane]);
    }
  } while (warp.ready && !fault.rule[0] && random_.below(16));
  if (!warp.ready) ready_ &= ~(1u << warp.index);
}

inline void Worker::report(const Thread* thread, const char* rule, u32 place, const char* format,
                           va_list list) {
  std::snprintf(fault.rule, sizeof fault.rule, "%s", rule);
  std::vsnprintf(fault.text, sizeof fault.text, format, list);
  fault.place = place;
  fault.block = std::int32_t(block_);
  fault.thread = thread ? std::int32_t(thread->index) : -1;
}

// The faulty thread stops here; its stack is simply used again.
inline void Worker::fail(const Thread* thread, const char* rule, u32 place, const char* format,
                         ...) {
  va_list list;
  va_start(list, format);
  report(thread, rule, place, format, list);
  va_end(list);
  stop();
}

// The same where no thread runs, or one that has more to do.
inline void Worker::note(const Thread* thread, const char* rule, u32 place, const char* format,
                         ...) {
  va_list list;
  va_start(list, format);
  report(thread, rule, place, format, list);
  va_end(list);
}

inline void Worker::stop() {
  for (;;) park();
}

inline Index Worker::block_index() const {
  const u32 x = launch_->request.grid[0], y = launch_->request.grid[1];
  return {u32(block_ % x), u32(block_ / x % y), u32(block_ / x / y)};
}

inline void Worker::begin_block() {
  const Request& request = launch_->request;
  random_.seed(request.seed, block_);
  shared_shadow_.begin(epoch_, nullptr);
  std::memset(smem_raw, 0xff, request.smem_bytes);
  touches_ = ticks_ = 0;
  learned_.clear();
  constexpr u32 kLateness[] = {16, 15, 8, 2};
  Random late;  // of its own: without TMA the order of warps is what it always was
  late.seed(~request.seed, block_);
  lateness_ = kLateness[late.below(4)];
  forget_order();
  begin_threads();
  begin_warps();
  if (request.trace) tracer.begin_block();
}

inline void Worker::forget_order() {
  for (Barrier& barrier : barriers_) {
    if (barrier.used) clocks_.drop(barrier.clock);
    barrier = Barrier{};
  }
  for (Mbarrier& mbarrier : mbarriers_) forget(mbarrier);
  for (Warpgroup& group : warpgroups_) {
    forget(group);
    group = Warpgroup{};
  }
  mbarriers_.clear();
  landings_.clear();
  fills_.clear();
}

inline void Worker::begin_threads() {
  const u32 x = launch_->request.block[0], y = launch_->request.block[1];
  Clock* clock = clocks_.make(epoch_ - 1);
  for (u32 t = 0; t < launch_->threads(); ++t) {
    Thread& thread = threads_[t];
    thread.index = t;
    thread.position = {t % x, t / x % y, t / x / y};
    thread.context = stacks_.start(int(t), &Worker::enter);
    thread.group = thread.store_group = epoch_;
    thread.copies.clear();
    thread.stores.clear();
    thread.held.clear();
    thread.held_begin = thread.held_end = nullptr;
    thread.ordered = 0;
    thread.waited = 0;
    const u32 before = epoch_ - 1;
    thread.done = {before, before, before, before, before, before};
    thread.asked = nullptr;
    clocks_.assign(thread.clock, clock);
  }
  clocks_.drop(clock);
}

inline void Worker::begin_warps() {
  ready_ = 0;
  spare_registers_ = 0;
  for (u32 w = 0; w < launch_->warps(); ++w) {
    Warp& warp = warps_[w];
    const u32 lanes = std::min(32u, launch_->threads() - 32 * w);
    warp.index = w;
    warp.alive = warp.ready = lanes == 32 ? ~0u : (1u << lanes) - 1;
    warp.barrier = 0;
    warp.epoch = warp.product_group = epoch_;
    warp.steps = 0;
    const u32 threads = 32 * launch_->warps() * launch_->request.blocks_per_sm;
    warp.registers = std::min(256u, kRegisterFile / threads & ~7u);
    warp.wanted = 0;
    warp.groups.clear();
    ready_ |= 1u << w;
  }
}

// Whatever this block filed under an epoch is over for the next one.
inline void Worker::end_block() {
  const auto over = [this](u32 epoch) { epoch_ = std::max(epoch_, epoch + 1); };
  for (const Warp& warp : warps_) over(warp.epoch), over(warp.product_group);
  for (const Thread& thread : threads_) over(thread.group), over(thread.store_group);
  for (const Mbarrier& mbarrier : mbarriers_) over(mbarrier.epoch());
  ++counts.blocks;
  counts.threads += launch_->threads();
}

inline void Worker::run_block() {
  begin_block();
  schedule();
  u32 alive = 0;
  for (const Warp& warp : warps_) alive |= warp.alive;
  if (alive && !fault.rule[0] && !given_up_ && !*launch_->request.stop) deadlock();
  end_block();
}

// For a launch that may be of another size than the last.
inline void Worker::prepare(Launch& launch, std::size_t shared_bytes) {
  launch_ = &launch;
  counts = {};
  fault = {};
  given_up_ = false;
  tracer.spans.clear();
  recent_ = nullptr;
  const bool worn = epoch_ > 1u << 30;  // epochs begin anew before they could run out
  if (threads_.size() == launch.threads() && shared_bytes_ == shared_bytes && !worn) return;
  for (Thread& thread : threads_) {
    if (thread.clock) clocks_.drop(thread.clock);  // none if this worker came too late for a block
  }
  forget_order();
  threads_.clear();
  threads_.resize(launch.threads());
  clocks_.resize(launch.threads());
  warps_.clear();
  warps_.resize(launch.warps());
  shared_shadow_.resize(shared_bytes, launch.warps());
  if (!moment_) written_.resize(kRegion / 4);
  shared_bytes_ = shared_bytes;
  epoch_ = 1;
}

// All blocks that are left, one by one, in an order drawn from the seed. `shared` is this system
// thread's instance of the kernel's shared memory.
inline void Worker::run(u8* shared) {
  shared_base_ = shared;
  dynamic_ = smem_raw - shared;
  window_ = kSystemBytes + u32(u64(smem_raw) % kSystemBytes);
  for (;;) {
    number_ = launch_->order.start();
    if (number_ < launch_->blocks() && !launch_->stopped()) {
      block_ = nth_block(number_, launch_->blocks(), launch_->request.seed);
      run_block();
    }
    launch_->order.end(number_);
    if (fault.rule[0]) launch_->failed = true;
    if (number_ + 1 >= launch_->blocks() || launch_->stopped()) return;
  }
}

}  // namespace emulator

// One block at a time: its threads as fibers, its warps, its barriers, its memory.
#pragma once
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"
#include "arrays.h"
#include "banks.h"
#include "clock.h"
#include "fiber.h"
#include "numbers.h"
#include "order.h"
#include "shadow.h"
#include "trace.h"

namespace emulator {

constexpr u32 kLine = 0x80000000;  // the place is a line of the kernel, not an offset in the code
constexpr u32 kBarriers = 16;

class Worker;
struct Warp;

// A cp.async that was issued and has not landed.
struct Copy {
  u32 group;
  u8* to;
  const u8* from;  // null: zeros
  u32 bytes;
};

struct Index {
  u32 x, y, z;
};

struct Thread {
  u32 index = 0;
  Index position{};
  Context context{};
  Clock* clock = nullptr;
  u32 group = 0;  // of copies, still open
  u32 copies_done = 0;  // all groups up to this one have landed
  std::deque<Copy> copies;
  const void* asked = nullptr;  // the counter that it asked last, and what that said
  u32 answer = 0;

  u32 warp() const { return index / 32; }
  u32 lane() const { return index % 32; }
  u32 bit() const { return 1u << lane(); }
};

struct Group;

// What a lane wants to do together with others of its warp.
struct Call {
  Kind kind;
  const void* site;  // the call's return address: lanes must stand at the same one
  u32 mask;  // of the lanes that take part, kLiving: all that have not exited
  u32 place;
  void (*act)(Worker&, Warp&, const Group&);
};

constexpr u32 kLiving = 0;

// Lanes that wait at the same call until they are complete. Lanes that have exited are not waited
// for, but a matrix instruction wants the whole warp.
struct Group {
  Call call;
  u32 arrived = 0;
  const void* operands[32];

  explicit Group(const Call& first) : call(first) {}
};

struct Warp {
  u32 index = 0;
  u32 alive = 0;  // lanes that have not exited
  u32 ready = 0;  // lanes that can go on
  u32 barrier = 0;  // lanes that sleep at a barrier of the block
  u32 epoch = 0;
  std::vector<Group> groups;
  Instructions instructions;
};

struct Barrier {
  u32 threads = 0;  // it waits for so many, 0: for all
  u32 arrived = 0;
  u32 place = 0;
  u32 lanes[32] = {};  // asleep, by warp
  bool used = false;
  Clock* clock = nullptr;  // what those who arrived know
};

class Random {
 public:
  void seed(u64 a, u64 b) { state_ = a * 0x9e3779b97f4a7c15u ^ (b + 1) * 0xd1b54a32d192ed03u; }
  u32 below(u32 n) { return u32((next() >> 32) * n >> 32); }

 private:
  u64 next() {  // splitmix64
    u64 z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  u64 state_ = 0;
};

// What all workers of a launch share.
struct Launch {
  const Request& request;
  std::deque<Array> arrays;
  Order order;
  std::atomic<bool> failed{false};

  explicit Launch(const Request& r) : request(r) {
    for (int i = 0; i < r.array_count; ++i) arrays.emplace_back(r.arrays[i], i, warps());
  }
  u32 threads() const { return request.block[0] * request.block[1] * request.block[2]; }
  u32 warps() const { return (threads() + 31) / 32; }
  u64 blocks() const { return u64(request.grid[0]) * request.grid[1] * request.grid[2]; }
  bool stopped() const { return failed.load(std::memory_order_relaxed) || *request.stop; }
};

class Worker {
 public:
  Worker() : stacks_(this) {}

  static Worker& here() {
    return *static_cast<Worker*>(Stacks::owner_of(__builtin_frame_address(0)));
  }

  void prepare(Launch& launch, std::size_t shared_bytes);
  void run(u8* shared);

  Thread& thread() { return *current_; }
  Thread& thread(u32 index) { return threads_[index]; }
  Warp& warp_of(const Thread& thread) { return warps_[thread.warp()]; }
  const Launch& launch() const { return *launch_; }
  Index block_index() const;
  u64 number() const { return number_; }  // of the block it runs or ran last, among those started

  // ---- memory (memory.h)
  void keep_going(u32 place);
  void touch(const void* address, u32 size, bool write, u32 place);
  void update(const void* address, u32 size, u32 place);  // an atomic read and write
  void in_order(const void* words, u32 count, u32 place);  // additions of floats
  u32 load_acquire(const u32* counter, u32 place);
  void add_release(u32* counter, u32 x, u32 place);
  void count_move();  // of a counter
  void load_row(Thread& thread, u32 address, u32 size, u32 place);  // of a matrix
  void copy(void* to, const void* from, u32 size, bool valid, u32 place);
  void commit(u32 place);
  void wait(u32 groups, u32 place);
  u32 window(const void* pointer, u32 place);
  const u8* from_window(u32 address) const;

  // ---- warps and barriers (warp.h)
  void together(const Call& call, const void* operands);
  void sync_lanes(Warp& warp, u32 lanes);
  void arrive(Warp& warp, u32 lanes, u32 id, u32 threads, bool sleep, u32 place);

  // Ends the launch. In `text`, %P of a place is written with place_text.
  [[noreturn]] void fail(const Thread* thread, const char* rule, u32 place, const char* format, ...)
      __attribute__((format(printf, 5, 6)));

  Operation& operation(Kind kind) { return counts.operations[kind]; }
  void trace(Kind kind, u32 place) { trace(kind, place, -1, 0, 0, 0); }
  void trace(Kind kind, u32 place, i64 array, i64 offset, u32 size, u32 smem) {
    if (!launch_->request.trace) return;
    const Warp& warp = warp_of(*current_);
    tracer.add({u32(block_), warp.index, kind, place, 0, 0, 1, array, offset, offset + size, smem,
                smem + size});
  }

  Counts counts{};
  Fault fault{};
  Tracer tracer;

 private:
  void run_block();
  void begin_block();
  void begin_threads();
  void begin_warps();
  void end_block();
  void schedule();
  void resume(Thread& thread);
  void deadlock();
  static void enter();
  void leave();
  void park();
  void report(const Thread* thread, const char* rule, u32 place, const char* format, va_list list);

  Access access(const Thread& thread, u32 place);
  void shared(Thread& thread, std::size_t offset, u32 size, bool write, u32 place);
  void check_shared(Thread& thread, std::size_t offset, u32 size, u32 place);
  void update_shared(Thread& thread, std::size_t offset, u32 size, u32 place);
  Array& global(const Thread& thread, const u8* address, u32 size, u32 place);
  void read_array(const Thread& thread, Array& array, const u8* address, u32 size, u32 place);
  void write_array(const Thread& thread, Array& array, const u8* address, u32 size, u32 place,
                   bool atomic);
  [[noreturn]] void race(const Thread& thread, const Conflict& conflict, const Access& access,
                         const char* space, std::size_t base, bool write);
  bool in_shared(const void* address) const {
    return std::size_t(static_cast<const u8*>(address) - shared_base_) < shared_bytes_;
  }
  [[noreturn]] void stray(const Thread& thread, const u8* address, u32 size, u32 place);
  void land(Thread& thread, u32 group);
  void wait_for_others(const Thread& thread, u32 place);
  bool knows(const Thread& thread, const Adder& adder) const;

  Group& join(Warp& warp, const Call& call);
  void complete(Warp& warp, Group& group);
  void settle(Warp& warp);
  Thread& lane(const Warp& warp, u32 lanes);
  void hopeless(Warp& warp);
  void release(Clock* clock, Warp& warp, u32 lanes);
  void acquire(Clock* clock, Warp& warp, u32 lanes);
  bool filled(const Barrier& barrier) const;
  void open(Barrier& barrier);
  void wake(Warp& warp, u32 lanes);

  Stacks stacks_;
  Context scheduler_{};
  Launch* launch_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Barrier barriers_[kBarriers];
  Thread* current_ = nullptr;
  Random random_;
  Clocks clocks_;
  u64 block_ = 0;
  u64 number_ = 0;  // of this block among those that started
  bool given_up_ = false;  // as it waited for a block that failed
  std::vector<Learned> learned_;  // of other blocks, by this one
  u64 touches_ = 0;  // of this block, against the budget
  u32 epoch_ = 1;  // no access so far was filed under it or anything later
  u32 ready_ = 0;  // warps with lanes that can go on

  u8* shared_base_ = nullptr;  // of this system thread's shared memory
  std::size_t shared_bytes_ = 0;
  std::size_t dynamic_ = 0;  // where smem_raw lies in it
  Shadow shared_shadow_;
  Array* recent_ = nullptr;
};

}  // namespace emulator

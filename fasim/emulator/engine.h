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
#include "async.h"
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
constexpr u32 kMostShared = 232448;  // bytes of one block on any GPU so far: 227 KiB
constexpr u32 kSystemBytes = 1024;  // at the start of the shared window
constexpr u32 kRegisterFile = 65536;  // of an SM

class Worker;
struct Warp;
struct TensorMap;
struct Layout;

struct Index {
  u32 x, y, z;
};

struct Thread {
  u32 index = 0;
  Index position{};
  Context context{};
  Clock* clock = nullptr;
  Progress done{};
  u32 group = 0;  // of copies, still open
  std::deque<Copy> copies;
  u32 store_group = 0;  // of bulk stores, still open
  std::deque<Store> stores;
  u32 ordered = 0;  // when it last executed wgmma.fence
  std::vector<Held> held;
  const u8* held_begin = nullptr;  // of all that is held
  const u8* held_end = nullptr;
  u64 waited = 0;  // mbarriers that it has waited at
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
  u32 barrier = 0;  // lanes that sleep until others come: at a barrier, at a product, for registers
  u32 epoch = 0;
  u32 product_group = 0;  // of wgmma, still open
  u32 steps = 0;  // that it executed, of instructions for its whole warpgroup
  u32 registers = 0;  // of each thread
  u32 wanted = 0;  // registers that it sleeps for
  u32 wanted_place = 0;
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

u32 place_of(const void* pc);  // of an address in the kernel's code

class Worker {
 public:
  Worker() : stacks_(this) {}

  static Worker& here() {
    return *static_cast<Worker*>(Stacks::owner_of(__builtin_frame_address(0)));
  }

  void prepare(Launch& launch, std::size_t shared_bytes);
  void run(u8* shared);
  void rest() { stacks_.rest(); }

  Thread& thread() { return *current_; }
  Thread& thread(u32 index) { return threads_[index]; }
  Warp& warp_of(const Thread& thread) { return warps_[thread.warp()]; }
  const Launch& launch() const { return *launch_; }
  Index block_index() const;
  u64 tick() { return ++ticks_; }
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
  void store_row(Thread& thread, u32 address, u32 size, u32 place);
  void copy(void* to, const void* from, u32 size, bool valid, u32 place);
  void commit(u32 place);
  void wait(u32 groups, u32 place);
  u32 window(const void* pointer, u32 place);
  u8* from_window(u32 address) const;
  void touch_own(const u8* address, u32 size, bool write, u32 place);

  // ---- mbarriers (mbarrier.h)
  void init_mbarrier(const void* pointer, u32 count, u32 place);
  void fence_mbarriers();
  void arrive_at(const void* pointer, u32 arrivals, i64 bytes, u32 place);
  bool try_wait(const void* pointer, u32 parity, u32 place);

  // ---- TMA (tma.h)
  void fence_proxy();
  void load_box(void* smem, const void* map, const void* mbarrier, const int* at, u32 rank,
                u32 place);
  void store_box(const void* map, const void* smem, const int* at, u32 rank, bool adds, u32 place);
  void load_bulk(void* smem, const void* global, u32 bytes, const void* mbarrier, u32 place);
  void store_bulk(void* global, const void* smem, u32 bytes, bool adds, u32 place);
  void commit_stores();
  void wait_stores(u32 groups, bool only_read);

  // ---- products of a warpgroup (wgmma.h)
  void keep_step(Warp& warp, const Call& call, const char* name);
  void order_registers(Warp& warp);
  void meet_warpgroup(Warp& warp, const Group& group);
  void commit_products(Warp& warp);
  void wait_products(Warp& warp, u32 groups, u32 place);
  void set_registers(Warp& warp, u32 registers, bool more, u32 place);

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
    trace(kind, place, array, offset, size, smem, size);
  }
  void trace(Kind kind, u32 place, i64 array, i64 offset, u32 size, u32 smem, u32 smem_size) {
    if (!launch_->request.trace) return;
    const Warp& warp = warp_of(*current_);
    tracer.add({u32(block_), warp.index, kind, place, 0, 0, 1, array, offset, offset + size, smem,
                smem + smem_size});
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
  void run_warp();
  class Deadlock;
  void deadlock();
  void forget_order();
  static void enter();
  void leave();
  void park();
  [[noreturn]] void stop();
  void note(const Thread* thread, const char* rule, u32 place, const char* format, ...)
      __attribute__((format(printf, 5, 6)));
  void report(const Thread* thread, const char* rule, u32 place, const char* format, va_list list);

  Agents agents() const { return {launch_->threads()}; }
  Access access(const Thread& thread, u32 place);
  void shared(Thread& thread, std::size_t offset, u32 size, bool write, u32 place);
  bool beyond(std::size_t offset, u32 size) const;
  i64 from_address(u32 address) const;
  void check_shared(Thread& thread, std::size_t offset, u32 size, u32 place);
  void update_shared(Thread& thread, std::size_t offset, u32 size, u32 place);
  std::size_t row_offset(Thread& thread, u32 address, u32 size, u32 place);
  Array& global(const Thread& thread, const u8* address, u32 size, u32 place);
  Array& array_of(const Thread& thread, const u8* address, u32 size, u32 place);
  void read_array(const Thread& thread, Array& array, const u8* address, u32 size, u32 place);
  void write_array(const Thread& thread, Array& array, const u8* address, u32 size, Access by,
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

  // ---- mbarriers
  std::size_t shared_offset(const void* pointer, u32 bytes, u32 place);
  Mbarrier& mbarrier_at(const void* pointer, u32 place);
  void settle(Mbarrier& mbarrier, u32 place);
  void acquire_from(Mbarrier& mbarrier, Thread& thread);
  struct Name {
    char text[120];
  };
  Name name(const Mbarrier& mbarrier) const;
  void forget(Mbarrier& mbarrier);
  bool has_waited(const Access& access, const Mbarrier& mbarrier) const;

  // ---- TMA
  const TensorMap& tensor_map(const void* pointer, u32 rank, u32 place);
  void check_aligned(std::size_t offset, u32 swizzle, u32 place);
  void check_box(const TensorMap& map, const int* at, bool store, u32 place);
  void check_bulk(const void* smem, const void* global, u32 bytes, u32 place);
  Landing begin_load(void* smem, u32 bytes, u32 swizzle, const void* mbarrier, u32 place);
  void fetch(const u8* from, u32 bytes, const Landing& landing);
  bool land_one();
  void check_landed();
  Store begin_store(const void* smem, u32 bytes, bool adds, u32 place);
  void take(u8* from, u8* to, u32 bytes, Store& store);
  void send(u8* to, u32 bytes, const Store& store);
  void drain(const Store& store);

  // ---- products
  void check_steps(const Thread& thread);
  void issue(Warpgroup& group, u32 index);
  Access access(Warpgroup& group, u32 index, u32 epoch, u32 place);
  Clock* common_clock(Warpgroup& group, u32 index);
  void forget(Warpgroup& group);
  void check_operand(const Access& by, u32 first, const ProductKind& kind, bool left);
  void check_strides(const Thread& thread, const Layout& layout, u32 rows, bool transposed,
                     const char* name, u32 place);
  void check_swizzle(const Thread& thread, std::size_t offset, u32 agent, u32 epoch, u32 swizzle,
                     const char* name, u32 place);
  void check_registers(Thread& thread, const void* registers, u32 bytes, u32 place);
  void hold(Thread& thread, const void* registers, u32 bytes, u32 group, u32 place, bool sums);
  void let_go(Thread& thread);
  u32 accumulator_of(Warpgroup& group, u32 index, const Product& product);
  void make_sums(Warpgroup& group, u32 up_to);
  void take_back(Warpgroup& group, Warp& warp, u32 up_to, u32 place);
  void grant_registers();

  Group& join(Warp& warp, const Call& call);
  void complete(Warp& warp, Group& group);
  void settle(Warp& warp);
  Thread& lane(const Warp& warp, u32 lanes);
  void hopeless(Warp& warp);
  void publish(Clock* clock, const Thread& thread, u32 epoch);
  void release(Clock* clock, Warp& warp, u32 lanes);
  void acquire(Clock* clock, Warp& warp, u32 lanes);
  bool filled(const Barrier& barrier) const;
  void open(Barrier& barrier);
  void wake(Warp& warp, u32 lanes);
  void sleep(Warp& warp, u32 lanes = ~0u);  // until roused
  void rouse(Warp& warp, u32 lanes = ~0u);

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
  u64 ticks_ = 0;  // how often its threads asked for the clock
  u32 epoch_ = 1;  // no access so far was filed under it or anything later
  u32 ready_ = 0;  // warps with lanes that can go on

  u8* shared_base_ = nullptr;  // of this system thread's shared memory
  std::size_t shared_bytes_ = 0;
  std::size_t dynamic_ = 0;  // where smem_raw lies in it
  u32 window_ = 0;  // ... and in the shared window
  Shadow shared_shadow_;
  Array* recent_ = nullptr;

  std::deque<Mbarrier> mbarriers_;
  std::vector<Landing> landings_;  // in flight
  std::vector<Fill> fills_;
  Warpgroup warpgroups_[kWarpgroups];
  u32 lateness_ = 0;  // of 16: how seldom copies land before they must
  u32 spare_registers_ = 0;  // of the block
  u32 moment_ = 0;  // counts wgmma.fence, 0: none so far
  Sparse<u32> written_;  // by word of the stacks: the moment it was last written
};

}  // namespace emulator

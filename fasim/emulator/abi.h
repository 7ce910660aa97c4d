// What Python and the runtime hand each other: plain C structures, mirrored in program.py.
#pragma once
#include <cstdint>

namespace emulator {

constexpr int kArrays = 32;  // arrays of one launch, at most
constexpr int kOuter = 3;  // dimensions of an array outside its rows

// One array in global memory. A row is `row_bytes` long; `count` and `step` (in bytes, descending)
// say where the rows lie. What lies between rows belongs to nobody.
struct ArrayView {
  const char* name;
  std::uint8_t* base;
  std::int64_t bytes;  // from the first byte to the end of the last row
  std::int64_t row_bytes;
  std::int64_t count[kOuter];
  std::int64_t step[kOuter];
  std::uint8_t* known;  // of a writable array: which bytes are initialised, updated by the launch
  std::int32_t writable;
};

struct Request {
  void (*kernel)(void** arguments);
  void** arguments;  // one pointer for each parameter, as cuLaunchKernel takes them
  const ArrayView* arrays;
  std::int32_t array_count;
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t smem_bytes;  // dynamic shared memory
  std::uint32_t blocks_per_sm;  // that are to share its registers
  std::uint64_t seed;
  std::uint64_t budget;  // memory accesses of a block before it counts as endless
  std::int32_t workers;
  std::int32_t trace;
  std::int32_t ordered;  // floats are to be added to a word in an order that is always the same
  volatile std::int32_t* stop;  // set from outside to give up
};

// The kinds of operation that are counted, in the order of `Counts::operations`.
enum Kind : std::uint32_t {
  kMma,
  kLdmatrix,
  kCpAsync,
  kShuffle,
  kVote,
  kBarrier,
  kSyncwarp,
  kEx2,
  kLg2,
  kRcp,
  kCvt,
  kSharedLoad,
  kSharedStore,
  kGlobalLoad,
  kGlobalStore,
  kAtomic,
  kWgmma,
  kStmatrix,
  kTmaLoad,
  kTmaStore,
  kMbarrier,
  kWait,
  kKinds
};

// `count` is instructions of a warp; of ex2, lg2, rcp, cvt, atomics and waits at an mbarrier it is
// threads; of wgmma it is blocks of 64 x 8 sums; of TMA it is copies.
struct Operation {
  std::uint64_t count, bytes, wavefronts, conflicts;
};

struct Counts {
  std::uint64_t blocks, threads;
  std::uint64_t reads[kArrays], writes[kArrays];  // bytes named by loads and stores
  Operation operations[kKinds];
};

// A stretch of one warp's work of one kind. Steps count what a block did so far.
struct Span {
  std::uint32_t block, warp, kind, place;
  std::uint64_t first, last, count;
  std::int64_t array, from, to;  // of a copy: which array, bytes [from, to) of it
  std::uint32_t smem_from, smem_to;
};

// A place is a line of the kernel (top bit set) or an offset in the library. In `text` places stand
// as @ and 8 hex digits.
struct Fault {
  char rule[48];
  char text[4000];
  std::uint32_t place;
  std::int32_t block, thread;  // -1: none in particular
};

struct Response {
  Counts counts;
  Fault fault;  // an empty rule: there was none
  Span* spans;  // valid until the next launch
  std::uint64_t span_count;
};

}  // namespace emulator

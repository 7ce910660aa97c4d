// Work in the background: what was issued and is not yet known to be done.
#pragma once
#include <deque>
#include <utility>
#include <vector>

#include "calls.h"
#include "clock.h"

namespace emulator {

// A cp.async that has not landed.
struct Copy {
  u32 group;
  u8* to;
  const u8* from;  // null: zeros
  u32 bytes;
};

// A bulk store or reduction: rows of shared memory on their way to global memory.
struct Row {
  u8* shared;
  u8* global;
  u32 bytes;
};

struct Store {
  u32 group;
  u32 place;
  bool adds;  // floats
  const u8* from;
  u32 bytes;
  std::vector<Row> rows;
};

// A copy of TMA into shared memory that has not landed.
struct Piece {
  u8* shared;
  const u8* global;  // null: zeros
  u32 bytes;
};

struct Landing {
  u32 mbarrier;
  u8* to;
  u32 bytes;  // of the whole box
  u32 place;
  std::vector<Piece> pieces;
};

// The last box that TMA wrote to a stretch of shared memory, for who reads it with another swizzle.
struct Fill {
  std::size_t begin, end;
  u32 agent, epoch, swizzle, place;
};

struct Mbarrier {
  std::size_t offset = 0;  // in shared memory
  u32 index = 0;
  u32 count = 0;  // arrivals that a phase waits for
  u32 pending = 0;
  i64 bytes = 0;  // still to come in this phase
  u32 phase = 0;  // since it was initialised
  u32 first = 0;  // epoch of phase 0
  u32 in_flight = 0;  // copies of this phase
  u32 maker = 0, made = 0, place = 0;  // who initialised it, in which epoch
  bool fenced = false;
  Clock* arrived = nullptr;  // what those know who arrived so far
  Clock* complete = nullptr;  // ... in the phases that are complete
  std::vector<std::pair<Clock*, Clock*>> joined;  // clocks before and after waiting for those
  u32 lanes[32] = {};  // asleep, by warp
  u32 wait_place = 0;

  u32 epoch() const { return first + phase; }
};

// One wgmma of a warpgroup. PTX ISA: wgmma.mma_async
struct ProductKind {
  Type type;
  u32 columns;
  bool transpose_a, transpose_b;
  bool a_in_registers, add;
  u64 a, b;  // descriptors

  bool operator==(const ProductKind&) const = default;
  u32 depth() const { return type == kE4m3 ? 32 : 16; }
};

// Its operands in shared memory are read when it is waited for.
struct Product {
  ProductKind kind;
  u32 group;
  u32 accumulator;  // index
  std::vector<u32> a;  // registers, by thread
};

// The sums of products in flight, by thread in the order of its registers.
struct Accumulator {
  float* registers[128];
  u32 count;  // of each thread
  u32 group;  // of the last product
  u32 taken;  // a mask of warps that have them back
  u32 place;
  std::vector<float> sums;
};

// An instruction for a whole warpgroup that some of its warps have executed, and others are to.
struct Step {
  const void* site;  // the call's return address; one a place where it was inlined
  const char* name;
  u32 place;
  u32 warp;  // the first that came
  u32 count;  // of warps that came
};

struct Warpgroup {
  std::deque<Step> steps;
  u32 over = 0;  // steps before those, which all warps have executed
  u32 arrived = 0;  // a mask of warps at a product
  const void* operands[128];
  u32 place = 0;
  u32 done = 0;  // groups whose sums are made
  std::vector<Product> products;
  std::vector<Accumulator> sums;
  Clock* common = nullptr;  // what all its threads know, made from `sources`
  std::vector<Clock*> sources;
};

// Registers that products in flight still need: to add to (nobody may touch them), or to read.
struct Held {
  const u8* begin;
  const u8* end;
  u32 group;
  u32 place;
  bool sums;
};

}  // namespace emulator

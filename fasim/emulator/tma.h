// TMA: boxes of tensors, and runs of bytes, between global and shared memory in the background.
// PTX ISA: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk
//
// What a load writes is poison until it lands, and it lands in any order, as late as a seed wants
// it; what a store reads is fetched when the store is waited for.
#pragma once
#include "engine.h"
#include "mbarrier.h"
#include "memory.h"

namespace emulator {

// What fasim/tensor_map.py fills in where a device has its own encoding. The innermost dimension
// comes first; strides are in bytes, of the dimensions after it.
struct TensorMap {
  u32 magic;
  u8 rank, element_bytes, floats, swizzle;
  u8* base;
  u64 size[5];
  u64 stride[4];
  u32 box[5];

  u32 row_bytes() const { return box[0] * element_bytes; }
  u32 box_bytes() const {
    u32 bytes = row_bytes();
    for (u32 d = 1; d < rank; ++d) bytes *= box[d];
    return bytes;
  }
};

constexpr u32 kMapMagic = 0x50414d46;  // FMAP
constexpr u32 kSwizzleSpan[4] = {16, 128, 64, 32};  // by the number that wgmma's descriptors have
constexpr u32 kUnknownSwizzle = ~0u;

// Where a byte of an address of shared memory lies under a swizzle: its 16-byte chunk is exchanged
// within the span by the number of the row. `base` is subtracted from that number.
inline u32 swizzled(u32 address, u32 swizzle, u32 base = 0) {
  const u32 mask = swizzle ? kSwizzleSpan[swizzle] / 16 - 1 : 0;
  return address ^ ((((address >> 7) - base) & mask) << 4);
}

// Calls f(byte of the box, global address, bytes) for each run of a row of the box that lies in the
// tensor.
template <typename F>
void for_each_row(const TensorMap& map, const int* at, F f) {
  const i64 first = std::max<i64>(0, -i64(at[0]));
  const i64 last = std::min<i64>(map.box[0], i64(map.size[0]) - at[0]);
  if (first >= last) return;
  const u32 rows = map.box_bytes() / map.row_bytes();
  for (u32 row = 0; row < rows; ++row) {
    u64 offset = u64(at[0] + first) * map.element_bytes;  // modulo 2^64, as on a device
    bool inside = true;
    for (u32 d = 1, rest = row; d < map.rank; rest /= map.box[d++]) {
      const i64 i = at[d] + i64(rest % map.box[d]);
      inside &= i >= 0 && i < i64(map.size[d]);
      offset += u64(i) * map.stride[d - 1];
    }
    if (!inside) continue;
    f(u32(row * map.row_bytes() + first * map.element_bytes), map.base + offset,
      u32((last - first) * map.element_bytes));
  }
}

// Calls f(byte, bytes) for the parts of a run of a box that stay together under a swizzle.
template <typename F>
void for_each_part(u32 byte, u32 bytes, u32 swizzle, F f) {
  while (swizzle && bytes) {
    const u32 part = std::min(bytes, 16 - byte % 16);
    f(byte, part);
    byte += part, bytes -= part;
  }
  if (bytes) f(byte, bytes);
}

inline void Worker::fence_proxy() {
  current_->done.fenced = warp_of(*current_).epoch;
  current_->done.fenced_copies = current_->done.copies;
  fence_mbarriers();
}

// ---- What must hold of both directions

inline const TensorMap& Worker::tensor_map(const void* pointer, u32 rank, u32 place) {
  const auto& map = *static_cast<const TensorMap*>(pointer);
  if (map.magic != kMapMagic || map.rank != rank) {
    fail(current_, "tensor map mismatch", place,
         "it takes the map of a tensor of %u dimensions, "
         "and this %s",
         rank, map.magic == kMapMagic ? "has another number" : "is no tensor map");
  }
  // A device answers with an illegal access, whatever part is asked for (recorded on an H200).
  const auto has_base = [&](const Array& array) {
    return map.base >= array.base && map.base < array.base + std::max<i64>(array.bytes, 1);
  };
  if (std::none_of(launch_->arrays.begin(), launch_->arrays.end(), has_base)) {
    fail(current_, "tensor map in no memory", place, "its tensor begins where no array is");
  }
  return map;
}

// TMA itself needs 128 bytes; a box that does not begin where its swizzle does is another layout
// than the one that descriptors and code assume.
inline void Worker::check_aligned(std::size_t offset, u32 swizzle, u32 place) {
  const u32 window = u32(offset - dynamic_) + window_;
  if (window % 128) {
    fail(current_, "misaligned access", place,
         "a box of TMA at [[shared+%zu]], which is no multiple of 128", offset - dynamic_);
  }
  if (swizzle && window % (8 * kSwizzleSpan[swizzle])) {
    fail(current_, "misaligned swizzle", place,
         "a box at [[shared+%zu]] (shared address %u): a swizzle of %u bytes repeats every %u",
         offset - dynamic_, window, kSwizzleSpan[swizzle], 8 * kSwizzleSpan[swizzle]);
  }
}

// A device answers these with "illegal instruction" (recorded on an H200): a box whose rows do not
// begin at a multiple of 16 bytes, and a store that begins before its tensor.
inline void Worker::check_box(const TensorMap& map, const int* at, bool store, u32 place) {
  if (i64(at[0]) * map.element_bytes % 16) {
    fail(current_, "misaligned box", place,
         "a box begins at element %d of its rows, which is no multiple of 16 bytes", at[0]);
  }
  for (u32 d = 0; store && d < map.rank; ++d) {
    if (at[d] >= 0) continue;
    fail(current_, "store before its tensor", place,
         "a box begins at %d in dimension %u: only a load may begin below 0", at[d], d);
  }
}

inline void Worker::check_bulk(const void* smem, const void* global, u32 bytes, u32 place) {
  const u32 window = u32(static_cast<const u8*>(smem) - shared_base_ - dynamic_) + window_;
  if (window % 16 || u64(global) % 16 || bytes % 16) {
    fail(current_, "misaligned access", place,
         "a bulk copy of %u bytes from or to shared address %u: all three must be multiples of 16",
         bytes, window);
  }
}

// ---- Loads

inline void Worker::load_box(void* smem, const void* map_at, const void* mbarrier, const int* at,
                             u32 rank, u32 place) {
  const TensorMap& map = tensor_map(map_at, rank, place);
  const std::size_t offset = shared_offset(smem, map.box_bytes(), place);
  check_aligned(offset, map.swizzle, place);
  check_box(map, at, false, place);
  Landing landing = begin_load(smem, map.box_bytes(), map.swizzle, mbarrier, place);
  const u32 first = u32(offset - dynamic_) + window_;
  for_each_row(map, at, [&](u32 byte, u8* from, u32 bytes) {
    fetch(from, bytes, landing);
    for_each_part(byte, bytes, map.swizzle, [&](u32 part, u32 size) {
      u8* to = from_window(swizzled(first + part, map.swizzle));
      landing.pieces.push_back({to, from + (part - byte), size});
    });
  });
  landings_.push_back(std::move(landing));
}

inline void Worker::load_bulk(void* smem, const void* global, u32 bytes, const void* mbarrier,
                              u32 place) {
  shared_offset(smem, bytes, place);
  check_bulk(smem, global, bytes, place);
  Landing landing = begin_load(smem, bytes, kUnknownSwizzle, mbarrier, place);
  fetch(static_cast<const u8*>(global), bytes, landing);
  landing.pieces.push_back({static_cast<u8*>(smem), static_cast<const u8*>(global), bytes});
  landings_.push_back(std::move(landing));
}

// Files the destination as written by TMA in the mbarrier's phase, and poisons it.
inline Landing Worker::begin_load(void* smem, u32 bytes, u32 swizzle, const void* pointer,
                                  u32 place) {
  Thread& thread = *current_;
  keep_going(place);
  Mbarrier& mbarrier = mbarrier_at(pointer, place);
  if (!mbarrier.fenced) {
    fail(&thread, "missing mbarrier fence", place,
         "TMA is to report to %s, and thread %u executed no fence.mbarrier_init afterwards",
         name(mbarrier).text, mbarrier.maker);
  }
  const std::size_t offset = static_cast<u8*>(smem) - shared_base_;
  Access by = access(thread, place);
  by.async = true;
  by.agent = by.agents.mbarrier(mbarrier.index);
  by.epoch = mbarrier.epoch();
  const Conflict conflict = shared_shadow_.write(by, offset, bytes);
  if (conflict.what) race(thread, conflict, by, "shared", dynamic_, true);
  std::memset(smem, 0xff, bytes);
  std::erase_if(fills_, [&](const Fill& f) { return f.begin < offset + bytes && offset < f.end; });
  fills_.push_back({offset, offset + bytes, by.agent, by.epoch, swizzle, place});
  ++mbarrier.in_flight;
  Operation& load = operation(kTmaLoad);
  ++load.count;
  load.bytes += bytes;
  return {mbarrier.index, static_cast<u8*>(smem), bytes, place, {}};
}

// A run of global memory that a load reads.
inline void Worker::fetch(const u8* from, u32 bytes, const Landing& landing) {
  const u32 place = landing.place, to = u32(landing.to - shared_base_ - dynamic_);
  Array& array = array_of(*current_, from, bytes, place);
  read_array(*current_, array, from, bytes, place);
  trace(kTmaLoad, place, array.index, from - array.base, bytes, to, landing.bytes);
}

// One of the copies in flight arrives, chosen by the seed. False if there is none.
inline bool Worker::land_one() {
  if (landings_.empty()) return false;
  std::swap(landings_[random_.below(u32(landings_.size()))], landings_.back());
  const Landing landing = std::move(landings_.back());
  landings_.pop_back();
  std::memset(landing.to, 0, landing.bytes);
  for (const Piece& piece : landing.pieces) std::memcpy(piece.shared, piece.global, piece.bytes);
  Mbarrier& mbarrier = mbarriers_[landing.mbarrier];
  mbarrier.bytes -= landing.bytes;
  --mbarrier.in_flight;
  settle(mbarrier, landing.place);
  return true;
}

// ---- Stores

inline void Worker::store_box(const void* map_at, const void* smem, const int* at, u32 rank,
                              bool adds, u32 place) {
  const TensorMap& map = tensor_map(map_at, rank, place);
  const std::size_t offset = shared_offset(smem, map.box_bytes(), place);
  check_aligned(offset, map.swizzle, place);
  check_box(map, at, true, place);
  if (adds && !map.floats) {
    fail(current_, "tensor map mismatch", place, "the emulator adds tensors of fp32 only");
  }
  const u32 first = u32(offset - dynamic_) + window_;
  Store store = begin_store(smem, map.box_bytes(), adds, place);
  for_each_row(map, at, [&](u32 byte, u8* to, u32 bytes) {
    send(to, bytes, store);
    for_each_part(byte, bytes, map.swizzle, [&](u32 part, u32 size) {
      u8* from = from_window(swizzled(first + part, map.swizzle));
      take(from, to + (part - byte), size, store);
    });
  });
  current_->stores.push_back(std::move(store));
}

inline void Worker::store_bulk(void* global, const void* smem, u32 bytes, bool adds, u32 place) {
  const std::size_t offset = shared_offset(smem, bytes, place);
  check_bulk(smem, global, bytes, place);
  Store store = begin_store(smem, bytes, adds, place);
  send(static_cast<u8*>(global), bytes, store);
  take(shared_base_ + offset, static_cast<u8*>(global), bytes, store);
  current_->stores.push_back(std::move(store));
}

inline Store Worker::begin_store(const void* smem, u32 bytes, bool adds, u32 place) {
  keep_going(place);
  Operation& store = operation(kTmaStore);
  ++store.count;
  store.bytes += bytes;
  return {current_->store_group, place, adds, static_cast<const u8*>(smem), bytes, {}};
}

// A run of shared memory that a store reads when it is waited for.
inline void Worker::take(u8* from, u8* to, u32 bytes, Store& store) {
  Thread& thread = *current_;
  Access by = access(thread, store.place);
  by.async = true;
  by.agent = by.agents.reads(thread.index);
  by.epoch = store.group;
  const Conflict conflict = shared_shadow_.read(by, from - shared_base_, bytes);
  if (conflict.what) race(thread, conflict, by, "shared", dynamic_, false);
  store.rows.push_back({from, to, bytes});
}

// A run of global memory that a store writes.
inline void Worker::send(u8* to, u32 bytes, const Store& store) {
  Thread& thread = *current_;
  Array& array = array_of(thread, to, bytes, store.place);
  if (store.adds && !(array.writable && array.shadow.written(to - array.base, bytes))) {
    fail(&thread, "uninitialised read", store.place,
         "a reduction adds to [[%s+%zu]], which nobody wrote", array.name,
         std::size_t(to - array.base));
  }
  if (store.adds) in_order(to, bytes / 4, store.place);
  Access by = access(thread, store.place);
  by.agent = by.agents.stores(thread.index);
  by.epoch = store.group;
  write_array(thread, array, to, bytes, by, store.adds);
  const u32 from = u32(store.from - shared_base_ - dynamic_);
  trace(kTmaStore, store.place, array.index, to - array.base, bytes, from, store.bytes);
}

inline void Worker::commit_stores() { ++current_->store_group; }

// All but the newest `groups` closed groups have read shared memory; and written, unless only_read.
inline void Worker::wait_stores(u32 groups, bool only_read) {
  Thread& thread = *current_;
  const u32 newest = thread.store_group - 1;
  if (newest < groups) return;
  const u32 group = newest - groups;
  while (!thread.stores.empty() && thread.stores.front().group <= group) {
    drain(thread.stores.front());
    thread.stores.pop_front();
  }
  thread.done.reads = std::max(thread.done.reads, group);
  if (!only_read) thread.done.stores = std::max(thread.done.stores, group);
}

inline void Worker::drain(const Store& store) {
  for (const Row& row : store.rows) {
    if (!store.adds) {
      std::memcpy(row.global, row.shared, row.bytes);
      continue;
    }
    for (u32 i = 0; i < row.bytes; i += 4) {
      float x;
      std::memcpy(&x, row.shared + i, 4);
      add_to(reinterpret_cast<float*>(row.global + i), x);
    }
  }
}

}  // namespace emulator

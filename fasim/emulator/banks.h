// How a warp's accesses to shared memory fall on its 32 banks of 4 bytes.
#pragma once
#include <algorithm>
#include <bit>
#include <vector>

#include "abi.h"
#include "numbers.h"

namespace emulator {

constexpr u32 kBanks = 32;

// Wavefronts of one instruction whose `lanes` (a mask) access `size` bytes each at these addresses.
// Words of one bank take turns; lanes that name the same word share it. 8-byte accesses go by
// half-warps, 16-byte ones by quarters, so that a wavefront is at most 128 bytes. `ideal` counts
// what would do without conflicts.
inline u32 wavefronts(const u32* addresses, u32 lanes, u32 size, u32& ideal) {
  const u32 unit = size < 4 ? 4 : size, slots = 4 * kBanks / unit;
  u32 total = 0;
  for (u32 first = 0; first < 32; first += slots) {
    u32 most = 0, words = 0, load[kBanks] = {}, seen[kBanks];
    for (u32 lane = first; lane < first + slots; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      const u32 word = addresses[lane] / unit;
      if (std::find(seen, seen + words, word) != seen + words) continue;
      seen[words++] = word;
      most = std::max(most, ++load[word % slots]);
    }
    total += most;
    ideal += most > 0;
  }
  return total;
}

// What a lane did to memory between two points where its warp meets.
struct Touch {
  u32 place;
  u32 address;  // in the shared window; unused for global memory
  u16 size;
  u16 kind;
};

// Joins the touches of a warp's lanes into instructions: the n-th time that each lane came by a
// place is taken to be the same instruction.
class Instructions {
 public:
  void add(u32 lane, const Touch& touch) {
    Site& site = site_of(touch);
    const u32 turn = site.turns[lane]++;
    if (turn >= site.instructions.size()) site.instructions.push_back({});
    Instruction& instruction = site.instructions[turn];
    instruction.lanes |= 1u << lane;
    instruction.addresses[lane] = touch.address;
  }

  void count(Operation* operations) {
    for (Site& site : sites_) {
      for (const Instruction& instruction : site.instructions) {
        add_to(operations[site.touch.kind], site.touch, instruction);
      }
    }
    sites_.clear();
  }

 private:
  struct Instruction {
    u32 lanes;
    u32 addresses[32];
  };
  struct Site {
    Touch touch;
    u32 turns[32];
    std::vector<Instruction> instructions;
  };

  static void add_to(Operation& operation, const Touch& touch, const Instruction& instruction) {
    ++operation.count;
    operation.bytes += u64(std::popcount(instruction.lanes)) * touch.size;
    if (touch.kind == kGlobalLoad || touch.kind == kGlobalStore) return;
    u32 ideal = 0;
    const u32 needed = wavefronts(instruction.addresses, instruction.lanes, touch.size, ideal);
    operation.wavefronts += needed;
    operation.conflicts += needed - ideal;
  }

  // A lane mostly comes by the places in a fixed order, so the search starts after the last one.
  Site& site_of(const Touch& touch) {
    for (std::size_t i = 0; i < sites_.size(); ++i, ++cursor_) {
      if (cursor_ >= sites_.size()) cursor_ = 0;
      if (sites_[cursor_].touch.place == touch.place) return sites_[cursor_];
    }
    cursor_ = sites_.size();
    return sites_.emplace_back(Site{touch, {}, {}});
  }

  std::vector<Site> sites_;
  std::size_t cursor_ = 0;
};

}  // namespace emulator

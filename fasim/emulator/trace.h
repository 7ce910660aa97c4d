// What the warps did, as spans: a tile copied, a product, a softmax step, a barrier.
#pragma once
#include <algorithm>
#include <vector>

#include "abi.h"
#include "numbers.h"

namespace emulator {

// Lanes run one after the other between two points where their warp meets, so an event extends any
// span of its kind that the warp opened since it last met; a meeting of another sort closes them.
class Tracer {
 public:
  void begin_block() {
    step_ = 0;
    for (auto& open : open_) open.clear();
  }

  void add(Span event) {
    event.first = event.last = step_++;
    auto& open = open_[event.warp];
    for (const std::size_t i : open) {
      if (extends(spans[i], event)) return extend(spans[i], event);
    }
    open.push_back(spans.size());
    spans.push_back(event);
  }

  // The warp went on together to another sort of work, or one of its lanes has waited for a phase.
  void meet(u32 warp, Kind kind) {
    const Sort now = sort_of(kind);
    if (sorts_[warp] != now || kind == kMbarrier) open_[warp].clear();
    sorts_[warp] = now;
  }

  std::vector<Span> spans;

 private:
  enum Sort { kNothing, kProduct, kSoftmax, kTransfer, kMeeting };

  static Sort sort_of(u32 kind) {
    switch (kind) {
      case kMma:
      case kLdmatrix:
      case kWgmma:
        return kProduct;
      case kShuffle:
      case kVote:
      case kEx2:
      case kLg2:
      case kRcp:
      case kCvt:
        return kSoftmax;
      case kBarrier:
      case kSyncwarp:
      case kMbarrier:
      case kWait:
        return kMeeting;
      default:
        return kTransfer;
    }
  }

  static bool extends(const Span& span, const Span& event) {
    const Sort sort = sort_of(event.kind);
    if (sort != sort_of(span.kind) || sort == kMeeting) return false;
    return span.array == event.array && (sort != kTransfer || span.kind == event.kind);
  }

  static void extend(Span& span, const Span& event) {
    span.last = event.last;
    ++span.count;
    span.from = std::min(span.from, event.from);
    span.to = std::max(span.to, event.to);
    span.smem_from = std::min(span.smem_from, event.smem_from);
    span.smem_to = std::max(span.smem_to, event.smem_to);
  }

  u64 step_ = 0;
  std::vector<std::size_t> open_[32];
  Sort sorts_[32] = {};
};

}  // namespace emulator

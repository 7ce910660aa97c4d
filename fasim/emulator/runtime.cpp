// The runtime: compiled once for each compiler, linked with every kernel.
//
// The kernel's own code is instrumented as for the thread sanitizer, and calls __tsan_* before each
// load and store; those functions are defined here and check the access. Nothing else of a sanitizer
// is linked.
#include <link.h>

#include "deadlock.h"
#include "engine.h"
#include "memory.h"
#include "operations.h"
#include "warp.h"

using namespace emulator;

namespace {

const u8* image_base = nullptr;  // where this library was loaded
std::size_t image_bytes = 0, tls_bytes = 0;

int find_image(dl_phdr_info* info, std::size_t, void*) {
  const auto here = reinterpret_cast<ElfW(Addr)>(&find_image);
  std::size_t tls = 0, end = 0;
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    const ElfW(Addr) begin = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD) {
      mine |= begin <= here && here < begin + header.p_memsz;
      end = header.p_vaddr + header.p_memsz;
    }
    if (header.p_type == PT_TLS) tls = header.p_memsz;
  }
  if (!mine) return 0;
  image_base = reinterpret_cast<const u8*>(info->dlpi_addr);
  image_bytes = end;
  tls_bytes = tls;
  return 1;
}

int find_segment(dl_phdr_info* info, std::size_t, void* result) {
  if (reinterpret_cast<const u8*>(info->dlpi_addr) != image_base) return 0;
  *static_cast<u8**>(result) = static_cast<u8*>(info->dlpi_tls_data);
  return 1;
}

// This system thread's instance of the kernel's shared memory.
// Shared memory is thread-local: a block runs on one system thread, and all of a kernel's shared
// variables lie in this library's one TLS segment. The kernel's unit defines smem_raw.
u8* shared_memory() {
  smem_raw[0] = 0;  // the instance comes into being when it is first used
  u8* base = nullptr;
  dl_iterate_phdr(find_segment, &base);
  return base;
}

std::mutex one_launch;
std::deque<Worker> workers;
std::vector<Span> spans;

void add(Counts& sum, const Counts& part) {
  const auto* from = reinterpret_cast<const u64*>(&part);
  auto* to = reinterpret_cast<u64*>(&sum);
  for (std::size_t i = 0; i < sizeof(Counts) / sizeof(u64); ++i) to[i] += from[i];
}

// Of several faults the one of the block that started first.
void collect(Response& response, const Worker& worker, u64& first) {
  add(response.counts, worker.counts);
  if (worker.fault.rule[0] && worker.number() < first) {
    first = worker.number();
    response.fault = worker.fault;
  }
  spans.insert(spans.end(), worker.tracer.spans.begin(), worker.tracer.spans.end());
}

void launch(const Request& request, Response& response) {
  if (!image_base) dl_iterate_phdr(find_image, nullptr);
  Launch launch(request);
  const std::size_t count = std::max(1, request.workers);
  while (workers.size() < count) workers.emplace_back();
  for (std::size_t i = 0; i < count; ++i) workers[i].prepare(launch, tls_bytes);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([i] { workers[i].run(shared_memory()); });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < count; ++i) workers[i].rest();
  u64 first = ~u64(0);
  for (std::size_t i = 0; i < count; ++i) collect(response, workers[i], first);
  for (Array& array : launch.arrays) {
    if (array.writable && array.known) array.shadow.learn(array.known);
  }
}

}  // namespace

// One launch. Returns when all blocks are done, one has failed, or `stop` was set.
extern "C" void fasim_launch(const Request* request, Response* response) {
  const std::lock_guard<std::mutex> lock(one_launch);
  *response = {};
  spans.clear();
  try {
    launch(*request, *response);
  } catch (const std::bad_alloc&) {
    response->fault = {"out of memory", "the shadows of its arrays do not fit", 0, -1, -1};
  }
  response->spans = spans.data();
  response->span_count = spans.size();
}

u32 emulator::place_of(const void* pc) { return u32(static_cast<const u8*>(pc) - image_base); }

// ---- What the instrumented kernel calls before an access

namespace {

inline __attribute__((always_inline)) void access(const void* address, std::size_t size, bool write,
                                                  const void* pc) {
  if (Stacks::same(address, __builtin_frame_address(0))) {  // a thread's own memory
    return Worker::here().touch_own(static_cast<const u8*>(address), u32(size), write,
                                    place_of(pc));
  }
  if (std::size_t(static_cast<const u8*>(address) - image_base) < image_bytes) return;  // constants
  Worker::here().touch(address, u32(size), write, place_of(pc));
}

void range(const void* address, std::size_t size, bool write, const void* pc) {
  const auto* bytes = static_cast<const u8*>(address);
  for (std::size_t i = 0; i < size; ++i) access(bytes + i, 1, write, pc);
}

}  // namespace

#define HOOK(name, size, write) \
  extern "C" void name(void* address) { access(address, size, write, __builtin_return_address(0)); }
#define HOOKS(size)                              \
  HOOK(__tsan_read##size, size, false)           \
  HOOK(__tsan_write##size, size, true)           \
  HOOK(__tsan_unaligned_read##size, size, false) \
  HOOK(__tsan_unaligned_write##size, size, true) \
  HOOK(__tsan_volatile_read##size, size, false)  \
  HOOK(__tsan_volatile_write##size, size, true)

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __tsan_read_range(void* address, std::size_t size) {
  range(address, size, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, std::size_t size) {
  range(address, size, true, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, std::size_t size) {
  range(from, size, false, __builtin_return_address(0));
  range(to, size, true, __builtin_return_address(0));
  return std::memcpy(to, from, size);
}
void* __tsan_memset(void* to, int value, std::size_t size) {
  range(to, size, true, __builtin_return_address(0));
  return std::memset(to, value, size);
}

// ---- What it calls after arithmetic that C++ does not define

struct SourceLocation {
  const char* file;
  u32 line;
  u32 column;
};

}  // extern "C"

namespace {

[[noreturn]] void undefined(const void* data, const char* what) {
  Worker& worker = Worker::here();
  const u32 line = static_cast<const SourceLocation*>(data)->line;
  worker.fail(&worker.thread(), "undefined arithmetic", kLine | line, "%s", what);
}

}  // namespace

#define UNDEFINED(name, what) \
  extern "C" void __ubsan_handle_##name(void* data, void*, void*) { undefined(data, what); }

UNDEFINED(add_overflow, "a sum does not fit its integer type")
UNDEFINED(sub_overflow, "a difference does not fit its integer type")
UNDEFINED(mul_overflow, "a product does not fit its integer type")
UNDEFINED(negate_overflow, "a negative does not fit its integer type")
UNDEFINED(divrem_overflow, "a division by zero, or a quotient that does not fit its integer type")
UNDEFINED(shift_out_of_bounds, "a shift by more bits than the integer has, or of a negative number")
UNDEFINED(float_cast_overflow, "a number beyond the range of its integer type")
UNDEFINED(out_of_bounds, "an index beyond the end of an array of a thread")

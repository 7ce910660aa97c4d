// Fibers: a stack each, and a switch that saves what the ABI lets a callee keep.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>
#if !defined(__x86_64__) && !defined(__aarch64__)
#define FASIM_UCONTEXT
#endif
#ifdef FASIM_UCONTEXT
#include <alloca.h>
#include <ucontext.h>
#endif

namespace emulator {

constexpr std::size_t kRegion = std::size_t(1) << 27;  // address space of one worker's stacks
constexpr std::size_t kStack = std::size_t(1) << 16;
constexpr int kMaxThreads = 1024;

#ifdef FASIM_UCONTEXT

using Context = ucontext_t*;

inline void switch_fiber(Context* save, Context to) {
  *save = static_cast<Context>(alloca(sizeof(ucontext_t)));  // on the stack that is left
  swapcontext(*save, to);
}

inline Context new_fiber(std::uint8_t* stack, std::size_t bytes, void (*entry)()) {
  auto* context = reinterpret_cast<Context>(stack);  // at the far end of its own stack
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = bytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

#else

using Context = void*;

// Stores the callee's registers and the stack pointer, and takes up another stack where it stopped.
// It ends in an indirect jump: a return would be predicted wrong every time.
extern "C" void fasim_switch(Context* save, Context to);

inline void switch_fiber(Context* save, Context to) { fasim_switch(save, to); }

#ifdef __x86_64__
asm(R"(
  .text
  .hidden fasim_switch
  .globl fasim_switch
  .type fasim_switch, @function
fasim_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  pop %rcx
  jmp *%rcx
  .size fasim_switch, . - fasim_switch
)");
constexpr int kSaved = 6;
#else
asm(R"(
  .text
  .hidden fasim_switch
  .globl fasim_switch
  .type fasim_switch, %function
fasim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  br x30
  .size fasim_switch, . - fasim_switch
)");
constexpr int kSaved = 20, kEntrySlot = 11;
#endif

// A fiber that will start in `entry`, which must not return.
inline Context new_fiber(std::uint8_t* stack, std::size_t bytes, void (*entry)()) {
  auto* top = reinterpret_cast<std::uintptr_t*>(stack + bytes) - 2;
#ifdef __x86_64__
  *--top = 0;  // the return address of a function that was called; its stack is aligned to 16 + 8
  *--top = reinterpret_cast<std::uintptr_t>(entry);
  for (int i = 0; i < kSaved; ++i) *--top = 0;
#else
  top -= kSaved;
  for (int i = 0; i < kSaved; ++i) top[i] = 0;
  top[kEntrySlot] = reinterpret_cast<std::uintptr_t>(entry);
#endif
  return top;
}

#endif

// The stacks of a worker's fibers, in one region aligned to its own size, so that any address on
// one of them leads to the region's head, where a pointer to the owner lies.
class Stacks {
 public:
  explicit Stacks(void* owner) {
    const auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    mapping_ = mmap(nullptr, 2 * kRegion, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping_ == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
    base_ = reinterpret_cast<std::uint8_t*>((address + kRegion - 1) & ~(kRegion - 1));
    *reinterpret_cast<void**>(base_) = owner;
  }
  Stacks(const Stacks&) = delete;
  ~Stacks() { munmap(mapping_, 2 * kRegion); }

  Context start(int index, void (*entry)()) {
    std::uint8_t* stack = base_ + kStack * (index + 1);
    if (index >= guarded_) {  // a kernel that overflows its stack must not reach its neighbour's
      mprotect(stack, 4096, PROT_NONE);
      guarded_ = index + 1;
    }
    std::memset(stack + kStack / 2, 0xff, kStack / 2);  // what was never written is a NaN
    const std::size_t stagger = 64 * (index % 61);  // or all would use the same cache sets
    return new_fiber(stack + 4096, kStack - 4096 - stagger, entry);
  }

  // Between launches: takes the guards away, as each splits a mapping and a process has so many, and
  // lets the system have the memory, as a process may have loaded hundreds of kernels.
  void rest() {
    mprotect(base_ + kStack, kStack * guarded_, PROT_READ | PROT_WRITE);
    madvise(base_ + kStack, kStack * guarded_, MADV_FREE);
    guarded_ = 0;
  }

  static void* owner_of(void* frame) {
    const auto address = reinterpret_cast<std::uintptr_t>(frame);
    return *reinterpret_cast<void**>(address & ~(kRegion - 1));
  }

  static bool same(const void* address, const void* frame) {
    const auto a = reinterpret_cast<std::uintptr_t>(address);
    return ((a ^ reinterpret_cast<std::uintptr_t>(frame)) / kRegion) == 0;
  }

 private:
  void* mapping_;
  std::uint8_t* base_;
  int guarded_ = 0;
};

}  // namespace emulator

// The words of CUDA that a generated kernel uses, as C++. It is included before the kernel's text;
// only the kernel's own loads and stores are instrumented and checked.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <utility>

#include "calls.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // a block runs on one system thread

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_dim())
#define gridDim (emulator::grid_dim())

// ---- Vectors. They are copied as one word, so that a copy is one access, as on the device.

#define FASIM_VECTOR(name, type, bytes, ...)                                   \
  struct __attribute__((aligned(bytes))) name {                                \
    typedef type Word __attribute__((vector_size(bytes), may_alias));          \
    type __VA_ARGS__;                                                          \
    name() = default;                                                          \
    __forceinline__ name(const name& other) { *this = other; }                 \
    __forceinline__ name& operator=(const name& other) {                       \
      *reinterpret_cast<Word*>(this) = *reinterpret_cast<const Word*>(&other); \
      return *this;                                                            \
    }                                                                          \
  };

FASIM_VECTOR(uint2, unsigned, 8, x, y)
FASIM_VECTOR(uint4, unsigned, 16, x, y, z, w)
FASIM_VECTOR(int2, int, 8, x, y)
FASIM_VECTOR(int4, int, 16, x, y, z, w)
FASIM_VECTOR(float2, float, 8, x, y)
FASIM_VECTOR(float4, float, 16, x, y, z, w)

#define FASIM_MAKE_2(name, type)            \
  inline name make_##name(type x, type y) { \
    name made;                              \
    made.x = x, made.y = y;                 \
    return made;                            \
  }
#define FASIM_MAKE_4(name, type)                            \
  inline name make_##name(type x, type y, type z, type w) { \
    name made;                                              \
    made.x = x, made.y = y, made.z = z, made.w = w;         \
    return made;                                            \
  }

FASIM_MAKE_2(uint2, unsigned)
FASIM_MAKE_4(uint4, unsigned)
FASIM_MAKE_2(int2, int)
FASIM_MAKE_4(int4, int)
FASIM_MAKE_2(float2, float)
FASIM_MAKE_4(float4, float)

// ---- Arithmetic

#define FASIM_MIN_MAX(type)                                 \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }

FASIM_MIN_MAX(int)
FASIM_MIN_MAX(unsigned)
FASIM_MIN_MAX(long long)
FASIM_MIN_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
// Four of the eight bytes of y x, each named by a digit. CUDA Math API: __byte_perm.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned digits) {
  const unsigned long long bytes = (unsigned long long)(y) << 32 | x;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    picked |= unsigned(bytes >> 8 * (digits >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return picked;
}
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

// ---- Warps and blocks. CUDA C++ Programming Guide, 10.6 and 10.22

__forceinline__ void __syncthreads(unsigned line = __builtin_LINE()) {
  emulator::barrier(0, 0, true, line);
}

__forceinline__ void __syncwarp(unsigned mask = ~0u, unsigned line = __builtin_LINE()) {
  emulator::syncwarp(mask, line);
}

template <typename T>
__forceinline__ T fasim_shuffle(emulator::Shuffle how, unsigned mask, T value, int by, int width,
                                unsigned line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulator::shuffle(how, mask, bits, by, width, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

#define FASIM_SHUFFLE(name, how)                                         \
  template <typename T>                                                  \
  __forceinline__ T name(unsigned mask, T value, int by, int width = 32, \
                         unsigned line = __builtin_LINE()) {             \
    return fasim_shuffle(emulator::how, mask, value, by, width, line);   \
  }

FASIM_SHUFFLE(__shfl_sync, kFrom)
FASIM_SHUFFLE(__shfl_up_sync, kUp)
FASIM_SHUFFLE(__shfl_down_sync, kDown)
FASIM_SHUFFLE(__shfl_xor_sync, kXor)

__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate,
                                       unsigned line = __builtin_LINE()) {
  return emulator::vote(emulator::kBallot, mask, predicate != 0, line);
}
__forceinline__ int __all_sync(unsigned mask, int predicate, unsigned line = __builtin_LINE()) {
  return int(emulator::vote(emulator::kAll, mask, predicate != 0, line));
}
__forceinline__ int __any_sync(unsigned mask, int predicate, unsigned line = __builtin_LINE()) {
  return int(emulator::vote(emulator::kAny, mask, predicate != 0, line));
}

__forceinline__ float atomicAdd(float* to, float x, unsigned line = __builtin_LINE()) {
  return emulator::atom_add(to, x, line);
}
__forceinline__ unsigned atomicAdd(unsigned* to, unsigned x, unsigned line = __builtin_LINE()) {
  return emulator::atom_add(to, x, line);
}

__forceinline__ void __trap(unsigned line = __builtin_LINE()) { emulator::trap(line); }

#include "ptx.h"

// ---- Launching: the kernel's parameters are taken from pointers, as cuLaunchKernel takes them

template <typename T>
__attribute__((no_sanitize("thread"))) T fasim_load(const void* argument) {
  T value;
  memcpy(&value, argument, sizeof(T));
  return value;
}

template <typename... P, size_t... I>
__attribute__((no_sanitize("thread"))) void fasim_call(void (*kernel)(P...), void** arguments,
                                                       std::index_sequence<I...>) {
  kernel(fasim_load<P>(arguments[I])...);
}

template <typename... P>
__attribute__((no_sanitize("thread"))) void fasim_call(void (*kernel)(P...), void** arguments) {
  fasim_call(kernel, arguments, std::index_sequence_for<P...>());
}

template <typename... P>
constexpr unsigned fasim_parameters(void (*)(P...)) {
  return sizeof...(P);
}

#define FASIM_KERNEL(name, blocks_per_sm)                                                        \
  extern "C" const unsigned fasim_blocks_##name = blocks_per_sm;                                 \
  extern "C" const unsigned fasim_parameters_##name = fasim_parameters(&name);                   \
  extern "C" __attribute__((no_sanitize("thread"))) void fasim_kernel_##name(void** arguments) { \
    fasim_call(&name, arguments);                                                                \
  }

// The dynamic shared memory of all kernels in a file, thread-local like the rest.
#define FASIM_SHARED_MEMORY(align, skip, bytes) \
  asm(".section .tbss,\"awT\",%nobits\n"        \
      ".balign " #align                         \
      "\n"                                      \
      ".skip " #skip                            \
      "\n"                                      \
      ".globl smem_raw\n"                       \
      ".type smem_raw,%tls_object\n"            \
      ".size smem_raw," #bytes                  \
      "\n"                                      \
      "smem_raw: .skip " #bytes                 \
      "\n"                                      \
      ".previous\n");

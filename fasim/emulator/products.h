// The arithmetic of tensor cores, with the bits of Hopper's.
//
// Products are exact. Of all addends of an element, the accumulator included, the one with the
// largest exponent sets the scale (a product's exponent is the sum of its factors'); each is cut
// toward zero some bits below it, and their sum is cut to a float, or, where fewer bits are kept of
// the addends than a float has, to as many below its own exponent.
#pragma once
#include <cmath>
#include <cstring>

#include "async.h"
#include "numbers.h"

namespace emulator {

constexpr int kBitsKept = 25;  // below the largest exponent
constexpr int kBitsKeptE4m3 = 13;  // of wgmma

template <Type kType>
struct Packed {  // how numbers lie in a 32-bit register
  static constexpr u32 kCount = kType == kE4m3 ? 4 : 2;
  static float value(u32 word, u32 i) {
    if (kType == kF16) return Half::value(u16(word >> 16 * i));
    if (kType == kBf16) return Bfloat::value(u16(word >> 16 * i));
    return E4m3Table::value(u8(word >> 8 * i));
  }
};

// The operands of a product of kRows x 8 elements, kDepth deep.
template <u32 kDepth, u32 kRows = 16>
struct Operands {
  float a[kRows][kDepth], b[kDepth][8], c[kRows][8];
};

constexpr int kNoExponent = -10000;  // of zero

inline int exponent_of(float x, int lowest) {
  const int exponent = int(std::bit_cast<u32>(x) >> 23 & 0xff) - 127;
  return x == 0.f ? kNoExponent : std::max(exponent, lowest);
}

inline double power_of_two(int n) { return std::bit_cast<double>(u64(n + 1023) << 52); }

// To a float toward zero, but to infinity where it is too large for one, and never to -0.
inline float cut(double x) {
  float y = float(x);
  const bool beyond = std::fabs(double(y)) > std::fabs(x) && !std::isinf(y);
  if (beyond) y = std::bit_cast<float>(std::bit_cast<u32>(y) - 1);
  return y == 0.f ? 0.f : y;
}

// The same with fewer bits of fraction.
inline float cut(double x, int bits) {
  const float y = cut(x);
  if (bits >= 23 || !std::isfinite(y)) return y;
  const u32 kept = std::bit_cast<u32>(y) & ~0u << (23 - bits);
  return kept << 1 ? std::bit_cast<float>(kept) : 0.f;
}

// Cut toward zero. What is no number counts as none; where all are numbers nothing need be asked.
template <bool kNumbers>
int units(double x) {
  return kNumbers || std::fabs(x) < 1 << 30 ? int(x) : 0;
}

// One row of D = A B + C.
template <u32 kDepth, bool kNumbers>
void multiply_row(const float* a, const float (&b)[kDepth][8], const int (&eb)[kDepth][8],
                  int lowest, int bits, float* c) {
  int top[8];
  double unit[8], sum[8];
  for (u32 n = 0; n < 8; ++n) top[n] = exponent_of(c[n], -126);
  for (u32 k = 0; k < kDepth; ++k) {
    const int ea = exponent_of(a[k], lowest);
    for (u32 n = 0; n < 8; ++n) top[n] = std::max(top[n], ea + eb[k][n]);
  }
  for (u32 n = 0; n < 8; ++n) {
    unit[n] = power_of_two(bits - std::max(top[n], -600));
    sum[n] = units<kNumbers>(c[n] * unit[n]);
  }
  for (u32 k = 0; k < kDepth; ++k) {
    for (u32 n = 0; n < 8; ++n) sum[n] += units<kNumbers>(double(a[k]) * b[k][n] * unit[n]);
  }
  for (u32 n = 0; n < 8; ++n) c[n] = cut(sum[n] / unit[n], bits);
}

inline float plain_nan(float x) { return x == x ? x : std::bit_cast<float>(0x7fffffffu); }

// Elements that an infinity or a NaN has a part in; finite products change nothing there.
template <u32 kDepth, u32 kRows>
void multiply_special(const Operands<kDepth, kRows>& given, Operands<kDepth, kRows>& all) {
  for (u32 i = 0; i < kRows * 8; ++i) {
    const u32 row = i / 8, n = i % 8;
    float sum = given.c[row][n];
    bool special = !std::isfinite(sum);
    for (u32 k = 0; k < kDepth; ++k) {
      const float a = given.a[row][k], b = given.b[k][n];
      if (std::isfinite(a) && std::isfinite(b)) continue;
      special = true;
      sum += a * b;
    }
    if (special) all.c[row][n] = plain_nan(sum);
  }
}

// all.c = all.a all.b + all.c. `lowest` is the exponent of the type's subnormal numbers, `bits` what is
// kept of an addend.
template <u32 kDepth, u32 kRows>
void multiply(Operands<kDepth, kRows>& all, int lowest, int bits = kBitsKept) {
  int eb[kDepth][8];
  const float* first = &all.a[0][0];
  const auto is_finite = [](float x) { return std::isfinite(x); };
  const bool plain = std::all_of(first, first + sizeof all / sizeof *first, is_finite);
  for (u32 i = 0; i < 8 * kDepth; ++i) eb[i / 8][i % 8] = exponent_of(all.b[i / 8][i % 8], lowest);
  if (plain) {
    for (u32 row = 0; row < kRows; ++row) {
      multiply_row<kDepth, true>(all.a[row], all.b, eb, lowest, bits, all.c[row]);
    }
    return;
  }
  const Operands<kDepth, kRows> given = all;
  for (u32 row = 0; row < kRows; ++row) {
    multiply_row<kDepth, false>(all.a[row], all.b, eb, lowest, bits, all.c[row]);
  }
  multiply_special(given, all);
}

}  // namespace emulator

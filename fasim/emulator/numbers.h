// The number formats of tensor cores: half, bfloat16 and e4m3, to and from float.
#pragma once
#include <bit>
#include <cstdint>

namespace emulator {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

// A format of 1 sign bit, kExponent exponent bits and kFraction fraction bits. e4m3 has no infinity
// and one NaN (all bits set); the others are as IEEE 754 has them.
template <int kExponent, int kFraction, bool kInfinity>
struct Format {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr u32 kSign = 1u << (kExponent + kFraction);
  static constexpr u32 kNan = kSign - 1;  // the one that conversions give. PTX ISA: cvt
  static constexpr u32 kLargest =  // finite
      kInfinity ? (((1u << kExponent) - 1) << kFraction) - 1 : kSign - 2;

  static float decode(u32 code) {
    const u32 sign = (code & kSign) ? 1u << 31 : 0;
    const u32 exponent = (code & (kSign - 1)) >> kFraction;
    const u32 fraction = code & ((1u << kFraction) - 1);
    const bool top = exponent == (1u << kExponent) - 1;
    if (kInfinity ? top : (code & (kSign - 1)) == kNan) {
      const bool infinite = kInfinity && fraction == 0;  // a NaN loses its sign
      return std::bit_cast<float>(infinite ? sign | 0x7f800000u : 0x7fffffffu);
    }
    const int power = (exponent ? int(exponent) : 1) - kBias - kFraction;
    const float size = float(exponent ? fraction | 1u << kFraction : fraction);
    return std::bit_cast<float>(sign | std::bit_cast<u32>(scaled(size, power)));
  }

  // Rounds to nearest, ties to even. Beyond the largest number it gives infinity, or the largest
  // number itself if `saturate`.
  static u32 encode(float x, bool saturate) {
    const u32 bits = std::bit_cast<u32>(x), size = bits & 0x7fffffffu;
    const u32 sign = bits >> 31 ? kSign : 0;
    if (size > 0x7f800000u) return kNan;
    const int exponent = int(size >> 23) - 127;
    const int lowest = 1 - kBias;  // exponent of the smallest normal number
    const int drop = 23 - kFraction + (exponent < lowest ? lowest - exponent : 0);
    const u32 over = kLargest + 1;
    if (exponent > kBias + 1) return sign | (saturate ? kLargest : over);
    if (drop > 24) return sign;  // less than half of the smallest number
    const u32 mantissa = (size & 0x7fffffu) | (exponent > -127 ? 0x800000u : 0);
    const u32 kept = mantissa >> drop, rest = mantissa & ((1u << drop) - 1);
    const u32 half = 1u << (drop - 1);
    u32 code = kept + (rest > half || (rest == half && (kept & 1)));
    if (exponent >= lowest) code += u32(exponent - lowest) << kFraction;  // the hidden bit adds one
    if (code > kLargest) code = saturate ? kLargest : over;
    return sign | code;
  }

 private:
  static float scaled(float x, int power) {
    for (; power < -100; power += 100) x *= std::bit_cast<float>(u32(27) << 23);
    return x * std::bit_cast<float>(u32(power + 127) << 23);
  }
};

using E4m3 = Format<4, 3, false>;

struct E4m3Table {
  static float value(u8 code) { return table[code]; }
  static const float* const table;  // of all 256
};

struct Half : Format<5, 10, true> {
  static float value(u16 code) { return table[code]; }
  static const float* const table;  // of all 65,536
};

// bfloat16 is the upper half of a float; float's own exponent range needs no rescaling.
struct Bfloat {
  static float value(u16 code) { return std::bit_cast<float>(u32(code) << 16); }
  static u32 encode(float x) {
    const u32 bits = std::bit_cast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

inline const float* make_half_table() {
  static float values[1 << 16];
  for (u32 code = 0; code < 1 << 16; ++code) values[code] = Half::decode(code);
  return values;
}

inline const float* make_e4m3_table() {
  static float values[1 << 8];
  for (u32 code = 0; code < 1 << 8; ++code) values[code] = E4m3::decode(code);
  return values;
}

inline const float* const Half::table = make_half_table();
inline const float* const E4m3Table::table = make_e4m3_table();

}  // namespace emulator

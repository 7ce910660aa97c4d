// An unsigned word of so many bytes, and the widest one every row of a tensor is aligned to.
template <int kBytes>
struct WordOf;
//% if kernel.dtype == "e4m3"
template <>
struct WordOf<1> {
  using type = unsigned char;
};
//% endif
template <>
struct WordOf<2> {
  using type = u16;
};
template <>
struct WordOf<4> {
  using type = u32;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

__device__ constexpr int copy_bytes(int columns, int size = sizeof(Element)) {
  int bytes = 16;
  while (columns * size % bytes != 0) bytes /= 2;
  return bytes;
}

// The largest power of two that divides n, but no more than limit.
__device__ constexpr int power_of_two_in(int n, int limit) {
  const int power = n & -n;
  return power < limit ? power : limit;
}

// The smallest power of two that is at least n, but no more than limit.
__device__ constexpr int min_power_of_two(int n, int limit) {
  int power = 1;
  while (power < n && power < limit) power *= 2;
  return power;
}

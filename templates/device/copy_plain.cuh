// One aligned copy into shared memory through a register.
template <int kBytes>
__device__ __forceinline__ void copy(Element* to, const Element* from, bool valid) {
  using Word = typename WordOf<kBytes>::type;
  *reinterpret_cast<Word*>(to) = valid ? *reinterpret_cast<const Word*>(from) : Word{};
}

// One aligned copy into shared memory, in the background where the hardware can (not 1 or 2
// bytes).
template <int kBytes>
__device__ __forceinline__ void copy(Element* to, const Element* from, bool valid) {
  if constexpr (kBytes >= 4) {
    ptx::cp_async<kBytes>(to, from, valid);
  } else {
    using Word = typename WordOf<kBytes>::type;
    *reinterpret_cast<Word*>(to) = valid ? *reinterpret_cast<const Word*>(from) : Word(0);
  }
}

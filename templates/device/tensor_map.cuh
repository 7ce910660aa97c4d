using u64 = unsigned long long;

// How TMA sees a tensor in global memory: its sizes, its strides, and the box that one instruction
// moves. The host encodes it.
struct alignas(64) TensorMap {
  u64 word[16];
};

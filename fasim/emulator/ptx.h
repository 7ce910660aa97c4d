// The PTX wrappers of templates/ptx/, given their meaning in C++ by the runtime.
#pragma once

namespace ptx {

#define FASIM_LINE unsigned line = __builtin_LINE()

__forceinline__ unsigned smem_address(const void* pointer, FASIM_LINE) {
  return emulator::smem_address(pointer, line);
}

// ---- Copies

template <int kBytes>
__forceinline__ void cp_async(void* smem, const void* global, bool valid, FASIM_LINE) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  emulator::cp_async(smem, global, kBytes, valid, line);
}
__forceinline__ void cp_async_commit_group(FASIM_LINE) { emulator::cp_async_commit_group(line); }
template <int kGroups>
__forceinline__ void cp_async_wait_group(FASIM_LINE) {
  emulator::cp_async_wait_group(kGroups, line);
}

// ---- Matrices

#define FASIM_LDMATRIX(count)                                                                      \
  __forceinline__ void ldmatrix_x##count(unsigned (&r)[count], unsigned row, FASIM_LINE) {         \
    emulator::ldmatrix(r, count, false, row, line);                                                \
  }                                                                                                \
  __forceinline__ void ldmatrix_x##count##_trans(unsigned (&r)[count], unsigned row, FASIM_LINE) { \
    emulator::ldmatrix(r, count, true, row, line);                                                 \
  }
FASIM_LDMATRIX(1)
FASIM_LDMATRIX(2)
FASIM_LDMATRIX(4)

#define FASIM_MMA(name, type, depth)                                                         \
  __forceinline__ void name(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, \
                            FASIM_LINE) {                                                    \
    const unsigned b[2] = {b0, b1};                                                          \
    emulator::mma(emulator::type, depth, d, a, b, line);                                     \
  }
FASIM_MMA(mma_m16n8k16_f16, kF16, 16)
FASIM_MMA(mma_m16n8k16_bf16, kBf16, 16)
FASIM_MMA(mma_m16n8k32_e4m3, kE4m3, 32)

#define FASIM_MMA_K8(name, type)                                                              \
  __forceinline__ void name(float (&d)[4], const unsigned (&a)[2], unsigned b0, FASIM_LINE) { \
    emulator::mma(emulator::type, 8, d, a, &b0, line);                                        \
  }
FASIM_MMA_K8(mma_m16n8k8_f16, kF16)
FASIM_MMA_K8(mma_m16n8k8_bf16, kBf16)

// ---- Numbers

__forceinline__ float ex2(float x, FASIM_LINE) { return emulator::ex2(x, line); }
__forceinline__ float lg2(float x, FASIM_LINE) { return emulator::lg2(x, line); }
__forceinline__ float rcp(float x, FASIM_LINE) { return emulator::rcp(x, line); }
__forceinline__ unsigned cvt_f16x2(float low, float high, FASIM_LINE) {
  return emulator::cvt_pair(emulator::kF16, low, high, line);
}
__forceinline__ unsigned cvt_bf16x2(float low, float high, FASIM_LINE) {
  return emulator::cvt_pair(emulator::kBf16, low, high, line);
}
__forceinline__ unsigned short cvt_f16(float x, FASIM_LINE) {
  return (unsigned short)(emulator::cvt_pair(emulator::kF16, x, 0.f, line));
}
__forceinline__ unsigned short cvt_e4m3x2(float low, float high, FASIM_LINE) {
  return (unsigned short)(emulator::cvt_pair(emulator::kE4m3, low, high, line));
}
__forceinline__ unsigned cvt_f16x2_e4m3x2(unsigned short pair, FASIM_LINE) {
  return emulator::cvt_f16x2_e4m3x2(pair, line);
}
__forceinline__ float cvt_f32_f16(unsigned short code, FASIM_LINE) {
  return emulator::cvt_from(emulator::kF16, code, line);
}

// ---- Named barriers and atomics

__forceinline__ void bar_sync(int barrier, int threads, FASIM_LINE) {
  emulator::barrier(unsigned(barrier), unsigned(threads), true, line);
}
__forceinline__ void bar_arrive(int barrier, int threads, FASIM_LINE) {
  emulator::barrier(unsigned(barrier), unsigned(threads), false, line);
}
__forceinline__ void red_add_f32(float* global, float x, FASIM_LINE) {
  emulator::atom_add(global, x, line);
}
__forceinline__ void red_add_f32x4(float* global, const float (&x)[4], FASIM_LINE) {
  emulator::atom_add_x4(global, x, line);
}
__forceinline__ float atom_add_f32(float* global, float x, FASIM_LINE) {
  return emulator::atom_add(global, x, line);
}
__forceinline__ unsigned atom_add_u32(unsigned* global, unsigned x, FASIM_LINE) {
  return emulator::atom_add(global, x, line);
}
__forceinline__ unsigned ld_acquire_u32(const unsigned* global, FASIM_LINE) {
  return emulator::ld_acquire(global, line);
}
__forceinline__ void red_release_add_u32(unsigned* global, unsigned x, FASIM_LINE) {
  emulator::red_release_add(global, x, line);
}

#undef FASIM_LINE
#undef FASIM_LDMATRIX
#undef FASIM_MMA
#undef FASIM_MMA_K8

}  // namespace ptx

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

#define FASIM_STMATRIX(count)                                                                    \
  __forceinline__ void stmatrix_x##count(unsigned row, const unsigned (&r)[count], FASIM_LINE) { \
    emulator::stmatrix(row, r, count, false, line);                                              \
  }                                                                                              \
  __forceinline__ void stmatrix_x##count##_trans(unsigned row, const unsigned (&r)[count],       \
                                                 FASIM_LINE) {                                   \
    emulator::stmatrix(row, r, count, true, line);                                               \
  }
FASIM_STMATRIX(1)
FASIM_STMATRIX(2)
FASIM_STMATRIX(4)

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

// ---- Products of a warpgroup. Each lane's sums are an array that lives until they are waited for.

#define FASIM_WGMMA(name, type)                                                               \
  template <int kTransposeA = 0, int kTransposeB = 0, int kCount>                             \
  __forceinline__ void name(float (&d)[kCount], unsigned long long a, unsigned long long b,   \
                            bool add, FASIM_LINE) {                                           \
    emulator::wgmma({emulator::type, 2 * kCount, kTransposeA, kTransposeB, d, 0, a, b, add},  \
                    line);                                                                    \
  }                                                                                           \
  template <int kTransposeB = 0, int kCount>                                                  \
  __forceinline__ void name(float (&d)[kCount], const unsigned (&a)[4], unsigned long long b, \
                            bool add, FASIM_LINE) {                                           \
    emulator::wgmma({emulator::type, 2 * kCount, 0, kTransposeB, d, a, 0, b, add}, line);     \
  }
FASIM_WGMMA(wgmma_m64k16_f16, kF16)
FASIM_WGMMA(wgmma_m64k16_bf16, kBf16)
FASIM_WGMMA(wgmma_m64k32_e4m3, kE4m3)
template <int kCount, typename A>
__forceinline__ void wgmma_m64k32_e4m3_fresh(float (&d)[kCount], const A& a, unsigned long long b,
                                             FASIM_LINE) {
  wgmma_m64k32_e4m3(d, a, b, false, line);
}

__forceinline__ void wgmma_fence(FASIM_LINE) { emulator::wgmma_fence(line); }
template <typename T, int kCount>
__forceinline__ void wgmma_fence_registers(T (&)[kCount]) {}
__forceinline__ void wgmma_commit_group(FASIM_LINE) { emulator::wgmma_commit_group(line); }
template <int kGroups>
__forceinline__ void wgmma_wait_group(FASIM_LINE) {
  emulator::wgmma_wait_group(kGroups, line);
}

template <int kRegisters>
__forceinline__ void setmaxnreg_inc(FASIM_LINE) {
  emulator::setmaxnreg(kRegisters, true, line);
}
template <int kRegisters>
__forceinline__ void setmaxnreg_dec(FASIM_LINE) {
  emulator::setmaxnreg(kRegisters, false, line);
}
__forceinline__ bool elect_sync(FASIM_LINE) { return emulator::elect_sync(line); }

// ---- Barriers in shared memory

__forceinline__ void mbarrier_init(unsigned long long* barrier, unsigned arrivals, FASIM_LINE) {
  emulator::mbarrier_init(barrier, arrivals, line);
}
__forceinline__ void mbarrier_arrive(unsigned long long* barrier, FASIM_LINE) {
  emulator::mbarrier_arrive(barrier, 1, 0, line);
}
__forceinline__ void mbarrier_arrive_expect_tx(unsigned long long* barrier, unsigned bytes,
                                               FASIM_LINE) {
  emulator::mbarrier_arrive(barrier, 1, bytes, line);
}
__forceinline__ void mbarrier_expect_tx(unsigned long long* barrier, unsigned bytes, FASIM_LINE) {
  emulator::mbarrier_arrive(barrier, 0, bytes, line);
}
__forceinline__ void mbarrier_complete_tx(unsigned long long* barrier, unsigned bytes, FASIM_LINE) {
  emulator::mbarrier_arrive(barrier, 0, -(long long)(bytes), line);
}
__forceinline__ bool mbarrier_try_wait(unsigned long long* barrier, unsigned parity, FASIM_LINE) {
  return emulator::mbarrier_try_wait(barrier, parity, line);
}
__forceinline__ void fence_mbarrier_init(FASIM_LINE) { emulator::fence_mbarrier_init(line); }
__forceinline__ void fence_proxy_async(FASIM_LINE) { emulator::fence_proxy_async(line); }

// ---- TMA. A tensor map is 128 bytes that fasim/tensor_map.py fills in.

__forceinline__ void prefetch_tensormap(const void*) {}

#define FASIM_BOX(rank, ...)                                                                  \
  __forceinline__ void cp_async_bulk_tensor_##rank##d(void* smem, const void* map,            \
                                                      unsigned long long* barrier,            \
                                                      FASIM_COORDINATES_##rank, FASIM_LINE) { \
    const int at[] = {__VA_ARGS__};                                                           \
    emulator::load_box(smem, map, barrier, at, rank, line);                                   \
  }                                                                                           \
  __forceinline__ void cp_async_bulk_tensor_##rank##d_store(                                  \
      const void* map, const void* smem, FASIM_COORDINATES_##rank, FASIM_LINE) {              \
    const int at[] = {__VA_ARGS__};                                                           \
    emulator::store_box(map, smem, at, rank, false, line);                                    \
  }                                                                                           \
  __forceinline__ void cp_reduce_async_bulk_tensor_##rank##d(                                 \
      const void* map, const void* smem, FASIM_COORDINATES_##rank, FASIM_LINE) {              \
    const int at[] = {__VA_ARGS__};                                                           \
    emulator::store_box(map, smem, at, rank, true, line);                                     \
  }
#define FASIM_COORDINATES_2 int c0, int c1
#define FASIM_COORDINATES_3 int c0, int c1, int c2
#define FASIM_COORDINATES_4 int c0, int c1, int c2, int c3
#define FASIM_COORDINATES_5 int c0, int c1, int c2, int c3, int c4
FASIM_BOX(2, c0, c1)
FASIM_BOX(3, c0, c1, c2)
FASIM_BOX(4, c0, c1, c2, c3)
FASIM_BOX(5, c0, c1, c2, c3, c4)

__forceinline__ void cp_async_bulk(void* smem, const void* global, unsigned bytes,
                                   unsigned long long* barrier, FASIM_LINE) {
  emulator::load_bulk(smem, global, bytes, barrier, line);
}
__forceinline__ void cp_async_bulk_store(void* global, const void* smem, unsigned bytes,
                                         FASIM_LINE) {
  emulator::store_bulk(global, smem, bytes, false, line);
}
__forceinline__ void cp_reduce_async_bulk(float* global, const void* smem, unsigned bytes,
                                          FASIM_LINE) {
  emulator::store_bulk(global, smem, bytes, true, line);
}
__forceinline__ void cp_async_bulk_commit_group(FASIM_LINE) { emulator::bulk_commit_group(line); }
template <int kGroups>
__forceinline__ void cp_async_bulk_wait_group(FASIM_LINE) {
  emulator::bulk_wait_group(kGroups, false, line);
}
template <int kGroups>
__forceinline__ void cp_async_bulk_wait_group_read(FASIM_LINE) {
  emulator::bulk_wait_group(kGroups, true, line);
}

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
__forceinline__ unsigned thread_index() { return emulator::thread_index().x; }
__forceinline__ unsigned long long clock64() { return emulator::clock64(); }
__forceinline__ void red_release_add_u32(unsigned* global, unsigned x, FASIM_LINE) {
  emulator::red_release_add(global, x, line);
}

#undef FASIM_LINE
#undef FASIM_LDMATRIX
#undef FASIM_MMA
#undef FASIM_MMA_K8
#undef FASIM_STMATRIX
#undef FASIM_WGMMA
#undef FASIM_BOX
#undef FASIM_COORDINATES_2
#undef FASIM_COORDINATES_3
#undef FASIM_COORDINATES_4
#undef FASIM_COORDINATES_5

}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// One thread adds so many bytes of floats in shared memory to global memory, each float atomically,
// as part of a bulk group. PTX ISA: cp.reduce.async.bulk.
__device__ __forceinline__ void cp_reduce_async_bulk(float* global, const void* smem, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(smem_address(smem)), "r"(bytes)
      : "memory");
}

#endif
}  // namespace ptx

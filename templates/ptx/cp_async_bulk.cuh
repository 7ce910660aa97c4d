namespace ptx {
#ifndef FASIM_EMULATE

// One thread copies so many bytes (a multiple of 16, aligned to 16) into shared memory; the
// barrier's phase receives them. PTX ISA: cp.async.bulk.
__device__ __forceinline__ void cp_async_bulk(void* smem, const void* global, u32 bytes,
                                              u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}

// ... and back, as part of a bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* global, const void* smem, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(smem_address(smem)), "r"(bytes)
               : "memory");
}

#endif
}  // namespace ptx

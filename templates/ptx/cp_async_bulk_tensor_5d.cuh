namespace ptx {
#ifndef FASIM_EMULATE

// One thread copies the box at these coordinates, the innermost first, into shared memory; what
// lies outside the tensor becomes zero. The barrier's phase receives the bytes of the whole box.
// PTX ISA: cp.async.bulk.tensor.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(void* smem, const TensorMap* map,
                                                        u64* barrier, int c0, int c1, int c2,
                                                        int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// One thread copies shared memory to the box, but for what lies outside the tensor, as part of a
// bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_5d_store(const TensorMap* map,
                                                              const void* smem, int c0, int c1,
                                                              int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];" ::"l"(map),
      "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

#endif
}  // namespace ptx

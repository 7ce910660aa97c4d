namespace ptx {
#ifndef FASIM_EMULATE

// One thread adds shared memory to the box, each element atomically, but for what lies outside the
// tensor, as part of a bulk group. PTX ISA: cp.reduce.async.bulk.tensor.
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_5d(const TensorMap* map,
                                                               const void* smem, int c0, int c1,
                                                               int c2, int c3, int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, "
      "%6}], [%1];" ::"l"(map),
      "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

#endif
}  // namespace ptx

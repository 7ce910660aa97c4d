namespace ptx {
#ifndef FASIM_EMULATE

// Where a generic pointer into shared memory lies in the shared window. PTX ISA: cvta.
__device__ __forceinline__ u32 smem_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

#endif
}  // namespace ptx

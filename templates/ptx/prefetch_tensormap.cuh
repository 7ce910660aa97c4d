namespace ptx {
#ifndef FASIM_EMULATE

// Fetches the description of a tensor before it is used. PTX ISA: prefetch.tensormap.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

#endif
}  // namespace ptx

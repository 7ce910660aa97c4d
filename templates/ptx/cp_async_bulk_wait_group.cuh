namespace ptx {
#ifndef FASIM_EMULATE

// Waits until at most kGroups of this thread's bulk groups are in flight.
// PTX ISA: cp.async.bulk.wait_group.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Waits until at most kGroups still read shared memory.
template <int kGroups>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Closes the group of bulk stores issued by this thread so far. PTX ISA: cp.async.bulk.commit_group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// Copies kBytes (4, 8 or 16) in the background, or writes zeros where not valid. PTX ISA: cp.async.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* smem, const void* global, bool valid) {
  const u32 address = smem_address(smem);
  const int size = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(size)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global),
                 "n"(kBytes), "r"(size)
                 : "memory");
  }
}

// Closes the group of copies issued by this thread so far. PTX ISA: cp.async.commit_group.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kGroups of this thread's groups are in flight. PTX ISA: cp.async.wait_group.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

#endif
}  // namespace ptx

namespace ptx {
#ifndef FASIM_EMULATE

// What this thread wrote to shared memory becomes visible to TMA and wgmma, once they are ordered
// after it. PTX ISA: fence.proxy.async.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif
}  // namespace ptx

// Waits until the barrier's phase of that parity is complete. With FASIM_WAIT_LIMIT, a debugging
// build's, it gives up after so many tries instead of hanging.
__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
#ifdef FASIM_WAIT_LIMIT
  int tries = 0;
#endif
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
#ifdef FASIM_WAIT_LIMIT
    if (++tries == FASIM_WAIT_LIMIT) __trap();
#endif
  }
}

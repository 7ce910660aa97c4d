#!/bin/bash
# compute-sanitizer's synccheck on V3 kernels whose rows get new references. Needs an H200, nvcc and
# compute-sanitizer; run in the root of the checkout: bash benchmarks/synccheck.sh [variant ...].
# bash benchmarks/synccheck.sh build [variant ...]   compiles only (anywhere with nvcc).
bin=${OUT:-/tmp}/synccheck; mkdir -p "$bin"
[ "$1" = build ] && only_build=1 && shift
chosen=" $* " failed=0
variant() {  # name kernel what
  [ "$chosen" = "  " ] || case "$chosen" in *" $1 "*) ;; *) return ;; esac
  [ -x "$bin/$1" ] && [ "$bin/$1" -nt "$2" ] || nvcc -std=c++17 -O3 -lineinfo \
    -gencode arch=compute_90a,code=sm_90a -DFASIM_MAIN -o "$bin/$1" "$2" || { failed=1; return; }
  [ "$only_build" ] && return
  echo "---- $1: $3"
  timeout 30 "$bin/$1" 1 2 1 300 500 | sed 's/^/alone      /'
  timeout 60 compute-sanitizer --tool synccheck --print-limit 20 --show-backtrace device --error-exitcode 9 \
    "$bin/$1" 1 2 1 300 500 >"$bin/$1.log" 2>&1 || failed=1
  grep -m1 -A6 'error detected\|Error: \|exception' "$bin/$1.log"
  grep 'ERROR SUMMARY\|ms$' "$bin/$1.log"
}
variant three_alibi generated/v3_fwd_sm90a_fp16_d64_causal_alibi_2a670209.cu "three consumers, causal, ALiBi: had the error"
variant three_full generated/v3_fwd_sm90a_fp16_d64_full_f120c5da.cu "three consumers, no mask"
variant dense generated/v3_fwd_sm90a_bf16_d64_full_dense_2c085e61.cu "a maximum in every tile"
variant two generated/v3_fwd_sm90a_bf16_d128_causal_fcc51ca1.cu "two consumers, bf16, d 128: was clean"
variant e4m3 generated/v3_fwd_sm90a_e4m3_d128_causal_acf74c14.cu "e4m3"
exit $failed

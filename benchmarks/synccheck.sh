#!/bin/bash
# Which part of the V3 kernel does synccheck object to? Needs an H200, nvcc and compute-sanitizer; run in
# the root of the checkout: bash benchmarks/synccheck.sh [variant ...]. Each takes under 30 s once compiled.
# bash benchmarks/synccheck.sh build   compiles only (anywhere with nvcc).
here=generated/v3_fwd_sm90a_fp16_d64_causal_alibi_c566111b.cu
full=generated/v3_fwd_sm90a_fp16_d64_full_03d34d39.cu
two=generated/v3_fwd_sm90a_bf16_d128_causal_fcc51ca1.cu
bin=${OUT:-/tmp}/synccheck; mkdir -p $bin
[ -f $bin/two_alibi.cu ] || PYTHONPATH=. ${PYTHON:-python3} -m fasim plan --gpu h200 --algo v3 --dtype fp16 \
  --head-dim 64 --causal --bias alibi --tile 128x112 -o $bin/plan.json >/dev/null &&
  { [ -f $bin/two_alibi.cu ] || PYTHONPATH=. ${PYTHON:-python3} -m fasim gen $bin/plan.json --stdout >$bin/two_alibi.cu; }
# The same kernel with one thing changed.
sed -E '/ptx::setmaxnreg_(dec|inc)</d' $here >$bin/no_setmaxnreg.cu
sed -E 's/ptx::bar_sync\(kTurnBarrier \+ warpgroup, 256\);/if (warpgroup == 0) ptx::bar_sync(4, 256); else if (warpgroup == 1) ptx::bar_sync(5, 256); else ptx::bar_sync(6, 256);/; s/ptx::bar_arrive\(kTurnBarrier \+ \(consumer \+ 1\) % kConsumers, 256\);/if (consumer == 0) ptx::bar_arrive(5, 256); else if (consumer == 1) ptx::bar_arrive(6, 256); else ptx::bar_arrive(4, 256);/' $here >$bin/constant_ids.cu
sed -E '/ptx::bar_sync\(kTurnBarrier/d; /ptx::bar_arrive\(kTurnBarrier/d' $here >$bin/no_turns.cu
# Starts with 120 registers a thread instead of 128, so that 512 threads do not fill the register file.
sed -E 's/__launch_bounds__\(kThreads, 1\)/__maxnreg__(120)/; s/^(constexpr int kRegisters = )[0-9]+/\1152/; s/^(constexpr int kLoaderRegisters = )[0-9]+/\124/' $here >$bin/room.cu
build() {  # name source flags
  [ -x $bin/$1 ] || nvcc -std=c++17 -O3 -lineinfo -gencode arch=compute_90a,code=sm_90a -DFASIM_MAIN $3 -o $bin/$1 $2
}
variant() {  # name source flags what
  build $1 $2 "$3" || return
  [ "$only_build" ] && return
  echo "---- $1: $4"
  timeout 30 $bin/$1 1 2 1 300 500 | sed 's/^/alone      /'
  timeout 30 compute-sanitizer --tool synccheck --print-limit 20 --show-backtrace device $bin/$1 1 2 1 300 500 >$bin/$1.log 2>&1
  echo "exit       $?"
  grep -c 'Barrier error' $bin/$1.log | sed 's/^/barrier errors /'
  grep -m1 -n -A6 'error detected\|Error: \|exception\|Program hit' $bin/$1.log | sed 's/^/  /'
  grep 'by thread\|at .*+0x' $bin/$1.log | sort | uniq -c | sort -rn | head -8
  echo "without API errors:"; timeout 30 compute-sanitizer --tool synccheck --report-api-errors no $bin/$1 1 2 1 300 500 2>&1 | grep -v '^========= *$' | head -12
  grep 'Program hit\|ERROR SUMMARY\|ms$' $bin/$1.log | sort | uniq -c
}
[ "$1" = build ] && only_build=1 && shift
wanted() { [ $# -eq 1 ] || case " ${*:2} " in *" $1 "*) ;; *) return 1 ;; esac; }
wanted three_alibi "$@" && variant three_alibi $here "" "as recorded: three consumers, ALiBi"
wanted three_full "$@" && variant three_full $full "" "three consumers, no ALiBi, no mask"
wanted two_alibi "$@" && variant two_alibi $bin/two_alibi.cu "" "two consumers, ALiBi"
wanted two "$@" && variant two $two "" "two consumers, bf16 d128: was clean"
wanted constant_ids "$@" && variant constant_ids $bin/constant_ids.cu "" "barrier numbers known to the compiler"
wanted no_setmaxnreg "$@" && variant no_setmaxnreg $bin/no_setmaxnreg.cu "" "registers never moved"
wanted room "$@" && variant room $bin/room.cu "" "registers left over at the start (120 a thread)"
wanted no_turns "$@" && variant no_turns $bin/no_turns.cu "" "no turn barriers at all (sound: they only order)"
wanted wait_limit "$@" && variant wait_limit $here -DFASIM_WAIT_LIMIT=50000000 "trap where an mbarrier hangs"
exit 0

"""Time candidates of V2's backward kernel at head_dim 256, and of its forward one at odd ones.

python3 benchmarks/bwd_candidates.py --compile-only | --verify | --out results/ [--rounds 7]

Candidates are edits of the rendered text; what is not in the templates is here only.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fasim import bench, legality, planner
from fasim.compile import compile_kernel
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.render import render

legality.BACKWARD_STAGES = 1  # two slots beside P in shared memory: edits below add the barrier

LOOP = "    __syncthreads();\n    load(t + 1);\n    finish_tile(t - 1);\n"
EARLY = (  # dV, dK and dQ of the tile before, then its slot is free
    (
        LOOP,
        "    __syncthreads();\n    finish_tile(t - 1);\n    __syncthreads();\n    load(t + 1);\n",
    ),
)
LATE = (  # dV and dK, then the slot is free; dQ, which reads K and dS alone, while it fills
    (
        LOOP,
        "    __syncthreads();\n    finish_tile(t - 1);\n    __syncthreads();\n    load(t + 1);\n"
        "    if (t > 0) add_dq(t - 1);\n",
    ),
    ("    add_dq(t);\n  };", "  };"),
    (
        "  finish_tile(steps - 1);\n",
        "  finish_tile(steps - 1);\n  if (steps > 0) add_dq(steps - 1);\n",
    ),
)
FOUR = (  # four warps share 32 keys, 16 queries of scores and a quarter of the columns each
    ("constexpr int kSplit = 2;", "constexpr int kSplit = 4;"),
    ("constexpr int kStepQ = 32;", "constexpr int kStepQ = 16;"),
    ("constexpr int kPartQ = kStepQ / kRowTiles;", "constexpr int kPartQ = 16;"),
)
UNITS = (("* kWarps ? 32 : 16;", "* kWarps ? 64 : 16;"),)  # dQ in units of 32 x 64
BIG = Tile(block_q=64, block_kv=64, warps=8, stages=2, p_in="shared")
BACKWARD = {
    "pick": (None, ()),
    "two": (BIG, EARLY),
    "two late": (BIG, LATE),
    "four": (BIG, (*EARLY, *FOUR)),
    "four late": (BIG, (*LATE, *FOUR)),
    "four late units": (BIG, (*LATE, *FOUR, *UNITS)),
}
UNROLL = (("kD > 8 * kDepth ? 4 : 8;", "kD > 12 * kDepth ? 4 : 12;"),)
ODD = {  # forward, by head_dim
    64: {"64": (None, ())},
    80: {"80": (None, ()), "80 128x80": (Tile(block_q=128, block_kv=80, stages=2), ())},
    96: {"96": (None, ()), "96 128x64": (Tile(block_q=128, block_kv=64, stages=2), ())},
    128: {"128": (None, ())},
    160: {
        "160": (None, ()),
        "160 unrolled": (None, UNROLL),
        "160 one stage": (Tile(block_q=128, block_kv=32), UNROLL),
        "160 64x128": (Tile(block_q=64, block_kv=128), ()),
    },
    256: {"256": (None, ())},
}
# 80, 96 and 160 as they were copied before: by 2, 4 and 4 threads a row.
OLD = ("return 4 * rows * copies > 3 * kThreads ? rows : 0;", "return 0;")
for d in (80, 96, 160):
    tile = Tile(block_q=64, block_kv=128) if d == 160 else None
    ODD[d][f"{d} before"] = (tile, (OLD,))


def made(problem, tile, edits):
    legality.BACKWARD_STAGES = 2 if tile is None else 1
    entry = planner.plan(problem, load("h200"), "v2", tile=tile)
    kernel = render(entry.plan)
    text = kernel.source
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return entry, replace(kernel, source=text)


def backward_problem(seq, causal):
    sizes = {"batch": 16384 // seq, "heads": 8, "seq": seq, "head_dim": 256}
    return Problem(**sizes, causal=causal, dtype="bf16", pass_="bwd")


def forward_problem(d, causal):
    sizes = {"batch": 4, "heads": 2048 // d, "seq": 4096, "head_dim": d}
    return Problem(**sizes, causal=causal, dtype="bf16")


def groups():
    for seq, causal in ((1024, False), (4096, False), (4096, True), (16384, False)):
        p = backward_problem(seq, causal)
        yield f"bwd 256 {seq} {causal}", {n: (p, *how) for n, how in BACKWARD.items()}
    for causal in (False, True):
        yield (
            f"odd {causal}",
            {n: (forward_problem(d, causal), *how) for d in ODD for n, how in ODD[d].items()},
        )


def report(one):
    name, (entry, kernel) = one
    used = compile_kernel(kernel).resources
    seconds = entry.time.seconds * 1e6
    print(f"{name:28} {used.registers:4} registers {used.spill_stores:4} spilled"
          f" {entry.smem_bytes:7} bytes, model {seconds:.0f} us", flush=True)  # fmt: skip


def verified(one):
    from fasim import properties
    from fasim.runners.emulator import EmulatorRunner

    name, how = one
    result = properties.verify(made(*how)[1], EmulatorRunner(), examples=2)
    print(name, "ok" if result.ok else result.failure.to_json(), flush=True)


def flops(problem):
    pairs = problem.batch * problem.heads * problem.seq**2 / (1 + problem.causal)
    return (10 if problem.pass_ == "bwd" else 4) * pairs * problem.head_dim


def timed(name, group, rounds):
    candidates, problems, arrays = [], {}, None  # backward all read what FlashAttention-2 reads
    for label, how in group.items():
        entry, kernel = made(*how)
        problems[label] = how[0]
        if how[0].pass_ == "bwd" and not candidates:
            candidates += fa2(entry, kernel, how[0])
            problems["fa2"] = how[0]
            arrays = {n: one.owner for n, one in candidates[0].launch.inputs.items()}
            continue
        call = started(kernel, how[0], arrays)
        candidates.append(bench.Candidate(label, call, entry.time.seconds))
    timings = bench.interleave(candidates, rounds=rounds)
    rates = {t.name: flops(problems[t.name]) / t.seconds / 1e12 for t in timings}
    print(name, {n: f"{r:.0f}" for n, r in rates.items()}, flush=True)
    for d, low, high, share in ((80, 64, 128, 0.25), (96, 64, 128, 0.5), (160, 128, 256, 0.25)):
        if "64" in rates:
            between = rates[str(low)] * (1 - share) + rates[str(high)] * share
            near = {n: f"{r / between:.3f}" for n, r in rates.items() if n.startswith(str(d))}
            print("   of the interpolation:", near, flush=True)
    if "fa2" in rates:
        near = {n: f"{r / rates['fa2']:.3f}" for n, r in rates.items()}
        print("   over fa2:", near, flush=True)
    return {"tflops": rates, "timings": [t.to_json() for t in timings]}


def started(kernel, problem, arrays):
    from fasim.runners import gpu

    launch = kernel.plan.launch_for(problem)
    return gpu.launch_on_device(kernel, arrays or bench.random_inputs(launch), launch)


def fa2(entry, kernel, problem):
    from v2_grid import backward

    ours, theirs = backward((problem, entry, kernel))
    return [replace(ours, name="pick"), theirs]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    found = [(n, g) for n, g in groups() if options.only in n]
    each = [(f"{n}: {label}", how) for n, g in found for label, how in g.items()]
    for one in each if options.verify else ():
        verified(one)
    built = [] if options.verify else [(name, made(*how)) for name, how in each]
    with ThreadPoolExecutor() as pool:  # compiled before anything is timed
        list(pool.map(report, built))
    if options.compile_only or options.verify:
        return
    result = {name: timed(name, group, options.rounds) for name, group in found}
    text = json.dumps({"device": bench.device(), "groups": result}, indent=1)
    (options.out / "v2-candidates.json").write_text(text)


if __name__ == "__main__":
    main()

"""Time candidates of V2's forward kernel at head_dim 160, between those at 128 and 256.

python3 benchmarks/odd_candidates.py --compile-only | --verify | --out results/ [--rounds 7]

Candidates are tiles, or edits of the rendered text; what is not in the templates is here only.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fasim import bench, planner
from fasim.compile import compile_kernel
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.render import render

# S of all columns unrolled, instead of 4 + 4 steps in a loop and 2 after it.
UNROLL = (("kD > 8 * kDepth ? 4 : 8;", "kD > 12 * kDepth ? 4 : 12;"),)
# A row copied by 4 threads, 5 pieces of 64 bytes each, instead of by 20: constant addresses.
FOURS = (("return 4 * rows * copies > 3 * kThreads ? rows : 0;", "return 0;"),)
# K and V of a step arrive together, half of the ring for each step: one barrier instead of two.
ONCE = (
    ("    if (t < 2 * kv_tiles && t % 2 == 0) {\n", "    if (t < 2 * kv_tiles) {\n"),
    ("    } else if (t < 2 * kv_tiles) {\n", ""),
    ("      const Element* source = v + key", "      const Element* source_v = v + key"),
    ("kSwizzledV>(slot(t), source,", "kSwizzledV>(slot(t + 1), source_v,"),
    ("cp_async_wait_group<kSlots - 2>();", "cp_async_wait_group<0>();"),
    ("    load(t + kSlots - 1);\n", "    load(t + 2);\n"),
    ("for (int t = 0; t < kSlots - 1; ++t) load(t);", "load(0);"),
    ("    advance(2 * j + 1);\n", ""),
)
# Where the next tile lies is kept, instead of its number times the stride.
KEPT = (
    (
        "  const auto load = [&](int t) {\n",
        "  const Element* k_next = k + i64(kv_tiles - 1) * kBlockKV * k_strides.seq;\n"
        "  const Element* v_next = v + i64(kv_tiles - 1) * kBlockKV * v_strides.seq;\n"
        "  const auto load = [&](int t) {\n",
    ),
    (
        " = k + key * k_strides.seq;\n",
        " = k_next;\n      k_next -= kBlockKV * k_strides.seq;\n",
    ),
    (
        " = v + key * v_strides.seq;\n",
        " = v_next;\n      v_next -= kBlockKV * v_strides.seq;\n",
    ),
)
LARGE = Tile(block_q=256, block_kv=32, stages=2, warps=8)
ODD = {  # by head_dim
    128: {"128": (None, ())},
    160: {
        "160": (None, ()),
        "160 unrolled": (None, UNROLL),
        "160 fours": (None, FOURS),
        "160 once": (None, ONCE),
        "160 unrolled, fours": (None, (*UNROLL, *FOURS)),
        "160 unrolled, once": (None, (*UNROLL, *ONCE)),
        "160 unrolled, fours, once": (None, (*UNROLL, *FOURS, *ONCE)),
        "160 unrolled, fours, kept": (None, (*UNROLL, *FOURS, *KEPT)),
        "160 all": (None, (*UNROLL, *FOURS, *ONCE, *KEPT)),
        "160 256x32 unrolled, once": (LARGE, (*UNROLL, *ONCE)),
        "160 64x128": (Tile(block_q=64, block_kv=128), ()),
    },
    256: {"256": (None, ())},
}


def made(problem, tile, edits):
    entry = planner.plan(problem, load("h200"), "v2", tile=tile)
    kernel = render(entry.plan)
    text = kernel.source
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return entry, replace(kernel, source=text)


def problem(d, causal):
    sizes = {"batch": 4, "heads": 2048 // d, "seq": 4096, "head_dim": d}
    return Problem(**sizes, causal=causal, dtype="bf16")


def groups():
    for causal in (False, True):
        each = {n: (problem(d, causal), *how) for d in ODD for n, how in ODD[d].items()}
        yield f"odd {'causal' if causal else 'full'}", each


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
    return 4 * pairs * problem.head_dim


def timed(name, group, rounds):
    candidates = [
        bench.Candidate(label, started(how), made(*how)[0].time.seconds)
        for label, how in group.items()
    ]
    timings = bench.interleave(candidates, rounds=rounds)
    rates = {t.name: flops(group[t.name][0]) / t.seconds / 1e12 for t in timings}
    print(name, {n: f"{r:.0f}" for n, r in rates.items()}, flush=True)
    between = 0.75 * rates["128"] + 0.25 * rates["256"]
    near = {n: f"{r / between:.3f}" for n, r in rates.items() if n.startswith("160")}
    print("   of the interpolation:", near, flush=True)
    return {"tflops": rates, "timings": [t.to_json() for t in timings]}


def started(how):
    from fasim.runners import gpu

    kernel = made(*how)[1]
    launch = kernel.plan.launch_for(how[0])
    return gpu.launch_on_device(kernel, bench.random_inputs(launch), launch)


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
    (options.out / "v2-odd-candidates.json").write_text(text)


if __name__ == "__main__":
    main()

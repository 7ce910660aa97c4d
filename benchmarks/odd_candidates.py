"""Time candidates of V2's forward kernel at head dimensions that are no power of two.

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

UNROLL = (("kD > 8 * kDepth ? 4 : 8;", "kD > 12 * kDepth ? 4 : 12;"),)
ODD = {  # by head_dim
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
    for d, low, high, share in ((80, 64, 128, 0.25), (96, 64, 128, 0.5), (160, 128, 256, 0.25)):
        between = rates[str(low)] * (1 - share) + rates[str(high)] * share
        near = {n: f"{r / between:.3f}" for n, r in rates.items() if n.startswith(str(d))}
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

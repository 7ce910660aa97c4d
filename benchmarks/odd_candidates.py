"""Time candidates of V2's forward kernel at head_dim 160 and others between 128 and 256.

python3 benchmarks/odd_candidates.py --compile-only | --verify | --out results/ [--rounds 7]

Candidates are edits of the rendered text; what is not in the templates is here only.
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
from fasim.problem import Problem
from fasim.render import render


def by_heads(together):
    """Of so many heads the tiles with the most keys first, as V3 does: the end has short ones."""
    return (
        (
            "  const int turn = blockIdx.x % q_blocks;\n",
            "  const int all_heads = gridDim.x / q_blocks;\n"
            f"  const int first_head = int(blockIdx.x) / ({together} * q_blocks) * {together};\n"
            f"  const int members = min({together}, all_heads - first_head);\n"
            "  const int place = int(blockIdx.x) - first_head * q_blocks;\n"
            "  const int turn = place / members, any_head = first_head + place % members;\n",
        ),
        ("blockIdx.x / q_blocks % heads;", "any_head % heads;"),
        ("blockIdx.x / q_blocks / heads;", "any_head / heads;"),
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
        "*k_source = k + key * k_strides.seq, *v_source = v + key * v_strides.seq;\n",
        "*k_source = k_next, *v_source = v_next;\n"
        "      k_next -= kBlockKV * k_strides.seq;\n"
        "      v_next -= kBlockKV * v_strides.seq;\n",
    ),
)
PLAIN = {"128": (128, ()), "160": (160, ()), "256": (256, ())}
# Rows of one stage as they were: not measured in their new form yet.
BEFORE = (
    ("kDepthUnroll = kD / kDepth;", "kDepthUnroll = kD > 8 * kDepth ? 4 : 8;"),
    ("if (copies > 16 && copies % 4 == 0) return 0;", ""),
)
ODD = {str(d): (d, ()) for d in (144, 176, 192, 208, 224, 240)}
ODD |= {f"{d} before": (d, BEFORE) for d in (176, 192, 208, 224, 240)}
CAUSAL = {
    "160 by 8 heads": (160, by_heads(8)),
    "160 kept, by 8 heads": (160, (*KEPT, *by_heads(8))),
    "128 by 8 heads": (128, by_heads(8)),
    "256 by 4 heads": (256, by_heads(4)),
}


def made(problem, edits):
    entry = planner.plan(problem, load("h200"), "v2")
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
    for name, more in (("full", {}), ("causal", CAUSAL), ("wide", ODD)):
        found = {**PLAIN, **more}
        each = {n: (problem(d, name == "causal"), edits) for n, (d, edits) in found.items()}
        yield f"odd {name}", each


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
    dims = {n: group[n][0].head_dim for n in rates}
    between = {n: rates["128"] + (rates["256"] - rates["128"]) * (dims[n] / 128 - 1) for n in rates}
    near = {n: f"{r / between[n]:.3f}" for n, r in rates.items()}
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

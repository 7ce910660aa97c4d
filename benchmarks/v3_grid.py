"""Time V3 beside FlashAttention-3, cuDNN, FlashAttention-2 and V2 on the grid of the papers.

    python3 benchmarks/v3_grid.py --out results/ [--dtype bf16] [grid] [options] [packed]

16,384 tokens of hidden size 2048: head_dim 64, 128 and 256, sequences of 512 to 16,384, causal or
not, the planner's tile for each, all candidates of a row in turns. FlashAttention-3 is the fa3-fwd
wheel where it is installed; as its launches wait for the host on short sequences, ``bar`` takes the
larger of its rate and of cuDNN's times the ratio of the two that was measured without the wheel.

Options: V3 beside itself, useful FLOPs a second over those of a neighbour in the same rounds. fp16
beside bf16; 32 heads over 8 beside 32 over 32, and a window of 4,096 keys beside the causal mask,
both on 16,384 tokens.

Packed: few queries of 32 heads over 8 against 8,192 keys, causal; V3 whose tiles pack the rows of
a group, V3 that does not, and V2, which splits keys where that serves, in turns on the same arrays.
At batch 1 K and V stay in the L2 from launch to launch, which the prediction does not know.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from v2_grid import (
    GPU,
    HEAD_DIMS,
    Planned,
    Shared,
    beside,
    geometric_mean,
    grid,
    planned,
    sized,
    useful_flops,
)

from fasim import bench, peers, planner
from fasim.gpu import load
from fasim.problem import Problem
from fasim.runners import gpu

PEERS = Path(__file__).parent / "results" / "h200-peers.json"


def candidates(v3: Planned, v2: Planned | None) -> list[bench.Candidate]:
    problem = v3[0]
    tensors = peers.tensors(problem)
    arrays = {name: Shared(tensor) for name, tensor in tensors.items()}
    found = [candidate("v3", v3, arrays), *([candidate("v2", v2, arrays)] if v2 else [])]
    rivals = [peer for peer in peers.peers(problem, **tensors) if peer.name != "unfused"]
    return found + [bench.Candidate(p.name, p.launch, None) for p in rivals if p.launch]


def candidate(name: str, one: Planned, arrays: dict[str, Shared]) -> bench.Candidate:
    problem, entry, kernel = one
    call = gpu.launch_on_device(kernel, arrays, kernel.plan.launch_for(problem))
    return bench.Candidate(name, call, entry.time.seconds)


def row(v3: Planned, v2: Planned | None, known: dict[tuple[int, int, bool], float]) -> Any:
    problem, entry, kernel = v3
    timings = {timing.name: timing for timing in bench.interleave(candidates(v3, v2))}
    ours = timings["v3"]
    ratios = {name: vars(bench.ratio(ours, t)) for name, t in timings.items() if t is not ours}
    least = known.get((problem.head_dim, problem.seq, problem.causal), 0.0)
    bar = min(
        ratios[name]["median"] / factor
        for name, factor in (("fa3", 1.0), ("cudnn", least))
        if name in ratios and factor
    )
    rates = {name: useful_flops(problem) / t.seconds / 1e12 for name, t in timings.items()}
    said = " ".join(f"{name} {r['median']:.3f}" for name, r in ratios.items())
    print(problem.head_dim, problem.seq, "causal" if problem.causal else "full", entry.tile,
          f"{rates['v3']:.0f} TFLOP/s, {entry.time.seconds / ours.seconds - 1:+.0%};",
          f"over {said}; over the bar {bar:.3f}", flush=True)  # fmt: skip
    return {
        "problem": problem.to_json(),
        "kernel": kernel.stem,
        "sources": bench.sources_sha(kernel),
        "tflops": rates,
        "ratios": ratios,
        "over_bar": bar,
        "timings": [timing.to_json() for timing in timings.values()],
    }


def known_ratios(dtype: str = "bf16") -> dict[tuple[int, int, bool], float]:
    """FA3 in a type over cuDNN in bf16, by head_dim, seq and causal."""
    rows = [r for r in json.loads(PEERS.read_text()) if r["case"] == "fwd"]
    rates = {(r["impl"], r["dtype"], r["d"], r["s"], r["causal"]): r["tflops"] for r in rows}
    return {
        (d, s, causal): rate / rates["cudnn", "bf16", d, s, causal]
        for (impl, kind, d, s, causal), rate in rates.items()
        if (impl, kind) == ("fa3", dtype)
    }


def summary(rows: list[Any]) -> dict[str, float]:
    names = sorted({name for one in rows for name in one["ratios"]})
    over = {
        name: geometric_mean([r["ratios"][name]["median"] for r in rows if name in r["ratios"]])
        for name in names
    }
    bars = [one["over_bar"] for one in rows]
    return {**over, "bar": geometric_mean(bars), "least over bar": min(bars, default=math.nan)}


# ---- V3 beside itself ---------------------------------------------------------------------------


def option_groups() -> Iterator[dict[str, Problem]]:
    """A neighbour first, then what is held against it."""
    for d, seq, causal in itertools.product(HEAD_DIMS, (1024, 4096, 16384), (False, True)):
        bf16 = sized(d, seq, causal)
        yield {"bf16": bf16, "fp16": replace(bf16, dtype="fp16", in_dtype=None, out_dtype=None)}
    long = Problem(heads=32, seq=16384, head_dim=128, dtype="bf16")
    for causal in (False, True):
        dense = replace(long, causal=causal)
        yield {"dense": dense, "gqa 32/8": replace(dense, kv_heads=8)}
    yield {"causal": replace(long, causal=True), "window 4096": replace(long, window=(4095, 0))}


def options_result() -> Any:
    groups = list(option_groups())
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # so that `beside` finds the kernels compiled
        list(pool.map(lambda p: planned(p, "v3"), (p for g in groups for p in g.values())))
    rows = [beside(group, "v3") for group in groups]
    for one in rows:
        first, *others = one["tflops"]
        one["over_first"] = {name: one["tflops"][name] / one["tflops"][first] for name in others}
    least: dict[str, float] = {}
    for name, factor in ((n, f) for one in rows for n, f in one["over_first"].items()):
        least[name] = min(factor, least.get(name, math.inf))
    return {"device": bench.device(), "summary": least, "groups": rows}


# ---- Packed rows --------------------------------------------------------------------------------

FORMS = {"packed": ("v3", "packed"), "unpacked": ("v3", "unpacked"), "v2": ("v2", "")}


def few_queries() -> Iterator[Problem]:
    for batch, seq in itertools.product((1, 16), (1, 16, 64, 128, 512)):
        sizes = {"batch": batch, "heads": 32, "kv_heads": 8, "seq": seq, "seq_kv": 8192}
        yield Problem(**sizes, dtype="bf16", causal=True)


def each_form(problem: Problem) -> dict[str, Planned]:
    found = {name: planned(problem, algo, form) for name, (algo, form) in FORMS.items()}
    return {name: one for name, one in found.items() if one}


def packed_row(found: dict[str, Planned]) -> Any:
    problem, *_ = found["packed"]
    arrays = {name: Shared(tensor) for name, tensor in peers.tensors(problem).items()}
    timings = {
        timing.name: timing
        for timing in bench.interleave([candidate(n, one, arrays) for n, one in found.items()])
    }
    ratios = {
        name: vars(bench.ratio(timings["packed"], timing))
        for name, timing in timings.items()
        if name != "packed"
    }
    chosen = planner.plan(problem, load(GPU), "v3").plan
    said = (
        f"{name} {timing.seconds * 1e6:.1f} us ({found[name][1].time.seconds * 1e6:.1f})"
        for name, timing in timings.items()
    )
    print(problem.batch, problem.seq, *said, flush=True)
    return {
        "problem": problem.to_json(),
        "kernels": {name: kernel.stem for name, (_, _, kernel) in found.items()},
        "sources": bench.sources_sha(*(kernel for _, _, kernel in found.values())),
        "planned": chosen.kernel.form if chosen else "",
        "ratios": ratios,
        "timings": [timing.to_json() for timing in timings.values()],
    }


def packed_result() -> Any:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [packed_row(found) for found in pool.map(each_form, few_queries())]
    over = {
        name: geometric_mean([row["ratios"][name]["median"] for row in rows])
        for name in FORMS
        if name != "packed"
    }
    return {"device": bench.device(), "summary": over, "rows": rows}


# ---- What is asked for --------------------------------------------------------------------------


def grid_result(dtype: str) -> Any:
    problems = [
        replace(problem, dtype=dtype, in_dtype=None, out_dtype=None) for problem in grid("fwd")
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ours = list(pool.map(lambda p: planned(p, "v3"), problems))
        others = list(pool.map(planned, problems))
    known = known_ratios()
    rows = [row(a, b, known) for a, b in zip(ours, others, strict=True) if a]
    return {"device": bench.device(), "summary": summary(rows), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", default=["grid", "options"])
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--out", type=Path, default=Path("."))
    asked = parser.parse_args()
    for section in asked.sections:
        others = {"options": options_result, "packed": packed_result}
        result = grid_result(asked.dtype) if section == "grid" else others[section]()
        print(result["summary"])
        name = f"h200-v3-fwd-{asked.dtype if section == 'grid' else section}.json"
        (asked.out / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

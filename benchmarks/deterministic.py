"""Time backward passes that repeat bit for bit beside V2's with atomic additions.

    python3 benchmarks/deterministic.py --out results/ [--seqs 1024,4096]

16,384 tokens of hidden size 2048 in bf16, head_dim 64 and 128, causal or not: V2 with ordered
additions, with a second pass, and V1, each with the planner's tile, in turns in one run. Each must
give the same bits in five launches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fasim import bench, planner
from fasim.entry import Entry
from fasim.gpu import load
from fasim.plan import FORMS
from fasim.problem import Problem
from fasim.render import render
from fasim.runners import gpu

TOKENS, HIDDEN = 16384, 2048
NAMES = ("atomic", *FORMS, "v1")
LAUNCHES = 5


def grid(seqs: list[int]) -> Iterator[Problem]:
    for d, seq, causal in itertools.product((64, 128), seqs, (False, True)):
        sizes = {"batch": TOKENS // seq, "heads": HIDDEN // d, "seq": seq, "head_dim": d}
        yield Problem(**sizes, causal=causal, dtype="bf16", pass_="bwd")


def planned(problem: Problem, name: str) -> Entry:
    form = name if name in FORMS else ""
    wanted = problem.with_(deterministic=bool(form))
    return planner.plan(wanted, load("auto"), "v1" if name == "v1" else "v2", form=form)


def candidate(entry: Entry, arrays: Any) -> bench.Candidate:
    kernel = render(entry.plan)
    call = gpu.launch_on_device(kernel, arrays, kernel.plan.launch_for(entry.problem))
    first = call.outputs["dq"].numpy().tobytes()
    for _ in range(LAUNCHES - 1):
        call()
        same = call.outputs["dq"].numpy().tobytes() == first
        if not same and kernel.plan.kernel.repeats("dq"):
            sys.exit(f"{kernel.stem} gave other bits in another launch")
    return bench.Candidate(entry.variant, call, entry.time.seconds)


def row(problem: Problem) -> dict[str, Any]:
    entries = [planned(problem, name) for name in NAMES]
    arrays = bench.random_inputs(entries[0].plan.launch_for(problem))
    timings = bench.interleave([candidate(entry, arrays) for entry in entries])
    atomic = timings[0]
    ratios = {x.name: vars(bench.ratio(x, atomic)) for x in timings[1:]}
    errors = {x.name: x.predicted_s / x.seconds - 1 for x in timings}
    shown = " ".join(
        f"{name} {ratio['median']:.3f} ({errors[name]:+.0%})" for name, ratio in ratios.items()
    )
    print(problem.head_dim, problem.seq, problem.causal, shown, flush=True)
    tiles = {entry.variant: str(entry.tile) for entry in entries}
    return {
        "problem": problem.to_json(),
        "tiles": tiles,
        "over_atomic": ratios,
        "errors": errors,
        "timings": [timing.to_json() for timing in timings],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seqs", default="1024,4096,16384")
    options = parser.parse_args()
    rows = [row(problem) for problem in grid([int(n) for n in options.seqs.split(",")])]
    summary = {
        name: math.exp(sum(math.log(r["over_atomic"][name]["median"]) for r in rows) / len(rows))
        for name in rows[0]["over_atomic"]
    }
    print(summary)
    result = {"device": bench.device(), "summary": summary, "rows": rows}
    (options.out / "deterministic.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

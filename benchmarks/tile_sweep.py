"""Time the planner's pick beside other legal tiles on the GPU of this machine.

    python benchmarks/tile_sweep.py --compile-only
    python benchmarks/tile_sweep.py --out sweep.json [--others 24] [--seconds 300] [NAME ...]

For every problem: the planner's pick, its next best tiles and a seeded sample of all other legal
ones, compiled at once on all cores and then timed in turns. Tiles whose code spills are left out,
and counted. The document, written after each problem, holds measured and predicted seconds of every
tile, and how far the pick is from the fastest. What a model was fitted on is named `fit …`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from fasim import bench, files, legality, planner
from fasim.compile import compile_kernel
from fasim.entry import Entry
from fasim.errors import FasimError
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import Kernel, render
from fasim.runners import gpu as runner

GPU, SEED, ROUNDS, LAUNCHES = "h200", 7, 5, 10
MANY = {"batch": 4, "heads": 16, "seq": 4096, "dtype": "bf16"}
PROBLEMS = {
    "v2 d64": ("v2", Problem(batch=4, heads=32, seq=4096, head_dim=64, dtype="bf16")),
    "v2 d128": ("v2", Problem(**MANY)),
    "v2 d128 causal": ("v2", Problem(**MANY, causal=True)),
    "v2 d256": ("v2", Problem(batch=4, heads=8, seq=4096, head_dim=256, dtype="bf16")),
    "v2 d128 bwd causal": ("v2", Problem(**MANY, causal=True, pass_="bwd")),
    "v1 d64": ("v1", Problem(batch=64, heads=16, seq=1024, head_dim=64, dtype="bf16")),
    "fit v2 d128 short": ("v2", Problem(batch=16, heads=16, seq=1024, dtype="bf16", causal=True)),
    "fit v2 d40": ("v2", Problem(batch=2, heads=8, seq=4096, head_dim=40)),
    "fit v2 fp32": ("v2", Problem(batch=1, heads=16, seq=4096, head_dim=64, dtype="fp32")),
    "fit v1 d64": ("v1", Problem(batch=8, heads=32, seq=2048, head_dim=64, dtype="bf16")),
    "fit v1 d128": ("v1", Problem(batch=16, heads=16, seq=1024, dtype="bf16", causal=True)),
}
SIX = [name for name in PROBLEMS if not name.startswith("fit")]

Built = tuple[Entry, Kernel, int]  # with the registers that the compiler used


def chosen(problem: Problem, algo: str, others: int) -> list[Entry]:
    """The planner's pick first; half of the others its next best, the rest drawn from all legal
    tiles."""
    device, rng = load(GPU), random.Random(SEED)
    entry = planner.plan(problem, device, algo, top=1 + others // 2)
    tried = planner.candidates(problem, device, algo, problem.pass_)
    case = legality.Case.of(problem, device, algo, problem.pass_, tried)
    legal = [case.tiles.tile(int(i)) for i in np.flatnonzero(legality.legal(case))]
    rng.shuffle(legal)
    tiles = [entry.tile, *(other.tile for other in entry.alternatives), *legal]
    distinct: dict[str, Entry] = {}
    for tile in filter(None, tiles):
        if len(distinct) <= others:
            one = planner.plan(problem, device, algo, tile=tile)
            assert one.plan
            distinct.setdefault(one.plan.kernel.stem, one)
    return list(distinct.values())


def compiled(entry: Entry) -> Built | None:
    """The kernel and the registers it uses, or None where the compiler refuses or spills."""
    assert entry.plan
    kernel = render(entry.plan)
    try:
        used = compile_kernel(kernel).resources
    except FasimError as error:
        print(kernel.stem, error, file=sys.stderr, flush=True)
        return None
    return None if used.spill_stores else (entry, kernel, used.registers)


def measured(built: list[Built], problem: Problem) -> list[dict[str, Any]]:
    """One row a tile, in the order given: measured and predicted seconds, in turns in one run."""
    launch = built[0][1].plan.launch_for(problem)
    arrays = bench.random_inputs(launch)
    candidates = [
        bench.Candidate(
            kernel.stem,
            runner.launch_on_device(kernel, arrays, kernel.plan.launch_for(problem)),
            entry.time.seconds,
        )
        for entry, kernel, _ in built
    ]
    timings = bench.interleave(candidates, rounds=ROUNDS, launches=LAUNCHES)
    return [
        {
            "tile": kernel.plan.to_json()["kernel"]["tile"],
            "registers": registers,
            "blocks_per_sm": entry.blocks_per_sm,
            **timing.to_json(),
        }
        for (entry, kernel, registers), timing in zip(built, timings, strict=True)
    ]


def result(name: str, built: list[Built | None]) -> dict[str, Any]:
    """The tiles of one problem, and the fastest one's time as a share of the pick's."""
    algo, problem = PROBLEMS[name]
    ready = [one for one in built if one]
    rows = measured(ready, problem)
    best = min(row["seconds"] for row in rows)
    pick = rows[0]["seconds"] if built[0] else None
    shown = "none" if pick is None else f"{best / pick:.3f} of the fastest of {len(rows)}"
    print(f"{name}: the pick reaches {shown}, {len(built) - len(ready)} not compiled or spilled")
    for row in sorted(rows, key=lambda row: float(row["seconds"])):
        print("  ", line(row, best), flush=True)
    return {
        "name": name,
        "algo": algo,
        "problem": problem.to_json(),
        "left_out": len(built) - len(ready),
        "pick_speed": best / pick if pick else None,
        "tiles": rows,
    }


def line(row: dict[str, Any], best: float) -> str:
    t, ratio = row["tile"], row["predicted_s"] / row["seconds"]
    return (
        f"{t['block_q']}x{t['block_kv']} step {t['step_kv']} w{t['warps']} st{t['stages']}"
        f" {t['p_in']} {row['seconds'] * 1e6:9.1f} us, {best / row['seconds']:.3f} of the fastest,"
        f" predicted/measured {ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=SIX, help=f"of {', '.join(PROBLEMS)}")
    parser.add_argument("--out", type=Path, default=Path("sweep.json"))
    parser.add_argument("--others", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=540, help="no problem is begun after them")
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    entries = {name: chosen(*PROBLEMS[name][::-1], options.others) for name in options.names}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {n: [pool.submit(compiled, entry) for entry in es] for n, es in entries.items()}
        built = {name: [job.result() for job in found] for name, found in jobs.items()}
    if options.compile_only:
        return
    device = {"device": bench.device(), "sources_sha": bench.sources_sha()}
    document: dict[str, Any] = {"schema": "fasim.sweep/1", **device, "results": []}
    for name in options.names:
        if time.monotonic() > deadline:
            print(name, "not begun", flush=True)
            continue
        document["results"].append(result(name, built[name]))
        files.write(options.out, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

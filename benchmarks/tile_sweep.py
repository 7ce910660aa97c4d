"""Time many tiles of V1 and V2 on the GPU of this machine, beside what the model predicted.

python benchmarks/tile_sweep.py --out sweep.json [--tiles 12] [--gpu h200]

For every problem: the planner's best tiles and a seeded sample of other legal ones, all compiled
before the device is used. The document holds measured and predicted seconds of each.
"""

import argparse
import json
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from fasim import bench, gpu, legality, planner
from fasim.compile import compile_kernel
from fasim.errors import FasimError
from fasim.problem import Problem
from fasim.render import render
from fasim.runners import gpu as runner

SEED = 7
PROBLEMS = (
    ("v2", Problem(batch=4, heads=32, seq=4096, head_dim=64, dtype="bf16")),
    ("v2", Problem(batch=4, heads=16, seq=4096, head_dim=128, dtype="bf16")),
    ("v2", Problem(batch=4, heads=16, seq=4096, head_dim=128, dtype="bf16", causal=True)),
    ("v2", Problem(batch=16, heads=16, seq=1024, head_dim=128, dtype="bf16", causal=True)),
    ("v2", Problem(batch=4, heads=8, seq=4096, head_dim=256, dtype="bf16")),
    ("v2", Problem(batch=2, heads=8, seq=4096, head_dim=40, dtype="fp16")),
    ("v2", Problem(batch=1, heads=16, seq=4096, head_dim=64, dtype="fp32")),
    ("v1", Problem(batch=64, heads=16, seq=1024, head_dim=64, dtype="bf16")),
    ("v1", Problem(batch=8, heads=32, seq=2048, head_dim=64, dtype="bf16")),
    ("v1", Problem(batch=16, heads=16, seq=1024, head_dim=128, dtype="bf16", causal=True)),
)


def chosen(problem, device, algo, count, rng):
    """Plans of half the tiles from the planner's best, the others drawn from all legal ones."""
    entry = planner.plan(problem, device, algo, top=count - count // 2)
    tiles = [entry.tile, *(other.tile for other in entry.alternatives)]
    case = legality.Case.of(
        problem, device, algo, "fwd", planner.candidates(problem, device, algo, "fwd")
    )
    legal = np.flatnonzero(legality.legal(case))
    tiles += [case.tiles.tile(int(i)) for i in rng.sample(list(legal), count - len(tiles))]
    return [planner.plan(problem, device, algo, tile=tile) for tile in dict.fromkeys(tiles)]


def compiled(entry):
    """The kernel and the registers it uses, or None where the compiler spills."""
    kernel = render(entry.plan)
    try:
        used = compile_kernel(kernel).resources
    except FasimError as error:
        print(kernel.stem, error, file=sys.stderr)
        return None
    return None if used.spill_stores else (entry, kernel, used.registers)


def measured(built, problem, rounds):
    """One row a tile: measured and predicted seconds, interleaved in one run."""
    launch = built[0][0].plan.launch_for(problem)
    arrays = bench.random_inputs(launch)
    candidates = [
        bench.Candidate(
            kernel.stem,
            runner.launch_on_device(kernel, arrays, entry.plan.launch_for(problem)),
            entry.time.seconds,
        )
        for entry, kernel, _ in built
    ]
    timings = bench.interleave(candidates, rounds=rounds)
    return [
        {
            "tile": entry.plan.to_json()["kernel"]["tile"],
            "registers": registers,
            "blocks_per_sm": entry.blocks_per_sm,
            **timing.to_json(),
        }
        for (entry, _, registers), timing in zip(built, timings, strict=True)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiles", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", default="h200")
    options = parser.parse_args()
    device, rng = gpu.load(options.gpu), random.Random(SEED)
    entries = [(a, p, chosen(p, device, a, options.tiles, rng)) for a, p in PROBLEMS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = [(a, p, list(filter(None, pool.map(compiled, e)))) for a, p, e in entries]
    results = []
    for algo, problem, ready in built:
        rows = measured(ready, problem, options.rounds)
        results.append({"algo": algo, "problem": problem.to_json(), "tiles": rows})
        best = min(row["seconds"] for row in rows)
        for row in sorted(rows, key=lambda row: row["seconds"]):
            t, ratio = row["tile"], row["predicted_s"] / row["seconds"]
            print(
                f"{algo} d{problem.head_dim} {problem.mask:6} {t['block_q']}x{t['block_kv']}"
                f" step {t['step_kv']} w{t['warps']} st{t['stages']}"
                f" {row['seconds'] * 1e6:9.1f} us, {best / row['seconds']:.2f} of best,"
                f" predicted/measured {ratio:.2f}"
            )
    document = {
        "schema": "fasim.sweep/1",
        "device": bench.device(),
        "sources_sha": bench.sources_sha(),
        "results": results,
    }
    options.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

"""Time V3 in e4m3 with and without the kernels that quantise, beside V3 in bf16, in turns.

    python3 benchmarks/quantise.py --out results/ [--head-dims 64,128,256] [--seqs 1024,4096,...]
                                                        on a device: writes h200-quantise.json

16,384 tokens of hidden size 2048. ``chain`` is everything from bf16 on, ``before`` the kernels that
quantise alone, with their rate in bytes issued; ``bf16`` is V3 on the same inputs. The bar: the
chain is faster than bf16 from 4,096 tokens on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from v2_grid import Planned, Shared, chosen, planned

from fasim import bench, peers
from fasim.model import traffic
from fasim.runners import gpu

E4M3 = {"dtype": "e4m3", "in_dtype": "bf16"}
WAYS: dict[str, dict[str, Any]] = {
    "block": {**E4M3, "scales": "block"},
    "block, rotated": {**E4M3, "scales": "block", "incoherent": True},
    "head": {**E4M3, "scales": "head"},
    "head, rotated": {**E4M3, "scales": "head", "incoherent": True},
    "bf16": {},
}


def candidate(
    name: str, one: Planned, arrays: dict[str, Shared], before: bool = False
) -> bench.Candidate:
    """A whole launch, or only what stands before its main kernel."""
    kernel = one[2]
    launch = kernel.plan.launch_for()
    some = replace(launch, stages=launch.stages[:-1]) if before else launch
    return bench.Candidate(name, gpu.launch_on_device(kernel, arrays, some))


def row(way: str, chain: Planned, bf16: Planned) -> dict[str, Any]:
    problem = bf16[0]
    arrays = {name: Shared(tensor) for name, tensor in peers.tensors(problem).items()}
    candidates = [
        candidate("chain", chain, arrays),
        candidate("before", chain, arrays, before=True),
        candidate("bf16", bf16, arrays),
    ]
    timings = {timing.name: timing for timing in bench.interleave(candidates)}
    rate = traffic.laid_out(chain[0]).total / timings["before"].seconds
    over = vars(bench.ratio(timings["chain"], timings["bf16"]))
    times = ", ".join(f"{name} {one.seconds * 1e6:.1f} us" for name, one in timings.items())
    shape = f"{problem.head_dim} {problem.seq} {'causal' if problem.causal else 'full'}"
    median = over["median"]
    print(f"{shape} {way}: {times}, {rate / 1e12:.2f} TB/s, over bf16 {median:.3f}", flush=True)
    return {
        "problem": chain[0].to_json(),
        "way": way,
        "kernel": chain[2].stem,
        "sources": bench.sources_sha(chain[2], bf16[2]),
        "before_bytes_s": rate,
        "over_bf16": over,
        "timings": [timing.to_json() for timing in timings.values()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--seqs", default="1024,4096,8192,16384")
    options = parser.parse_args()
    asked = [(p, way, p.with_(**change)) for p in chosen(options) for way, change in WAYS.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda one: planned(one[2], "v3"), asked))
    ready = {(p, way): one for (p, way, _), one in zip(asked, found, strict=True) if one}
    rows: list[dict[str, Any]] = []
    for (problem, way), chain in ready.items():
        if way == "bf16" or (problem, "bf16") not in ready:
            continue
        rows.append(row(way, chain, ready[problem, "bf16"]))
        result = {"device": bench.device(), "rows": rows}
        (options.out / "h200-quantise.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

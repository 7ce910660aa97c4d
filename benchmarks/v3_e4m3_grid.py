"""Time V3 in e4m3 beside FlashAttention-3 in e4m3, and V3 and cuDNN in bf16, on v3_grid's grid.

    python3 benchmarks/v3_e4m3_grid.py --out results/ [--head-dims 64,128,256] [--seqs 512,...]

Unit-normal tensors rounded to e4m3, scale factors of 1 for each head. ``v3`` counts every launch
from row-major tensors, ``kernel`` the last one alone, without the one that lays V out anew. ``bar``
is the larger of FlashAttention-3's rate and of cuDNN's in bf16 times the ratio that was measured
without the wheel.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from v2_grid import Planned, Shared, chosen, geometric_mean, planned, useful_flops
from v3_grid import candidate, known_ratios

from fasim import bench, peers
from fasim.runners import gpu

SCALES = {"dtype": "e4m3", "in_dtype": None, "out_dtype": None, "scales": "head"}


def candidates(e4m3: Planned, bf16: Planned) -> list[bench.Candidate]:
    tensors = peers.tensors(bf16[0])
    rounded = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    ours = arrays_of(e4m3, rounded)
    fa3 = peers.fa3(e4m3[0], **rounded)
    cudnn = peers.sdpa("cudnn", bf16[0], **tensors)
    return [
        candidate("v3", e4m3, ours),
        alone(e4m3, ours),
        candidate("v3 bf16", bf16, {name: Shared(tensor) for name, tensor in tensors.items()}),
        bench.Candidate("fa3", fa3, None),
        bench.Candidate("cudnn", cudnn, None),
    ]


def arrays_of(one: Planned, rounded: dict[str, torch.Tensor]) -> dict[str, Shared]:
    """Its arrays on the device, with scale factors of 1."""
    arrays = {name: Shared(tensor) for name, tensor in rounded.items()}
    inputs = one[2].plan.launch_for(one[0]).inputs
    ones = {
        name: Shared(torch.ones(shape, device="cuda"))
        for name, (shape, _) in inputs.items()
        if name not in arrays
    }
    return arrays | ones


def alone(one: Planned, arrays: dict[str, Shared]) -> bench.Candidate:
    """The last kernel of a launch, with what those before it left: of zeros it would be faster."""
    problem, _, kernel = one
    launch = kernel.plan.launch_for(problem)
    whole = gpu.launch_on_device(kernel, arrays, launch)
    last = gpu.launch_on_device(kernel, arrays, replace(launch, stages=launch.stages[-1:]))
    for name in launch.workspaces:
        as_bytes(last.buffers[name]).copy_(as_bytes(whole.buffers[name]))
    return bench.Candidate("kernel", last, None)


def as_bytes(array: gpu.DeviceArray) -> torch.Tensor:
    """The memory of a contiguous array, for torch."""
    interface = array.__cuda_array_interface__
    size = math.prod(interface["shape"]) * np.dtype(interface["typestr"]).itemsize
    seen = {**interface, "shape": (size,), "typestr": "|u1", "strides": None}
    view = type("View", (), {"__cuda_array_interface__": seen})
    return torch.as_tensor(view(), device="cuda")


def row(e4m3: Planned, bf16: Planned, known: dict[tuple[int, int, bool], float]) -> Any:
    problem, entry, kernel = e4m3
    timings = {timing.name: timing for timing in bench.interleave(candidates(e4m3, bf16))}
    rates = {name: useful_flops(problem) / t.seconds / 1e12 for name, t in timings.items()}
    least = known.get((problem.head_dim, problem.seq, problem.causal), 0.0) * rates["cudnn"]
    bar = max(rates["fa3"], least)
    over = {name: rates[name] / bar for name in ("v3", "kernel")}
    error = entry.time.seconds / timings["v3"].seconds - 1
    print(problem.head_dim, problem.seq, "causal" if problem.causal else "full", entry.tile,
          *(f"{name} {rate:.0f}" for name, rate in rates.items()), f"model {error:+.0%}",
          *(f"{name}/bar {ratio:.3f}" for name, ratio in over.items()), flush=True)  # fmt: skip
    ratios = {name: vars(bench.ratio(timings["v3"], timings[name])) for name in rates}
    return {
        "problem": problem.to_json(),
        "kernel": kernel.stem,
        "sources": bench.sources_sha(kernel),
        "tflops": rates,
        "over_bar": over,
        "ratios": ratios,
        "timings": [timing.to_json() for timing in timings.values()],
    }


def summary(rows: list[Any]) -> dict[str, float]:
    over = [(r["over_bar"]["v3"], r["over_bar"]["kernel"]) for r in rows]
    return {
        "v3 over the bar": geometric_mean([a for a, _ in over]),
        "kernel over the bar": geometric_mean([b for _, b in over]),
        "least kernel over the bar": min((b for _, b in over), default=math.nan),
        "over v3 bf16": geometric_mean([r["ratios"]["v3 bf16"]["median"] for r in rows]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--seqs", default="512,1024,2048,4096,8192,16384")
    options = parser.parse_args()
    bf16 = chosen(options)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ours = pool.map(lambda p: planned(replace(p, **SCALES), "v3"), bf16)
        others = pool.map(lambda p: planned(p, "v3"), bf16)
        pairs = [(a, b) for a, b in zip(list(ours), list(others), strict=True) if a and b]
    known = known_ratios("e4m3")
    rows = [row(a, b, known) for a, b in pairs]
    result = {"device": bench.device(), "summary": summary(rows), "rows": rows}
    print(result["summary"])
    (options.out / "h200-v3-fwd-e4m3.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

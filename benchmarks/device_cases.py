"""Prove kernels on the GPU of this machine with inputs drawn by Hypothesis.

    python3 benchmarks/device_cases.py --compile-only
    python3 benchmarks/device_cases.py --out results/ --seconds 420 [forward] [backward] [v3] [e4m3]

Sections: V1 and V2 forward and backward, V3 forward in 16 bits, V3 in e4m3. Their kernels are the
canonical ones, and four more in e4m3; each gets its share of a section's inputs, in batches, and
tries every property on each of them. A batch is a process, many share the device, and what it found
is written down at once: a batch that fails, hangs or takes the device down costs no other. Batches
of all kernels advance together, so a run that its time ends has met them all.

The document counts, besides inputs and checks (a property on an input), the options and edges met
and how large errors were beside their tolerances. Exit 1 if a property failed, an edge was never
met, or time ended before all inputs were tried.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fasim import bench, files, planner, properties
from fasim.compile import compile_kernel
from fasim.errors import FasimError
from fasim.files import read_kernel
from fasim.gpu import load
from fasim.plan import KernelSpec
from fasim.problem import Problem
from fasim.render import render
from fasim.runners import gpu

Result = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
GPU = "h200"
SECTIONS = {"forward": 2000, "backward": 1000, "v3": 2000, "e4m3": 1000}  # inputs
BATCH = 40  # inputs of one process
STALL_S = 150.0  # a batch that takes longer hangs
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
E4M3 = Problem(heads=16, seq=4096, dtype="e4m3")
MORE = (  # scale factors of a tensor, a head and a block, four head dimensions, both masks
    E4M3.with_(head_dim=64, scales="tensor"),
    E4M3.with_(causal=True, scales="block"),
    E4M3.with_(head_dim=96, scales="block"),
    E4M3.with_(head_dim=256, causal=True, scales="head"),
)
EDGES = (  # what the inputs of a section must have met
    *("keys 0", "keys 1", "keys tile-1", "keys tile", "keys tile+1"),
    *("queries 1", "queries tile-1", "queries tile+1", "queries > keys", "empty rows"),
    *(f"layout {layout}" for layout in properties.LAYOUTS),
    *(f"group {group}" for group in properties.GROUPS),
)


@dataclass(frozen=True)
class Batch:
    """Inputs for one kernel. ``place`` is how far into its section they come, from 0 to 1."""

    section: str
    path: Path
    inputs: int
    seed: int
    place: float


# ---- Kernels ------------------------------------------------------------------------------------


def canonical(folder: Path) -> list[Path]:
    """The kernels that run on the device: those of generated/, and MORE, written to ``folder``."""
    for problem in MORE:
        plan = planner.plan(problem, load(GPU), "v3").plan
        assert plan is not None
        files.write(folder / f"{plan.kernel.stem}.cu", render(plan).source)
    paths = (*(ROOT / "generated").glob("*.cu"), *folder.glob("*.cu"))
    return sorted(filter(runs, paths), key=lambda path: path.stem)


def runs(path: Path) -> bool:
    try:
        target(read_kernel(str(path)).plan.kernel)
    except FasimError:
        return False
    return True


def target(spec: KernelSpec) -> str | None:
    return gpu.target_arch(spec.arch, load(GPU).compute_capability)


def section_of(path: Path) -> str:
    spec = read_kernel(str(path)).plan.kernel
    if spec.algo == "v3":
        return "e4m3" if spec.dtype == "e4m3" else "v3"
    return "forward" if spec.pass_ == "fwd" else "backward"


def compile_all(paths: Iterable[Path]) -> None:
    """Into the cache, on all cores. A kernel that does not compile is told again by its batches."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiled, paths))


def compiled(path: Path) -> None:
    kernel = read_kernel(str(path))
    try:
        compile_kernel(kernel, arch=target(kernel.plan.kernel))
    except FasimError as error:
        print(path.stem, error, file=sys.stderr, flush=True)


# ---- Batches ------------------------------------------------------------------------------------


def batches(kernels: dict[str, list[Path]], inputs: dict[str, int], seed: int) -> list[Batch]:
    """All sections and kernels side by side, in the order in which they are tried."""
    made = (
        batch
        for section, paths in kernels.items()
        for path in paths
        for batch in share(section, path, math.ceil(inputs[section] / len(paths)), seed)
    )
    return sorted(made, key=lambda batch: batch.place)


def share(section: str, path: Path, inputs: int, seed: int) -> Iterator[Batch]:
    """The inputs of one kernel in batches of about the same size."""
    count = math.ceil(inputs / BATCH)
    for i in range(count):
        size = inputs * (i + 1) // count - inputs * i // count
        yield Batch(section, path, size, seed + i, (i + 0.5) / count)


def tried(batch: Batch, runner: str, deadline: float) -> Result:
    """What verify says of a batch; ``late`` if time ended first, else a failure if it never ended.

    Every search begins with the simplest input, which counts only once a kernel: one more is drawn.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        return {"late": True}
    asked = {"runner": runner, "examples": batch.inputs + 1, "seed": batch.seed}
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "fasim", "verify", str(batch.path), *words, "--json"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    place: dict[str, Any] = {"cwd": ROOT, "env": os.environ | ONE_THREAD}
    try:
        done = subprocess.run(command, timeout=min(STALL_S, left), check=False, **streams, **place)
    except subprocess.TimeoutExpired:
        return {"late": True} if left < STALL_S else {"failure": f"no end in {STALL_S:g} s"}
    try:
        return dict(json.loads(done.stdout))
    except json.JSONDecodeError:
        return {"failure": done.stderr[-2000:]}


# ---- What they found ----------------------------------------------------------------------------


class Section:
    """The sums over the batches of a section so far."""

    def __init__(self, wanted: int, paths: list[Path]) -> None:
        self.wanted = wanted
        self.inputs = Counter({path.stem: 0 for path in paths})
        self.checks, self.late = 0, 0
        self.failures: list[Result] = []
        self.worst: dict[str, float] = {}
        self.errors, self.histogram = Counter[str](), Counter[str]()

    def add(self, batch: Batch, found: Result) -> None:
        self.late += found.get("late", False)
        self.histogram.update(found.get("histogram", {}))
        for outcome in found.get("properties", ()):
            self._add_property(batch, outcome)
        failures = [p["failure"] for p in found.get("properties", ()) if p["failure"]]
        if not found.get("properties") and not found.get("late"):
            failures = [{"what": found.get("failure", "no report")}]
        place = {"kernel": batch.path.stem, "seed": batch.seed, "examples": batch.inputs + 1}
        self.failures += [{**place, **failure} for failure in failures]

    def _add_property(self, batch: Batch, outcome: Result) -> None:
        name = outcome["property"]
        self.checks += outcome["cases"]
        if outcome["cases"]:
            self.worst[name] = max(self.worst.get(name, 0.0), outcome["worst"])
        if name == "matches_float64":
            self.inputs[batch.path.stem] += max(0, outcome["cases"] - 1)
            self.errors.update(outcome["errors"])

    @property
    def empty(self) -> list[str]:
        return [name for name in EDGES if not self.histogram[name]]

    @property
    def done(self) -> bool:
        enough = self.inputs.total() >= self.wanted
        return enough and not (self.failures or self.empty or self.late)

    def to_json(self) -> Result:
        return {
            "wanted": self.wanted,
            "inputs": self.inputs.total(),
            "checks": self.checks,
            "kernels": dict(self.inputs),
            "batches_not_tried": self.late,
            "failures": self.failures,
            "worst": self.worst,
            "errors": dict(sorted(self.errors.items())),
            "histogram": dict(sorted(self.histogram.items())),
            "empty": self.empty,
        }


def document(sections: dict[str, Section], head: Result) -> Result:
    """With the bins that no section met, where there are all sections."""
    histogram = sum((section.histogram for section in sections.values()), Counter[str]())
    whole = sections.keys() == SECTIONS.keys()
    empty = properties.empty_bins(histogram) if whole else ()
    found = {name: section.to_json() for name, section in sections.items()}
    return {"schema": "fasim.cases/1", **head, "empty": empty, "sections": found}


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        paths = [p for p in canonical(Path(folder)) if options.only in p.stem]
        kernels = {name: [p for p in paths if section_of(p) == name] for name in options.sections}
        kernels = {name: found for name, found in kernels.items() if found}
        if options.runner == "gpu":
            compile_all(path for found in kernels.values() for path in found)
        if not options.compile_only:
            sys.exit(not run(options, kernels))


def run(options: argparse.Namespace, kernels: dict[str, list[Path]]) -> bool:
    """Whether all batches held; ``options.out`` is written after each of them."""
    inputs = {name: options.inputs or SECTIONS[name] for name in kernels}
    sections = {name: Section(inputs[name], found) for name, found in kernels.items()}
    device = bench.device() if options.runner == "gpu" else {"name": "the emulator"}
    head = {"device": device, "sources": bench.sources_sha(), "seed": options.seed}
    try_one = partial(tried, runner=options.runner, deadline=options.deadline)
    with ThreadPoolExecutor(options.processes) as pool:
        made = batches(kernels, inputs, options.seed)
        jobs = {pool.submit(try_one, batch): batch for batch in made}
        for job in as_completed(jobs):
            batch = jobs[job]
            sections[batch.section].add(batch, job.result())
            report = json.dumps(document(sections, head), indent=1) + "\n"
            files.write(options.out / "h200-cases.json", report)
    for name, section in sections.items():
        print(name, f"{section.inputs.total()} inputs, {section.checks} checks,",
              f"empty {section.empty}, not tried {section.late}, failures:", *section.failures,
              sep="\n  ")  # fmt: skip
    return all(s.done for s in sections.values()) and not document(sections, head)["empty"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", default=[*SECTIONS])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=540, help="compiling included")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--runner", choices=["gpu", "emulator"], default="gpu")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--inputs", type=int, default=0, help="of each section, instead of its own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.seconds
    if unknown := set(options.sections) - SECTIONS.keys():
        parser.error(f"no section {', '.join(sorted(unknown))}: they are {', '.join(SECTIONS)}")
    return options


if __name__ == "__main__":
    main()

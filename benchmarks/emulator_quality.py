"""How far the emulator can be trusted: no alarm on right kernels, an alarm on every planted bug.

    python benchmarks/emulator_quality.py [--seeds 200] [--out benchmarks/results]

Every canonical kernel runs under as many schedules as there are seeds, each on a shape, layout and
values of its own; each bug of tests/quality/cuda_bugs.py under 20. All cores work. The result is
emulator-quality.json; exit 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "quality"))

import numpy as np
from cuda_bugs import BUGS, SEEDS

from fasim import catalogue, properties
from fasim.emulator import build
from fasim.errors import CheckFailed
from fasim.plan import Plan, Tile
from fasim.properties import LAYOUTS, VALUES, Case, Trial
from fasim.render import Kernel, render, template_root
from fasim.runners.emulator import EmulatorRunner
from fasim.toolchain import find_cxx

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "fasim.emulator-quality/1"
ONE_LAUNCH = (  # properties that share it
    "outputs_are_fully_written",
    "matches_float64",
    "bytes_moved_are_bytes_predicted",
    "matrix_instructions_do_the_flops_predicted",
    "main_loop_has_no_bank_conflicts",
)
CHECKS = tuple(p for p in properties.PROPERTIES if p.name in ONE_LAUNCH)


def cases(tile: Tile, seeds: Iterable[int]) -> list[Case]:
    """One small input for each seed: lengths around a tile's edges, any values and layout."""
    return [case(tile, np.random.default_rng(seed), seed) for seed in seeds]


def case(tile: Tile, rng: np.random.Generator, seed: int) -> Case:
    kv_heads, group = rng.integers(1, 3, 2)
    q, kv = tile.block_q, tile.keys_per_step
    lengths = [rng.choice([0, 1, n - 1, n, n + 1, rng.integers(1, n + 9)]) for n in (q, kv)]
    return Case(
        heads=int(kv_heads * group),
        kv_heads=int(kv_heads),
        seq=int(lengths[0]),
        seq_kv=int(lengths[1] + rng.integers(0, 2) * kv),
        values=str(rng.choice(sorted(VALUES))),
        layout=str(rng.choice(LAYOUTS)),
        seed=seed,
    )


def alarm(kernel: Kernel, one: Case) -> str:
    """What is wrong with a launch of this case, "" if nothing."""
    trial = Trial(kernel, EmulatorRunner(workers=1), one)
    for check in CHECKS:
        if check.skipped(kernel.plan, trial.runner):
            continue
        try:
            check.check(trial)
        except CheckFailed as error:
            return f"{one} property={check.name}: {error}"
    return ""


def right(plan: Plan, seeds: int) -> dict[str, Any]:
    """A canonical kernel under many schedules."""
    start, kernel = time.perf_counter(), render(plan)
    tried = cases(plan.kernel.tile, range(seeds))
    alarms = [text for one in tried if (text := alarm(kernel, one))]
    return {
        "kernel": kernel.stem,
        "seeds": seeds,
        "shapes": len({(c.heads, c.kv_heads, c.seq, c.seq_kv) for c in tried}),
        "alarms": alarms,
        "seconds": round(time.perf_counter() - start, 1),
    }


def planted(number: int) -> dict[str, Any]:
    """A bug under all its seeds: what found it, how often."""
    start, bug = time.perf_counter(), BUGS[number]
    kernel = bug.planted()
    found = Counter(bug.finder(kernel, seed) for seed in SEEDS)
    return {
        "bug": bug.name,
        "kernel": bug.kernel,
        "seeds": len(SEEDS),
        "caught": sum(n for finder, n in found.items() if finder in bug.finders),
        "found": dict(sorted(found.items())),
        "seconds": round(time.perf_counter() - start, 1),
    }


def sources_sha() -> str:
    """Of the emulator, the templates and the bugs."""
    bugs = ROOT / "tests" / "quality" / "cuda_bugs.py"
    files = [*build.SOURCES.iterdir(), *template_root().rglob("*"), bugs]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--seeds", type=int, default=200)
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given, start = options.parse_args(), time.perf_counter()
    plans = catalogue.plans()
    with ProcessPoolExecutor() as pool:
        kernels = list(pool.map(right, plans, [given.seeds] * len(plans)))
        bugs = list(pool.map(planted, range(len(BUGS))))
    alarms = sum(len(kernel["alarms"]) for kernel in kernels)
    missed = sum(bug["seeds"] - bug["caught"] for bug in bugs)
    document = {
        "schema": SCHEMA,
        "date": date.today().isoformat(),
        "compiler": find_cxx().version,
        "cores": len(os.sched_getaffinity(0)),
        "sources": sources_sha(),
        "alarms": alarms,
        "missed": missed,
        "seconds": round(time.perf_counter() - start, 1),
        "kernels": kernels,
        "planted": bugs,
    }
    (given.out / "emulator-quality.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(kernels)} kernels x {given.seeds} seeds: {alarms} alarms")
    print(f"{len(bugs)} bugs x {len(SEEDS)} seeds: {missed} missed")
    print(f"{document['seconds']} s")
    return int(bool(alarms or missed))


if __name__ == "__main__":
    sys.exit(main())

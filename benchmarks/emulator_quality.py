"""How far the emulator can be trusted: no alarm on right kernels, an alarm on every planted bug.

    python benchmarks/emulator_quality.py [--seeds 200] [--out benchmarks/results]

Every canonical kernel runs under as many schedules as there are seeds, each on a shape, layout and
values of its own, and so does the Hopper kernel of tests/quality; each bug of cuda_bugs.py,
hopper_bugs.py and v3_bugs.py there under 20. All cores work. The result is emulator-quality.json;
exit 1 if anything was not as it should be. With --hopper only Hopper's part is done again.
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
from hopper import NOTHING, Shape, finder, source
from hopper_bugs import BUGS as HOPPER_BUGS
from v3_bugs import BUGS as V3_BUGS

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


def hopper_alarm(seed: int) -> str:
    """What is wrong with the Hopper kernel on a shape of its own, "" if nothing."""
    rng, edges = np.random.default_rng(seed), (1, 63, 64, 65, 127, 128, 129, 200, 256)
    rows, keys = int(rng.choice(edges)), int(rng.choice([*edges, 300, 513]))
    shape = Shape(int(rng.integers(1, 3)), rows, keys, grid=int(rng.integers(1, 4)))
    found = finder(source(), shape, seed)
    return "" if found == NOTHING else f"{shape} seed {seed}: {found}"


def planted(number: int) -> dict[str, Any]:
    """A bug under all its seeds: what found it, how often."""
    start, bug = time.perf_counter(), BUGS[number]
    kernel = bug.planted()
    return _planted(start, bug, Counter(bug.finder(kernel, seed) for seed in SEEDS))


def planted_in_hopper(number: int) -> dict[str, Any]:
    start, bug = time.perf_counter(), HOPPER_BUGS[number]
    return _planted(start, bug, Counter(bug.finder(seed) for seed in SEEDS))


def planted_in_v3(number: int) -> dict[str, Any]:
    start, bug = time.perf_counter(), V3_BUGS[number]
    kernel = bug.planted()
    found = _planted(start, bug, Counter(bug.finder(kernel, seed) for seed in SEEDS))
    return found | {"kernel": f"v3 {bug.kernel}"}


def _planted(start: float, bug: Any, found: Counter[str]) -> dict[str, Any]:
    return {
        "bug": bug.name,
        "kernel": bug.kernel or "hopper attention",
        "seeds": len(SEEDS),
        "caught": sum(n for finder, n in found.items() if finder in bug.finders),
        "found": dict(sorted(found.items())),
        "seconds": round(time.perf_counter() - start, 1),
    }


def sources_sha() -> str:
    """Of the emulator, the templates and the bugs."""
    quality = ROOT / "tests" / "quality"
    names = ("cuda_bugs.py", "hopper.py", "hopper_bugs.py", "v3_bugs.py")
    bugs = [quality / name for name in names]
    files = [*build.SOURCES.iterdir(), *template_root().rglob("*"), *bugs, *quality.rglob("*.cu")]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def hopper_part(pool: ProcessPoolExecutor, seeds: int) -> dict[str, Any]:
    start = time.perf_counter()
    alarms = [text for text in pool.map(hopper_alarm, range(seeds)) if text]
    bugs = list(pool.map(planted_in_hopper, range(len(HOPPER_BUGS))))
    bugs += pool.map(planted_in_v3, range(len(V3_BUGS)))
    return {
        **{"seeds": seeds, "alarms": alarms, "sources": sources_sha()},
        **{"seconds": round(time.perf_counter() - start, 1), "planted": bugs},
    }


def other_parts(pool: ProcessPoolExecutor, seeds: int) -> dict[str, Any]:
    plans, start = catalogue.plans(), time.perf_counter()
    kernels = list(pool.map(right, plans, [seeds] * len(plans)))
    bugs = list(pool.map(planted, range(len(BUGS))))
    return {
        "schema": SCHEMA,
        "date": date.today().isoformat(),
        "compiler": find_cxx().version,
        "cores": len(os.sched_getaffinity(0)),
        "sources": sources_sha(),
        "alarms": sum(len(kernel["alarms"]) for kernel in kernels),
        "missed": _missed(bugs),
        "seconds": round(time.perf_counter() - start, 1),
        "kernels": kernels,
        "planted": bugs,
    }


def _missed(bugs: list[dict[str, Any]]) -> int:
    return sum(bug["seeds"] - bug["caught"] for bug in bugs)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--seeds", type=int, default=200)
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options.add_argument("--hopper", action="store_true")
    given = options.parse_args()
    file = given.out / "emulator-quality.json"
    with ProcessPoolExecutor() as pool:
        rest = json.loads(file.read_text()) if given.hopper else other_parts(pool, given.seeds)
        document = {**rest, "hopper": hopper_part(pool, given.seeds)}
    file.write_text(json.dumps(document, indent=1) + "\n")
    part, seeds = document["hopper"], len(SEEDS)
    alarms, missed = len(part["alarms"]), _missed(part["planted"])
    print(f"{len(document['kernels'])} kernels x {given.seeds} seeds: {document['alarms']} alarms")
    print(f"{len(document['planted'])} bugs x {seeds} seeds: {document['missed']} missed")
    print(f"Hopper's kernel x {given.seeds} seeds: {alarms} alarms")
    print(f"Hopper's {len(part['planted'])} bugs x {seeds} seeds: {missed} missed")
    return int(bool(document["alarms"] or document["missed"] or alarms or missed))


if __name__ == "__main__":
    sys.exit(main())

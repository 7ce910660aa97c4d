"""Prove the canonical kernels on the GPU of this machine with inputs drawn by Hypothesis.

    python3 benchmarks/device_cases.py --out results/ [--forward 2000] [--backward 1000]

Each kernel that runs here gets its share of the inputs, and tries every property on each of them;
several processes share the device. The document counts the inputs' options and edges: lengths 0 and
1, around tiles, more queries than keys, rows that see nothing, strided layouts, shared heads.
Exit 1 if a property failed or a bin stayed empty.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fasim import bench
from fasim.errors import FasimError
from fasim.files import read_kernel
from fasim.gpu import load
from fasim.runners import gpu

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 14
EDGES = (  # what the inputs of a section must have met
    *("keys 0", "keys 1", "keys tile-1", "keys tile", "keys tile+1"),
    *("queries 1", "queries tile-1", "queries tile+1", "queries > keys", "empty rows"),
    *("layout contiguous", "layout padded", "layout tokens"),
    *("group 1", "group 2", "group 3", "group 4", "group 8"),
)


def runnable(path: Path) -> bool:
    try:
        gpu.target_arch(read_kernel(str(path)).plan.kernel.arch, load("h200").compute_capability)
    except FasimError:
        return False
    return True


def verified(path: Path, examples: int, seed: int) -> dict[str, Any]:
    asked = ["--runner", "gpu", "--examples", str(examples), "--seed", str(seed), "--json"]
    command = [sys.executable, "-m", "fasim", "verify", str(path), *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        report = {"kernel": path.stem, "ok": False, "failure": done.stderr[-2000:]}
    print(path.stem, "ok" if report["ok"] else report["failure"], flush=True)
    return report


def section(paths: list[Path], wanted: int, seed: int) -> dict[str, Any]:
    examples = math.ceil(wanted / max(1, len(paths)))
    with ThreadPoolExecutor(PROCESSES) as pool:
        jobs = [pool.submit(verified, path, examples, seed + i) for i, path in enumerate(paths)]
        reports = [job.result() for job in jobs]
    histogram: Counter[str] = Counter()
    for report in reports:
        histogram.update(report.get("histogram", {}))
    return {
        "inputs": examples * len(paths),
        "kernels": [report["kernel"] for report in reports],
        "failures": [r for r in reports if not r["ok"]],
        "histogram": dict(sorted(histogram.items())),
        "empty": [name for name in EDGES if not histogram[name]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--forward", type=int, default=2000)
    parser.add_argument("--backward", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    options = parser.parse_args()
    paths = [p for p in sorted((ROOT / "generated").glob("*.cu")) if options.only in p.stem]
    paths = [path for path in paths if runnable(path)]
    parts = {
        "forward": ([p for p in paths if "_fwd_" in p.stem], options.forward),
        "backward": ([p for p in paths if "_bwd_" in p.stem], options.backward),
    }
    result: dict[str, Any] = {"device": bench.device(), "sources": bench.sources_sha()}
    result |= {name: section(found, n, options.seed) for name, (found, n) in parts.items() if found}
    text = json.dumps(result, indent=1) + "\n"
    (options.out / f"h200-cases{'-' + options.only if options.only else ''}.json").write_text(text)
    sections = [part for part in result.values() if isinstance(part, dict) and "inputs" in part]
    empty = [name for part in sections for name in part["empty"]]
    failed = sum(len(part["failures"]) for part in sections)
    print(f"{sum(part['inputs'] for part in sections)} inputs, {failed} failures, empty: {empty}")
    sys.exit(bool(failed or empty))


if __name__ == "__main__":
    main()

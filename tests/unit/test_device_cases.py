"""The script that proves kernels on a device: how inputs are shared out, what is kept of them."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_cases.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("device_cases", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["device_cases"] = module
    spec.loader.exec_module(module)
    return module


def test_every_kernel_gets_its_share_and_all_advance_together(script: Any) -> None:
    kernels = {"forward": [Path("a.cu"), Path("b.cu")], "v3": [Path("c.cu")]}
    made = script.batches(kernels, {"forward": 201, "v3": 90}, seed=5)
    totals = {name: sum(b.inputs for b in made if b.path.stem == name) for name in "abc"}
    assert totals == {"a": 101, "b": 101, "c": 90}
    assert max(b.inputs for b in made) <= script.BATCH
    assert {b.path.stem for b in made[:3]} == {"a", "b", "c"}
    assert len({(b.path, b.seed) for b in made}) == len(made)


def test_what_batches_found_is_summed_and_a_failure_kept(script: Any) -> None:
    batch = script.Batch("forward", Path("a.cu"), 4, 7, 0.5)
    failure = {"property": "nan_stays_in_its_row", "what": "o is off"}
    properties = [
        {"property": "matches_float64", "cases": 5, "worst": 0.4, "errors": {"0.4": 5}},
        {"property": "nan_stays_in_its_row", "cases": 1, "worst": 0.0, "errors": {}},
    ]
    report = {
        "histogram": {"keys 1": 2},
        "properties": [{**p, "failure": None} for p in properties],
    }
    section = script.Section(8, [Path("a.cu")])
    section.add(batch, report)
    assert (section.inputs["a"], section.checks, section.errors["0.4"]) == (4, 6, 5)
    assert not section.failures
    report["properties"][1]["failure"] = failure
    section.add(batch, report)
    section.add(batch, {"failure": "no end in 150 s"})
    section.add(batch, {"late": True})
    found = section.to_json()
    assert found["failures"][0] == {"kernel": "a", "seed": 7, "examples": 5, **failure}
    assert (found["failures"][1]["what"], found["batches_not_tried"]) == ("no end in 150 s", 1)
    assert found["inputs"] == 8
    assert not section.done


def test_a_batch_that_says_nothing_is_a_failure_and_one_too_late_is_none(
    script: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("no kernel")
    batch = script.Batch("forward", broken, 1, 1, 0.5)
    found = script.tried(batch, "emulator", time.monotonic() + 60)
    assert "broken.cu" in found["failure"]
    assert script.tried(batch, "emulator", time.monotonic() - 1) == {"late": True}

"""Measuring works end to end; no time is asserted."""

from __future__ import annotations

import json

import pytest

from fasim import bench, planner, timeline
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import render
from fasim.runners.gpu import GpuRunner

pytestmark = pytest.mark.gpu


def test_a_measurement_is_complete() -> None:
    problem = Problem(heads=4, seq=512, head_dim=64, causal=True)
    plan = planner.plan(problem, load("auto"), "v2").plan
    assert plan
    measured = bench.measure(render(plan), problem)
    document = json.loads(json.dumps(measured.to_json()))
    assert document["schema"] == "fasim.bench/1"
    assert document["device"]["name"]
    assert document["device"]["driver"]
    assert document["seconds"] > 0
    assert document["predicted_s"] > 0
    assert len(document["rounds"]) == bench.ROUNDS
    assert document["clocks"]["sm_mhz"] > 0


def test_a_timeline_is_complete() -> None:
    here = load("auto")
    if here.arch != "sm_90a":
        pytest.skip("V3 runs on sm_90a only")
    problem = Problem(heads=4, seq=1024, head_dim=128, causal=True)
    plan = planner.plan(problem, here, "v3").plan
    assert plan
    found = timeline.take(render(plan), problem, GpuRunner(), here, bench.device())
    document = json.loads(json.dumps(found.to_json()))
    assert document["unit"] == "clocks"
    assert document["cost"] > 0
    for role in ("producer", "consumer 0", "consumer 1"):
        mine = [span for span in found.spans if span.role == role]
        assert mine
        assert all(span.start <= span.end for span in mine)
    weighed = [s.step for s in found.spans if (s.role, s.what) == ("consumer 0", "softmax")]
    assert weighed == list(range(len(weighed)))
    assert timeline.a_step(found.spans) > 0

"""Measuring works end to end; no time is asserted."""

from __future__ import annotations

import json

import pytest

from fasim import bench, planner
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import render

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

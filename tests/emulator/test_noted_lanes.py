"""What V3's warpgroups note of themselves, in the emulator: there a note is a count."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from fasim import gpu, planner, timeline
from fasim.cli import run
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.render import render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

TILE = Tile(block_q=128, block_kv=64, stages=2, warps=8, registers=240)
THREE = Tile(block_q=192, block_kv=64, stages=2, warps=12, registers=160)
BENCH = ("bench", "--gpu=h200", "--algo=v3")
CASES: dict[str, tuple[Tile, dict[str, Any]]] = {
    "two": (TILE, {"seq": 200, "seq_kv": 300}),
    "three": (THREE, {"seq": 380, "seq_kv": 250, "causal": True, "dtype": "bf16"}),
}


def taken(name: str) -> timeline.Timeline:
    tile, options = CASES[name]
    problem = Problem(heads=1, head_dim=64, **options)
    plan = planner.plan(problem, gpu.load("h200"), "v3", tile=tile).plan
    assert plan
    runner = EmulatorRunner(workers=1)
    return timeline.take(render(plan), problem, runner, gpu.load("h200"), {})


@pytest.mark.parametrize("name", CASES)
def test_notes_follow_the_kernel(name: str) -> None:
    found = taken(name)
    assert found.unit == "notes"
    by_role: dict[str, list[Any]] = {}
    for span in found.spans:
        by_role.setdefault(span.role, []).append(span)
    consumers = sorted(role for role in by_role if role != "producer")
    assert consumers == [f"consumer {i}" for i in range(CASES[name][0].warps // 4)]
    loads = {(span.what, span.step): span.end for span in by_role["producer"]}
    for role in consumers:
        ends = {(span.what, span.step): span.end for span in by_role[role]}
        steps = [span.step for span in by_role[role] if span.what == "softmax"]
        assert steps == list(range(len(steps)))
        assert steps, "it has weighed something"
        for n in steps:
            assert loads["load k", n] < ends["wait", n] < ends["scores", n] < ends["softmax", n]
            assert loads["load v", n] < ends["values", n]
        assert ends["output", steps[-1]] > ends["values", steps[-1]]


@pytest.mark.parametrize("name", CASES)
def test_consumers_take_turns(name: str) -> None:
    spans = taken(name).spans
    began = sorted((s.end, s.role) for s in spans if s.what == "wait")
    consumers = CASES[name][0].warps // 4
    places = [int(role[-1]) for _, role in began]
    assert len(places) > 2 * consumers
    assert all((a + 1) % consumers == b for a, b in pairwise(places))


def test_the_command_shows_lanes_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--heads=1", "--seq=128", "--seq-kv=300", "--head-dim=64")
    command = [*BENCH, *sizes, "--timeline", "--runner=emulator"]
    assert run(command) == 0
    lines = [line.split(maxsplit=1)[0] for line in capsys.readouterr().out.splitlines() if line]
    assert lines.count("producer") == lines.count("noted,") + lines.count("model:") == 2
    assert run([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == timeline.SCHEMA
    assert document["unit"] == "notes"
    assert set(document["spans"][0]) == {"role", "what", "step", "start", "end"}
    assert document["model"]["spans"]


def test_the_emulator_times_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BENCH, "--seq=128", "--runner=emulator"]) == 2
    assert "only a GPU times a kernel" in capsys.readouterr().err

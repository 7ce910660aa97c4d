"""The model's lanes keep to the pipes' rates, and notes of a block become spans and lines."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fasim import gpu, planner, timeline
from fasim.entry import Entry
from fasim.errors import UsageError
from fasim.model.lanes import Span, lanes
from fasim.model.silicon import rates
from fasim.model.steps import step
from fasim.model.tiles import Tiles
from fasim.plan import WARPGROUP
from fasim.problem import Problem
from fasim.render import render, template_root

CASES: tuple[dict[str, Any], ...] = (
    {"seq": 4096, "head_dim": 128},
    {"seq": 4096, "head_dim": 64, "causal": True},
    {"seq": 1024, "head_dim": 256, "dtype": "bf16"},
    {"seq": 300, "seq_kv": 500, "head_dim": 96, "head_dim_v": 32, "window": (90, 20)},
)


def planned(options: dict[str, Any], algo: str = "v3") -> Entry:
    entry = planner.plan(Problem(**options), gpu.load("h200"), algo)
    assert entry.tile
    return entry


def played(options: dict[str, Any], steps: int = 12) -> tuple[Entry, list[Span]]:
    entry = planned(options)
    assert entry.tile
    return entry, lanes(entry.problem, gpu.load("h200"), entry.tile, steps)


@pytest.mark.parametrize("options", CASES)
def test_a_role_does_one_thing_at_a_time(options: dict[str, Any]) -> None:
    by_role: dict[str, list[Span]] = defaultdict(list)
    for span in played(options)[1]:
        by_role[span.role].append(span)
    for spans in by_role.values():
        assert all(span.start <= span.end for span in spans)
        assert all(a.end <= b.start for a, b in pairwise(spans))


@pytest.mark.parametrize("options", CASES)
def test_the_longest_pipe_sets_the_pace(options: dict[str, Any]) -> None:
    """In a long row of steps one takes what its longest pipe does, never less; one consumer alone,
    which other blocks would fill in for, takes what both do."""
    entry, spans = played({**options, "seq_kv": 8192, "window": (-1, -1), "causal": False}, 24)
    assert entry.tile
    speed = rates(gpu.load("h200"), "v3", entry.problem)
    pipes = step(entry.problem, speed, "v3", "fwd", Tiles.of([entry.tile]))
    ends = [s.end for s in spans if (s.role, s.what) == ("consumer 0", "softmax")]
    pace = (ends[20] - ends[4]) / 16
    tensor, softmax = float(pipes.tensor[0]), float(pipes.softmax[0])
    alone = entry.tile.warps == WARPGROUP
    longest, most = max(tensor, softmax), tensor + softmax if alone else max(tensor, softmax)
    assert longest * 0.999 <= pace <= most * 1.3


@pytest.mark.parametrize("options", CASES)
def test_every_step_is_scored_weighed_and_loaded_before(options: dict[str, Any]) -> None:
    entry, spans = played(options, 6)
    assert entry.tile
    loaded = {s.step: s.start for s in spans if s.what == "load k"}
    for i in range(entry.tile.warps // WARPGROUP):
        mine = [s for s in spans if s.role == f"consumer {i}"]
        weighed = {s.step: s for s in mine if s.what == "softmax"}
        assert sorted(weighed) == list(range(len(weighed)))
        for n, span in weighed.items():
            scored = next(s for s in mine if (s.what, s.step) == ("scores", n))
            assert loaded[n] < scored.start < scored.end <= span.start


def test_consumers_begin_in_turns() -> None:
    _, spans = played({"seq": 4096, "head_dim": 64})
    began = sorted((s.start, s.role) for s in spans if s.what == "scores")
    steps = [roles for _, roles in began]
    assert steps[:6] == ["consumer 0", "consumer 1", "consumer 2"] * 2


def test_acts_are_those_of_the_kernel() -> None:
    text = (template_root() / "device/timeline.cuh").read_text()
    names = re.search(r"enum Act \{ (.*), kActs \};", text)
    assert names
    words = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name[1:]).lower() for name in names[1].split(", ")]
    assert words == list(timeline.ACTS)
    assert f"kNotedSteps = {timeline.STEPS};" in text
    assert f"{timeline.SYMBOL}[kConsumers + 1][kNotedSteps][kActs];" in text


def noted(*notes: tuple[int, int, str, int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """From (role, step, act, clock)."""
    array = np.zeros((3, timeline.STEPS, len(timeline.ACTS)), np.uint64)
    for role, n, act, clock in notes:
        array[role, n, list(timeline.ACTS).index(act)] = clock
    return array


def test_notes_become_spans() -> None:
    notes = noted(
        (2, 0, "load k", 100), (0, 0, "asked", 110), (0, 0, "began", 130), (0, 0, "scored", 150)
    )  # fmt: skip
    assert list(timeline.spans_of(notes)) == [
        Span("consumer 0", "other", 0, 10, 10),
        Span("consumer 0", "wait", 0, 10, 30),
        Span("consumer 0", "scores", 0, 30, 50),
        Span("producer", "load k", 0, 0, 0),
    ]
    assert list(timeline.spans_of(noted())) == []


def test_spans_become_lines() -> None:
    spans = [
        Span("producer", "load k", 0, 0, 0),
        Span("producer", "load v", 0, 0, 0),
        Span("consumer 0", "wait", 0, 0, 4),
        Span("consumer 0", "scores", 0, 4, 7),
        Span("consumer 0", "softmax", 0, 7, 9),
        Span("consumer 0", "softmax", 99, 90, 99),
    ]
    lines = timeline.drawn(spans, 10)
    assert list(lines.items()) == [("producer", "KV"), ("consumer 0", "....sss==")]


def test_the_share_of_each_thing() -> None:
    spans = [
        Span("producer", "load k", 0, 0, 0),
        Span("consumer 0", "wait", 0, 0, 30),
        Span("consumer 1", "softmax", 0, 0, 10),
    ]
    assert timeline.shares(spans) == {"wait": 0.75, "softmax": 0.25}
    assert timeline.a_step(spans) == 0.0


class Unasked:
    name = "gpu"

    def read_after(self, *_: object) -> Any:
        raise AssertionError("it is refused before")


@pytest.mark.parametrize(("algo", "change"), [("v2", None), ("v3", "FASIM_TIMELINE")])
def test_a_file_without_notes_is_refused(algo: str, change: str | None) -> None:
    plan = planned({"seq": 256}, algo).plan
    assert plan
    kernel = render(plan)
    if change:
        kernel = replace(kernel, source=kernel.source.replace(change, "OTHER"))
    with pytest.raises(UsageError, match="V2" if algo == "v2" else "notes nothing"):
        timeline.take(kernel, plan.problem, Unasked(), gpu.load("h200"), {})

"""How candidates are timed, with a clock that the tests turn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from fasim import bench, show
from fasim.bench import Candidate, Timing, _turns, interleave, ratio
from fasim.problem import Problem


@dataclass
class Clock:
    """Every launch takes the time its candidate says."""

    now: float = 0.0
    order: list[str] = field(default_factory=list)

    def candidate(self, name: str, seconds: float) -> Candidate:
        def launch() -> None:
            self.now += seconds
            self.order.append(name)

        return Candidate(name, launch, 2 * seconds)

    def time(
        self, launch: Callable[[], object], count: int, meanwhile: Callable[[], object]
    ) -> float:
        start = self.now
        for _ in range(count):
            launch()
        meanwhile()
        return (self.now - start) / count


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "clock_reader", lambda: lambda: {"sm_mhz": 1700.0})


def test_candidates_take_turns_and_another_begins_every_round() -> None:
    clock = Clock()
    fast, slow = interleave(
        [clock.candidate("fast", 0.001), clock.candidate("slow", 0.002)],
        rounds=3,
        launches=2,
        timer=clock.time,
    )
    warm, one, other = ["fast"] * 3 + ["slow"] * 3, ["fast"] * 2, ["slow"] * 2
    assert clock.order == warm + one + other + other + one + one + other
    assert fast.rounds == pytest.approx([0.001] * 3)
    assert slow.seconds == pytest.approx(0.002)
    assert slow.predicted_s == 0.004
    assert slow.spread == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("count", range(1, 8))
def test_each_comes_behind_each_other_one_equally_often(count: int) -> None:
    rounds = [_turns(count, round_) for round_ in range(2 * count)]
    assert all(sorted(turns) == list(range(count)) for turns in rounds)
    pairs = Counter(pair for turns in rounds for pair in pairwise(turns))
    assert pairs == {(a, b): 2 for a in range(count) for b in range(count) if a != b}
    assert Counter(turns[0] for turns in rounds) == dict.fromkeys(range(count), 2)


def test_a_slow_candidate_launches_fewer_times() -> None:
    clock = Clock()
    timings = interleave(
        [clock.candidate("slow", 0.09), clock.candidate("very slow", 3.0)], timer=clock.time
    )
    assert [timing.launches for timing in timings] == [4, 3]


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    fast, slow = Timing("fast", (1.0, 1.0, 2.0), 20), Timing("slow", (2.0, 3.0, 8.0), 20)
    assert vars(ratio(fast, slow)) == {"median": 3.0, "low": 2.0, "high": 4.0}


def test_a_timing_is_json_with_its_clocks() -> None:
    clock = Clock()
    (timing,) = interleave([clock.candidate("one", 0.001)], timer=clock.time)
    document = json.loads(json.dumps(timing.to_json()))
    assert document["clocks"] == {"sm_mhz": 1700.0}
    assert len(document["rounds"]) == 7


def test_without_any_reader_no_clock_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(bench, "_nvml_reader", _absent)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert bench.clock_reader()() == {}


def _absent() -> None:
    raise ImportError("no pynvml")


@pytest.mark.parametrize(
    ("printed", "read"),
    [
        ("1710, 512.25, 44", {"sm_mhz": 1710.0, "power_w": 512.25, "temperature_c": 44.0}),
        ("1710, [N/A], 44", {}),
        ("", {}),
    ],
)
def test_nvidia_smi_is_read_or_left_alone(
    monkeypatch: pytest.MonkeyPatch, printed: str, read: dict[str, float]
) -> None:
    monkeypatch.setattr(bench, "_smi", lambda query: printed)
    assert bench._smi_clocks() == read


@dataclass(frozen=True)
class Rival:
    name: str
    launch: Callable[[], object] | None
    reason: str = ""


def test_peers_that_run_are_timed_and_the_others_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from fasim import peers

    def found(problem: Problem, **tensors: object) -> list[Rival]:
        return [Rival("fa2", lambda: None), Rival("fa3", None, "no such wheel")]

    monkeypatch.setattr(peers, "tensors", lambda problem: {"q": torch.zeros(1)})
    monkeypatch.setattr(peers, "peers", found)
    rivals, missing = bench.rivals_of(Problem())
    assert [rival.name for rival in rivals] == ["fa2"]
    assert missing == {"fa3": "no such wheel"}


def test_peers_of_a_kernel_that_quantises_take_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = pytest.importorskip("fasim.peers")
    asked: list[Problem] = []

    def found(problem: Problem, **tensors: Any) -> list[Any]:
        asked.append(problem)
        return []

    monkeypatch.setattr(peers, "tensors", lambda problem: {})
    monkeypatch.setattr(peers, "peers", found)
    problem = Problem(dtype="e4m3", in_dtype="fp16", scales="block", incoherent=True, scale=0.5)
    bench.rivals_of(problem)
    assert asked == [Problem(dtype="fp16", scale=0.5)]
    assert bench.rivals_of(Problem(dtype="e4m3"))[0] == []


@pytest.mark.parametrize("changes", [{"pass_": "bwd"}, {"softcap": 9.0}, {"bias": "alibi"}])
def test_peers_have_no_options_and_no_backward_pass(changes: dict[str, Any]) -> None:
    rivals, missing = bench.rivals_of(Problem(**changes))
    assert (rivals, list(missing)) == ([], ["torch"])


def test_a_measurement_tells_of_its_peers() -> None:
    ours, other = Timing("k", (1.0, 1.0), 20), Timing("fa2", (2.0, 3.0), 20)
    device = {"name": "a GPU"}
    measured = bench.Measurement("k", Problem(), device, ours, "", (other,), {"fa3": "no wheel"})
    document = json.loads(json.dumps(measured.to_json()))
    assert document["peers"][0]["ratio"] == {"median": 2.5, "low": 2.0, "high": 3.0}
    facts = dict(show._measured_facts(measured))
    assert facts["beside fa2"].endswith("2.50x the kernel's")
    assert facts["no fa3"] == "no wheel"

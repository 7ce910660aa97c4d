"""Standard attention, V1, V2 and V3 side by side, on one problem or along a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fasim import planner
from fasim.entry import Entry
from fasim.gpu import Gpu
from fasim.model import flops
from fasim.model.visits import visible_pairs
from fasim.problem import Problem

SCHEMA = "fasim.compare/1"


@dataclass(frozen=True)
class Comparison:
    """One entry per algorithm, unavailable ones included with their reason."""

    problem: Problem
    gpu: Gpu
    entries: tuple[Entry, ...]

    def speedup(self, place: int) -> dict[str, float | None]:
        """How many times as fast an entry is as the one before it and as standard attention.
        None where either cannot run or does not fit."""
        earlier = [entry for entry in self.entries[:place] if _runs(entry)]
        entry = self.entries[place]
        return {
            "over_previous": _ratio(earlier[-1], entry) if earlier else None,
            "over_standard": _ratio(self.entries[0], entry) if place else None,
        }

    @property
    def fastest(self) -> Entry | None:
        """The fastest that runs and fits."""
        running = filter(_runs, self.entries)
        return min(running, key=lambda entry: entry.time.seconds, default=None)

    def to_json(self) -> dict[str, Any]:
        entries = [
            {**entry.to_json(), "speedup": self.speedup(place)}
            for place, entry in enumerate(self.entries)
        ]
        return {"problem": self.problem.to_json(), "entries": entries}


@dataclass(frozen=True)
class Report:
    """Comparisons along the values of an option, or a single one (``option`` is None).

    ``crossover`` is the sequence length below which flash attention brings nothing, None if there
    is none; ``recomputed_flops`` is what the backward pass of flash attention adds by building the
    scores again, ``backward_flops`` what the backward pass needs, both at the problem asked for.
    """

    gpu: Gpu
    option: str | None
    values: tuple[int, ...]
    points: tuple[Comparison, ...]
    crossover: int | None
    recomputed_flops: int
    backward_flops: int

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "gpu": {"name": self.gpu.name, "arch": self.gpu.arch},
            "crossover": self.crossover,
            "recomputed_flops": self.recomputed_flops,
            "backward_flops": self.backward_flops,
        }
        if self.option is None:
            return document | self.points[0].to_json()
        points = zip(self.values, self.points, strict=True)
        return document | {
            "sweep": self.option,
            "points": [{self.option: value, **point.to_json()} for value, point in points],
        }


def compare(
    problem: Problem, gpu: Gpu, sweep: tuple[str, Sequence[int]] | None = None, reserve: int = 0
) -> Report:
    """All four algorithms on one problem, or along one of its options (``seq``, ``heads``, ...).

    ``reserve`` is device memory in bytes that something else needs.
    """
    option, values = sweep or (None, ())
    changes = [{option.replace("-", "_"): value} for value in values] if option else [{}]
    points = tuple(_point(problem.with_(**change), gpu, reserve) for change in changes)
    crossover = planner.crossover(problem, gpu)
    needed = flops.useful(problem, "bwd")
    return Report(gpu, option, tuple(values), points, crossover, recomputed_flops(problem), needed)


def _point(problem: Problem, gpu: Gpu, reserve: int) -> Comparison:
    return Comparison(problem, gpu, tuple(planner.compare(problem, gpu, reserve=reserve)))


def _runs(entry: Entry) -> bool:
    return entry.available and entry.fits


def _ratio(slow: Entry, fast: Entry) -> float | None:
    if not (_runs(slow) and _runs(fast)):
        return None
    return float(slow.time.seconds / fast.time.seconds)


def recomputed_flops(problem: Problem) -> int:
    """Q K^T once more: what the backward pass of flash attention pays for not storing P."""
    pairs = problem.batch * problem.heads * visible_pairs(problem)
    return 2 * pairs * problem.head_dim

"""When the warpgroups of a V3 block did what, as a build with FASIM_TIMELINE notes it.

Each first thread of a warpgroup of block 0 notes the clock at the end of every act
(templates/device/timeline.cuh); what lies between two notes is a span. The model's lanes of the
same steps stand beside them. In the emulator a note is a count: it orders, and is no time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fasim.bench import Candidate, interleave, random_inputs
from fasim.errors import UsageError
from fasim.gpu import Gpu
from fasim.model.lanes import Span, lanes
from fasim.plan import WARPGROUP, Launch, padded_tensors, transposes
from fasim.problem import Problem
from fasim.render import PLAN_END, Kernel
from fasim.runners import gpu as device_runner

SCHEMA = "fasim.timeline/1"
SYMBOL, STEPS = "fasim_timeline", 1024  # as the kernel has them
# What a role has just done, in the order of the kernel's enum, and what it did until then.
ACTS = {
    "load q": "load q",
    "load k": "load k",
    "load v": "load v",
    "asked": "other",
    "began": "wait",
    "scored": "scores",
    "weighed": "softmax",
    "summed": "values",
    "stored": "output",
}
SHOWN = 8  # steps, of the model's lanes and in a terminal


class Noting(Protocol):
    """A runner that reads a variable of the file after a launch that found it zeroed."""

    @property
    def name(self) -> str: ...

    def read_after(
        self, kernel: Kernel, arrays: Mapping[str, Any], launch: Launch, symbol: str, size: int
    ) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class Timeline:
    """The spans of block 0, by role, and the model's; ``unit`` is clocks or, in the emulator,
    notes. ``model`` is empty where the model has no events of the kernel. ``cost`` is the time of
    the build that notes over that of the kernel; None where there is no time."""

    kernel: str
    problem: Problem
    runner: str
    device: Mapping[str, Any]
    unit: str
    spans: tuple[Span, ...]
    model: tuple[Span, ...]
    cost: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kernel": self.kernel,
            "problem": self.problem.to_json(),
            "runner": self.runner,
            "device": dict(self.device),
            "unit": self.unit,
            "cost": self.cost,
            "spans": [span._asdict() for span in self.spans],
            "model": {"unit": "clocks", "spans": [span._asdict() for span in self.model]},
        }


def take(
    kernel: Kernel, problem: Problem, runner: Noting, gpu: Gpu, device: Mapping[str, Any]
) -> Timeline:
    """One launch on random inputs, noted. Raises UsageError for a kernel whose warpgroups have no
    roles, or a file that notes nothing."""
    _check(kernel)
    launch, tile = kernel.plan.launch_for(problem), kernel.plan.kernel.tile
    shape = (tile.warps // WARPGROUP + 1, STEPS, len(ACTS))
    size, arrays = 8 * math.prod(shape), random_inputs(launch)
    raw = runner.read_after(instrumented(kernel), arrays, launch, SYMBOL, size)
    notes = raw.view(np.uint64).reshape(shape)
    unit = "notes" if runner.name == "emulator" else "clocks"
    known = not transposes("v3", problem.dtype) and not padded_tensors(problem)
    model = tuple(lanes(problem, gpu, tile, SHOWN, kernel.plan.kernel.variant)) if known else ()
    cost = cost_of_notes(kernel, launch, arrays) if unit == "clocks" else None
    spans = tuple(spans_of(notes))
    return Timeline(kernel.stem, problem, runner.name, device, unit, spans, model, cost)


def cost_of_notes(kernel: Kernel, launch: Launch, arrays: Mapping[str, Any]) -> float:
    """Time of the build that notes over that of the kernel, in turns on the GPU here."""
    builds = {"plain": kernel, "noting": instrumented(kernel)}
    calls = {
        name: device_runner.launch_on_device(build, arrays, launch)
        for name, build in builds.items()
    }
    plain, noting = interleave([Candidate(name, call) for name, call in calls.items()], rounds=3)
    return noting.seconds / plain.seconds


def _check(kernel: Kernel) -> None:
    spec = kernel.plan.kernel
    if spec.algo != "v3":
        raise UsageError(
            f"--timeline shows V3, not {spec.algo.upper()}",
            why="only in V3 do the warpgroups of a block have roles of their own",
            hint="add --algo v3",
        )
    if "FASIM_TIMELINE" not in kernel.source:
        raise UsageError(
            f"{kernel.stem} notes nothing",
            why="it was generated before kernels could, or that part was removed",
            hint="generate it again with `fasim gen`",
        )


def instrumented(kernel: Kernel) -> Kernel:
    """The kernel as a build that notes what it does."""
    head, mark, rest = kernel.source.partition(PLAN_END)
    line, _, body = rest.partition("\n")
    source = f"{head}{mark}{line}\n#define FASIM_TIMELINE\n{body}"
    return replace(kernel, source=source, origins=())  # its lines have moved


def spans_of(notes: NDArray[np.uint64]) -> Iterator[Span]:
    """From notes (roles, steps, acts), 0 where there is none; the first is at 0."""
    if not notes.any():
        return
    start = int(notes[notes > 0].min())
    for i, of_role in enumerate(notes):
        role = "producer" if i == len(notes) - 1 else f"consumer {i}"
        before = None
        for at, n, act in _in_order(of_role, start):
            what = ACTS[act]
            yield Span(role, what, n, at if before is None else before, at)
            before = None if role == "producer" else at  # a load takes no time of its own


def _in_order(notes: NDArray[np.uint64], start: int) -> list[tuple[int, int, str]]:
    """(clock, step, act) of one role."""
    names = list(ACTS)
    found = zip(*np.nonzero(notes), strict=True)
    return sorted((int(notes[n, act]) - start, int(n), names[act]) for n, act in found)


# ---- in a terminal ------------------------------------------------------------------------------

LETTERS = {
    "wait": ".",
    "scores": "s",
    "softmax": "=",
    "values": "v",
    "output": "o",
    "other": "-",
    "load q": "Q",
    "load k": "K",
    "load v": "V",
}
LEGEND = (
    "K, V, Q: a load starts; . waits for keys and its turn; s waits for Q K'; = softmax;"
    " v waits for P V; o O leaves; - other"
)


def drawn(spans: Iterable[Span], width: int, steps: int = SHOWN) -> dict[str, str]:
    """A line for each role, the producer's first, up to the end of so many steps."""
    kept = [span for span in spans if span.step < steps]
    first = min((span.start for span in kept), default=0.0)
    last = max((span.end for span in kept if span.what == "softmax"), default=first + 1)
    scale = (width - 1) / max(last - first, 1)
    roles = sorted({span.role for span in kept}, key=lambda role: (role != "producer", role))
    lines = {role: [" "] * width for role in roles}
    for span in kept:
        begin, end = (round((x - first) * scale) for x in (span.start, span.end))
        if span.role == "producer":  # loads at once stand side by side
            begin += next((i for i, c in enumerate(lines[span.role][begin:]) if c == " "), width)
        for at in range(begin, min(max(end, begin + 1), width)):
            lines[span.role][at] = LETTERS[span.what]
    return {role: "".join(line).rstrip() for role, line in lines.items()}


def a_step(spans: Iterable[Span]) -> float:
    """Median from one softmax of the first consumer to its next; 0 without two."""
    ends = [span.end for span in spans if (span.role, span.what) == ("consumer 0", "softmax")]
    return float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0


def shares(spans: Iterable[Span]) -> dict[str, float]:
    """What share of their time the consumers spend on each thing."""
    total: dict[str, float] = {}
    for span in spans:
        if span.role != "producer":
            total[span.what] = total.get(span.what, 0.0) + span.end - span.start
    whole = sum(total.values()) or 1.0
    return {what: time / whole for what, time in sorted(total.items(), key=lambda x: -x[1])}

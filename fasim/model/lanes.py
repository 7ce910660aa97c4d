"""When each warpgroup of a V3 block does what: a head's events, played on pipes at their rates.

The tensor cores and the exponentials each serve one consumer after the other, in the order in which
they ask; loads arrive a latency after their turn on the way from L2. Nothing else takes time, but
for a tile's ends: so these lanes show what the schedule hides, and the time law (timeline.py) adds
what shows nevertheless.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fasim.gpu import Gpu
from fasim.model.events import Event, events
from fasim.model.silicon import rates
from fasim.model.steps import step
from fasim.model.tiles import Tiles, padded
from fasim.model.timeline import WGMMA_TILE_CLOCKS
from fasim.plan import WARPGROUP, Tile, tiles_stay, v3_layout
from fasim.problem import Problem


class Span(NamedTuple):
    """What a role does from ``start`` to ``end``: wait (for keys, and for its turn), scores (for
    Q K'), softmax, values (for P V), output; of the producer load q, load k, load v, which take no
    time of its own. ``step`` counts tiles of keys from the block's first."""

    role: str
    what: str
    step: int
    start: float
    end: float


def lanes(problem: Problem, gpu: Gpu, tile: Tile, steps: int, variant: str = "v3") -> list[Span]:
    """The first ``steps`` steps of a V3 block's roles, in clocks. Errors as of ``events``."""
    played = _Block(problem, gpu, tile)
    for group in _groups(events(problem, variant, tile), steps):
        played.play(group)
    return played.spans


def _groups(stream: Iterable[Event], steps: int) -> Iterator[list[Event]]:
    """The stream cut where a step begins, each part ordered consumer by consumer; loads last, as
    they take the places that the consumers leave."""
    group: list[Event] = []
    at: tuple[int, int] | None = None
    for event in stream:
        if event.what == "s" and (event.query, event.key) != at:
            yield sorted(group, key=lambda e: e.role)
            group, steps, at = [], steps - 1, (event.query, event.key)
        if steps < 0:
            return
        group.append(event)
    yield sorted(group, key=lambda e: e.role)


class _Block:
    """The pipes of an SM, each with the clock at which it is free, and the roles on them."""

    def __init__(self, problem: Problem, gpu: Gpu, tile: Tile) -> None:
        self.speed = rates(gpu, "v3", problem)
        whole = step(problem, self.speed, "v3", "fwd", Tiles.of([tile]))
        consumers = tile.warps // WARPGROUP
        d, dv = (padded(n, problem.dtype) for n in (problem.head_dim, problem.head_dim_v))
        self.scores = float(whole.tensor[0]) * d / (d + dv) / consumers
        self.values = float(whole.tensor[0]) * dv / (d + dv) / consumers
        self.softmax = float(whole.softmax[0]) / consumers
        self.stay = tiles_stay(problem, tile)  # Q and K, until their scores are weighed
        layout, stages = v3_layout(problem, tile), tile.stages
        self.slots = {"q": layout.q_stages, "k": stages + layout.more_keys, "v": stages}
        self.tensor = self.mufu = self.l2 = self.turn = self.loader = 0.0
        self.free: dict[str, float] = defaultdict(float)  # by role
        self.ready: dict[tuple[str, str], float] = {}  # its products, by role and tensor
        self.summed: dict[str, int] = {}  # the last step whose values it has begun to sum, by role
        self.left: dict[str, float] = {}  # when a slot was given back last, by tensor
        self.arrived: dict[tuple[str, int], float] = {}  # tiles of K and V by number, Q by query
        self.loaded: Counter[str] = Counter()  # how often what was
        self.numbers: dict[tuple[int, int], int] = {}  # of steps, by query and key
        self.spans: list[Span] = []

    def play(self, group: Iterable[Event]) -> None:
        for event in group:
            if event.role == "producer" and event.what in self.slots:
                self._load(event)
            elif event.what == "s":
                self._score(event.role, event.query, self._number(event))
            elif event.what == "pv":
                self._sum(event.role, self._number(event))
            elif event.what == "p":
                self._weigh(event.role, self._number(event))
            elif event.what == "o":
                self._store(event.role)

    def _number(self, event: Event) -> int:
        """Of a step, in which not every consumer need be at work."""
        return self.numbers.setdefault((event.query, event.key), len(self.numbers))

    def _load(self, event: Event) -> None:
        what, number = event.what, self.loaded[event.what]
        if number >= self.slots[what]:
            self.loader = max(self.loader, self.left[what])
        self.l2 = max(self.l2, self.loader) + event.bytes / self.speed.l2_bytes
        which = event.query if what == "q" else number
        self.arrived[what, which] = self.l2 + self.speed.l2_latency
        before = self.loaded["k"] if what == "q" else number
        self.spans.append(Span(event.role, f"load {what}", before, self.loader, self.loader))
        self.loaded[what] += 1

    def _score(self, role: str, query: int, n: int) -> None:
        there = max(self.arrived["k", n], self.arrived["q", query])
        self._until(role, "wait", n, max(there, self.turn))
        self.turn = self.free[role]
        self.tensor = max(self.tensor, self.turn) + self.scores
        self.ready[role, "s"] = self.tensor
        if not self.stay:
            self.left["k"] = self.left["q"] = self.tensor

    def _sum(self, role: str, n: int) -> None:
        there = self.arrived["v", n]
        self.summed[role] = n
        self.tensor = max(self.tensor, there, self.free[role]) + self.values
        self.ready[role, "pv"] = self.left["v"] = self.tensor

    def _weigh(self, role: str, n: int) -> None:
        self._until(role, "scores", n, self.ready[role, "s"])
        self.mufu = max(self.mufu, self.free[role]) + self.softmax
        self._until(role, "softmax", n, self.mufu)
        if self.stay:
            self.left["k"] = self.left["q"] = self.mufu
        if role in self.summed:
            self._until(role, "values", self.summed[role], self.ready[role, "pv"])

    def _store(self, role: str) -> None:
        n = self.summed[role]
        self._until(role, "values", n, self.ready[role, "pv"])
        self._until(role, "output", n, self.free[role] + WGMMA_TILE_CLOCKS)

    def _until(self, role: str, what: str, n: int, end: float) -> None:
        """The role is at it until then, if it is not past that."""
        start = self.free[role]
        if end > start:
            self.spans.append(Span(role, what, n, start, end))
            self.free[role] = end

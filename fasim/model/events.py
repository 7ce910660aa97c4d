"""What one head's kernel loads, computes and stores, in order: the schedule behind every byte.

A stream of events for each algorithm, in the order in which a kernel's roles issue them. Summed
over the heads, the bytes are the issued traffic of traffic.py, tensor by tensor; the emulator sees
a kernel do the same in the same order (tests/emulator/test_event_order.py).

Sources: Dao et al. 2022, algorithm 1 (V1: keys outside); Dao 2023, algorithm 1 (V2: queries
outside); Shah et al. 2024, algorithms 1 and 2 (V3: a producer fills a ring, consumers keep the
values of one tile behind the scores of the next).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from fasim.errors import UsageError
from fasim.plan import (
    PACKED,
    SCALE_INPUTS,
    SLAB_BYTES,
    V3,
    WARPGROUP,
    WARPGROUP_ROWS,
    Tile,
    keeps_q,
    lays_out,
    o_in_q,
    passes_by,
    rows_before,
    streams,
    tiles_stay,
    transposed_shape,
    transposers,
    transposes,
    v3_layout,
    value_slabs,
    widened,
)
from fasim.problem import Problem

TRANSPOSER = "transposer"  # of V3 in e4m3: the kernel before the main one


class Event(NamedTuple):
    """``role`` does ``kind`` (load, product, softmax or store) to ``what``: a tensor (vt: V laid
    out anew); s, the scores Q K'; p, their weights; pv, the weighted values. ``query`` and
    ``key`` are the first row and key of its tile, -1 where it has none."""

    role: str
    kind: str
    what: str
    query: int = -1
    key: int = -1
    bytes: int = 0


def units(problem: Problem, variant: str, role: str = "") -> int:
    """How many times a role's part of the stream runs: once a query head; where rows are packed, or
    V is laid out anew, once a K/V head."""
    per_kv_head = variant in PACKED or role == TRANSPOSER
    return problem.batch * (problem.kv_heads if per_kv_head else problem.heads)


def events(problem: Problem, variant: str, tile: Tile, splits: int = 1) -> Iterator[Event]:
    """The events of one of ``units`` heads, forward. Raises UsageError for rows that V3 pads: those
    tensors come from a kernel before."""
    if variant == "v3" and widened(problem) != problem:
        raise UsageError("V3 that pads rows has no events", why="launches of their own copy them")
    streams = {"v1": _v1, "v2": _v2, "v2_split": _v2_split, **dict.fromkeys(V3, _v3)}
    return streams[variant](_Head(problem, variant, tile), splits)


class _Head:
    """Tiles of one head and the bytes of each."""

    def __init__(self, problem: Problem, variant: str, tile: Tile) -> None:
        self.problem, self.tile, self.variant = problem, tile, variant
        self.group = problem.group if variant in PACKED else 1  # query heads whose rows pack
        self.transposes = transposes(variant, problem.dtype)
        self.values = "vt" if self.transposes else "v"  # what the main kernel takes for V
        stays = variant in V3 and tiles_stay(problem, tile)
        # The last that may ask for K's tile again.
        self.frees_k = "pv" if self.transposes else "p" if stays else "s"
        if variant in V3:
            self.layout, self.keeps_q = v3_layout(problem, tile), bool(keeps_q(problem, tile))
            self.o_in_q = o_in_q(problem, tile)
            self.streams = streams(problem, tile)
        self.passes_by = variant == "v3" and bool(passes_by(problem, tile))
        self.rows = problem.seq * self.group
        # Rows that the first tile of queries lacks at its front; it is called by its first query.
        self.before = int(rows_before(problem, variant, "fwd", tile.block_q))
        starts = range(-self.before, self.rows, tile.block_q)
        self.queries = [max(start, 0) for start in starts]

    def seen(self, first: int, count: int) -> range:
        """Keys that ``count`` rows from ``first`` on see; empty if none."""
        last = min(first + count, self.rows) - 1
        start, stop = self.problem.keys_seen(first // self.group, last // self.group)
        return range(start, max(start, stop))

    def steps(self, query: int) -> list[int]:
        """First keys of the tiles that a tile of queries visits, ascending."""
        seen, n = self.seen(query, self.held(query)), self.tile.block_kv
        return list(range(seen.start // n * n, seen.stop, n)) if seen else []

    def start(self, query: int) -> int:
        """Where a tile begins: the first one perhaps before its first query."""
        return query - self.before * (query == 0)

    def held(self, query: int) -> int:
        """Rows of a tile, those clipped that are no query's."""
        return min(self.start(query) + self.tile.block_q, self.rows) - query

    def own(self, query: int, consumer: int) -> range:
        """Those of them that are a consumer's."""
        first = self.start(query) + WARPGROUP_ROWS * consumer
        return range(max(first, 0), max(first + WARPGROUP_ROWS, 0))[: max(self.rows - first, 0)]

    def at_work(self, query: int, key: int) -> list[int]:
        """The consumers that do not pass a tile of keys by: those of which a row sees some of them,
        and in 16 bits with the last one all."""
        consumers = range(self.tile.warps // WARPGROUP)
        if not self.passes_by or key < 0:
            return list(consumers)
        last = not self.transposes and key <= min(self.steps(query), default=key)
        return [i for i in consumers if last or self.meets(self.own(query, i), key)]

    def meets(self, rows: range, key: int) -> bool:
        """Whether one of some rows sees one of a tile of keys."""
        seen = self.seen(rows.start, len(rows)) if rows else range(0)
        return bool(seen) and key < seen.stop and seen.start < key + self.tile.block_kv

    def load(self, role: str, what: str, query: int = -1, key: int = -1) -> Event:
        return Event(role, "load", what, query, key, self.bytes(what, query, key))

    def store(self, role: str, what: str, query: int) -> Event:
        return Event(role, "store", what, query, -1, self.bytes(what, query, -1))

    def bytes(self, what: str, query: int, key: int) -> int:
        """Of a tile, clipped to the tensor."""
        p = self.problem
        rows = self.held(query)
        keys = max(0, min(self.tile.block_kv, p.seq_kv - key))
        size = {
            "q": rows * p.head_dim * p.element_bytes,
            "k": keys * p.head_dim * p.element_bytes,
            "v": keys * p.head_dim_v * p.element_bytes,
            "vt": self.transposed(key, self.tile.block_kv),
            "o": rows * p.head_dim_v * p.out_bytes,
            **dict.fromkeys(("o_acc", "o_part"), rows * p.head_dim_v * 4),
            **dict.fromkeys(("lse", "m", "l", "m_part", "l_part"), rows * 4),
        }
        return size[what]

    def transposed(self, key: int, count: int) -> int:
        """Bytes of so many keys of V laid out anew, up to the end of its last slab."""
        *_, rows, width = transposed_shape(self.problem)
        return rows * max(0, min(count, value_slabs(self.problem) * width - key))

    def constants(self, role: str) -> Iterator[Event]:
        """What every thread of a block reads for itself, for some options."""
        p, threads = self.problem, self.tile.threads
        size = {"slopes": 4 * (p.bias == "alibi")}
        if self.variant not in V3:
            size |= dict.fromkeys(SCALE_INPUTS, 4 * (p.dtype == "e4m3"))
            yield from self.ends(role, threads)
        yield from (Event(role, "load", n, bytes=b * threads) for n, b in size.items() if b)

    def scales(self, role: str, query: int) -> Iterator[Event]:
        """What V3's producer reads with a tile of queries; scale factors of blocks of keys come
        with those."""
        if self.problem.scales == "block":
            groups = self.tile.block_q // WARPGROUP_ROWS
            yield Event(role, "load", "q_scale", query, bytes=4 * groups)
        elif self.problem.dtype == "e4m3":
            yield from (Event(role, "load", name, bytes=4) for name in SCALE_INPUTS)

    def block_scale(self, role: str, name: str, key: int) -> Iterator[Event]:
        """That of a block of keys, which is a tile of them; beyond the last there is none."""
        if self.problem.scales == "block" and key < self.problem.seq_kv:
            yield Event(role, "load", name, -1, key, 4)

    def ends(self, role: str, threads: int) -> Iterator[Event]:
        """Those of its sequence, where several are packed."""
        names = ("cu_seqlens_q", "cu_seqlens_k") if self.problem.varlen else ()
        yield from (Event(role, "load", name, bytes=8 * threads) for name in names)

    def step(self, role: str, query: int, key: int) -> Iterator[Event]:
        """Scores and their weights; where they have a dense bias, it is read between."""
        yield Event(role, "product", "s", query, key)
        if self.problem.dense:
            yield Event(role, "load", "bias", query, key, self.bias(query, key))
        yield Event(role, "softmax", "p", query, key)

    def bias(self, query: int, key: int) -> int:
        """Rows that skip a tile of keys together do not read its bias."""
        p, n = self.problem, self.tile.keys_per_step
        apart = (self.variant, p.dtype != "fp32") == ("v2", True)
        rows = self.tile.block_q // self.tile.warps if apart else self.tile.block_q
        keys = max(0, min(n, p.seq_kv - key))
        total = 0
        for first in range(query, min(query + self.tile.block_q, p.seq), rows):
            seen = self.seen(first, rows)
            meets = bool(seen) and key < seen.stop and seen.start < key + n
            total += meets * min(rows, p.seq - first) * keys * p.bias_bytes
        return total


def _v1(head: _Head, _: int) -> Iterator[Event]:
    """Keys outside: each tile of them comes once, and every tile of queries that sees it passes by
    and takes its O, m and l along."""
    if not head.queries:
        return
    yield from head.constants("block")
    block_kv = head.tile.block_kv
    for key in range(0, max(head.problem.seq_kv, 1), block_kv):
        yield head.load("block", "k", key=key)
        yield head.load("block", "v", key=key)
        for query in head.queries:
            visited = head.steps(query) or [0]
            if visited[0] <= key <= visited[-1]:
                yield from _v1_tile(head, query, key, visited)


def _v1_tile(head: _Head, query: int, key: int, visited: list[int]) -> Iterator[Event]:
    yield head.load("block", "q", query)
    seen, n = head.seen(query, head.tile.block_q), head.tile.keys_per_step
    stop = min(key + head.tile.block_kv, seen.stop) if seen else key
    for step in range(max(key, seen.start // n * n), stop, n):
        yield from head.step("block", query, step)
        yield Event("block", "product", "pv", query, step)
    state = ("m", "l", "o_acc")
    if key > visited[0]:
        yield from (head.load("block", name, query) for name in state)
    for name in state if key < visited[-1] else ("lse", "o"):
        yield head.store("block", name, query)


def _v2(head: _Head, _: int) -> Iterator[Event]:
    """A block a tile of queries; under a causal mask those with the most keys first, keys
    descending."""
    for query in head.queries[:: -1 if head.problem.mask == "causal" else 1]:
        yield from head.constants("block")
        yield head.load("block", "q", query)
        yield from _ring(head, query, head.steps(query)[::-1])
        yield head.store("block", "lse", query)
        yield head.store("block", "o", query)


def _ring(head: _Head, query: int, keys: list[int]) -> Iterator[Event]:
    """K, V, K, V … through 2 x stages slots: a load starts as soon as its slot is free."""
    loads = deque(head.load("block", what, key=key) for key in keys for what in ("k", "v"))
    ahead = 2 * head.tile.stages - 1

    def fill(count: int) -> Iterator[Event]:
        yield from (loads.popleft() for _ in range(min(count, len(loads))))

    yield from fill(ahead)
    for key in keys:
        yield from fill(1)
        yield from head.step("block", query, key)
        yield from fill(1)
        yield Event("block", "product", "pv", query, key)


def _v2_split(head: _Head, splits: int) -> Iterator[Event]:
    """Rows of a group packed; every split of their keys is a block and leaves a part of O, m and l,
    which a last kernel combines."""
    for split in range(splits):
        for query in head.queries:
            keys = head.steps(query)
            share = slice(len(keys) * split // splits, len(keys) * (split + 1) // splits)
            yield head.load("block", "q", query)
            yield from _ring(head, query, keys[share])
            yield from (head.store("block", name, query) for name in ("o_part", "m_part", "l_part"))
    for query in head.queries:
        for name in ("m_part", "m_part", "l_part", "o_part"):
            part = head.load("combine", name, query)
            yield part._replace(bytes=part.bytes * splits)
        yield head.store("combine", "o", query)
        yield head.store("combine", "lse", query)


def _v3(head: _Head, _: int) -> Iterator[Event]:
    """One block that works on all tiles of queries, those with the most keys first. The producer
    runs ahead as far as its rings let it: a slot is free when all consumers are done with it."""
    if head.transposes:
        yield from _v3_transpose(head)
    steps = [(query, _v3_keys(head, query)) for query in reversed(head.queries)]
    loads = deque(_v3_loads(head, steps))
    done: Counter[str] = Counter()
    for event, finished in _v3_work(head, steps):
        while loads and done[loads[0][1]] > loads[0][2]:
            yield loads.popleft()[0]
        if event:
            yield event
        done.update(finished)


def _v3_transpose(head: _Head) -> Iterator[Event]:
    """In e4m3 a kernel before lays out V anew, a slab of keys after the other, for all heads that
    share it."""
    p, slabs = head.problem, value_slabs(head.problem)
    for key in range(0, slabs * SLAB_BYTES, SLAB_BYTES) if lays_out(p) else ():
        keys = max(0, min(SLAB_BYTES, p.seq_kv - key))
        if p.varlen:
            asked = 8 * transposers(p.head_dim_v)
            yield Event(TRANSPOSER, "load", "cu_seqlens_k", bytes=asked)
        yield Event(TRANSPOSER, "load", "v", -1, key, keys * p.head_dim_v * p.element_bytes)
        yield Event(TRANSPOSER, "store", "vt", -1, key, head.transposed(key, SLAB_BYTES))


def _v3_keys(head: _Head, query: int) -> list[int]:
    """Descending; where no query sees a key one tile beyond the last, whose bytes are none."""
    beyond = (head.problem.seq_kv // head.tile.block_kv + 1) * head.tile.block_kv
    return head.steps(query)[::-1] or [beyond]


_Steps = list[tuple[int, list[int]]]
_Gated = tuple[Event, str, int]  # what must have happened more often than so many times before it


def _v3_loads(head: _Head, steps: _Steps) -> Iterator[_Gated]:
    """The producer's, each when its slot is free; V one step behind K, in e4m3 right behind it, as
    is the last of a tile of queries where O leaves before the next."""
    role, stages, count = "producer", head.tile.stages, 0
    late: list[int] = []  # the key tile whose V is still to come
    for i, (query, keys) in enumerate(steps):
        constants = (*head.ends(role, 1), *head.scales(role, query))
        yield from ((event, "tile", -1) for event in constants)
        yield head.load(role, "q", query), "tile", i - head.layout.q_stages
        for key in keys:
            yield from _v3_load(
                head, "k", key, head.frees_k, count - stages - head.layout.more_keys
            )
            if head.transposes:
                yield from _v3_load(head, head.values, key, "pv", count - stages)
            for k in late:
                yield from _v3_load(head, head.values, k, "pv", count - 1 - stages)
            late, count = [] if head.transposes else [key], count + 1
        if head.streams and i < len(steps) - 1:
            continue
        for k in late:
            yield from _v3_load(head, head.values, k, "pv", count - 1 - stages)
        late = []


def _v3_load(head: _Head, what: str, key: int, freed: str, times: int) -> Iterator[_Gated]:
    """A tile of keys, after its scale factor if blocks have one."""
    scales = head.block_scale("producer", f"{what[0]}_scale", key)
    loads = (*scales, head.load("producer", what, key=key))
    yield from ((event, freed, times) for event in loads)


class _Step(NamedTuple):
    """A tile of queries against one of keys; whether these are the first or the last of them."""

    query: int
    key: int
    begins: bool
    ends: bool


_Done = tuple[Event | None, tuple[str, ...]]  # and what is finished after it


def _v3_work(head: _Head, steps: _Steps) -> Iterator[_Done]:
    """The consumers', who keep the values of one step behind the scores of the next."""
    all_ = [_Step(q, k, k == keys[0], k == keys[-1]) for q, keys in steps for k in keys]
    for before, now in zip([None, *all_], [*all_, None], strict=True):
        yield from _v3_step(head, before, now)


def _v3_step(head: _Head, before: _Step | None, now: _Step | None) -> Iterator[_Done]:
    """The one place that says in which order consumers work: the scores of ``now``, and the values
    of ``before``; O of a tile of queries leaves while the first scores of the next become weights,
    or before them: in e4m3, whose sums take the registers of scores, and where Q has one place."""
    ahead = head.transposes or (before is not None and before.ends and not head.streams)
    behind = None if ahead else before
    if now and now.begins:
        yield from ((event, ()) for event in head.constants("consumers"))
    if before and not behind:
        yield from _v3_values(head, before)
        yield from _v3_output(head, before, "lse", "o")
    if now:
        leaves = now.begins if head.keeps_q else now.ends  # Q its place in shared memory
        freed = {head.frees_k: ("tile",)} if leaves else {}
        owed = ("tile",) * bool(before and now.begins and head.o_in_q)  # the place of the Q before
        yield from _each(head, "product", "s", *now[:2], ("s", *freed.get("s", ()), *owed))
    if now and head.problem.dense:
        yield from _each(head, "load", "bias", *now[:2])
    if behind:
        yield from _v3_values(head, behind)
        yield from _v3_output(head, behind, "lse")
    if now:
        yield from _each(head, "softmax", "p", *now[:2], ("p", *freed.get("p", ())))
    if behind:
        yield from _v3_output(head, behind, "o")


def _v3_values(head: _Head, step: _Step) -> Iterator[_Done]:
    finished = ("pv", "tile")[: 1 + (step.ends and head.transposes and not head.o_in_q)]
    return _each(head, "product", "pv", *step[:2], finished)


def _v3_output(head: _Head, step: _Step, *names: str) -> Iterator[_Done]:
    """What the last step of a tile of queries leaves."""
    for what in names if step.ends else ():
        yield from _each(head, "store", what, step.query)


def _each(
    head: _Head, kind: str, what: str, query: int, key: int = -1, finished: tuple[str, ...] = ()
) -> Iterator[_Done]:
    """The same of every consumer at work, for its own rows; the last of them finishes it."""
    whole = {"store": lambda: head.bytes(what, query, key), "load": lambda: head.bias(query, key)}
    size = whole[kind]() if kind in whole else 0
    rows = head.held(query)
    for i in head.at_work(query, key):
        own = len(head.own(query, i))
        event = Event(f"consumer {i}", kind, what, query, key, size * own // rows)
        yield event, ()
    yield None, finished

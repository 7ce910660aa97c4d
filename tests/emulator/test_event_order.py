"""A kernel in the emulator does what the model's stream of events says, in its order, role by role.

The trace counts instructions, the stream tiles: products in a row are one span, told apart by how
many instructions one takes, and loads between two products are a set; a producer's are in order.
The warp looked at sees all keys that its tile of queries does: the last one, in V3 any, of which
the first stores. Warps that lay out V anew share its slabs: they are looked at one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from fasim import gpu, planner
from fasim.emulator import trace
from fasim.model.events import TRANSPOSER, Event, events
from fasim.plan import (
    SCALE_BLOCK,
    SCALE_INPUTS,
    SLAB_BYTES,
    WARPGROUP,
    WARPGROUP_ROWS,
    Plan,
    Tile,
    rows_before,
    transposed_shape,
)
from fasim.problem import Problem
from fasim.render import render
from fasim.runners.arrays import DTYPES
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

Seen = tuple[str, Any]  # a kind; of loads and stores a set of (tensor, tile), of a product which

V2 = Tile(block_q=64, block_kv=64, stages=2, warps=4, registers=128)
V3 = Tile(block_q=128, block_kv=64, stages=2, warps=8, registers=240)
E4M3 = replace(V3, block_kv=128)
CASES: dict[str, tuple[str, Tile, dict[str, Any]]] = {
    "v1": (
        "v1",
        Tile(block_q=64, block_kv=128, warps=4, step_kv=32, registers=168),
        {"seq": 256, "seq_kv": 300, "causal": True},
    ),
    "v2-causal": ("v2", V2, {"seq": 256, "seq_kv": 250, "causal": True}),
    "v2-one-stage": ("v2", replace(V2, stages=1), {"seq": 128, "seq_kv": 256}),
    "v3-causal": ("v3", V3, {"seq": 512, "seq_kv": 250, "causal": True}),
    "v3-one-q": ("v3", V3, {"seq": 384, "seq_kv": 250, "head_dim": 256, "causal": True}),
    "v3-one-q-three": (
        "v3",
        Tile(block_q=192, block_kv=96, warps=12, stages=2),
        {"seq": 250, "seq_kv": 300, "head_dim": 80, "causal": True},
    ),
    "v3-passing-by": ("v3", V3, {"seq": 150, "seq_kv": 250, "head_dim": 256, "causal": True}),
    "v3-window": ("v3", V3, {"seq": 256, "seq_kv": 250, "window": (70, 10)}),
    "v3-three-consumers": (
        "v3",
        replace(V3, block_q=192, warps=12, registers=160),
        {"seq": 384, "seq_kv": 256},
    ),
    "v3-e4m3-causal": ("v3", E4M3, {"seq": 512, "seq_kv": 500, "causal": True, "dtype": "e4m3"}),
    "v3-e4m3-wide": ("v3", E4M3, {"seq": 256, "seq_kv": 300, "head_dim": 128, "dtype": "e4m3"}),
    "v3-e4m3-o-in-q": (
        "v3",
        E4M3,
        {"seq": 512, "seq_kv": 500, "head_dim": 256, "causal": True, "dtype": "e4m3"},
    ),
    "v3-e4m3-o-in-q-few-rows": (
        "v3",
        E4M3,
        {"seq": 330, "seq_kv": 300, "head_dim": 256, "dtype": "e4m3"},
    ),
    "v3-e4m3-two-rounds": (
        "v3",
        E4M3,
        {"seq": 256, "seq_kv": 300, "head_dim_v": 256, "dtype": "e4m3"},
    ),
    "v3-e4m3-three-consumers": (
        "v3",
        replace(E4M3, block_q=192, warps=12, registers=160),
        {"seq": 384, "seq_kv": 500, "window": (200, 30), "dtype": "e4m3", "scales": "block"},
    ),
    "v3-e4m3-blocks": (
        "v3",
        E4M3,
        {"seq": 300, "seq_kv": 512, "causal": True, "dtype": "e4m3", "scales": "block"},
    ),
}
TRANSPOSING = ("_transpose", "load_columns")  # functions of the kernel that lays out V
WEIGHING = {  # functions of the softmax
    *("quad_max", "weigh", "reset", "all_settled", "round_weights"),
    *("settle", "move_to", "follow", "weigh_step", "exponentials", "add_up", "lower"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_emulator_does_what_the_events_say(name: str) -> None:
    algo, tile, options = CASES[name]
    problem = Problem(**{"batch": 1, "heads": 1, "head_dim": 64} | options)
    entry = planner.plan(problem, gpu.load("h200"), algo, tile=tile)
    assert entry.plan
    assert entry.tile
    assert -(-problem.seq // tile.block_q) <= 4
    assert -(-problem.seq_kv // tile.block_kv) <= 4
    said = list(events(problem, algo, entry.tile))
    spans = traced(replace(entry.plan, slots=1))  # V3: one block does all
    before = [span for span in spans if span["function"].endswith(TRANSPOSING)]
    main = [span for span in spans if span not in before]
    lacks = int(rows_before(problem, algo, "fwd", tile.block_q))
    starts = range(-lacks, max(problem.seq, 1), tile.block_q)
    for role, warp in warps(algo, tile):
        mine = [span for span in main if span["warp"] == warp]
        done, wanted = executed(mine, problem, tile, starts), stated(said, role)
        if role == "producer":
            assert list(done) == list(wanted)
        else:
            assert list(grouped(done)) == list(grouped(wanted))
    check_transposed(before, problem, [event for event in said if event.role == TRANSPOSER])


def check_transposed(spans: list[dict[str, Any]], problem: Problem, said: list[Event]) -> None:
    """Slabs of V are loaded and stored in the order of the stream, with its bytes: a lane loads 16
    columns of a key at once and stores 16 keys of a column."""
    in_order = sorted(spans, key=lambda span: (span["block"], span["warp"]))
    for kind, size in (("load", 16), ("store", 16)):
        mine = [span for span in in_order if span["sort"] == kind]
        events = [event for event in said if event.kind == kind and event.bytes]
        slabs = (key // SLAB_BYTES * SLAB_BYTES for span in mine for key in keys_of(span, problem))
        assert list(dict.fromkeys(slabs)) == [event.key for event in events]
        assert sum(span["count"] * size for span in mine) == sum(event.bytes for event in events)


def keys_of(span: dict[str, Any], problem: Problem) -> list[int]:
    """First and last of the keys whose values a span moves: rows of V, columns of V laid out anew,
    slab by slab."""
    start, stop = span["source"]
    if span["array"] == "v":
        return [start // problem.head_dim_v, (stop - 1) // problem.head_dim_v]
    _, _, rows, width = transposed_shape(problem)
    return [at // (rows * width) * width for at in (start, stop - 1)]


def warps(algo: str, tile: Tile) -> Iterable[tuple[str, int]]:
    if algo != "v3":
        return [("block", tile.warps - 1)]
    consumers = tile.warps // WARPGROUP
    first = [(f"consumer {i}", WARPGROUP * i) for i in range(consumers)]
    return [*first, ("producer", tile.warps)]


def traced(plan: Plan) -> list[dict[str, Any]]:
    kernel, launch = render(plan), plan.launch_for()
    draw = np.random.default_rng(0)
    arrays = {
        name: (np.ones(shape) if name in SCALE_INPUTS else draw.standard_normal(shape)).astype(
            DTYPES[dtype]
        )
        for name, (shape, dtype) in launch.inputs.items()
    }
    spans = EmulatorRunner(workers=1).trace(kernel, arrays, launch)
    return list(trace.document(kernel, spans)["spans"])


def stated(said: Iterable[Event], role: str) -> Iterator[Seen]:
    """What the stream says of a role. TMA and copies name no byte beyond a tensor."""
    for event in said:
        if event.role != role or (event.kind in ("load", "store") and not event.bytes):
            continue
        if event.kind in ("load", "store"):
            yield event.kind, (event.what, max(event.query, event.key))
        else:
            yield event.kind, event.what


def executed(
    spans: list[dict[str, Any]], problem: Problem, tile: Tile, starts: range
) -> Iterator[Seen]:
    """What one warp did; block after block. That it takes Q into registers is part of its load.
    Tiles of queries begin at ``starts``."""
    spans = [span for span in spans if span["function"] != "take_queries"]
    products = [span["count"] for span in spans if span["sort"] == "product"]
    cost = {"s": products[0], "pv": products[-1]} if products else {}
    for span in spans:
        if span["sort"] == "product":
            yield from (("product", what) for what in multiplied(span, cost))
        elif span["sort"] == "softmax" and span["function"] in WEIGHING:
            yield "softmax", "p"
        elif "array" in span:
            kind = "store" if span["sort"] == "store" else "load"
            yield from ((kind, (span["array"], row)) for row in rows(span, problem, tile, starts))


def multiplied(span: dict[str, Any], cost: dict[str, int]) -> Iterator[str]:
    """The products of a span take turns; they take as many instructions as it has. Values in rounds
    of columns have spans of their own."""
    if "columns" in span["function"]:
        yield "pv"
        return
    what, left = "s" if "scores" in span["function"] else "pv", span["count"]
    while left > 0:
        yield what
        left -= cost[what]
        what = "pv" if what == "s" else "s"
    assert left == 0, span


def rows(span: dict[str, Any], problem: Problem, tile: Tile, starts: range) -> Iterable[int]:
    """First rows of the tiles that a span's bytes are of; -1 of what has none."""
    name, (start, stop) = span["array"], span["source"]
    if name == "vt":
        return [max(keys_of(span, problem)) // tile.block_kv * tile.block_kv]
    if name in SCALE_INPUTS:
        if problem.scales != "block":
            return [-1]
        blocks = range(start // 4, stop // 4)
        if name == "q_scale":
            return [max(first, 0) for first in starts if scaled(first, problem, tile) == blocks]
        return [-(-blocks.start * SCALE_BLOCK // tile.block_kv) * tile.block_kv]
    d, dv, size = problem.head_dim, problem.head_dim_v, problem.element_bytes
    element = {
        **{"q": d * size, "k": d * size, "v": dv * size, "o": dv * problem.out_bytes},
        **{"o_acc": 4 * dv, "m": 4, "l": 4, "lse": 4},
    }[name]
    first, last = start // element, (stop - 1) // element
    if name in ("k", "v"):
        return range(first // tile.block_kv * tile.block_kv, last + 1, tile.block_kv)
    met = (one for one in starts if one <= last and first < one + tile.block_q)
    return [max(one, 0) for one in met]


def scaled(first: int, problem: Problem, tile: Tile) -> range:
    """Blocks of scale factors of a tile's queries."""
    at = [max(first + WARPGROUP_ROWS * i, 0) for i in range(tile.block_q // WARPGROUP_ROWS)]
    most = (problem.seq - 1) // SCALE_BLOCK
    return range(min(at[0] // SCALE_BLOCK, most), min(at[-1] // SCALE_BLOCK, most) + 1)


def grouped(seen: Iterable[Seen]) -> Iterator[tuple[str, Any]]:
    """Loads in a row, and stores in a row, as a set; softmax in a row as one, and values, which may
    come in parts."""
    for kind, group in groupby(seen, key=lambda one: one[0]):
        if kind == "product":
            yield from (one for one, _ in groupby(group))
        else:
            yield kind, sorted({what for _, what in group})

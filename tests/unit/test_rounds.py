"""How V3 deals tiles of queries out: device/schedule.cuh, played."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu, planner, rounds
from fasim.model.tiles import Tiles
from fasim.model.visits import tile_visits
from fasim.plan import Plan, Tile
from fasim.problem import Problem
from fasim.reference import attention

costs_of_tiles = st.lists(st.integers(1, 50), min_size=1, max_size=9).map(tuple)


def dealt(costs: tuple[int, ...], heads: int, blocks: int, together: int) -> Counter[int]:
    """What each block is dealt: the kernel's work_at, read line by line."""
    load: Counter[int] = Counter()
    for turn in range(heads * len(costs)):
        round_, place = divmod(turn, blocks)
        block = blocks - 1 - place if round_ % 2 else place
        first_head = turn // (together * len(costs)) * together
        members = min(together, heads - first_head)
        load[block] += costs[(turn - first_head * len(costs)) // members]
    return load


@given(costs_of_tiles, st.integers(1, 20), st.integers(1, 9), st.integers(1, 20))
def test_the_busiest_block_is_the_kernel_s(
    costs: tuple[int, ...], heads: int, blocks: int, together: int
) -> None:
    load = dealt(costs, heads, blocks, together)
    assert sum(load.values()) == heads * sum(costs)
    assert rounds.longest(costs, heads, blocks, together) == max(load.values())


@given(costs_of_tiles, st.integers(1, 20), st.integers(1, 9), st.integers(1, 3))
def test_no_other_group_ends_much_sooner(
    costs: tuple[int, ...], heads: int, blocks: int, fewest: int
) -> None:
    found = rounds.heads_together(costs, heads, blocks, fewest)
    assert min(fewest, heads) <= found <= heads
    ends = {
        n: rounds.longest(costs, heads, blocks, n) for n in range(min(fewest, heads), heads + 1)
    }
    assert ends[found] <= min(ends.values()) * (1 + heads * rounds.HEAD_COSTS)


@pytest.mark.parametrize("empty", [((), 3, 2), ((1,), 0, 2), ((1,), 3, 0)])
def test_nothing_to_deal_out_is_a_group_of_one(empty: Any) -> None:
    assert rounds.heads_together(*empty) == 1


def test_long_rows_of_tiles_are_played_in_part() -> None:
    assert rounds.heads_together(tuple(range(20000, 0, -1)), 1 << 20, 132) == 1


# ---- V3 -----------------------------------------------------------------------------------------


def plan_of(problem: Problem, **options: Any) -> Plan:
    plan = planner.plan(problem, gpu.load("h200"), "v3", **options).plan
    assert plan
    return plan


def costs_of(plan: Plan, problem: Problem) -> tuple[float, ...]:
    q_blocks = plan._q_blocks(problem)
    return tuple(plan._tile_cost(problem, q) for q in reversed(range(q_blocks)))


def problem(head_dim: int, seq: int, **more: Any) -> Problem:
    sizes = {"batch": 16384 // seq, "heads": 2048 // head_dim, "seq": seq, "head_dim": head_dim}
    return Problem(**{**sizes, "dtype": "bf16", **more})


E4M3 = {"dtype": "e4m3", "scales": "head"}


@pytest.mark.parametrize(
    ("given", "before", "gain"),
    [
        (problem(128, 1024, **E4M3), 1, 1.02),
        (problem(64, 1024, **E4M3), 1, 1.04),
        (problem(128, 4096, causal=True, **E4M3), 12, 1.06),
        (problem(128, 512, causal=True, **E4M3), 88, 1.1),
    ],
)
def test_where_tiles_differ_the_blocks_end_together(
    given: Problem, before: int, gain: float
) -> None:
    """Cases that were measured slow on an H200: a head at a time, or groups of two whole rounds."""
    plan = plan_of(given)
    costs, heads = costs_of(plan, given), given.batch * given.heads
    together = plan.launch_for(given).scalars["heads_together"]
    assert isinstance(together, int)
    ends = [rounds.longest(costs, heads, 132, n) for n in (before, together)]
    assert ends[0] > gain * ends[1]


@pytest.mark.parametrize(
    ("given", "together"),
    [
        (problem(128, 2048), 2),
        (problem(128, 16384), 1),
        (problem(256, 2048, **E4M3), 3),
        (problem(64, 512).with_(batch=1, heads=1), 1),
    ],
)
def test_equal_tiles_are_dealt_out_a_few_heads_at_a_time(given: Problem, together: int) -> None:
    assert plan_of(given).launch_for(given).scalars["heads_together"] == together


TILE = Tile(block_q=128, block_kv=64, stages=2, warps=8)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 9)},
}
PLANS = {
    mask: plan_of(Problem(seq=512, head_dim=64, dtype="bf16", **options), tile=TILE)
    for mask, options in MASKS.items()
}
masks = st.sampled_from([*MASKS.values(), {"window": (-1, 5)}])


@given(masks, st.integers(1, 700), st.integers(1, 700))
def test_tiles_cost_what_they_visit(mask: dict[str, Any], seq: int, seq_kv: int) -> None:
    """The model counts the same steps in closed form; a tile that sees no key walks one."""
    given = Problem(seq=seq, seq_kv=seq_kv, head_dim=64, dtype="bf16", **mask)
    visits = tile_visits(given, "v3", "fwd", Tiles.of([TILE]))
    costs = costs_of(PLANS[given.mask], given)
    assert len(costs) == visits.q_tiles[0]
    assert sum(costs) == len(costs) + visits.steps[0] + visits.blind[0]


def test_a_consumer_without_rows_spares_time_in_e4m3_alone() -> None:
    tile = Tile(block_q=192, block_kv=128, stages=2, warps=12)
    for kind, spared in (({"dtype": "bf16"}, 0), (E4M3, 1)):
        given = problem(64, 1024, **kind)
        first, *others = costs_of(plan_of(given, tile=tile), given)  # 64 rows, then 192 each
        assert others == [9] * 5
        assert first == pytest.approx(9 - spared * 2 * 0.2 * 8)


@given(masks, st.integers(1, 40), st.integers(1, 40), st.data())
def test_keys_seen_are_those_that_the_reference_takes(
    mask: dict[str, Any], seq: int, seq_kv: int, data: st.DataObject
) -> None:
    given = Problem(seq=seq, seq_kv=seq_kv, head_dim=1, dtype="fp32", **mask)
    first = data.draw(st.integers(0, seq - 1))
    last = data.draw(st.integers(first, seq - 1))
    zeros = np.zeros((1, 1, seq, 1)), np.zeros((1, 1, seq_kv, 1))
    ones = np.eye(seq_kv)[None, None]  # O is then which keys a row sees
    o = attention(zeros[0], zeros[1], ones, causal=given.causal, window=given.window).o
    seen = np.flatnonzero(o[0, 0, first : last + 1].any(0))
    begin, end = given.keys_seen(first, last)
    assert (seen.size == 0 and end <= begin) or (begin, end) == (seen[0], seen[-1] + 1)

"""V3 on packed rows: who may pack, who does, what a launch is, and what the model says about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu as gpus
from fasim import planner
from fasim.entry import Entry
from fasim.errors import NoPlanError, UsageError
from fasim.model import flops, traffic
from fasim.model.tiles import Tiles
from fasim.model.visits import grouped_visits, packed_visits
from fasim.plan import Plan, Tile, contiguous_strides
from fasim.problem import Problem
from fasim.render import parse, render
from fasim.runners.arrays import tensor_maps

SERVED = Problem(batch=16, heads=32, kv_heads=8, seq=16, seq_kv=8192, dtype="bf16", causal=True)
TILE = Tile(block_q=128, block_kv=64, warps=8, stages=2)
H200 = gpus.load("h200")


def planned(problem: Problem = SERVED, **options: Any) -> Entry:
    return planner.plan(problem, H200, "v3", **options)


def plan_of(problem: Problem = SERVED, **options: Any) -> Plan:
    found = planned(problem, **options).plan
    assert found
    return found


# ---- the choice ---------------------------------------------------------------------------------


def test_few_queries_of_many_heads_are_packed() -> None:
    entry = planned()
    assert entry.packed
    assert entry.variant == "v3_packed"
    assert entry.to_json()["launch"]["packed"]
    assert "4 heads packed fill 1 tile of rows, instead of 4" in entry.reasons
    alone = planned(form="unpacked").time.seconds / entry.time.seconds
    assert f"without packing rows it would take {alone:.2f} times as long" in entry.reasons
    assert alone > 2


def test_where_tiles_are_full_nothing_is_packed() -> None:
    """The same whole tiles either way: no faster, so the plain kernel."""
    entry = planned(SERVED.with_(seq=512))
    assert not entry.packed
    assert "with packed rows it would take 1.00 times as long" in entry.reasons
    assert not planned(SERVED.with_(seq=4096)).packed
    assert not planned(SERVED.with_(kv_heads=32)).packed


def test_one_tile_more_than_the_gpu_runs_at_once_decides() -> None:
    """Few blocks leave SMs idle: fewer of them end no earlier."""
    assert not planned(SERVED.with_(batch=1)).packed
    assert planned(SERVED.with_(batch=5)).packed


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bias": "alibi"}, "several slopes"),
        ({"bias": "dense"}, "several slopes or biases"),
        ({"varlen": True}, "whole boxes"),
        ({"dtype": "e4m3", "out_dtype": "bf16"}, "16 bits only, not in e4m3"),
        ({"head_dim": 33}, "copied head by head"),
        ({"heads": 24, "kv_heads": 8}, "groups of 3 heads do not divide the 64 rows of a box"),
        ({"heads": 128, "kv_heads": 1}, "groups of 128 heads"),
        (
            {"batch": 1, "heads": 2, "kv_heads": 1, "seq": 2**30, "seq_kv": 64, "head_dim": 8},
            "packed rows of a K/V head exceed",
        ),
    ],
)
def test_what_cannot_be_packed_says_why(options: dict[str, Any], why: str) -> None:
    problem = SERVED.with_(**options)
    with pytest.raises(NoPlanError) as caught:
        planned(problem, form="packed")
    assert why in caught.value.why
    entry = planned(problem)
    assert not entry.packed
    if problem.seq == SERVED.seq:
        assert any("not packed" in said and why in said for said in entry.reasons)


def test_only_v3_forward_has_these_forms() -> None:
    with pytest.raises(UsageError, match="V3's forward pass"):
        planner.plan(SERVED, H200, "v2", form="packed")
    assert planned(SERVED.with_(kv_heads=32), form="packed").packed  # a group of one


# ---- the kernel ---------------------------------------------------------------------------------


def test_other_kernels_have_no_trace_of_it() -> None:
    plain, packed = (render(plan_of(form=form)) for form in ("unpacked", "packed"))
    assert "_packed_" in packed.stem
    for word in ("group_log2", "tensor_5d", "mask_groups"):
        assert word in packed.source
        assert word not in plain.source
    assert parse(packed.source).plan == packed.plan


def test_a_launch_has_tiles_of_rows_of_the_heads_of_k() -> None:
    plan = plan_of(tile=TILE, form="packed")
    launch = plan.launch_for(SERVED.with_(batch=2, seq=50))
    assert launch.stages[0].grid == 2 * 8 * 2  # 200 rows are two tiles of 128
    assert launch.scalars["group_log2"] == 2
    assert launch.scalars["heads_together"] == 2
    assert launch.groups == {"q": 4, "o": 4}
    assert plan.launch_for(SERVED.with_(batch=99, seq=50)).stages[0].grid == plan.slots == 132


def test_one_kernel_serves_every_group_that_fills_a_box() -> None:
    plan = plan_of(form="packed")
    for group in (1, 2, 4, 8, 16, 32, 64):
        launch = plan.launch_for(SERVED.with_(heads=2 * group, kv_heads=2))
        assert 1 << int(launch.scalars["group_log2"]) == group  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot run") as caught:
        plan.launch_for(SERVED.with_(heads=12, kv_heads=2))
    assert "groups of 6 heads" in caught.value.why


def test_tma_sees_the_heads_of_a_group_side_by_side() -> None:
    problem = Problem(batch=2, heads=8, kv_heads=2, seq=30, seq_kv=200, head_dim=72)
    launch = plan_of(problem, tile=TILE, form="packed").launch_for()
    arrays = {**launch.inputs, **launch.outputs}
    steps = {name: contiguous_strides(arrays[name][0]) for name in launch.boxes}
    made = tensor_maps(launch, dict.fromkeys(launch.boxes, 1 << 32), steps)
    for name in "qo":
        assert made[name].sizes == (72, 4, 30, 2, 2)
        assert made[name].strides == (30 * 144, 144, 4 * 30 * 144, 8 * 30 * 144)
        assert made[name].box == (64, 4, 16, 1, 1)
    assert made["k"].box == (64, 64, 1, 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bias": "alibi"}, "several slopes"),
        ({"varlen": True}, "whole boxes"),
        ({"splits": True}, "only V2 splits keys"),
    ],
)
def test_a_plan_that_no_template_makes_is_refused(changes: dict[str, Any], why: str) -> None:
    plan = plan_of(form="packed")
    wrong = replace(plan, kernel=replace(plan.kernel, **changes))
    with pytest.raises(UsageError) as caught:
        Plan.from_json(wrong.to_json())
    assert why in caught.value.why


# ---- the model ----------------------------------------------------------------------------------


@given(
    st.sampled_from((1, 2, 4, 8, 16)),
    st.integers(0, 150),
    st.integers(0, 300),
    st.sampled_from(({}, {"causal": True}, {"window": (40, 9)}, {"window": (3, 0)})),
)
def test_visits_are_counted_by_hand(
    group: int, seq: int, seq_kv: int, mask: dict[str, Any]
) -> None:
    problem = Problem(heads=2 * group, kv_heads=2, seq=seq, seq_kv=seq_kv, **mask)
    left, right = problem.reach
    steps = blind = 0
    for first in range(0, group * seq, TILE.block_q):
        rows = np.arange(first, min(first + TILE.block_q, group * seq))
        aligned = rows[[0, -1]] // group + seq_kv - seq
        begin = max(0, int(aligned[0]) - left) if left >= 0 else 0
        end = min(seq_kv, int(aligned[1]) + right + 1) if right >= 0 else seq_kv
        seen = range(begin // TILE.block_kv, -(-end // TILE.block_kv)) if end > begin else ()
        steps, blind = steps + len(seen), blind + (not seen)
    tiles = Tiles.of([TILE])
    counted = grouped_visits(problem, tiles)
    assert (int(counted.steps[0]), int(counted.blind[0])) == (steps, blind)
    assert int(counted.q_tiles[0]) == -(-group * seq // TILE.block_q)
    if problem.mask != "window":
        assert int(packed_visits(problem, tiles).keys[0]) == int(counted.keys[0])


def test_whole_tiles_are_charged() -> None:
    """16 queries of 4 heads: half a tile a K/V head, where each head would take one."""
    tiles = Tiles.of([TILE])
    packed, alone = (flops.executed(SERVED, name, "fwd", tiles)[0] for name in ("v3_packed", "v3"))
    assert alone == 4 * packed
    assert packed == 16 * 8 * 128 * 8192 * 4 * 128
    read = {n: traffic.issued(SERVED, n, "fwd", tiles).at(0).reads for n in ("v3_packed", "v3")}
    assert read["v3"]["k"] == 4 * read["v3_packed"]["k"] == 4 * 16 * 8 * 8192 * 128 * 2
    assert read["v3"]["q"] == read["v3_packed"]["q"]


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_no_prediction_is_below_the_bytes_over_the_bandwidth(batch: int) -> None:
    entry = planned(SERVED.with_(batch=batch), form="packed")
    assert entry.time.seconds > 2 * batch * 8 * 8192 * 128 * 2 / H200.hbm_bandwidth

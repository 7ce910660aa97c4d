"""Split keys: how many parts, what a launch is, and what the model says about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu as gpus
from fasim import planner
from fasim.errors import UsageError
from fasim.model import flops, traffic
from fasim.model.tiles import Tiles
from fasim.model.visits import packed_visits, visits
from fasim.plan import MOST_SPLITS, Plan, Tile, split_count
from fasim.problem import Problem

DECODE = Problem(heads=64, kv_heads=8, seq=1, seq_kv=32768, dtype="bf16")
TILE = Tile(block_q=16, block_kv=64, warps=4, stages=2, step_kv=16)


def planned(problem: Problem = DECODE, gpu: str = "h200", **options: Any) -> planner.Entry:
    return planner.plan(problem, gpus.load(gpu), "v2", **options)


def plan_of(problem: Problem = DECODE, gpu: str = "h200", **options: Any) -> Plan:
    found = planned(problem, gpu, **options).plan
    assert found
    return found


# ---- how many parts -----------------------------------------------------------------------------


def test_three_blocks_on_each_of_132_sms_take_12_parts_of_32_sequences() -> None:
    """flashinfer#4904: 3 parts left slots empty that 12 fill, 384 of 396."""
    assert split_count(key_tiles=512, blocks=32, slots=396) == 12


def test_one_part_more_than_fills_the_gpu_starts_a_wave() -> None:
    assert split_count(key_tiles=4096, blocks=10, slots=100) == 10
    assert split_count(key_tiles=4096, blocks=100, slots=100) == 1


def test_where_one_wave_would_leave_much_idle_there_are_more() -> None:
    """70 of 100 slots: 10 parts in 7 full waves beat 1 part in one, and 2 in two."""
    splits = split_count(key_tiles=4096, blocks=70, slots=100)
    waves = -(-70 * splits // 100)
    assert 70 * splits / waves / 100 > 0.9


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 1000))
def test_parts_are_never_empty_by_choice(key_tiles: int, blocks: int, slots: int) -> None:
    splits = split_count(key_tiles, blocks, slots)
    assert 1 <= splits <= max(1, min(key_tiles, MOST_SPLITS))


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 1000))
def test_no_other_count_takes_fewer_turns(key_tiles: int, blocks: int, slots: int) -> None:
    def turns(splits: int) -> int:
        return -(-blocks * splits // slots) * (-(-key_tiles // splits) + 2)

    best = turns(split_count(key_tiles, blocks, slots))
    assert best == min(map(turns, range(1, min(key_tiles, MOST_SPLITS) + 1)))


@pytest.mark.parametrize("batch", [1, 3, 16, 33, 131])
def test_the_gpu_is_filled(batch: int) -> None:
    entry = planned(DECODE.with_(batch=batch))
    slots = gpus.load("h200").sm_count * entry.blocks_per_sm
    waves = -(-entry.grid // slots)
    assert entry.grid / waves / slots > 0.8


# ---- the launch ---------------------------------------------------------------------------------


def test_a_launch_is_two_kernels_over_packed_rows() -> None:
    launch = plan_of().launch_for(DECODE.with_(batch=2, seq=5), splits=7)
    main, combine = launch.stages
    assert main.grid == 2 * 8 * 3 * 7  # 8 heads x 5 queries are 40 rows, 3 blocks of 16
    assert (combine.grid, combine.block) == (2 * 64 * 5, 32)
    assert combine.entry == f"{main.entry}_combine"
    assert launch.scalars["splits"] == 7
    assert launch.workspaces["o_part"] == ((2, 64, 5, 7, 128), "fp32")
    assert launch.workspaces["m_part"] == launch.workspaces["l_part"] == ((2, 64, 5, 7), "fp32")


def test_a_launch_counts_its_own_parts() -> None:
    """Of another problem than the planned one; the kernel stays the same."""
    plan = plan_of()
    short = plan.launch_for(DECODE.with_(seq_kv=100))
    assert short.scalars["splits"] == 2
    many = plan.launch_for(DECODE.with_(batch=64)).scalars["splits"]
    assert many == split_count(512, 64 * 8, plan.slots)


def test_the_slots_are_not_part_of_the_kernel() -> None:
    plan = plan_of()
    other = replace(plan, slots=7)
    assert other.kernel.stem == plan.kernel.stem
    assert Plan.from_json(other.to_json()) == other
    assert plan.slots == 132 * 2


def test_more_rows_than_an_int_counts_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot run") as caught:
        plan_of().launch_for(DECODE.with_(seq=2**29))
    assert "packed rows" in caught.value.why


# ---- the choice ---------------------------------------------------------------------------------


def test_few_queries_over_many_keys_split_them() -> None:
    entry = planned()
    assert entry.splits > 1
    assert entry.plan
    assert entry.plan.kernel.splits
    assert entry.plan.kernel.pack_gqa
    assert any("without splitting" in reason for reason in entry.reasons)
    assert entry.to_json()["launch"]["splits"] == entry.splits


@pytest.mark.parametrize(
    "problem",
    [
        DECODE.with_(seq=4096, seq_kv=4096),
        DECODE.with_(seq_kv=32),
        DECODE.with_(window=(100, 0)),
        DECODE.with_(softcap=10.0),
        DECODE.with_(bias="alibi"),
        DECODE.with_(bias="dense"),
        DECODE.with_(varlen=True),
    ],
    ids=("many queries", "few keys", "window", "softcap", "alibi", "dense", "varlen"),
)
def test_others_do_not(problem: Problem) -> None:
    assert not planned(problem).splits


def test_a_gpu_without_background_copies_does_not_split() -> None:
    assert not planned(DECODE.with_(dtype="fp16"), "t4").splits


def test_no_prediction_is_below_the_bytes_over_the_bandwidth() -> None:
    for batch in (1, 4, 16):
        entry = planned(DECODE.with_(batch=batch))
        keys = 2 * batch * 8 * 32768 * 128 * 2
        assert entry.time.seconds > keys / gpus.load("h200").hbm_bandwidth


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        (replace(TILE, block_q=48), "not the 16 or 32 rows"),
        (replace(TILE, step_kv=32), "not 32 keys, a multiple of 16, for each of 4 warps"),
        (replace(TILE, stages=64), "shared memory"),
        (replace(TILE, warps=8, block_kv=128, stages=1), "the parts of 8 warps need"),
    ],
)
def test_illegal_tiles_say_why(tile: Tile, why: str) -> None:
    from fasim.legality import Case, broken, sentence

    problem = DECODE.with_(head_dim=16)
    case = Case.of(problem, gpus.load("h200"), "v2_split", "fwd", Tiles.of([tile]))
    assert why in sentence(case, 0, int(broken(case)[0]))


# ---- the model ----------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 70), st.integers(0, 300), st.booleans())
def test_packed_visits_are_counted_by_hand(
    kv_heads: int, group: int, seq: int, seq_kv: int, causal: bool
) -> None:
    problem = Problem(
        heads=kv_heads * group, kv_heads=kv_heads, seq=seq, seq_kv=seq_kv, causal=causal
    )
    steps = keys = 0
    for first in range(0, group * seq, 16):
        query = (min(first + 16, group * seq) - 1) // group
        seen = min(max(query + 1 + seq_kv - seq, 0), seq_kv) if causal else seq_kv
        steps += -(-seen // 64)
        keys += min(-(-seen // 64) * 64, seq_kv)
    counted = packed_visits(problem, Tiles.of([TILE]))
    assert (int(counted.steps[0]), int(counted.keys[0])) == (steps, keys)


def test_without_a_group_packed_rows_are_queries() -> None:
    problem = Problem(heads=4, seq=45, seq_kv=300, causal=True)
    tiles = Tiles.of([TILE])
    packed, plain = packed_visits(problem, tiles), visits(problem, tiles.block_q, tiles.block_kv)
    assert (packed.steps == plain.steps).all()
    assert (packed.keys == plain.keys).all()


def test_keys_are_read_once_for_a_group_however_many_parts() -> None:
    problem = DECODE.with_(heads=71, kv_heads=1, head_dim=64)
    few, many = (
        traffic.issued(problem, "v2_split", "fwd", Tiles.of([TILE]).split(np.array([n]))).at(0)
        for n in (1, 40)
    )
    row_blocks = 5  # 71 rows in blocks of 16
    assert few.reads["k"] == many.reads["k"] == row_blocks * 32768 * 64 * 2
    assert many.writes["o_part"] == 40 * 71 * 64 * 4
    executed = flops.executed(problem, "v2_split", "fwd", Tiles.of([TILE]))
    assert int(executed[0]) == row_blocks * 16 * 32768 * 4 * 64

"""V3 in e4m3: a plan with two kernels, and what the model says of them, counted by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fasim import gpu, planner, properties
from fasim.errors import UsageError
from fasim.model import flops, footprint, traffic
from fasim.model.tiles import Tiles
from fasim.plan import (
    Plan,
    Tile,
    columns_at_once,
    columns_under_way,
    packed_blocks,
    transposed_rows,
    value_box_rows,
)
from fasim.problem import Problem
from fasim.render import render
from fasim.runners.numpy import NumpyRunner

TILE = Tile(block_q=128, block_kv=128, warps=8, stages=2)


def problem(**options: Any) -> Problem:
    shape = {"batch": 2, "heads": 6, "kv_heads": 3, "seq": 300, "seq_kv": 200, "head_dim": 96}
    return Problem(dtype="e4m3", scales="head", **{**shape, **options})


def plan_of(wanted: Problem) -> Plan:
    plan = planner.plan(wanted, gpu.load("h200"), "v3", tile=TILE).plan
    assert plan
    return plan


def test_v_is_laid_out_by_a_kernel_of_its_own() -> None:
    launch = plan_of(problem(head_dim_v=80)).launch_for()
    before, main = launch.stages
    heads, slabs, rows = 2 * 3, 2, 96 + 1  # whole steps, and a row of ones
    assert launch.workspaces == {"vt": ((heads, slabs, rows, 128), "e4m3")}
    assert before.grid == heads * slabs * (96 // 16) * 8 // 64  # 16 keys of 16 columns a thread
    assert (before.entry, before.block) == (f"{main.entry}_transpose", 64)
    assert launch.boxes == {"q": 64, "k": 128, "vt": 96 + 8, "o": 64}
    assert "v_strides" in launch.scalars


@pytest.mark.parametrize(("seq", "seq_kv"), [(0, 200), (300, 0)])
def test_lengths_of_nothing(seq: int, seq_kv: int) -> None:
    launch = plan_of(problem()).launch_for(problem(seq=seq, seq_kv=seq_kv))
    assert (launch.stages[0].grid > 0) == (seq > 0)
    assert launch.workspaces["vt"][0][1] == max(1, -(-seq_kv // 128))


def test_bytes_by_hand() -> None:
    wanted, tiles = problem(causal=True), Tiles.of([TILE])
    asked = traffic.issued(wanted, "v3", "fwd", tiles).at(0)
    keys_of = [min(200, max(0, min(first + 128, 300) - 100)) for first in (-64, 64, 192)]
    slabs = sum(-(-keys // 128) for keys in keys_of)
    assert asked.reads["v"] == 2 * 3 * 200 * 96
    assert asked.writes["vt"] == 2 * 3 * 97 * 256
    assert asked.reads["vt"] == 2 * 6 * slabs * 97 * 128
    assert asked.reads["k_scale"] == 4 * 2 * 6 * 3
    assert footprint.hbm(wanted, "v3", "fwd").workspace == 2 * 3 * 97 * 256


def test_packed_sequences_begin_in_slabs_of_their_own() -> None:
    wanted = problem(varlen=True, batch=3).with_(scales="block")
    launch = plan_of(wanted).launch_for(tokens=(700, 260))
    slabs, rows = 260 // 128 + 3, 96 + 1
    assert launch.workspaces == {"vt": ((slabs, 3, rows, 128), "e4m3")}
    assert launch.inputs["q_scale"] == ((700 // 128 + 3, 6), "fp32")
    assert launch.inputs["k_scale"] == launch.inputs["v_scale"] == ((slabs, 3), "fp32")
    longest = -(-3 * 3 * 2 * 48 // 64)  # if all were as long as it; 48 threads a slab
    assert launch.stages[0].grid == longest
    heads = plan_of(wanted.with_(scales="head")).launch_for(tokens=(700, 260))
    assert heads.inputs["q_scale"] == ((3, 6), "fp32")


@pytest.mark.parametrize("seed", range(3))
def test_no_two_packed_sequences_share_a_block(seed: int) -> None:
    """Sequence i, of tokens from t on, has blocks t // 128 + i and on: all it needs, in bounds."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 127, 128, 129, 300], 50)
    wanted = problem(varlen=True, batch=len(lengths))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    first = ends[:-1] // 128 + np.arange(len(lengths))
    last = first + -(-lengths // 128)  # one past it
    assert (last[:-1] <= first[1:]).all()
    assert last[-1] <= packed_blocks(wanted, int(ends[-1]))


def test_bytes_of_packed_sequences_by_hand() -> None:
    wanted, tiles = problem(varlen=True), Tiles.of([TILE])
    asked = traffic.issued(wanted, "v3", "fwd", tiles).at(0)
    assert asked.writes["vt"] == 2 * 3 * 97 * 256
    producers, transposers = 2 * 6 * 3, 2 * 3 * 2 * 96 // 2  # a thread a tile, many a slab
    assert asked.reads["cu_seqlens_q"] == 8 * producers
    assert asked.reads["cu_seqlens_k"] == 8 * (producers + transposers)
    slabs = 2 * 200 // 128 + 2
    assert footprint.hbm(wanted, "v3", "fwd").workspace == slabs * 3 * 97 * 128
    quantised = wanted.with_(in_dtype="bf16")
    asked = traffic.issued(quantised, "v3", "fwd", tiles).at(0)
    blocks_q, blocks_k = 2 * 6 * 3, 2 * 3 * 2
    assert asked.reads["cu_seqlens_q"] == 8 * (producers + 2 * 256 * blocks_q)
    assert asked.reads["cu_seqlens_k"] == 8 * (producers + 2 * 256 * 2 * blocks_k)
    assert asked.writes["most"] == 4 * (blocks_q + 2 * blocks_k)
    nothing = traffic.issued(quantised.with_(seq_kv=0), "v3", "fwd", tiles).at(0)
    assert nothing.writes["vt"] == 0


def test_work_counts_the_column_of_ones() -> None:
    wanted = problem(seq=128, seq_kv=128)
    done = flops.executed(wanted, "v3", "fwd", Tiles.of([TILE]))[0]
    assert done == 2 * 6 * 2 * 128 * 128 * (96 + 96 + 8)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "warps", "columns"),
    [
        *((64, 64, 8, 72), (128, 128, 8, 136), (128, 96, 8, 104), (256, 32, 8, 40)),
        *((64, 144, 8, 56), (64, 192, 8, 56), (64, 224, 8, 40), (256, 256, 8, 56)),
        *((64, 64, 12, 72), (96, 96, 12, 72), (128, 128, 12, 72)),
    ],
)
def test_registers_by_hand(head_dim: int, head_dim_v: int, warps: int, columns: int) -> None:
    """S, whose registers the sums of two rounds of so many columns of P V take later, P, O with the
    sums of rounded weights, and ten more."""
    wanted = problem(head_dim=head_dim, head_dim_v=head_dim_v)
    tiles = Tiles.of([replace(TILE, block_q=16 * warps, warps=warps)])
    assert columns_at_once(head_dim_v, warps) == columns
    used = footprint.registers(wanted, "v3", "fwd", tiles)[0]
    sums = min(columns, transposed_rows(head_dim_v) // 2)
    assert used == max(64, sums, columns // 2) + 16 + -(-head_dim_v // 32) * 16 + 2 + 10


def test_values_come_in_one_round_or_in_rounds_of_as_many_columns() -> None:
    """Where one is too wide two are under way; none has only the 8 columns with the ones."""
    for dv, (warps, one, most) in itertools.product(
        range(16, 257, 16), ((8, 136, 56), (12, 96, 72))
    ):
        rows, columns = transposed_rows(dv), columns_at_once(dv, warps)
        if rows <= one:
            assert columns == rows
        else:
            assert columns in (most, most - 16)
            assert rows % columns != 8
        assert columns_under_way(dv, warps) == min(rows, 2 * columns)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"varlen": True}, 0),
        ({"window": (9, 9)}, 12),
        ({"bias": "dense_fp32"}, 40),
        ({"bias": "dense", "in_dtype": "bf16", "window": (9, 9), "softcap": 30.0}, 40),
    ],
)
def test_registers_of_options_by_hand(options: dict[str, Any], more: int) -> None:
    tiles, plain = Tiles.of([TILE]), problem()
    used, without = (
        footprint.registers(p, "v3", "fwd", tiles)[0] for p in (problem(**options), plain)
    )
    assert used == without + more


def test_a_dense_bias_has_the_type_of_the_inputs() -> None:
    for in_dtype, size in (("bf16", 2), ("fp16", 2)):
        wanted = problem(bias="dense", in_dtype=in_dtype)
        assert plan_of(wanted).launch_for().inputs["bias"] == ((2, 6, 300, 200), in_dtype)
        asked = traffic.issued(wanted, "v3", "fwd", Tiles.of([TILE])).at(0)
        assert asked.reads["bias"] == 2 * 6 * 300 * 200 * size


@pytest.mark.parametrize(("dv", "box"), [(64, 72), (128, 136), (192, 200), (224, 232), (256, 88)])
def test_tma_brings_v_in_equal_boxes(dv: int, box: int) -> None:
    """A box has 256 rows at most: 264 come in three."""
    assert value_box_rows(dv) == box
    assert plan_of(problem(head_dim=64, head_dim_v=dv)).launch_for().boxes["vt"] == box


def test_shared_memory_by_hand() -> None:
    used = footprint.smem_bytes(
        problem(head_dim=192, head_dim_v=128), "v3", "fwd", Tiles.of([TILE])
    )
    q, o, k, v = 2 * 128 * 256, 128 * 256, 2 * 128 * 256, 2 * 136 * 128
    assert used[0] == q + o + k + v + 1024


def test_keys_come_in_whole_slabs() -> None:
    data = plan_of(problem()).to_json()
    data["kernel"]["tile"]["block_kv"] = 96
    with pytest.raises(UsageError, match="makes no sense") as refused:
        Plan.from_json(data)
    assert refused.value.why == "block_kv 96 is not one slab of 128 keys of V"


def test_the_order_of_keys_is_that_of_the_weights() -> None:
    """Of 16 columns a thread scores 2t, 2t + 1, 2t + 8 and 2t + 9, four bytes of a register, so
    places 4t to 4t + 3 of V transposed: the expressions in the kernel, read as Python."""
    source = render(plan_of(problem())).source
    (line,) = (x for x in source.splitlines() if "v + key_at(" in x)
    (body,) = (x for x in source.splitlines() if "return place / 16 * 16 +" in x)
    place_of = line.split("key_at(")[1].partition(")")[0]
    key_at = body.split("return ")[1].rstrip(";").replace("/", "//")
    got = [eval(key_at, {"place": eval(place_of, {"j": j})}) for j in range(32)]
    columns = [[2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9] for t in range(4)]
    assert got == [16 * half + key for half in range(2) for key in np.ravel(columns)]


@pytest.mark.parametrize("scales", ["head", "block"])
def test_keys_that_share_a_scale_factor_are_not_parted(scales: str) -> None:
    """A property that no input of a kernel suits is skipped: a search for one would end in vain."""
    name = "splitting_keys_and_merging_by_lse_gives_the_whole"
    (found,) = (one for one in properties.PROPERTIES if one.name == name)
    skipped = found.skipped(plan_of(problem().with_(scales=scales)), NumpyRunner())
    assert bool(skipped) == (scales == "block")

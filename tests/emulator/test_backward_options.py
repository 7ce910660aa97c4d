"""Backward kernels that repeat bit for bit, and those whose keys four warps share, hold every
property with every option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasim import planner, properties
from fasim.gpu import load
from fasim.plan import BACKWARD_STAGES, FORMS, Tile
from fasim.problem import Problem
from fasim.render import render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

TILES = {
    "bf16": Tile(block_q=32, block_kv=32, warps=2),
    "fp32": Tile(block_q=16, block_kv=32, warps=4, p_in="shared"),
}
FOUR = Tile(block_q=64, block_kv=32, warps=4, stages=2, p_in="shared", sharers=4)
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {"window": (20, 5), "softcap": 1.0, "bias": "dense_fp32"}),
    ("bf16", {"window": (40, 9), "bias": "alibi", "varlen": True}),
    ("fp32", {"window": (9, 30), "softcap": 1.0, "bias": "dense"}),
)


@pytest.mark.parametrize(("dtype", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["v1", *FORMS])
@pytest.mark.parametrize("seed", range(2))
def test_every_property_holds(kind: str, dtype: str, options: dict[str, Any], seed: int) -> None:
    form = kind if kind in FORMS else ""
    problem = Problem(
        dtype=dtype, head_dim=40, head_dim_v=24, pass_="bwd", deterministic=bool(form), **options
    )
    algo, how = "v2" if form else "v1", TILES[dtype]
    how = replace(how, stages=1 if algo == "v1" else BACKWARD_STAGES + how.sharing - 1)
    plan = planner.plan(problem, load("h200"), algo, tile=how, form=form).plan
    assert plan
    properties.verify(render(plan), EmulatorRunner(workers=1), examples=1, seed=seed).check()


OF_FOUR: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("a100-80gb", "", {"head_dim": 80, "head_dim_v": 48, "dtype": "fp16", "causal": True}),
    ("h200", "", {"head_dim": 40, "window": (20, 5), "softcap": 1.0, "bias": "dense_fp32"}),
    ("h200", "ordered", {"head_dim": 64, "window": (40, 9), "bias": "alibi", "varlen": True}),
    ("a100-80gb", "second_pass", {"head_dim": 64, "head_dim_v": 33, "softcap": 1.0}),
    ("h200", "second_pass", {"head_dim": 64, "causal": True, "varlen": True}),
)


@pytest.mark.parametrize(("gpu", "form", "options"), OF_FOUR, ids=str)
def test_every_property_holds_where_four_warps_share_keys(
    gpu: str, form: str, options: dict[str, Any]
) -> None:
    problem = Problem(**{"dtype": "bf16", **options}, pass_="bwd", deterministic=bool(form))
    plan = planner.plan(problem, load(gpu), "v2", tile=FOUR, form=form).plan
    assert plan
    runner = EmulatorRunner(workers=1, schedules=3)
    properties.verify(render(plan), runner, examples=1, seed=5).check()

"""Backward kernels that repeat bit for bit hold every property with every option."""

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

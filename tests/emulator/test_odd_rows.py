"""V2 in the form of long rows that are no power of two: every property holds in any schedule."""

from __future__ import annotations

from typing import Any

import pytest
from thorough import share

from fasim import gpu, planner, properties
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.render import render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

ONE = Tile(block_q=32, block_kv=32, warps=2)
TWO, THREE = (Tile(block_q=32, block_kv=32, warps=2, stages=n) for n in (2, 3))
CASES: dict[str, tuple[Tile, dict[str, Any]]] = {
    "shared by four": (TWO, {"head_dim": 160, "causal": True}),
    "shared by eight": (TWO, {"head_dim": 192, "window": (40, 9), "softcap": 10.0}),
    "two threads a row": (TWO, {"head_dim": 176, "bias": "alibi"}),
    "shorter values": (TWO, {"head_dim": 144, "head_dim_v": 40, "dtype": "bf16"}),
    "longer values": (TWO, {"head_dim": 136, "head_dim_v": 256, "causal": True}),
    "packed": (TWO, {"head_dim": 160, "dtype": "bf16", "varlen": True}),
    "three pairs of tiles": (THREE, {"head_dim": 144, "causal": True}),
    "one pair": (ONE, {"head_dim": 224, "causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_property_holds(name: str) -> None:
    tile, options = CASES[name]
    problem = Problem(heads=2, kv_heads=1, seq=150, seq_kv=90, **options)
    plan = planner.plan(problem, gpu.load("h200"), "v2", tile=tile).plan
    assert plan
    assert plan.kernel.odd_rows
    assert plan.kernel.paired == (tile.stages > 1)
    properties.verify(render(plan), EmulatorRunner(schedules=share(3)), examples=share(2)).check()

"""V3 in 16 bits: rows of one warp that move twice in a tile, each for another reason."""

from __future__ import annotations

import numpy as np
import pytest

from fasim import planner
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Case, Trial
from fasim.render import Kernel, parse, render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

KEYS = 32  # of a tile
AGAIN = "all = again ? all * factor : factor;"


def worst_error(kernel: Kernel) -> float:
    """Row 0 has scores so huge that it is settled anew in every tile, and they grow a little, by a
    factor of O; row 1 of the same warp outgrows its reference in every tile."""
    case = Case(heads=1, kv_heads=1, seq=64, seq_kv=4 * KEYS)
    trial = Trial(kernel, EmulatorRunner(workers=1), case)
    q, k, v = (trial.arrays[name].copy() for name in "qkv")
    step = 3 - np.arange(4 * KEYS) // KEYS  # tiles are walked from the last
    q[...], k[...] = 0, 0
    q[0, 0, 0, :2], q[0, 0, 1, 2] = (4096, 1), 16
    k[..., 0], k[..., 1], k[..., 2] = 512, 6 * step, 30 * step
    outputs = trial.run({"q": q, "k": k, "v": v})
    exponents = (q[0, 0].astype(float) @ k[0, 0].astype(float).T) * trial.problem.scale
    weights = np.exp(exponents - exponents.max(1, keepdims=True))
    wanted = weights / weights.sum(1, keepdims=True) @ v[0, 0].astype(float)
    return float(abs(outputs["o"][0, 0] - wanted).max())


def test_a_row_keeps_its_factor_where_others_move_again() -> None:
    problem = Problem(head_dim=64, dtype="fp16")
    tile = Tile(block_q=128, block_kv=KEYS, warps=8, stages=2)
    plan = planner.plan(problem, load("h200"), "v3", tile=tile).plan
    assert plan
    kernel = render(plan)
    assert kernel.source.count(AGAIN) == 1
    assert worst_error(kernel) < 2e-3
    assert worst_error(parse(kernel.source.replace(AGAIN, "all = factor;"))) > 0.1

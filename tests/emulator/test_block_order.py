"""The order in which V2 starts its blocks under a causal mask: device/order.cuh."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu, planner, properties
from fasim.emulator.program import Program
from fasim.plan import Plan, Tile
from fasim.problem import Problem
from fasim.properties import Case, Trial
from fasim.render import Kernel, render, render_text
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

KERNEL = """//% set kernel = {"dtype": "bf16"}
//% include "device/order.cuh"

extern "C" __global__ void list(int* y, int tiles, int all_heads, int together) {
  const auto [head, tile] = sorted(blockIdx.x, tiles, all_heads, together);
  y[blockIdx.x] = head * tiles + tile;
}
"""
TEXT = render_text(KERNEL)


def listed(tiles: int, heads: int, together: int) -> np.ndarray:
    """(head, tile) of every block, in the order of their numbers."""
    y = np.zeros(tiles * heads, np.int32)
    numbers = {"tiles": tiles, "all_heads": heads, "together": together}
    scalars = {name: np.int32(value).tobytes() for name, value in numbers.items()}
    Program.load(TEXT, "list").launch({"y": y, **scalars}, ["y"], grid=len(y), block=1)
    return np.stack(np.divmod(y, tiles), axis=1)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 25))
def test_every_tile_is_one_blocks_and_those_of_a_group_come_longest_first(
    tiles: int, heads: int, together: int
) -> None:
    found = listed(tiles, heads, together)
    expected, first = [], 0
    for last in range(heads % together or together, heads + together, together):
        group = range(first, min(last, heads))
        expected += [(head, tile) for tile in range(tiles) for head in group]
        first = last
    assert found.tolist() == [list(pair) for pair in expected]
    assert len(set(expected)) == tiles * heads


def test_one_head_together_is_head_by_head() -> None:
    assert listed(tiles=3, heads=2, together=1).tolist() == [
        *([0, 0], [0, 1], [0, 2]),
        *([1, 0], [1, 1], [1, 2]),
    ]


# ---- kernels ------------------------------------------------------------------------------------

SMALL = Tile(block_q=32, block_kv=16, warps=2)
BACKWARD = Tile(block_q=32, block_kv=32, warps=2, stages=2)


def kernel_of(together: int, **options: object) -> Kernel:
    """A kernel whose launches take so many heads of CASE together."""
    problem = Problem(head_dim=32, dtype="bf16", causal=True, **options)  # type: ignore[arg-type]
    plan = planner.plan(problem, gpu.load("a100-80gb"), "v2", tile=SMALL).plan
    assert plan
    return render(replaced(plan, together))


def replaced(plan: Plan, together: int) -> Plan:
    return replace(plan, slots=together * TILES, l2_bytes=0)


CASE = Case(batch=1, heads=6, kv_heads=3, seq=70, seq_kv=80)
TILES = 3  # of 32 queries, or keys


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("together", [1, 4, 6])
@pytest.mark.parametrize("name", ["matches_float64", "bytes_moved_are_bytes_predicted"])
def test_a_kernel_is_right_whatever_the_heads_together(
    name: str, together: int, varlen: bool
) -> None:
    (property_,) = (p for p in properties.PROPERTIES if p.name == name)
    trial = Trial(kernel_of(together, varlen=varlen), EmulatorRunner(workers=1), CASE)
    launch = trial.kernel.plan.launch_for(trial.problem)
    assert launch.scalars["heads_together"] == together
    property_.check(trial)


@pytest.mark.parametrize(("form", "together"), [("", 1), ("", 2), ("second_pass", 2)])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("name", ["matches_float64", "bytes_moved_are_bytes_predicted"])
def test_a_backward_kernel_too(name: str, varlen: bool, form: str, together: int) -> None:
    (property_,) = (p for p in properties.PROPERTIES if p.name == name)
    problem = Problem(head_dim=32, dtype="bf16", causal=True, pass_="bwd", varlen=varlen)
    device = gpu.load("h200")
    given = problem.with_(deterministic=bool(form))
    plan = planner.plan(given, device, "v2", tile=BACKWARD, form=form).plan
    assert plan
    trial = Trial(render(replaced(plan, together)), EmulatorRunner(workers=1), CASE)
    launch = trial.kernel.plan.launch_for(trial.problem)
    assert launch.scalars["heads_together"] == together
    property_.check(trial)

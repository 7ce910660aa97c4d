"""V3 on packed rows in the emulator: every group that fills a box, any number of queries."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from thorough import share

from fasim import planner, properties
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Trial, parse_replay
from fasim.render import Kernel, render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

TILE = Tile(block_q=128, block_kv=64, warps=8, stages=2)
THREE = Tile(block_q=192, block_kv=48, warps=12, stages=2)
KERNELS = {
    "causal": (Problem(head_dim=128, dtype="bf16", causal=True), TILE),
    "full": (Problem(head_dim=64), TILE),
    "window": (Problem(head_dim=64, dtype="bf16", window=(40, 9), softcap=30.0), THREE),
}
REACH = {"causal": "", "full": "", "window": " left=40 right=9 softcap=30"}
each_kernel = pytest.mark.parametrize("name", KERNELS)


@cache
def kernel_of(name: str, form: str = "packed") -> Kernel:
    problem, tile = KERNELS[name]
    plan = planner.plan(problem, load("h200"), "v3", tile=tile, form=form).plan
    assert plan
    assert plan.kernel.form == form
    return render(plan)


def trial(name: str, line: str, form: str = "packed") -> Trial:
    case = parse_replay(line + REACH[name])[1]
    return Trial(kernel_of(name, form), EmulatorRunner(workers=1), case)


@each_kernel
def test_every_property_holds(name: str) -> None:
    properties.verify(kernel_of(name), EmulatorRunner(workers=1), examples=share(4), seed=1).check()


@each_kernel
@pytest.mark.parametrize("group", [1, 2, 8, 64])
@pytest.mark.parametrize("queries", [1, 3, 17, 50])
def test_rows_of_a_group_fill_a_tile(name: str, group: int, queries: int) -> None:
    """As a rule no whole number of tiles; what is read and multiplied is what the model counts."""
    line = f"heads={2 * group} kv_heads=2 seq={queries} seq_kv=150 layout=padded seed={group}"
    one = trial(name, line)
    properties.matches_float64(one)
    properties.bytes_moved_are_bytes_predicted(one)
    properties.matrix_instructions_do_the_flops_predicted(one)


@each_kernel
@pytest.mark.parametrize("layout", properties.LAYOUTS)
def test_boxes_follow_strides(name: str, layout: str) -> None:
    line = f"batch=2 heads=12 kv_heads=3 seq=40 seq_kv=70 layout={layout} values=large"
    properties.matches_float64(trial(name, line))


@each_kernel
@pytest.mark.parametrize(("queries", "keys"), [(90, 20), (40, 0), (33, 64), (0, 50)])
def test_more_queries_than_keys(name: str, queries: int, keys: int) -> None:
    """Tiles of which no row sees a key, and rows that see none: 0, and -inf."""
    one = trial(name, f"heads=8 kv_heads=2 seq={queries} seq_kv={keys}")
    properties.matches_float64(one)
    properties.outputs_are_fully_written(one)
    properties.bytes_moved_are_bytes_predicted(one)
    got, blind = one.outputs, max(0, queries - keys)
    if name == "causal" or not keys:
        assert not got["o"][:, :, :blind].astype(np.float64).any()
        assert (got["lse"][:, :, :blind] == -np.inf).all()


@each_kernel
@pytest.mark.parametrize("values", ["normal", "falling"])
def test_packing_changes_no_bit(name: str, values: str) -> None:
    """What becomes of a row depends on no other row of its tile."""
    line = f"heads=8 kv_heads=1 seq=45 seq_kv=130 values={values}"
    packed, alone = (trial(name, line, form).outputs for form in ("packed", "unpacked"))
    for output, x in packed.items():
        assert x.tobytes() == alone[output].tobytes()


def test_keys_are_read_once_for_a_group() -> None:
    line = "heads=16 kv_heads=2 seq=16 seq_kv=100"
    reads = {}
    for form in ("packed", "unpacked"):
        one = trial("full", line, form)
        properties.matches_float64(one)
        reads[form] = one.runner.last.reads  # type: ignore[attr-defined]
    assert reads["unpacked"]["k"] == 8 * reads["packed"]["k"]
    assert reads["unpacked"]["q"] == reads["packed"]["q"]

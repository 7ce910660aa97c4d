"""V3 in e4m3 where a weight outgrows its type: a key that one row alone sees as heavy as all others
together, in every kind of tile. A looked-at tile finds it first; in another one the row is
done again by its warp, before the tile's products or after, and no other row's bits change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fasim import planner, properties
from fasim.gpu import load
from fasim.plan import Tile, columns_at_once, transposed_rows, v3_layout
from fasim.problem import Problem
from fasim.properties import Case, Trial
from fasim.render import Kernel, render
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]

pytestmark = pytest.mark.emulator

TWO = Tile(block_q=128, block_kv=128, warps=8, stages=2, registers=240)
THREE = Tile(block_q=192, block_kv=128, warps=12, stages=2, registers=160)
KERNELS: dict[str, tuple[Tile, dict[str, Any]]] = {
    "d64": (THREE, {"head_dim": 64}),
    "d64 blocks": (TWO, {"head_dim": 64, "scales": "block"}),
    "d128": (TWO, {"head_dim": 128}),
    "d128, two rounds": (THREE, {"head_dim": 128}),
    "d256, five rounds": (TWO, {"head_dim": 256}),
    "d256 to 64, one Q": (replace(TWO, stages=4), {"head_dim": 256, "head_dim_v": 64}),
}
TILES = 6  # and a part of one, which is walked first: looked at are 5 and 2
FIRST, LOOKED, UNLOOKED, LAST = TILES, 2, 3, 0
RISE = 4.0  # exp(4) = 55
CASE = Case(heads=1, kv_heads=1, seq=250, seq_kv=128 * TILES + 40)


@cache
def kernel(name: str) -> Kernel:
    tile, options = KERNELS[name]
    problem = Problem(dtype="e4m3", **options)
    plan = planner.plan(problem, load("h200"), "v3", tile=tile).plan
    assert plan
    return render(replace(plan, slots=1))


def inputs(
    name: str, rows: tuple[int, ...], tiles: tuple[int, ...], seed: int
) -> tuple[Trial, Any]:
    """Unit-normal inputs where each of ``tiles``, in the order in which they are walked, has a key
    that ``rows`` see exp(3 + RISE) times as heavy as others, exp(RISE) times from tile to tile,
    and that nobody else sees at all."""
    trial = Trial(kernel(name), EmulatorRunner(workers=1), replace(CASE, seed=seed))
    rng = np.random.default_rng(seed)
    made = {n: rng.standard_normal(trial.arrays[n].shape) for n in ("q", "k", "v")}
    made["q"][..., 0] = made["k"][..., 0] = 0
    made["q"][:, :, list(rows), 0] = 8
    for count, tile in enumerate(tiles, 1):
        made["k"][:, :, 128 * tile + 37, 0] = (RISE * count + 3) / (8 * trial.problem.scale)
    return trial, properties.quantised(made, trial.kernel.plan.kernel.scales)


def run(trial: Trial, arrays: Any) -> tuple[Any, int]:
    """Outputs, and how many products came from a warp alone: none where no row was done again."""
    outputs = trial.run(arrays)
    assert isinstance(trial.runner, EmulatorRunner)
    alone = trial.runner.last.operations.get("mma")
    return outputs, alone.count if alone else 0


def check(trial: Trial, arrays: Any, outputs: Any) -> None:
    for output, (want, limit) in trial.expected_of(arrays, trial.problem).wanted.items():
        properties.worst_error(output, outputs[output], want, limit)


def test_the_kernels_are_what_they_are_here_for() -> None:
    """Rounds of products, and tiles of Q in shared memory."""
    found = {}
    for name in KERNELS:
        spec = kernel(name).plan.kernel
        columns = columns_at_once(spec.head_dim_v, spec.tile.warps)
        found[name] = (
            -(-transposed_rows(spec.head_dim_v) // columns),
            v3_layout(spec, spec.tile)[0],
        )
    assert found == {
        "d64": (1, 2),
        "d64 blocks": (1, 2),
        "d128": (1, 2),
        "d128, two rounds": (2, 2),
        "d256, five rounds": (5, 2),
        "d256 to 64, one Q": (1, 1),
    }


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("tiles", "again"),
    [((FIRST,), False), ((LOOKED,), False), ((UNLOOKED,), True), ((LAST,), True)],
    ids=["first", "looked at", "not looked at", "last"],
)
def test_one_row_outgrows_its_reference(name: str, tiles: tuple[int, ...], again: bool) -> None:
    """And only where nobody looks is it done again; its neighbours' bits are those of inputs where
    it sees nothing."""
    hit = 133
    trial, arrays = inputs(name, (hit,), tiles, seed=2)
    outputs, alone = run(trial, arrays)
    assert (alone > 0) == again
    check(trial, arrays, outputs)
    calm = {**arrays, "q": arrays["q"].copy()}
    calm["q"][:, :, hit, 0] = 0
    quiet, none = run(trial, calm)
    assert none == 0
    others = np.arange(CASE.seq) != hit
    for output, x in outputs.items():
        np.testing.assert_array_equal(x[:, :, others], quiet[output][:, :, others])
        assert (x[:, :, hit] != quiet[output][:, :, hit]).any()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_outgrow_it_again_and_again(name: str, seed: int) -> None:
    """In neighbouring tiles, both rows of a thread and one of them, in every warp."""
    rows = tuple(row for row in range(CASE.seq) if row % 5 == 0 or row in (8, 9, 140))
    trial, arrays = inputs(name, rows, (UNLOOKED, LOOKED, 1, LAST), seed)
    trial.runner.next_seed = seed  # type: ignore[attr-defined]
    outputs, alone = run(trial, arrays)
    assert alone > 0
    check(trial, arrays, outputs)


@pytest.mark.parametrize("name", KERNELS)
def test_other_queries_change_nothing_where_rows_are_done_again(name: str) -> None:
    case = replace(CASE, values="spikes", seed=3)
    properties.other_queries_change_nothing(Trial(kernel(name), EmulatorRunner(workers=1), case))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(4))
def test_a_row_of_nan_changes_no_bit_of_others(name: str, seed: int) -> None:
    """It never settles, so its warp takes the long way in every tile: others are not to notice."""
    trial, arrays = inputs(name, (), (FIRST,), seed)
    outputs, _ = run(trial, arrays)
    hit = np.arange(CASE.seq) % 16 == 5  # one of each warp
    nan = {**arrays, "q": arrays["q"].copy()}
    nan["q"][:, :, hit] = np.nan
    broken, _ = run(trial, nan)
    for output, x in outputs.items():
        np.testing.assert_array_equal(x[:, :, ~hit], broken[output][:, :, ~hit])

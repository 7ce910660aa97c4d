"""Kernels that quantise, in the emulator: every bit that they leave for the main kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fasim import planner, quantise
from fasim.gpu import load
from fasim.plan import tensor_shapes
from fasim.problem import Problem
from fasim.reference import DTYPES
from fasim.render import render
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]

pytestmark = pytest.mark.emulator

SHAPE: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "seq": 200, "seq_kv": 300}
CASES: tuple[dict[str, Any], ...] = (
    {"scales": "block", "incoherent": True},
    {"scales": "head", "in_dtype": "fp16", "incoherent": True, "head_dim": 64},
    {"scales": "tensor", "head_dim": 80, "head_dim_v": 48},
    {"scales": "block", "head_dim": 112},
    {"scales": "block", "incoherent": True, "head_dim": 256, "head_dim_v": 64},
    {"scales": "tensor", "incoherent": True, "head_dim": 16},
    {"scales": "head", "incoherent": True, "head_dim": 32, "seq_kv": 0},
    {"scales": "block", "head_dim": 32, "seq_kv": 0},
)


def problem(**options: Any) -> Problem:
    return Problem(dtype="e4m3", **{"in_dtype": "bf16", **SHAPE, **options})


def drawn(wanted: Problem) -> dict[str, Array]:
    """Numbers of all sizes."""
    rng, shapes = np.random.default_rng(0), tensor_shapes(wanted)
    sizes = {name: np.exp(2 * rng.standard_normal(shapes[name])) for name in "qkv"}
    made = {name: x * rng.standard_normal(x.shape) for name, x in sizes.items()}
    return {name: x.astype(DTYPES[wanted.in_dtype]) for name, x in made.items()}


def left_behind(wanted: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """Outputs and workspaces of a launch."""
    plan = planner.plan(wanted, load("h200"), "v3").plan
    assert plan
    launch = plan.launch_for()
    everything = {**launch.outputs, **launch.workspaces}
    shown = replace(launch, outputs=everything, workspaces={})
    return EmulatorRunner().run(render(plan), arrays, shown)


def transposed(v: Array, slabs: int, rows: int, width: int) -> Array:
    """V (batch, heads, seq, dim) in e4m3 as bytes in the layout of the main kernel."""
    batch, heads, seq, columns = v.shape
    padded = np.zeros((batch, heads, slabs * width, rows), np.uint8)
    padded[:, :, :seq, :columns] = v.view(np.uint8)
    padded[..., -1] = 0x38  # one
    sixteen = [2 * t + i for t in range(4) for i in (0, 1, 8, 9)]
    order = (16 * np.arange(slabs * width // 16)[:, None] + sixteen).ravel()
    in_order = padded[:, :, order].reshape(batch * heads, slabs, width, rows)
    return in_order.swapaxes(2, 3)


def check_bits(wanted: Problem, arrays: dict[str, Array]) -> None:
    got, want = left_behind(wanted, arrays), quantise.stored(arrays, wanted)
    for name in ("q_scale", "k_scale", "v_scale"):
        np.testing.assert_array_equal(got[name], want[name], name)
    for name in ("q", "k"):
        stored = got[f"{name}8"].view(np.uint8)
        np.testing.assert_array_equal(stored, want[name].view(np.uint8), name)
    vt = got["vt"].view(np.uint8)
    np.testing.assert_array_equal(vt, transposed(want["v"], *vt.shape[1:]))


@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_bit_is_that_of_the_numpy_twin(options: dict[str, Any]) -> None:
    wanted = problem(**options)
    check_bits(wanted, drawn(wanted))


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_infinities_nan_and_zeros(scales: str) -> None:
    """They take no part in a scale factor; a block of zeros has one too."""
    wanted = problem(scales=scales, head_dim=32)
    arrays = drawn(wanted)
    for n, name in enumerate("qkv"):
        arrays[name][0, 0, 7 + n, 3] = np.inf
        arrays[name][0, 1, 130, 4 + n] = -np.inf
        arrays[name][1, 0, 5] = np.nan
        arrays[name][1, 1] = 0
    check_bits(wanted, arrays)

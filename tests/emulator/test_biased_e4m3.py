"""V3 in e4m3 with a dense bias: every property, and weights that never outgrow their type."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from thorough import share

from fasim import gpu, planner, properties
from fasim.emulator.program import Fault
from fasim.errors import CheckFailed
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.reference import DTYPES
from fasim.render import Kernel, parse, render
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]

pytestmark = pytest.mark.emulator

THREE = Tile(block_q=192, block_kv=128, stages=2, warps=12, registers=160)
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"head_dim": 32, "bias": "dense_fp32", "scales": "head"},
    "fp32, factors of blocks": {
        **{"head_dim": 64, "bias": "dense_fp32", "scales": "block", "window": (90, 7)},
        **{"softcap": 20.0},
    },
    "bf16": {"head_dim": 36, "bias": "dense", "in_dtype": "bf16", "scales": "block"},
    "fp16": {"head_dim": 32, "bias": "dense", "in_dtype": "fp16", "causal": True, "softcap": 9.0},
    "three consumers": {"head_dim": 32, "bias": "dense_fp32", "scales": "block"},
    "two rounds": {"head_dim": 32, "head_dim_v": 160, "bias": "dense_fp32", "causal": True},
}


@cache
def kernel_of(name: str) -> Kernel:
    shape = {"batch": 2, "heads": 2, "kv_heads": 1, "seq": 150, "seq_kv": 90}
    problem = Problem(**{**shape, "dtype": "e4m3", **CASES[name]})
    tile = THREE if name == "three consumers" else None
    plan = planner.plan(problem, gpu.load("h200"), "v3", tile=tile).plan
    assert plan
    return render(plan)


@pytest.mark.parametrize("name", CASES)
def test_every_property_holds(name: str) -> None:
    properties.verify(kernel_of(name), EmulatorRunner(), examples=share(2)).check()


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_computed_again(name: str) -> None:
    """The maximum is looked for in every tile, so the text has no way back to the scores."""
    source = kernel_of(name).source
    for word in ("few_scores", "few_values", "is_looked_at", "lower(", "mma_m16n8k32"):
        assert word not in source


def attend(kernel: Kernel, bias: Array) -> Array:
    """O of two heads, all of whose scores are 0, for a bias (seq, seq_kv) and V of the key / 512:
    rows of one number, in e4m3 exact for keys that are multiples of 32."""
    seq, keys = bias.shape
    problem = kernel.plan.problem.with_(batch=1, seq=seq, seq_kv=keys)
    launch = kernel.plan.launch_for(problem)
    arrays = {name: np.zeros(x[0], DTYPES[x[1]]) for name, x in launch.inputs.items()}
    arrays |= {name: np.ones(x.shape, x.dtype) for name, x in arrays.items() if "scale" in name}
    arrays["v"][...] = (np.arange(keys) // 32 * 32 / 512)[:, None]
    arrays["bias"][...] = bias
    return EmulatorRunner().run(kernel, arrays, launch)["o"].astype(np.float64)


def rising() -> Array:
    """A bias that makes the first tile, which comes last, outweigh all others by e^9."""
    return np.where(np.arange(512) < 128, 9.0, 0.0) + np.zeros((70, 1))


def test_weights_that_grow_from_tile_to_tile() -> None:
    o = attend(kernel_of("fp32"), rising())
    np.testing.assert_allclose(o, np.mean([0, 32, 64, 96]) / 512, rtol=0.01)


def test_a_bias_hides_keys_and_rows() -> None:
    bias = np.where(np.arange(512) // 32 == 7, 0.0, -np.inf) + np.zeros((70, 1))
    bias[33] = -np.inf
    o = attend(kernel_of("fp32"), bias)
    np.testing.assert_allclose(np.delete(o, 33, 2), 224 / 512, rtol=0.01)
    assert (o[:, :, 33] == 0).all()


BUGS = {
    "a maximum is looked for only at first": (
        "const bool looks = true;",
        "const bool looks = false;",
    ),
    "a bias of another head": ("work.head * bias_strides.head", "0 * bias_strides.head"),
}


def test_a_maximum_that_is_not_looked_for_is_missed() -> None:
    o = attend(edited("a maximum is looked for only at first"), rising())
    assert (abs(o / (np.mean([0, 32, 64, 96]) / 512) - 1) > 0.1).all()


def test_the_bias_of_another_head_is_found() -> None:
    with pytest.raises((Fault, CheckFailed)):
        properties.verify(
            edited("a bias of another head"), EmulatorRunner(), examples=4, hurry=True
        ).check()


def edited(bug: str) -> Kernel:
    kernel, (right, wrong) = kernel_of("fp32"), BUGS[bug]
    assert kernel.source.count(right) == 1
    return parse(kernel.source.replace(right, wrong))

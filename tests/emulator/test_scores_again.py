"""V3 in 16 bits where weights outgrow their range: a warp computes scores again from Q and K as
they lie in global memory, whatever lies around them, for their tiles have left shared memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fasim import planner, properties
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Case, Trial
from fasim.render import Kernel, render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

TILE = Tile(block_q=128, block_kv=32, warps=8, stages=2)
KERNELS: dict[str, dict[str, Any]] = {
    "full": {"head_dim": 64},
    "causal": {"head_dim": 80, "causal": True, "dtype": "bf16"},  # two slabs, the second in part
    "window": {"head_dim": 40, "window": (130, 9)},  # half of the last matrix step is zeros
    "softcap": {"head_dim": 128, "softcap": 60.0},
    "alibi": {"head_dim": 64, "bias": "alibi"},
    "wide": {"head_dim": 33, "dtype": "bf16"},  # K is copied to wider rows
    "packed": {"head_dim": 64, "causal": True},
    "varlen": {"head_dim": 64, "varlen": True},
    "varlen wide": {"head_dim": 33, "varlen": True},
}
SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "seq": 100, "seq_kv": 250, "values": "falling"}
each_kernel = pytest.mark.parametrize("name", KERNELS)


@cache
def kernel_of(name: str) -> Kernel:
    form = "packed" if name == "packed" else ""
    plan = planner.plan(Problem(**KERNELS[name]), load("h200"), "v3", tile=TILE, form=form).plan
    assert plan
    return render(plan)


def trial(name: str, layout: str = "contiguous", batch: int = 2) -> Trial:
    left, right = KERNELS[name].get("window", (-1, -1))
    case = Case(**SHAPE, batch=batch, layout=layout, left=left, right=right)
    return Trial(kernel_of(name), EmulatorRunner(workers=2), case)


def alone(one: Trial) -> int:
    """Products that warps computed by themselves in the latest launch."""
    assert isinstance(one.runner, EmulatorRunner)
    return one.runner.last.operations["mma"].count


@each_kernel
def test_scores_computed_again_are_right(name: str) -> None:
    """A tail of 26 keys, two heads of Q a head of K; a product reads 8 columns of 8 keys again."""
    one = trial(name, "padded")
    properties.matches_float64(one)
    properties.bytes_moved_are_bytes_predicted(one)
    assert alone(one) > 0


@each_kernel
def test_they_do_not_depend_on_strides(name: str) -> None:
    outputs = [trial(name, layout).outputs for layout in ("contiguous", "padded", "tokens")]
    for other in outputs[1:]:
        assert {n: x.tobytes() for n, x in other.items()} == {
            n: x.tobytes() for n, x in outputs[0].items()
        }


@pytest.mark.parametrize("name", ["varlen", "varlen wide"])
def test_neighbours_of_a_packed_sequence_may_be_nan(name: str) -> None:
    one = trial(name, "padded", batch=4)
    properties.packed_sequences_are_those_one_by_one(one)
    properties.nan_stays_in_its_sequence(one)
    assert alone(one) > 0

"""V3 on rows that TMA does not take: every property holds, and a wrong copy is found."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from thorough import share

from fasim import gpu, planner, properties
from fasim.emulator.program import Fault
from fasim.errors import CheckFailed
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.render import Kernel, parse, render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

TILE = Tile(block_q=128, block_kv=32, stages=2, warps=8, registers=240)
CASES: dict[str, dict[str, Any]] = {
    "all": {"head_dim": 36, "head_dim_v": 33, "causal": True},
    "q and k": {"head_dim": 25, "head_dim_v": 16, "dtype": "bf16", "softcap": 10.0},
    "v and o": {"head_dim": 16, "head_dim_v": 67, "window": (40, 9)},
    "packed": {"head_dim": 33, "dtype": "bf16", "varlen": True},
    "one column": {"head_dim": 1, "bias": "dense"},
    "all in e4m3": {"dtype": "e4m3", "head_dim": 36, "head_dim_v": 33, "causal": True},
    "q and k in e4m3": {"dtype": "e4m3", "head_dim": 25, "head_dim_v": 24, "scales": "head"},
    "o of e4m3": {"dtype": "e4m3", "head_dim": 16, "head_dim_v": 66, "window": (40, 9)},
    "nothing in e4m3": {"dtype": "e4m3", "head_dim": 16, "head_dim_v": 72, "bias": "alibi"},
    "quantised, no whole eight": {
        **{"dtype": "e4m3", "head_dim": 33, "head_dim_v": 35, "in_dtype": "bf16"},
        **{"scales": "block", "causal": True},
    },
    "quantised, whole eights": {
        **{"dtype": "e4m3", "head_dim": 40, "head_dim_v": 56, "in_dtype": "fp16"},
    },
    "quantised and rotated": {
        **{"dtype": "e4m3", "head_dim": 4, "head_dim_v": 8, "in_dtype": "bf16"},
        **{"scales": "head", "incoherent": True},
    },
}


@cache
def kernel_of(name: str) -> Kernel:
    problem = Problem(heads=2, kv_heads=1, seq=150, seq_kv=90, **CASES[name])
    tile = None if problem.dtype == "e4m3" else TILE
    plan = planner.plan(problem, gpu.load("h200"), "v3", tile=tile).plan
    assert plan
    return render(plan)


@pytest.mark.parametrize("name", CASES)
def test_every_property_holds(name: str) -> None:
    properties.verify(kernel_of(name), EmulatorRunner(), examples=share(2)).check()


BUGS = {
    "the end of a row is not zero": (
        "u32 words[4] = {0, 0, 0, 0};",
        "u32 words[4] = {~0u, ~0u, ~0u, ~0u};",
    ),
    "a chunk too many is read": ("if (8 * chunk + i < kColumns)", "if (true)"),
    "a chunk too many is written": ("if (column < kHeadDimV) O", "if (true) O"),
    "rows are not wider": ("[row * kChunks<kColumns> + chunk]", "[row * (kColumns / 8) + chunk]"),
    "Q has as many heads as K": ("(row, q_strides, heads, ", "(row, q_strides, kv_heads, "),
}


E4M3_BUGS = {
    "all in e4m3": {
        "a chunk too many is read": ("if (16 * chunk + i < kColumns)", "if (true)"),
        "columns of V beyond the last": ("piece = i < count ?", "piece = count > 0 ?"),
        "rows of O are not wider": ("[row * kChunksO + chunk]", "[row * (kHeadDimV / 8) + chunk]"),
    },
    "quantised, no whole eight": {
        "columns beyond the last": ("i < count ? from[i] : 0", "count > 0 ? from[i] : 0"),
        "rows are not wider": ("* seq + first) * kWide;", "* seq + first) * kHeadDim;"),
    },
    "quantised, whole eights": {
        "a chunk too many is read": ("row < rows && column < kHeadDim;", "row < rows;"),
    },
    "quantised and rotated": {
        "more columns than there are": ("apart < kHeadDim; apart", "apart < kEight; apart"),
    },
}


@pytest.mark.parametrize(
    ("name", "bug"), [(name, bug) for name, bugs in E4M3_BUGS.items() for bug in bugs]
)
def test_a_wrong_copy_in_e4m3_is_found(name: str, bug: str) -> None:
    kernel = kernel_of(name)
    right, wrong = E4M3_BUGS[name][bug]
    assert kernel.source.count(right) == 1
    edited = parse(kernel.source.replace(right, wrong))
    with pytest.raises((Fault, CheckFailed)):
        properties.verify(edited, EmulatorRunner(), examples=4, hurry=True).check()


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_copy_is_found(bug: str) -> None:
    kernel = kernel_of("all")
    right, wrong = BUGS[bug]
    assert kernel.source.count(right) == 1
    edited = parse(kernel.source.replace(right, wrong))
    with pytest.raises((Fault, CheckFailed)):
        properties.verify(edited, EmulatorRunner(), examples=4, hurry=True).check()

"""Every type on every architecture whose tensor cores take it: it compiles as promised."""

from __future__ import annotations

import pytest

from fasim import planner
from fasim.compile import check_promises, compile_kernel
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import render

pytestmark = pytest.mark.nvcc

# (GPU, type, head_dim, algorithm): the canonical kernels are the rest of the ladder.
LADDER = (
    ("t4", "fp16", 128, "v2"),
    ("t4", "fp32", 64, "v2"),
    ("t4", "fp16", 64, "v1"),
    ("a10", "bf16", 64, "v2"),
    ("a10", "fp32", 64, "v1"),
    ("l4", "e4m3", 64, "v2"),
    ("l4", "fp32", 128, "v2"),
    ("h200", "e4m3", 64, "v2"),
    ("5090", "e4m3", 128, "v2"),
    ("5090", "fp16", 64, "v2"),
)


@pytest.mark.parametrize(("gpu", "dtype", "head_dim", "algo"), LADDER)
def test_compiles_without_spills_within_the_plan(
    gpu: str, dtype: str, head_dim: int, algo: str
) -> None:
    plan = planner.plan(Problem(dtype=dtype, head_dim=head_dim), load(gpu), algo).plan
    assert plan
    binary = compile_kernel(render(plan))
    check_promises(binary, plan)
    assert 0 < binary.resources.registers <= plan.registers

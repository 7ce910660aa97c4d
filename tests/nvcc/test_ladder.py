"""Every type on every architecture whose tensor cores take it: it compiles as promised."""

from __future__ import annotations

import pytest

from fasim import planner
from fasim.compile import check_promises, compile_kernel
from fasim.gpu import load
from fasim.plan import Tile
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
    ("h200", "bf16", 80, "v2"),
    ("h200", "bf16", 160, "v2"),
    ("a100-80gb", "bf16", 160, "v2"),
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


def test_rows_of_ten_chunks_are_copied_by_ten_threads() -> None:
    """128 threads copy 12 rows of 80 columns at once, so a tile of 96 rows takes each of them 8
    copies, Q's 128 rows 11; where ends have to be looked for one in a loop."""
    tile = Tile(block_q=128, block_kv=96, warps=4, stages=1)
    problem = Problem(dtype="bf16", head_dim=80)
    plan = planner.plan(problem, load("h200"), "v2", tile=tile).plan
    assert plan
    ptx = compile_kernel(render(plan)).cubin.with_name("kernel.ptx").read_text()
    assert ptx.count("cp.async.cg") == (11 + 1) + 3 * (8 + 1)

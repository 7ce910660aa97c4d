"""The build that notes what V3 does, and the build that has no trace of it."""

import pytest

from fasim import gpu, planner, timeline
from fasim.compile import check_promises, compile_kernel
from fasim.problem import Problem
from fasim.render import render

pytestmark = pytest.mark.nvcc


@pytest.mark.parametrize("head_dim", [64, 128])
def test_only_the_build_for_it_notes(head_dim: int) -> None:
    plan = planner.plan(Problem(head_dim=head_dim, causal=True), gpu.load("h200"), "v3").plan
    assert plan
    plain = compile_kernel(render(plan))
    noting = compile_kernel(timeline.instrumented(render(plan)))
    name = timeline.SYMBOL.encode()
    assert name not in plain.cubin.read_bytes()
    assert name in noting.cubin.read_bytes()
    ptx = [binary.cubin.with_name("kernel.ptx").read_text() for binary in (plain, noting)]
    assert ["%clock64" in text for text in ptx] == [False, True]
    check_promises(
        noting, plan
    )  # no spills, products not serialised: it shows what the kernel does

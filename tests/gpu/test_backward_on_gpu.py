"""Backward kernels that repeat bit for bit, on a real GPU."""

from __future__ import annotations

import pytest

from fasim import bench, planner, properties
from fasim.gpu import load
from fasim.plan import FORMS
from fasim.problem import Problem
from fasim.render import Kernel, render
from fasim.runners import gpu

pytestmark = pytest.mark.gpu

KINDS = (*FORMS, "v1")


def kernel_of(kind: str, problem: Problem) -> Kernel:
    form = kind if kind in FORMS else ""
    algo = "v1" if kind == "v1" else "v2"
    wanted = problem.with_(deterministic=bool(form))
    plan = planner.plan(wanted, load("auto"), algo, form=form).plan
    assert plan
    return render(plan)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_property_holds(kind: str, dtype: str, head_dim: int, causal: bool) -> None:
    problem = Problem(dtype=dtype, head_dim=head_dim, causal=causal, pass_="bwd")
    properties.verify(kernel_of(kind, problem), gpu.GpuRunner(), examples=15).check()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (48, 48), (32, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_device_gives_the_same_bits_every_time(
    kind: str, heads: int, kv_heads: int, causal: bool
) -> None:
    """More blocks than run at once, in whatever order the device starts and delays them."""
    problem = Problem(
        batch=2, heads=heads, kv_heads=kv_heads, seq=2000, seq_kv=3000, head_dim=64,
        dtype="bf16", causal=causal, pass_="bwd",
    )  # fmt: skip
    kernel = kernel_of(kind, problem)
    launch = kernel.plan.launch_for(kernel.plan.problem)
    call = gpu.launch_on_device(kernel, bench.random_inputs(launch), launch)
    first = call.outputs["dq"].numpy().tobytes()
    for _ in range(20):
        call()
        assert call.outputs["dq"].numpy().tobytes() == first

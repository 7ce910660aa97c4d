"""One device, one context: fasim and PyTorch in the same process, in either order."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from fasim import planner, reference
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import Kernel, render
from fasim.runners import gpu

pytestmark = pytest.mark.gpu

FASIM = """
import numpy as np
from fasim import planner
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import render
from fasim.runners import gpu

kernel = render(planner.plan(Problem(dtype="fp16", head_dim=64), load("auto"), "v2").plan)
launch = kernel.plan.launch_for(kernel.plan.problem.with_(heads=1, seq=8))
x = np.ones((1, 1, 8, 64), np.float16)
run = lambda: gpu.GpuRunner().run(kernel, {"q": x, "k": x, "v": x}, launch)
assert (run()["o"] == 1).all()
"""
TORCH = """
import torch
assert float(torch.ones(3, device="cuda").sum()) == 3
"""


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA")
    return torch


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    plan = planner.plan(Problem(dtype="bf16", head_dim=64), load("auto"), "v2").plan
    assert plan
    return render(plan)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    "code", [FASIM + TORCH + "run()\n" + TORCH, TORCH + FASIM + TORCH], ids=["first", "second"]
)
def test_either_may_come_first(code: str) -> None:
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "PyCUDA" not in done.stderr


def test_an_exception_after_a_launch_exits_with_its_own_code() -> None:
    done = python(FASIM + "raise SystemExit(7)")
    assert (done.returncode, done.stderr) == (7, "")
    done = python(FASIM + "with gpu._device():\n    raise ValueError('mine')")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: mine")


def test_a_fault_is_one_error_and_no_abort() -> None:
    wild = (
        "from dataclasses import replace\n"
        "far = {**launch.scalars, 'seq_kv': 1 << 30, 'seq_q': 8}\n"
        "bad = replace(launch, scalars=far)\n"
        "from fasim.runners import DeviceFault\n"
        "try:\n    gpu.GpuRunner().run(kernel, {'q': x, 'k': x, 'v': x}, bad)\n"
        "except DeviceFault as error:\n    raise SystemExit(error.exit_code)\n"
    )
    assert python(FASIM + wild).returncode == 1


def test_tensors_are_read_in_place_whatever_their_strides(torch: Any, kernel: Kernel) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(2, 70, 3, 4, 64, generator=draw, device="cuda").bfloat16()
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    launch = kernel.plan.launch_for(kernel.plan.problem.with_(batch=2, heads=4, seq=70))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call = gpu.launch_on_device(kernel, {"q": q, "k": k, "v": v}, launch)
    assert call.inputs["v"].address == v.data_ptr()
    want = reference.attention(*(x.float().cpu().numpy() for x in (q, k, v))).o
    np.testing.assert_allclose(call.outputs["o"].numpy().astype(np.float64), want, atol=2e-2)


def test_unaligned_rows_are_copied_and_said(torch: Any, kernel: Kernel) -> None:
    wide = torch.randn(1, 2, 16, 65, device="cuda").bfloat16()
    x = wide[..., :64]
    launch = kernel.plan.launch_for(kernel.plan.problem.with_(heads=2, seq=16))
    with warnings.catch_warnings(record=True, action="always") as said:
        got = gpu.GpuRunner().run(kernel, {"q": x.contiguous(), "k": x, "v": x}, launch)
    copied = [str(each.message).split(" is copied: its rows are not aligned")[0] for each in said]
    assert copied == ["k", "v"]
    want = gpu.GpuRunner().run(kernel, dict.fromkeys("qkv", x.contiguous()), launch)
    assert all(np.array_equal(got[name], want[name]) for name in got)


def test_offsets_beyond_two_to_the_31(torch: Any, kernel: Kernel) -> None:
    seq, far = 40, 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 3 * 2 * far:
        pytest.skip("too little free memory for tensors of 2^31 elements")
    small = [torch.randn(2, 1, seq, 64, device="cuda").bfloat16() for _ in range(3)]
    spread = []
    for x in small:
        memory = torch.empty(far + seq * 64, dtype=torch.bfloat16, device="cuda")
        view = memory.as_strided((2, 1, seq, 64), (far, seq * 64, 64, 1))
        view.copy_(x)
        spread.append(view)
    launch = kernel.plan.launch_for(kernel.plan.problem.with_(batch=2, heads=1, seq=seq))
    runner = gpu.GpuRunner()
    got = runner.run(kernel, dict(zip("qkv", spread, strict=True)), launch)
    want = runner.run(kernel, dict(zip("qkv", small, strict=True)), launch)
    assert all(np.array_equal(got[name], want[name]) for name in got)

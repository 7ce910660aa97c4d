"""The real nvcc on tiny kernels: what tests/unit/test_cache.py can only claim about it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fasim.compile import check_promises, compile_kernel, sass
from fasim.errors import CheckFailed, CompilerError, MissingToolError
from fasim.plan import KernelSpec, Plan, Tile
from fasim.problem import Problem
from fasim.render import Kernel
from fasim.toolchain import find_nvcc, find_tool


def missing(tool: str) -> bool:
    try:
        find_tool(tool)
    except MissingToolError:
        return True
    return False


pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(missing("nvcc"), reason="no nvcc on this machine"),
]

SPEC = KernelSpec(
    algo="v2",
    pass_="fwd",
    arch="sm_80",
    dtype="fp32",
    out_dtype="fp32",
    head_dim=64,
    head_dim_v=64,
    tile=Tile(block_q=64, block_kv=64, registers=32),
)
PLAN = Plan(problem=Problem(head_dim=64, dtype="fp32"), gpu="a100", kernel=SPEC, smem_bytes=0)
TINY = "x[threadIdx.x] = exp2f(x[threadIdx.x]);"
SPILLING = """float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i + n] = a[63 - i] * a[(i * 7) % 64];
  __shared__ float s[77];
  s[threadIdx.x] = x[n];
  __syncthreads();
  x[0] = s[n];"""


def kernel(body: str, bounds: str = "", name: str = SPEC.stem) -> Kernel:
    head = f'extern "C" __global__ void {bounds} {name}(float* x, int n) {{'
    source = f"// a header\n{head}\n  {body}\n}}\n"
    origins = tuple(("kernels/tiny.cu", 10 * i) for i in range(1, source.count("\n") + 1))
    return Kernel(SPEC.stem, source, PLAN, origins)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_and_caches(arch: str) -> None:
    binary = compile_kernel(kernel(TINY), arch=arch)
    assert binary.cubin.read_bytes().startswith(b"\x7fELF")
    assert 0 < binary.resources.registers <= PLAN.registers
    check_promises(binary, PLAN)
    assert compile_kernel(kernel(TINY), arch=arch) == replace(binary, cached=True)


def test_equal_sources_give_equal_cubins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = compile_kernel(kernel(TINY)).cubin.read_bytes()
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "quite" / "another" / "place"))
    second = compile_kernel(kernel(TINY))
    assert not second.cached
    assert second.cubin.read_bytes() == first


def test_entry_truncated_to_1000_bytes(caplog: pytest.LogCaptureFixture) -> None:
    binary = compile_kernel(kernel(TINY))
    for path in binary.cubin.parent.iterdir():
        os.truncate(path, min(path.stat().st_size, 1000))
    assert compile_kernel(kernel(TINY)).resources == binary.resources
    assert len(caplog.records) == 1
    assert compile_kernel(kernel(TINY)).cached


def test_spills_and_static_memory_are_reported() -> None:
    binary = compile_kernel(kernel(SPILLING, "__launch_bounds__(1024, 2)"))
    used = binary.resources
    assert min(used.spill_stores, used.spill_loads, used.stack) > 0
    assert used.smem_static == 77 * 4
    with pytest.raises(CheckFailed) as caught:
        check_promises(binary, PLAN)
    assert f"{used.spill_stores} bytes of spill stores, not 0" in caught.value.why


def test_ignored_setmaxnreg_is_reported() -> None:
    body = 'asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); x[0] = 1;'
    with pytest.raises(CheckFailed, match=r"C7508.*setmaxnreg"):
        check_promises(compile_kernel(kernel(body), arch="sm_90a"), PLAN)


def test_frontend_error_points_at_the_template() -> None:
    with pytest.raises(CompilerError) as caught:
        compile_kernel(kernel("x[0] = bb;  // here"))
    error = caught.value
    assert error.what == 'nvcc rejected the kernel: identifier "bb" is undefined'
    assert error.where == f"templates/kernels/tiny.cu:30 ({SPEC.stem}.cu:3)"
    assert error.why.splitlines()[1:] == ["  3 |   x[0] = bb;  // here", "    |          ^"]


def test_missing_header_points_at_the_template() -> None:
    with pytest.raises(CompilerError, match=r"no_such\.h") as caught:
        compile_kernel(kernel('\n#include "no_such.h"\n'))
    assert caught.value.where.startswith("templates/kernels/tiny.cu:40 ")


def test_ptxas_error_points_at_the_template() -> None:
    body = 'x[0] = 1;\n  asm volatile("wgmma.fence.sync.aligned;");'
    with pytest.raises(CompilerError, match="wgmma") as caught:
        compile_kernel(kernel(body), arch="sm_90")
    assert caught.value.where == f"templates/kernels/tiny.cu:40 ({SPEC.stem}.cu:4)"


def test_kernel_of_another_name() -> None:
    with pytest.raises(CompilerError, match="it defines renamed"):
        compile_kernel(kernel(TINY, name="renamed"))


def test_target_that_this_nvcc_lacks() -> None:
    targets = find_nvcc().targets
    assert "sm_80" in targets
    absent = next(arch for arch in ("sm_70", "sm_20", "sm_999") if arch not in targets)
    with pytest.raises(MissingToolError, match=f"cannot compile for {absent}"):
        compile_kernel(kernel(TINY), arch=absent)


@pytest.mark.skipif(missing("nvdisasm"), reason="no nvdisasm on this machine")
def test_sass() -> None:
    assert "MUFU.EX2" in sass(compile_kernel(kernel(TINY)))

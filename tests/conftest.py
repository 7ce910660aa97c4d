"""Hypothesis profiles, and skips that say why."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

# Before NumPy is imported: its threads of one worker only get in the way of the other workers'.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from fasim.errors import MissingToolError
from fasim.plan import KernelSpec, Plan, Tile
from fasim.problem import Problem
from fasim.render import Kernel
from fasim.runners import emulator, gpu
from fasim.toolchain import find_nvcc

hypothesis.settings.register_profile("ci", derandomize=True, max_examples=30, deadline=None)
hypothesis.settings.register_profile("dev", max_examples=200, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@cache
def no_nvcc() -> str:
    try:
        find_nvcc()
    except MissingToolError as error:
        return error.what
    return ""


@cache
def no_gpu() -> str:
    return gpu.available() or no_nvcc()


@cache
def no_emulator() -> str:
    return emulator.available() or ""


REASONS = {"gpu": no_gpu, "nvcc": no_nvcc, "emulator": no_emulator}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in REASONS.items():
            if item.get_closest_marker(name) and reason():
                item.add_marker(pytest.mark.skip(reason=reason()))


@pytest.fixture(scope="session")
def sketch() -> Callable[..., Kernel]:
    """A kernel of tiny tiles without text, for tests that never compile it."""

    def make(
        algo: str = "v2",
        dtype: str = "fp32",
        causal: bool = False,
        head_dim: int = 16,
        block_q: int = 16,
        block_kv: int = 32,
        **options: Any,
    ) -> Kernel:
        problem = Problem(dtype=dtype, causal=causal, head_dim=head_dim, **options)
        spec = KernelSpec(
            algo=algo,
            pass_="fwd",
            arch="sm_80",
            dtype=dtype,
            out_dtype=problem.out_dtype,
            head_dim=head_dim,
            head_dim_v=head_dim,
            tile=Tile(block_q=block_q, block_kv=block_kv, warps=1),
            mask=problem.mask,
            softcap=problem.softcap > 0,
            bias=problem.bias,
            varlen=problem.varlen,
            scales=problem.scales if dtype == "e4m3" else "none",
            in_dtype=problem.in_dtype if problem.quantises else "",
            incoherent=problem.incoherent,
        )
        plan = Plan(problem=problem, gpu="none", kernel=spec, smem_bytes=64 << 10)
        return Kernel(spec.stem, "", plan)

    return make

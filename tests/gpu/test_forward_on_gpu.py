"""Generated forward kernels on a real GPU: every property, and the inputs that caught others."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fasim import planner, properties, reference
from fasim.errors import UsageError
from fasim.gpu import load
from fasim.plan import Plan
from fasim.problem import Problem
from fasim.render import Kernel, render
from fasim.runners import gpu

pytestmark = pytest.mark.gpu

ALGOS = ("v1", "v2")
DTYPES = ("fp32", "fp16", "bf16")


@cache
def kernel_of(algo: str, dtype: str, causal: bool = False, head_dim: int = 64) -> Kernel:
    problem = Problem(dtype=dtype, causal=causal, head_dim=head_dim)
    plan = planner.plan(problem, load("auto"), algo).plan
    assert plan
    return render(plan)


def run(kernel: Kernel, *tensors: Any, **changes: Any) -> dict[str, Any]:
    """Outputs for q, k, v of shape (batch, heads, seq, head_dim)."""
    q, k = tensors[:2]
    sizes = {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1]}
    lengths = {"seq": q.shape[2], "seq_kv": k.shape[2]}
    launch = kernel.plan.launch_for(kernel.plan.problem.with_(**sizes, **lengths, **changes))
    return gpu.GpuRunner().run(kernel, dict(zip("qkv", tensors, strict=True)), launch)


def draw(*shapes: tuple[int, ...], dtype: str = "fp32") -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(gpu.DTYPES[dtype]) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [33, 40, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algo", ALGOS)
def test_every_property_holds(algo: str, dtype: str, head_dim: int, causal: bool) -> None:
    kernel = kernel_of(algo, dtype, causal, head_dim)
    properties.verify(kernel, gpu.GpuRunner(), examples=15).check()


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(33, 33), (100, 64), (64, 100)])
def test_v3_pads_rows(head_dim: int, head_dim_v: int, varlen: bool) -> None:
    here = load("auto")
    if here.arch != "sm_90a":
        pytest.skip("V3 runs on sm_90a only")
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    problem = Problem(dtype="bf16", causal=True, varlen=varlen, **dims)
    plan = planner.plan(problem, here, "v3").plan
    assert plan
    properties.verify(render(plan), gpu.GpuRunner(), examples=15).check()


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_v3_takes_few_tokens_of_long_sequences(dtype: str) -> None:
    """Nothing of a packed tensor is looked for where a sequence of the greatest length began."""
    here = load("auto")
    if here.arch != "sm_90a":
        pytest.skip("V3 runs on sm_90a only")
    problem = Problem(batch=1, heads=8, kv_heads=1, seq=4_000_000, dtype=dtype, varlen=True)
    plan = planner.plan(problem, here, "v3").plan
    assert plan
    tokens = 33
    q, k, v = draw(*((tokens, heads, 128) for heads in (8, 1, 1)), dtype=dtype)
    given = {"q": q, "k": k, "v": v}
    given |= {f"cu_seqlens_{of}": np.array([0, tokens], np.int32) for of in "qk"}
    launch = plan.launch_for(problem, tokens=(tokens, tokens))
    shapes = {name: shape for name, (shape, _) in launch.inputs.items() if name.endswith("_scale")}
    given |= {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    got = gpu.GpuRunner().run(render(plan), given, launch)
    wanted = reference.attention(*(x.swapaxes(0, 1)[None] for x in (q, k, v)))
    error = np.abs(got["o"].swapaxes(0, 1)[None].astype(np.float64) - wanted.o).max()
    assert error < (0.02 if dtype == "bf16" else 0.2)


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 36, "head_dim_v": 33, "causal": True},
        {"head_dim": 100, "in_dtype": "bf16", "scales": "block"},
        {"head_dim": 64, "varlen": True, "causal": True, "scales": "block"},
        {"head_dim": 128, "varlen": True, "in_dtype": "bf16", "scales": "head"},
        {"head_dim": 64, "bias": "dense_fp32", "scales": "head"},
        {"head_dim": 128, "bias": "dense", "in_dtype": "bf16", "causal": True, "scales": "block"},
    ],
    ids=str,
)
def test_v3_in_e4m3_has_every_option(options: dict[str, Any]) -> None:
    here = load("auto")
    if here.arch != "sm_90a":
        pytest.skip("V3 runs on sm_90a only")
    plan = planner.plan(Problem(dtype="e4m3", **options), here, "v3").plan
    assert plan
    properties.verify(render(plan), gpu.GpuRunner(), examples=15).check()


@pytest.mark.parametrize("algo", ALGOS)
def test_queries_before_the_first_key_give_zero(algo: str) -> None:
    kernel = kernel_of(algo, "fp32", causal=True, head_dim=1)
    zeros = np.zeros((1, 1, 4, 1), np.float32)
    v = np.array([1, 2], np.float32).reshape(1, 1, 2, 1)
    got = run(kernel, zeros, zeros[:, :, :2], v)
    np.testing.assert_allclose(got["o"].ravel(), [0, 0, 1, 1.5], atol=1e-6)
    np.testing.assert_allclose(got["lse"].ravel(), [-np.inf, -np.inf, 0, math.log(2)], atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("algo", ALGOS)
def test_huge_finite_inputs_stay_exact(algo: str, keys: int, dtype: str) -> None:
    q, k = (np.full((1, 1, n, 64), 133120, gpu.DTYPES[dtype]) for n in (1, keys))
    got = run(kernel_of(algo, dtype), q, k, k)
    assert (got["o"].astype(np.float64) == 133120).all()
    assert got["lse"][0, 0, 0] == pytest.approx(64 * 133120.0**2 / 8, rel=1e-6)


@pytest.mark.parametrize("algo", ALGOS)
def test_no_keys_and_no_queries(algo: str) -> None:
    kernel = kernel_of(algo, "fp16")
    q, none = draw((2, 2, 4, 64), (2, 2, 0, 64), dtype="fp16")
    got = run(kernel, q, none, none)
    assert not got["o"].any()
    assert np.isneginf(got["lse"]).all()
    assert run(kernel, none, q, q)["o"].shape == (2, 2, 0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algo", ALGOS)
def test_any_layout_gives_the_bits_of_compact_copies(algo: str, dtype: str) -> None:
    kernel = kernel_of(algo, dtype, head_dim=32)
    q, buffer, v = draw((1, 2, 33, 32), (1, 2, 66, 32), (1, 2, 33, 32), dtype=dtype)
    k = buffer[:, :, ::2]
    want = run(kernel, q, k.copy(), v)
    views = {
        "every second row": (q, k, v),
        "Fortran order": (q, np.asfortranarray(k), np.asfortranarray(v)),
        "tokens first": (q, k, v.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)),
        "reversed twice": (q, k[:, :, ::-1].copy()[:, :, ::-1], v),
    }
    for name, arrays in views.items():
        got = run(kernel, *arrays)
        assert all(np.array_equal(got[n], want[n]) for n in got), name


@pytest.mark.parametrize("dtype", [np.float64, np.int32, ml_dtypes.bfloat16])
def test_another_type_is_refused(dtype: Any) -> None:
    q, k, v = (x.astype(dtype) for x in draw(*[(1, 1, 8, 64)] * 3))
    with pytest.raises(UsageError, match="this kernel takes fp16"):
        run(kernel_of("v2", "fp16"), q, k, v)


def test_many_heads_on_one_key_head() -> None:
    kernel = kernel_of("v2", "bf16", causal=True)
    q, k, v = draw((1, 71, 130, 64), (1, 1, 130, 64), (1, 1, 130, 64), dtype="bf16")
    got = run(kernel, q, k, v)
    problem = kernel.plan.problem.with_(heads=71, kv_heads=1, seq=130)
    want = properties.expected({"q": q, "k": k, "v": v}, problem)
    properties.worst_error("o", got["o"], want.o, want.o_tolerance)


def test_a_kernel_built_for_an_older_gpu_runs_here() -> None:
    entry = planner.plan(Problem(dtype="fp16", head_dim=64), load("a100-80gb"), "v2")
    assert isinstance(entry.plan, Plan)
    q, k, v = draw(*[(1, 2, 70, 64)] * 3, dtype="fp16")
    got = run(render(entry.plan), q, k, v)
    want = reference.attention(q, k, v)
    np.testing.assert_allclose(got["o"].astype(np.float64), want.o, atol=2e-3)

"""Inputs whose right results need no reference, from public reports about other kernels."""

from __future__ import annotations

import mmap
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from fasim import inputs, planner, properties
from fasim.gpu import load
from fasim.plan import Tile, alignment
from fasim.problem import Problem
from fasim.reference import DTYPES
from fasim.render import Kernel, render
from fasim.runners.arrays import View, why_copy
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]

pytestmark = pytest.mark.emulator

TILES = {
    "v1": Tile(block_q=32, block_kv=32, warps=2, step_kv=16),
    "v2": Tile(block_q=32, block_kv=16, warps=2),
    "v3": Tile(block_q=128, block_kv=16, warps=8, stages=2),
}
GPUS = {"v1": "a100-80gb", "v2": "a100-80gb", "v3": "h200"}
each_algo = pytest.mark.parametrize("algo", ["v1", "v2"])
each_16_bit_algo = pytest.mark.parametrize("algo", TILES)


def each_algo_in(*dtypes: str) -> pytest.MarkDecorator:
    """V3 has no fp32."""
    pairs = [(a, d) for a in TILES for d in dtypes if (a, d) != ("v3", "fp32")]
    return pytest.mark.parametrize(("algo", "dtype"), pairs)


@cache
def kernel_for(algo: str, problem: Problem) -> Kernel:
    plan = planner.plan(problem, load(GPUS[algo]), algo, tile=TILES[algo]).plan
    assert plan
    return render(plan)


def attend(
    algo: str, q: Any, k: Any, v: Any, more: dict[str, Array] | None = None, **options: Any
) -> tuple[Array, Array]:
    """(o, lse) in float64; q, k, v are (seq, dim) or (batch, heads, seq, dim)."""
    q, k, v = (np.reshape(x, (1,) * (4 - np.ndim(x)) + np.shape(x)) for x in (q, k, v))
    problem = Problem(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seq=q.shape[2],
        seq_kv=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        **options,
    )
    kernel, dtype = kernel_for(algo, problem), DTYPES[problem.dtype]
    arrays = {name: x.astype(dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
    launch = kernel.plan.launch_for(problem)
    got = EmulatorRunner(workers=1).run(kernel, {**arrays, **(more or {})}, launch)
    o, lse = (got[name].astype(np.float64) for name in ("o", "lse"))
    return np.squeeze(o), np.squeeze(lse)


BACKWARD = Tile(block_q=32, block_kv=32, warps=2, stages=2)
BACKWARD_FP32 = Tile(block_q=16, block_kv=32, warps=4, stages=3, p_in="shared")
DTYPES_BACKWARD = pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])


def backward_kernel(problem: Problem) -> Kernel:
    tile = BACKWARD_FP32 if problem.dtype == "fp32" else BACKWARD
    plan = planner.plan(problem, load("a100-80gb"), "v2", tile=tile).plan
    assert plan
    return render(plan)


def differentiate(
    q: Any, k: Any, v: Any, do: Any, more: dict[str, Array] | None = None, **options: Any
) -> dict[str, Array]:
    """dq, dk and dv, found to be right; arrays are (seq, dim) or (batch, heads, seq, dim)."""
    q, k, v, do = (np.reshape(x, (1,) * (4 - np.ndim(x)) + np.shape(x)) for x in (q, k, v, do))
    problem = Problem(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seq=q.shape[2],
        seq_kv=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        pass_="bwd",
        **options,
    )
    kernel, dtype = backward_kernel(problem), DTYPES[problem.dtype]
    named = zip(("q", "k", "v", "do"), (q, k, v, do), strict=True)
    arrays = {name: x if x.dtype == dtype else x.astype(dtype) for name, x in named}
    arrays = properties.after_forward({**arrays, **(more or {})}, problem)
    got = EmulatorRunner(workers=1).run(kernel, arrays, kernel.plan.launch_for(problem))
    for name, (want, limit) in properties.expected_gradients(arrays, problem).items():
        properties.worst_error(name, got[name], want, limit)
    return {name: x.astype(np.float64) for name, x in got.items()}


def column(*values: float) -> Array:
    return np.array(values, np.float64)[:, None]


def zeros(n: int, dim: int = 1) -> Array:
    return np.zeros((n, dim))


@each_algo_in("fp32", "fp16", "bf16")
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3, 0)}], ids=str)
def test_causal_is_aligned_bottom_right(algo: str, dtype: str, options: dict[str, Any]) -> None:
    """Dao-AILab/flash-attention#1778: with more queries than keys the first rows see nothing."""
    o, lse = attend(algo, zeros(4), zeros(2), column(1, 2), dtype=dtype, **options)
    assert o.tolist() == [0, 0, 1, 1.5]
    assert np.isneginf(lse[:2]).all()
    assert lse[2:] == pytest.approx([0, np.log(2)], abs=1e-6)


@each_algo_in("bf16", "fp32")
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("options", [{}, {"window": (5, 5)}, {"bias": "alibi"}], ids=str)
def test_huge_finite_scores_stay_exact(
    algo: str, dtype: str, keys: int, options: dict[str, Any]
) -> None:
    """pytorch/pytorch#121558: a rounded maximum taken from an exact product gave NaN."""
    more = {"slopes": np.zeros(1, np.float32)} if "bias" in options else None
    huge = np.full((keys, 64), 133120.0)
    o, lse = attend(algo, huge[:1], huge, huge, more, dtype=dtype, **options)
    assert (o == 133120).all()
    assert lse == pytest.approx(64 * 133120.0**2 / 8, rel=1e-6)


@each_algo
@pytest.mark.parametrize(
    ("left", "seen", "last"), [(3, [1, 2, 3, 4, 4, 4, 4, 4], 5.5), (4, [1, 2, 3, 4, 5, 5, 5, 5], 5)]
)
def test_a_window_counts_keys_besides_the_aligned_one(
    algo: str, left: int, seen: list[int], last: float
) -> None:
    """huggingface/transformers#39408: W keys are left = W - 1."""
    v = np.arange(8.0)[:, None]
    o, lse = attend(algo, zeros(8), zeros(8), v, causal=True, window=(left, 0), dtype="fp32")
    assert np.exp(lse) == pytest.approx(seen, rel=1e-5)
    assert o[-1] == last


@each_algo
def test_softcap_comes_before_the_mask(algo: str) -> None:
    """Dao-AILab/flash-attention#1025: after it, a hidden key keeps exp(-cap) of a weight."""
    options: dict[str, Any] = {"causal": True, "dtype": "fp32"}
    o, _ = attend(algo, zeros(2), zeros(2), column(0, 1), softcap=1.0, **options)
    assert o.tolist() == [0, 0.5]


@each_algo
def test_softcap_is_the_tanh_of_the_scaled_score(algo: str) -> None:
    """On both sides of where its two formulas meet, and beyond where tanh is 1 in fp32."""
    scores = np.array([0, 1e-6, 0.1, 0.49, 0.51, 2, 9, 80, -0.3, -0.7, -80])
    keys = np.stack([scores, np.zeros_like(scores)], 1)
    for cap in (1.0, 50.0):
        lse = [
            attend(algo, [[2.0, 0]], [key], [[1.0, 0]], softcap=cap, scale=cap / 2, dtype="fp32")[1]
            for key in keys
        ]
        np.testing.assert_allclose(lse, cap * np.tanh(scores), rtol=5e-7, atol=0)


@each_16_bit_algo
@pytest.mark.parametrize(
    "options", [{}, {"window": (2, 2)}, {"bias": "alibi"}, {"softcap": 1.0}], ids=str
)
def test_no_keys_give_zero_and_minus_infinity(algo: str, options: dict[str, Any]) -> None:
    """pytorch/pytorch#103963."""
    more = {"slopes": inputs.alibi_slopes(1)} if "bias" in options else None
    o, lse = attend(algo, np.ones((4, 16)), zeros(0, 16), zeros(0, 16), more, **options)
    assert (o == 0).all()
    assert np.isneginf(lse).all()


@each_16_bit_algo
@pytest.mark.parametrize("kind", ["dense", "dense_fp32"])
def test_a_mask_with_empty_rows_gives_zeros_there(algo: str, kind: str) -> None:
    """pytorch/pytorch#103749: a boolean mask is a bias of -inf."""
    bias = np.full((1, 1, 8, 8), -np.inf)
    bias[..., :4, :4] = 0
    x = np.random.default_rng(0).standard_normal((8, 16))
    x[6] = np.nan  # no row sees it
    dtype = np.float32 if kind == "dense_fp32" else np.float16
    more = {"bias": bias.astype(dtype)}
    o, lse = attend(algo, np.ones((8, 16)), x, np.nan_to_num(x), more, bias=kind)
    assert (o[4:] == 0).all()
    assert np.isneginf(lse[4:]).all()
    assert np.isfinite(o).all()
    assert np.isfinite(lse[:4]).all()


@each_16_bit_algo
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": (9, 9)}], ids=str)
def test_nan_stays_in_its_row(algo: str, options: dict[str, Any]) -> None:
    """Dao-AILab/flash-attention#2470."""
    q = np.ones((4, 16))
    q[2, 3] = np.nan
    o, lse = attend(algo, q, np.ones((5, 16)), np.ones((5, 16)), **options)
    assert np.isnan(o[2]).all()
    assert np.isnan(lse[2])
    assert (o[[0, 1, 3]] == 1).all()


@each_16_bit_algo
def test_packed_sequences_of_any_length(algo: str) -> None:
    """Each averages its own values; one without keys gives 0, one without queries nothing."""
    lengths_q, lengths_k = [2, 3, 0, 40], [4, 0, 5, 33]
    problem = Problem(batch=4, heads=1, seq=40, seq_kv=33, head_dim=16, dtype="bf16", varlen=True)
    kernel = kernel_for(algo, problem)
    owner = np.repeat(np.arange(1.0, 5), lengths_k)[:, None, None]
    v = (owner * np.ones((1, 1, 16))).astype(ml_dtypes.bfloat16)
    q = np.zeros((sum(lengths_q), 1, 16), ml_dtypes.bfloat16)
    arrays = {"q": q, "k": np.zeros_like(v), "v": v}
    arrays |= {"cu_seqlens_q": inputs.cu_seqlens(lengths_q)}
    arrays |= {"cu_seqlens_k": inputs.cu_seqlens(lengths_k)}
    launch = kernel.plan.launch_for(problem, tokens=(len(q), len(v)))
    got = EmulatorRunner(workers=1).run(kernel, arrays, launch)
    seen = np.repeat(lengths_k, lengths_q)
    own = np.repeat([1, 0, 3, 4], lengths_q)
    assert (got["o"][:, 0, 0].astype(float) == own).all()
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(got["lse"][0], np.log(seen), rtol=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_that_tma_cannot_take_are_copied(name: str) -> None:
    """Their strides are no multiples of 16 bytes; the result is that of contiguous arrays."""
    kernel = kernel_for("v3", Problem(seq=20, seq_kv=30, heads=2, head_dim=16, causal=True))
    problem, rng = kernel.plan.problem, np.random.default_rng(0)
    shapes = kernel.plan.launch_for(problem).inputs
    arrays = {n: rng.standard_normal(shape).astype(np.float16) for n, (shape, _) in shapes.items()}
    wide = np.zeros((*arrays[name].shape[:3], 17), np.float16)
    wide[..., :16] = arrays[name]
    given = {**arrays, name: wide[..., :16]}
    launch = kernel.plan.launch_for(problem)
    view = View.of(given[name].__array_interface__)
    assert why_copy(view, alignment(name, launch)) == "its rows are not aligned to 16 bytes"
    runner = EmulatorRunner(workers=1)
    got, want = (runner.run(kernel, some, launch) for some in (given, arrays))
    assert got["o"].tobytes() == want["o"].tobytes()


# ---- gradients ----------------------------------------------------------------------------------


@DTYPES_BACKWARD
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3, 0)}], ids=str)
def test_rows_before_the_first_key_have_no_gradient(dtype: str, options: dict[str, Any]) -> None:
    """Dao-AILab/flash-attention#1778, backward."""
    q = column(1, 2, 3, 4)
    found = differentiate(q, column(1, -1), column(1, 2), np.ones((4, 1)), dtype=dtype, **options)
    assert (found["dq"][0, 0, :2] == 0).all()
    assert found["dq"][0, 0, 3] != 0
    assert found["dv"].sum() == pytest.approx(2, rel=0.01)  # two rows saw a key


@DTYPES_BACKWARD
def test_the_derivative_of_a_softcap_is_that_of_its_tanh(dtype: str) -> None:
    """Dao-AILab/flash-attention#1025, backward: where tanh is flat and where it is not."""
    scores = np.array([0, 0.1, -0.4, 0.6, 2, -5, 20])
    q, k = column(*np.ones(7)), column(*scores)
    rng = np.random.default_rng(0)
    v, do = rng.standard_normal((7, 16)), rng.standard_normal((7, 16))
    found = differentiate(q, k, v, do, dtype=dtype, softcap=1.0, scale=1.0, causal=True)
    assert abs(found["dk"][0, 0, 6]) < 1e-15  # 1 - tanh(20)^2 is 2e-17, and 0 from fp32's tanh
    assert found["dq"][0, 0, 0] == 0  # one key: no choice


@DTYPES_BACKWARD
@pytest.mark.parametrize(
    "options", [{}, {"window": (2, 2)}, {"bias": "alibi"}, {"softcap": 1.0}], ids=str
)
def test_no_keys_have_no_gradient(dtype: str, options: dict[str, Any]) -> None:
    """pytorch/pytorch#103963, backward."""
    more = {"slopes": inputs.alibi_slopes(1)} if "bias" in options else None
    none, some = zeros(0, 16), np.ones((4, 16))
    found = differentiate(some, none, none, some, more, dtype=dtype, **options)
    assert (found["dq"] == 0).all()
    found = differentiate(none, some, some, none, more, dtype=dtype, **options)
    assert (found["dk"] == 0).all()
    assert (found["dv"] == 0).all()


@pytest.mark.parametrize("kind", ["dense", "dense_fp32"])
def test_a_mask_with_empty_rows_has_finite_gradients(kind: str) -> None:
    """pytorch/pytorch#103749, backward; a NaN that only hidden pairs would meet is not met."""
    bias = np.full((1, 1, 8, 8), -np.inf)
    bias[..., :4, :4] = 0
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 8, 16))
    v[6] = np.nan
    dtype = np.float32 if kind == "dense_fp32" else np.float16
    found = differentiate(q, k, v, do, {"bias": bias.astype(dtype)}, bias=kind)
    for x in found.values():
        assert np.isfinite(x).all()
        assert (x[0, 0, 4:] == 0).all()
        assert (x[0, 0, :4] != 0).any()


def test_seventy_one_heads_share_one() -> None:
    """Falcon-7B: dK and dV are sums over a prime number of heads."""
    rng = np.random.default_rng(0)
    shapes = ((1, 71, 40, 16), (1, 1, 40, 16), (1, 1, 40, 16), (1, 71, 40, 16))
    differentiate(*map(rng.standard_normal, shapes), causal=True, dtype="bf16")


# ---- offsets beyond 2^31 ------------------------------------------------------------------------

SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: only what is used is there


@each_16_bit_algo
def test_a_bias_reaches_beyond_2_to_the_31(algo: str) -> None:
    """A dense mask of 8 x 28 x 4096^2 has more elements than 32 bits count."""
    rows, stride = 40, 2**26
    memory = mmap.mmap(-1, rows * stride * 2, flags=SPARSE)
    bias: Array = np.ndarray((1, 1, rows, 8), np.float16, memory, 0, (0, 0, stride * 2, 2))
    bias[...] = np.where(np.arange(8) == np.arange(rows)[:, None] % 8, 0, -np.inf)
    v = np.arange(8.0)[:, None] * np.ones((1, 16))
    o, _ = attend(algo, zeros(rows, 16), zeros(8, 16), v, {"bias": bias}, bias="dense")
    assert (o[:, 0] == np.arange(rows) % 8).all()


def sparse(x: Array, stride: int) -> Array:
    """A copy whose rows lie so many elements apart."""
    memory = mmap.mmap(-1, x.shape[2] * stride * x.itemsize, flags=SPARSE)
    far: Array = np.ndarray(x.shape, x.dtype, memory, 0, (0, 0, stride * x.itemsize, x.itemsize))
    far[...] = x
    return far


@pytest.mark.parametrize("bias", ["none", "dense"])
def test_gradients_reach_beyond_2_to_the_31(bias: str) -> None:
    """Row 225,304 of rows 9,728 apart wrapped to -2,103,209,984, and a mask of 8 x 28 x 4096^2."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 1, 1, 40, 16)).astype(np.float16)
    q, k, v, do = (sparse(each, 2**26) for each in x)
    more = {"bias": sparse(rng.standard_normal((1, 1, 40, 40)).astype(np.float16), 2**26)}
    differentiate(q, k, v, do, more if bias == "dense" else None, bias=bias)

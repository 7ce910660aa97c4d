"""The loops over tiles against the oracle: the text to read first must be right."""

from __future__ import annotations

import doctest
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fasim import planner, properties, reference, tiled
from fasim.errors import UsageError
from fasim.gpu import load
from fasim.plan import KernelSpec, Plan, Tile
from fasim.problem import Problem
from fasim.render import render
from fasim.runners.numpy import NumpyRunner

Array = NDArray[Any]
Forward = Callable[..., tuple[Array, Array]]
VERSIONS: dict[str, Forward] = {"v1": tiled.v1, "v2": tiled.v2, "v3": tiled.v3}
versions = pytest.mark.parametrize("version", VERSIONS)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def heads(*arrays: Array) -> list[Array]:
    return [x[None, None] for x in arrays]


@dataclass(frozen=True)
class Case:
    n_q: int
    n_k: int
    block_q: int
    block_kv: int
    causal: bool
    d: int = 3
    d_v: int = 2

    @property
    def inputs(self) -> list[Array]:
        shapes = (self.n_q, self.d), (self.n_k, self.d), (self.n_k, self.d_v)
        return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]

    @property
    def options(self) -> dict[str, Any]:
        return {"block_q": self.block_q, "block_kv": self.block_kv, "causal": self.causal}

    @property
    def expected(self) -> reference.Forward:
        o, lse = reference.attention(*heads(*self.inputs), causal=self.causal)
        return reference.Forward(o[0, 0], lse[0, 0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Lengths around multiples of the tiles: 0, 1, a tile and one more or less."""
    block_q, block_kv = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    lengths = [
        draw(st.integers(0, 3)) * block + draw(st.sampled_from([-1, 0, 1]))
        for block in (block_q, block_kv)
    ]
    n_q, n_k = (max(0, n) for n in lengths)
    return Case(n_q, n_k, block_q, block_kv, draw(st.booleans()))


@versions
@given(case=cases())
def test_tiles_do_not_show(version: str, case: Case) -> None:
    o, lse = VERSIONS[version](*case.inputs, **case.options)
    assert o == pytest.approx(case.expected.o, abs=1e-12)
    assert lse == pytest.approx(case.expected.lse, abs=1e-12)


@versions
@pytest.mark.parametrize("n_q", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("n_k", [0, 1, 7, 8, 9, 40])
def test_edges(version: str, n_q: int, n_k: int) -> None:
    for causal in (False, True):
        case = Case(n_q, n_k, 16, 8, causal)
        o, lse = VERSIONS[version](*case.inputs, **case.options)
        assert o == pytest.approx(case.expected.o, abs=1e-12)
        assert lse == pytest.approx(case.expected.lse, abs=1e-12)


@given(case=cases())
def test_backward_gives_the_gradients(case: Case) -> None:
    dO = normal(case.n_q, case.d_v, seed=9)
    backward: Callable[..., tuple[Array, ...]] = tiled.backward
    got = backward(*case.inputs, *case.expected, dO, **case.options)
    want = reference.gradients(*heads(*case.inputs, dO), causal=case.causal)
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs[0, 0], abs=1e-12)


def test_backward_takes_a_scale() -> None:
    Q, K, V, dO = (normal(20, 4, seed=i) for i in range(4))
    o, lse = tiled.v2(Q, K, V, scale=0.3)
    got = tiled.backward(Q, K, V, o, lse, dO, scale=0.3)
    want = reference.gradients(*heads(Q, K, V, dO), scale=0.3)
    assert got[0] == pytest.approx(want.dq[0, 0], abs=1e-12)


@pytest.mark.parametrize("name", ["flash_attention_v1", "flash_attention_v2", "flash_attention_v3"])
def test_the_check_of_the_articles(name: str) -> None:
    rng = np.random.RandomState(42)
    Q, K, V = (rng.randn(128, 16) for _ in range(3))
    s = Q @ K.T / np.sqrt(16)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    expected = p / p.sum(axis=1, keepdims=True) @ V
    out = getattr(tiled, name)(Q, K, V, block_size=32)
    assert np.abs(out - expected).max() < 1e-6


def test_v1_visits_key_tiles_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sets the loop orders apart, seen from the tiles that are scored."""
    assert visits(tiled.v1, monkeypatch) == [(q, k) for k in (0, 4, 8) for q in (0, 4)]
    assert visits(tiled.v2, monkeypatch) == [(q, k) for q in (0, 4) for k in (0, 4, 8)]
    assert visits(tiled.v3, monkeypatch) == [(q, k) for q in (4, 0) for k in (8, 4, 0)]


def visits(version: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(tiled, "_mask", lambda S, q, k, shift: seen.append((q.start, k.start)))
        version(normal(8, 2), normal(12, 2), normal(12, 2), 4, 4)
    return seen


@versions
def test_hidden_tiles_are_skipped(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = spy_on_scores(monkeypatch)
    VERSIONS[version](normal(16, 2), normal(16, 2), normal(16, 2), 4, 4, causal=True)
    assert len(scored) == 4 + 3 + 2 + 1


def spy_on_scores(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the tiles that are scored from here on."""
    seen: list[tuple[int, int]] = []
    real = tiled._scores

    def spy(Q_i: Array, K_j: Array, scale: float | None) -> Array:
        seen.append((len(Q_i), len(K_j)))
        return real(Q_i, K_j, scale)

    monkeypatch.setattr(tiled, "_scores", spy)
    return seen


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_producer_is_ahead_by_its_stages(stages: int) -> None:
    loaded = []

    def steps() -> Any:
        for j, tile in enumerate(tiled.tiles(20, 4)):
            loaded.append(j)
            yield j, tile

    K = normal(20, 2)
    taken = []
    for (j, tile), K_j, V_j in tiled.producer(K, K, steps(), stages):
        assert max(loaded) <= j + stages
        assert min(j + stages, 4) in loaded
        assert K_j == pytest.approx(K[tile])
        assert V_j is not K_j
        taken.append(j)
    assert taken == [0, 1, 2, 3, 4]


@versions
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_logits(version: str, dtype: Any) -> None:
    """133120² is far beyond the range of exp: only the difference to the maximum may count."""
    x = np.full((1, 64), 133120, dtype)
    o, lse = VERSIONS[version](x, x, x)
    assert (o == 133120).all()
    assert lse == pytest.approx(64 * 133120**2 / 8, rel=1e-6)
    K, V = np.repeat(x, 2, axis=0), np.stack([x[0], 3 * x[0]])
    o, _ = VERSIONS[version](x, K, V, 1, 1)
    assert (o == 2 * 133120).all()


@versions
def test_fp32_stays_within_a_millionth(version: str) -> None:
    Q, K, V = (normal(1024, 64, seed=i).astype(np.float32) for i in range(3))
    o, lse = VERSIONS[version](Q, K, V, 128, 64)
    want = reference.attention(*heads(Q, K, V))
    assert {o.dtype, lse.dtype} == {np.dtype(np.float32)}
    assert np.abs(o - want.o[0, 0]).max() <= 1e-6
    assert np.abs(lse - want.lse[0, 0]).max() <= 2e-6


@versions
def test_nan_stays_in_its_row(version: str) -> None:
    Q, K, V = (normal(20, 3, seed=i) for i in range(3))
    clean = VERSIONS[version](Q, K, V, 8, 8)[0]
    Q[5, 1] = np.nan
    o, lse = VERSIONS[version](Q, K, V, 8, 8)
    assert np.isnan(o[5]).all()
    assert np.isnan(lse[5])
    others = np.arange(20) != 5
    assert o[others] == pytest.approx(clean[others], abs=1e-13)


def test_a_forgotten_rescale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: without alpha, V2 is wrong as soon as the maximum moves."""
    real = tiled.online_softmax

    def forgetful(S: Array, m: Array, l: Array) -> Any:  # noqa: E741
        P, alpha, *rest = real(S, m, l)
        return P, np.ones_like(alpha), *rest

    monkeypatch.setattr(tiled, "online_softmax", forgetful)
    case = Case(8, 40, 8, 8, causal=False)
    o, _ = VERSIONS["v2"](*case.inputs, **case.options)
    assert np.abs(o - case.expected.o).max() > 1e-2


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_v3_in_fp8(block: int, causal: bool) -> None:
    Q, K, V = (normal(128, 64, seed=i) for i in range(3))
    stored, scales = zip(*(tiled.quantise(x, block) for x in (Q, K, V)), strict=True)
    o, lse = VERSIONS["v3"](*stored, block, block, causal=causal, scales=tiled.Scales(*scales))
    real = [
        x.astype(float) * np.repeat(s, block)[:, None] for x, s in zip(stored, scales, strict=True)
    ]
    exact, quantised = (
        reference.attention(*heads(*inputs), causal=causal) for inputs in ((Q, K, V), real)
    )
    assert o.dtype == np.float32
    assert lse == pytest.approx(quantised.lse[0, 0], abs=1e-5)
    own = np.sqrt(np.mean((o - quantised.o[0, 0]) ** 2))  # from casting P
    total = np.sqrt(np.mean((o - exact.o[0, 0]) ** 2))
    assert 1e-4 < own < 5e-3 if not causal else own < 2e-2
    assert total < (1e-2 if not causal else 4e-2)


def test_quantise_agrees_with_the_reference() -> None:
    X = normal(70, 5) * np.linspace(1, 100, 70)[:, None]
    for block, kind in ((32, "block"), (70, "tensor")):
        stored, scales = tiled.quantise(X, block)
        want = reference.quantise(X[None, None], kind, block)
        assert scales == pytest.approx(want.scales.ravel(), rel=1e-6)
        assert (stored.astype(float) == want.stored[0, 0].astype(float)).mean() > 0.98


def test_quantise_zeros_and_nothing() -> None:
    stored, scales = tiled.quantise(np.zeros((3, 2)), 2)
    assert not stored.astype(float).any()
    assert np.isfinite(scales).all()
    assert tiled.quantise(np.zeros((0, 2)), 2)[1].shape == (0,)


def test_doctests() -> None:
    failed, tried = doctest.testmod(tiled)
    assert (failed, tried > 5) == (0, True)


def test_the_functions_are_short_enough_to_read_aloud() -> None:
    for name, function in inspect.getmembers(tiled, inspect.isfunction):
        code = inspect.getsource(function).split('"""')[-1].splitlines()
        assert len(code) <= 25, name


def spec(problem: Problem, algo: str, **changes: Any) -> KernelSpec:
    options: dict[str, Any] = {
        "algo": algo,
        "pass_": "fwd",
        "arch": "sm_80",
        "dtype": problem.dtype,
        "out_dtype": problem.out_dtype,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "mask": problem.mask,
        "tile": Tile(block_q=16, block_kv=8),
    }
    return KernelSpec(**{**options, **changes})


def kernel(problem: Problem, algo: str, **changes: Any) -> Any:
    """What the runner looks at: a kernel's plan."""
    made = spec(problem, algo, **changes)
    return SimpleNamespace(plan=Plan(problem=problem, gpu="a100-80gb", kernel=made, smem_bytes=0))


def inputs(problem: Problem) -> dict[str, Array]:
    p, dtype = problem, reference.DTYPES[problem.dtype]
    shapes = {
        "q": (p.batch, p.heads, p.seq, p.head_dim),
        "k": (p.batch, p.kv_heads, p.seq_kv, p.head_dim),
        "v": (p.batch, p.kv_heads, p.seq_kv, p.head_dim_v),
    }
    return {name: normal(*s, seed=i).astype(dtype) for i, (name, s) in enumerate(shapes.items())}


@pytest.mark.parametrize("algo", ["v1", "v2"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 41), (41, 33), (0, 5), (5, 0)])
def test_the_runner(algo: str, dtype: str, causal: bool, lengths: tuple[int, int]) -> None:
    problem = Problem(
        batch=2,
        heads=4,
        kv_heads=2,
        seq=lengths[0],
        seq_kv=lengths[1],
        head_dim=16,
        head_dim_v=8,
        dtype=dtype,
        causal=causal,
        scale=0.2,
    )
    made, arrays = kernel(problem, algo), inputs(problem)
    got = NumpyRunner().run(made, arrays, made.plan.launch_for())
    qkv = (arrays["q"], arrays["k"], arrays["v"])
    options = reference.options_of(problem)
    want = reference.attention(*qkv, **options)
    assert got["o"].dtype == reference.DTYPES[dtype]
    assert got["lse"].dtype == np.float32
    error = np.abs(got["o"].astype(float) - want.o)
    assert (error <= reference.bound(want.o, *qkv, dtype, **options)).all()
    assert got["lse"] == pytest.approx(want.lse, abs=1e-5)


def test_the_runner_works_at_the_tiles_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(heads=1, seq=40, head_dim=4, dtype="fp32")
    made = kernel(problem, "v2")
    scored = spy_on_scores(monkeypatch)
    NumpyRunner().run(made, inputs(problem), made.plan.launch_for())
    assert set(scored) == {(16, 8), (8, 8)}


def test_the_runner_is_quiet_about_nan_and_huge_values() -> None:
    problem = Problem(heads=1, seq=2, head_dim=64, dtype="bf16")
    made = kernel(problem, "v2")
    x = np.full((1, 1, 2, 64), 133120, ml_dtypes.bfloat16)
    q = x.copy()
    q[0, 0, 1, 3] = np.nan
    got = NumpyRunner().run(made, {"q": q, "k": x, "v": x}, made.plan.launch_for())
    assert (got["o"][0, 0, 0].astype(float) == 133120).all()
    assert np.isnan(got["o"][0, 0, 1].astype(float)).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"algo": "standard"},
        {"pass_": "bwd"},
        {"dtype": "e4m3", "scales": "head"},
        {"mask": "window"},
        {"bias": "alibi"},
        {"softcap": True},
        {"varlen": True},
    ],
    ids=str,
)
def test_the_runner_refuses_what_it_has_no_tiles_for(changes: dict[str, Any]) -> None:
    problem = Problem(heads=1, seq=4, head_dim=4)
    launch = kernel(problem, "v2").plan.launch_for()
    with pytest.raises(UsageError, match="numpy runner"):
        NumpyRunner().run(kernel(problem, **{"algo": "v2", **changes}), inputs(problem), launch)


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize("incoherent", [False, True])
def test_v3_runs_in_e4m3_from_16_bits(scales: str, incoherent: bool) -> None:
    """What quantising, rotated or not, and products in e4m3 lose, of two blocks of keys."""
    problem = Problem(
        **{"heads": 4, "kv_heads": 2, "seq": 150, "seq_kv": 200, "head_dim": 32, "causal": True},
        **{"dtype": "e4m3", "in_dtype": "bf16", "scales": scales, "incoherent": incoherent},
    )
    plan = planner.plan(problem, load("h200"), "v3").plan
    assert plan
    arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in inputs(problem).items()}
    got = NumpyRunner().run(render(plan), arrays, plan.launch_for())
    want = reference.attention(*(arrays[n] for n in "qkv"), **reference.options_of(problem))
    error = math.sqrt(np.mean((got["o"].astype(np.float64) - want.o) ** 2))
    assert 1e-3 < error < 2e-2
    stored = properties.real(arrays, problem)
    exact = reference.attention(*(stored[n] for n in "qkv"), **reference.options_of(problem))
    assert np.abs(got["lse"] - exact.lse).max() < 1e-5

"""The oracle against brute force, finite differences and cases with a known answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fasim import reference
from fasim.errors import UsageError
from fasim.problem import Problem
from fasim.reference import (
    DTYPES,
    Options,
    attention,
    attention_varlen,
    bound,
    gradients,
    gradients_varlen,
    options_of,
    quantise,
    standard,
)

Array = NDArray[Any]
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Case:
    q: Array
    k: Array
    v: Array
    options: Options

    @property
    def do(self) -> Array:
        shape = (*self.q.shape[:3], self.v.shape[3])
        return np.random.default_rng(7).standard_normal(shape)


def make(seed: int, shape: tuple[int, ...], **options: Any) -> Case:
    """shape: batch, kv_heads, group, seq, seq_kv, head_dim, head_dim_v; a bias as its kind."""
    b, kv, group, sq, sk, d, dv = shape
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal(s) for s in ((b, kv * group, sq, d), (b, kv, sk, d), (b, kv, sk, dv))
    )
    kind = options.pop("bias", "none")
    full = (b if seed % 2 else 1, kv * group if seed % 3 else 1, sq, sk)
    if kind == "dense":
        options["bias"] = rng.standard_normal(full)
        options["bias"][rng.random(full) < 0.2] = -np.inf
    elif kind == "boolean":
        options["bias"] = rng.random(full) < 0.6
    return Case(q, k, v, cast(Options, options))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = [draw(st.integers(low, high)) for low, high in _RANGES]
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": (draw(st.integers(-1, 3)), draw(st.integers(-1, 3))),
        "softcap": draw(st.sampled_from([0.0, 1.0, 0.3])),
        "alibi": draw(st.booleans()),
        "bias": draw(st.sampled_from(["none", "dense", "boolean"])),
    }
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.1, 2.0]))
    return make(draw(st.integers(0, 99)), tuple(shape), **options)


_RANGES = [(1, 2), (1, 2), (1, 2), (0, 6), (0, 6), (1, 3), (1, 3)]


def brute_force(case: Case) -> tuple[Array, Array]:
    """The definition, one score at a time, with Python's own floats."""
    q, k, v = case.q, case.k, case.v
    o, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, h, i in np.ndindex(*q.shape[:3]):
        g = h * k.shape[1] // q.shape[1]
        scores = {j: brute_score(case, b, h, g, i, j) for j in range(k.shape[2])}
        weights = {j: math.exp(s) for j, s in scores.items() if s is not None}
        total = sum(weights.values())
        if total:
            o[b, h, i] = sum(w * v[b, g, j] for j, w in weights.items()) / total
            lse[b, h, i] = math.log(total)
    return o, lse


def brute_score(case: Case, b: int, h: int, g: int, i: int, j: int) -> float | None:
    options, (heads, seq, d) = case.options, case.q.shape[1:]
    ahead = j - i - case.k.shape[2] + seq
    left, right = options.get("window", (-1, -1))
    if (left >= 0 and ahead < -left) or (right >= 0 and ahead > right):
        return None
    if options.get("causal") and ahead > 0:
        return None
    s = sum(float(x) * float(y) for x, y in zip(case.q[b, h, i], case.k[b, g, j], strict=True))
    s *= options.get("scale", 1 / math.sqrt(d))
    cap = options.get("softcap", 0.0)
    s = cap * math.tanh(s / cap) if cap else s
    if options.get("alibi"):
        s -= 2 ** (-8 * (h + 1) / heads) * abs(ahead)
    if "bias" in options:
        bias = options["bias"][b % len(options["bias"]), h % options["bias"].shape[1], i, j]
        if bias.dtype == bool:
            return s if bias else None
        return s + float(bias) if bias > -np.inf else None
    return s


def lean(o: Array, do: Array) -> float:
    return float((o * do).sum())


def column(*values: float) -> Array:
    """One batch, one head, one dimension."""
    return np.array(values, float).reshape(1, 1, -1, 1)


@given(cases())
def test_forward_is_the_definition(case: Case) -> None:
    o, lse = brute_force(case)
    got = attention(case.q, case.k, case.v, **case.options)
    assert got.o == pytest.approx(o, abs=1e-13)
    assert got.lse == pytest.approx(lse, abs=1e-13)


EACH_OPTION: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (1, 2)},
    {"window": (2, -1), "causal": True},
    {"softcap": 0.7},
    {"alibi": True},
    {"bias": "dense"},
    {"bias": "boolean"},
    {"scale": 1.7},
    {"causal": True, "softcap": 0.5, "alibi": True, "bias": "dense", "window": (3, 3)},
]


@pytest.mark.parametrize("options", EACH_OPTION, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2, 3, 5, 2, 3), (2, 1, 1, 5, 3, 2, 1)], ids=str)
def test_gradients_are_the_slopes(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    case = make(5, shape, **options)
    inputs, step = (case.q, case.k, case.v), 1e-5
    for which, got in enumerate(gradients(*inputs, case.do, **case.options)):
        slopes = np.zeros_like(got)
        for index in np.ndindex(*got.shape):
            moved = [x.copy() for x in inputs]
            moved[which][index] += step
            above = lean(attention(*moved, **case.options).o, case.do)
            moved[which][index] -= 2 * step
            below = lean(attention(*moved, **case.options).o, case.do)
            slopes[index] = (above - below) / (2 * step)
        assert got == pytest.approx(slopes, abs=2e-9)


@given(cases())
def test_gradients_sum_to_what_shifts_do(case: Case) -> None:
    """Adding a constant to V adds it to every row that sees a key: sum(dv) = sum of those dO."""
    got = gradients(case.q, case.k, case.v, case.do, **case.options)
    sees = np.isfinite(attention(case.q, case.k, case.v, **case.options).lse)
    assert got.dv.sum() == pytest.approx(case.do[sees].sum(), abs=1e-12)
    assert not got.dq[~sees].any()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}], ids=str)
def test_standard_gradients_are_as_wrong_as_their_type(dtype: str, options: dict[str, Any]) -> None:
    case = make(7, (1, 4, 2, 40, 50, 16, 8), **options)
    q, k, v, do = (x.astype(reference.DTYPES[dtype]) for x in (case.q, case.k, case.v, case.do))
    o = attention(q, k, v, **options).o.astype(q.dtype)
    want = gradients(q, k, v, do, **options)
    sums = reference.gradient_sums(q, k, v, do, **options)
    got = reference.standard_gradients(q, k, v, o, do, dtype, **options)
    unit = reference.UNIT_ROUNDOFF[dtype]
    for x, ref, size in zip(got, want, sums, strict=True):
        assert x.dtype == q.dtype
        assert (abs(ref) <= size + 1e-12).all()
        error = abs(x.astype(np.float64) - ref)
        assert (error <= (20 if dtype == "fp32" else 3) * unit * (size + abs(ref)) + 1e-9).all()
        assert error.max() > unit * abs(ref).max() / 64, "nothing was rounded"


@given(cases(), st.data())
def test_rows_pick_from_the_whole(case: Case, data: st.DataObject) -> None:
    seq = case.q.shape[2]
    rows = data.draw(st.lists(st.integers(0, seq - 1), max_size=4)) if seq else []
    whole = attention(case.q, case.k, case.v, **case.options)
    picked = attention(case.q, case.k, case.v, rows=rows, **case.options)
    assert picked.o == pytest.approx(whole.o[:, :, rows], abs=1e-14)
    assert picked.lse == pytest.approx(whole.lse[:, :, rows], abs=1e-14)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(1, (2, 2, 2, 9, 7, 3, 2), causal=True, alibi=True, bias="dense")
    whole = attention(case.q, case.k, case.v, **case.options)
    slopes = gradients(case.q, case.k, case.v, case.do, **case.options)
    monkeypatch.setattr("fasim.reference.CHUNK_SCORES", 15)
    for got, want in zip(
        (
            *attention(case.q, case.k, case.v, **case.options),
            *gradients(case.q, case.k, case.v, case.do, **case.options),
        ),
        (*whole, *slopes),
        strict=True,
    ):
        assert got == pytest.approx(want, abs=1e-14)


def test_causal_is_aligned_bottom_right() -> None:
    q, k, v = column(0, 0, 0, 0), column(0, 0), column(1, 2)
    got = attention(q, k, v, causal=True)
    assert got.o.ravel().tolist() == [0, 0, 1, 1.5]
    assert got.lse.ravel() == pytest.approx([-np.inf, -np.inf, 0, math.log(2)])
    dq = gradients(q, column(1, 2), v, np.ones_like(q), causal=True).dq
    assert dq.ravel()[:2].tolist() == [0, 0]
    assert dq.ravel()[3] != 0


def test_twice_as_many_queries_as_keys_leave_half_the_rows_empty() -> None:
    case = make(0, (1, 1, 1, 256, 128, 8, 8), causal=True)
    o = attention(case.q, case.k, case.v, **case.options).o
    assert (~o.any(axis=3)).sum() == 128
    assert not o[0, 0, :128].any()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_huge_logits_are_exact_over_one_key(dtype: str) -> None:
    x = np.full((1, 1, 1, 64), 133120, DTYPES[dtype])
    for got in (attention(x, x, x, scale=1 / 8), standard(x, x, x, dtype, scale=1 / 8)):
        assert (got.o.astype(float) == 133120).all()
        assert got.lse.item() == pytest.approx(1.41767e11, rel=1e-5)
    two = np.repeat(x, 2, axis=2)
    v = np.stack([x[:, :, 0], -x[:, :, 0] * 0.5], axis=2)
    assert (attention(x, two, v, scale=1 / 8).o == 133120 / 4).all()


def test_a_window_counts_keys_besides_the_aligned_one() -> None:
    q, v = column(*[0] * 8), column(*range(8))
    lse = attention(q, q, v, causal=True, window=(3, 0)).lse
    assert np.exp(lse).ravel() == pytest.approx([1, 2, 3, 4, 4, 4, 4, 4])
    assert attention(q, q, v, causal=True, window=(3, 0)).o.item(-1) == pytest.approx(5.5)
    assert attention(q, q, v, causal=True, window=(4, 0)).o.item(-1) == pytest.approx(5.0)


def test_causal_closes_the_right_side_of_a_window() -> None:
    case = make(3, (1, 1, 1, 6, 6, 2, 2))
    both = attention(case.q, case.k, case.v, causal=True, window=(2, 4))
    assert both.o == pytest.approx(attention(case.q, case.k, case.v, window=(2, 0)).o)


def test_the_cap_comes_before_the_mask() -> None:
    zero = column(0, 0)
    got = attention(zero, zero, column(0, 1), causal=True, softcap=1.0)
    assert got.o.ravel().tolist() == [0, 0.5]


@pytest.mark.parametrize("cap", [-1.0, math.inf, math.nan])
def test_a_senseless_cap_is_refused(cap: float) -> None:
    with pytest.raises(UsageError, match="softcap"):
        attention(column(0), column(0), column(0), softcap=cap)


def test_alibi_slopes_start_at_the_first_head() -> None:
    q, k = np.zeros((1, 8, 1, 1)), np.zeros((1, 8, 2, 1))
    lse = attention(q, k, k, alibi=True).lse.ravel()
    assert lse == pytest.approx([math.log(1 + math.exp(-(2.0**-h))) for h in range(1, 9)])


def test_no_keys_give_zeros() -> None:
    q, none = np.ones((1, 1, 4, 16)), np.ones((1, 1, 0, 16))
    got = attention(q, none, none)
    assert not got.o.any()
    assert np.isneginf(got.lse).all()
    assert not gradients(q, none, none, q).dq.any()


def test_no_queries_give_nothing_and_no_gradient() -> None:
    none, k = np.ones((2, 4, 0, 3)), np.ones((2, 2, 5, 3))
    assert attention(none, k, k).o.shape == (2, 4, 0, 3)
    assert not gradients(none, k, k, none).dk.any()


def test_rows_hidden_by_a_boolean_mask_are_empty() -> None:
    case = make(2, (1, 1, 1, 8, 8, 4, 4))
    mask = np.zeros((1, 1, 8, 8), bool)
    mask[..., :4, :4] = True
    got = attention(case.q, case.k, case.v, bias=mask)
    assert not got.o[0, 0, 4:].any()
    assert got.o[0, 0, :4].all()
    for gradient in gradients(case.q, case.k, case.v, case.do, bias=mask):
        assert np.isfinite(gradient).all()
        assert not gradient[0, 0, 4:].any()
        assert gradient[0, 0, :4].any()


@pytest.mark.parametrize("mask", [True, False])
def test_a_boolean_mask_is_a_bias_of_minus_infinity(mask: bool) -> None:
    case = make(4, (2, 1, 2, 5, 4, 3, 3), bias="boolean", causal=mask)
    dense: Options = {**case.options, "bias": np.where(case.options["bias"], 0.0, -np.inf)}
    got, want = (attention(case.q, case.k, case.v, **o) for o in (case.options, dense))
    assert got.o == pytest.approx(want.o, abs=0)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_nan_stays_in_the_rows_that_see_it(where: str, what: float) -> None:
    """Causal over 6: row 3 of q, key 3 of k and v are seen by row 3, or rows 3 to 5."""
    case = make(6, (1, 1, 1, 6, 6, 3, 3), causal=True)
    clean = attention(case.q, case.k, case.v, causal=True)
    slopes = gradients(case.q, case.k, case.v, case.do, causal=True)
    getattr(case, where)[0, 0, 3, 1] = what
    got = attention(case.q, case.k, case.v, causal=True)
    seen = np.arange(6) == 3 if where == "q" else np.arange(6) >= 3
    assert got.o[0, 0, ~seen] == pytest.approx(clean.o[0, 0, ~seen], abs=0)
    after = gradients(case.q, case.k, case.v, case.do, causal=True)
    assert after.dq[0, 0, ~seen] == pytest.approx(slopes.dq[0, 0, ~seen], abs=0)
    if np.isnan(what):
        assert np.isnan(got.o[0, 0, seen]).any(axis=1).all()
        assert np.isnan(after.dq[0, 0, seen]).any(axis=1).all()
    if where == "q":
        assert after.dk[0, 0, 4:] == pytest.approx(slopes.dk[0, 0, 4:], abs=0)
        assert np.isnan(after.dk[0, 0, :4]).any()


def test_nan_in_a_key_that_a_bias_hides_does_no_harm() -> None:
    case = make(6, (1, 1, 1, 2, 3, 2, 2))
    bias = np.array([[0, 0, -np.inf]] * 2).reshape(1, 1, 2, 3)
    case.k[..., 2, :] = case.v[..., 2, :] = np.nan
    got = attention(case.q, case.k, case.v, bias=bias)
    assert np.isfinite(got.o).all()
    slopes = gradients(case.q, case.k, case.v, case.do, bias=bias)
    assert all(np.isfinite(x).all() for x in slopes)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
def test_packed_sequences_do_not_see_each_other(lengths: list[tuple[int, int]]) -> None:
    cu_q, cu_kv = (np.cumsum([0, *lens]) for lens in zip(*lengths, strict=True))
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, cu_q[-1], 4, 3))
    k, v = rng.standard_normal((2, cu_kv[-1], 2, 3))
    o, lse = attention_varlen(q, k, v, cu_q, cu_kv, causal=True)
    slopes = gradients_varlen(q, k, v, do, cu_q, cu_kv, causal=True)
    assert (o.shape, lse.shape) == (q.shape, (4, cu_q[-1]))
    for i in range(len(lengths)):
        a, b = slice(cu_q[i], cu_q[i + 1]), slice(cu_kv[i], cu_kv[i + 1])
        one = [x.transpose(1, 0, 2)[None] for x in (q[a], k[b], v[b], do[a])]
        assert o[a] == pytest.approx(attention(*one[:3], causal=True).o[0].transpose(1, 0, 2))
        dk = gradients(*one, causal=True).dk[0].transpose(1, 0, 2)
        assert slopes.dk[b] == pytest.approx(dk)


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)),
        ((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)),
        ((1, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)),
        ((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4, 4)),
        ((3, 4), (3, 4), (3, 4)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UsageError, match="do not fit together"):
        attention(*map(np.zeros, shapes))


@pytest.mark.parametrize("shape", [(3, 3), (1, 1, 3, 1), (2, 1, 3, 3), (1, 3, 3, 3)])
def test_a_bias_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    x = np.zeros((1, 2, 3, 4))
    with pytest.raises(UsageError, match="bias of shape"):
        attention(x, x, x, bias=np.zeros(shape))


def test_options_of_a_problem() -> None:
    problem = Problem(heads=2, head_dim=4, causal=True, window=(3, 0), softcap=2.0, bias="alibi")
    assert options_of(problem) == {
        "scale": 0.5,
        "causal": True,
        "window": (3, 0),
        "softcap": 2.0,
        "alibi": True,
    }
    bias = np.zeros((1, 1, 2, 2))
    assert options_of(Problem(bias="dense"), bias)["bias"] is bias


@given(cases(), st.sampled_from(["fp32", "fp16", "bf16"]))
def test_standard_attention_stays_within_the_bound(case: Case, dtype: str) -> None:
    q, k, v = (x.astype(DTYPES[dtype]) for x in (case.q, case.k, case.v))
    ref = attention(q, k, v, **case.options)
    got = standard(q, k, v, dtype, **case.options)
    assert got.o.dtype == DTYPES[dtype]
    assert got.lse.dtype == np.float32
    error = np.abs(got.o.astype(float) - ref.o)
    assert (error <= bound(ref.o, q, k, v, dtype, **case.options)).all()
    assert got.lse == pytest.approx(ref.lse, abs=2e-5)


def test_the_bound_is_the_contract_and_follows_rows() -> None:
    case = make(8, (1, 1, 2, 4, 5, 3, 2), causal=True)
    ref = attention(case.q, case.k, case.v, causal=True).o
    weights = attention(case.q, case.k, np.abs(case.v), causal=True).o
    got = bound(ref, case.q, case.k, case.v, "bf16", causal=True)
    assert got == pytest.approx(1.25 / 256 * (weights + np.abs(ref)) + 1e-6, rel=1e-12)
    some = bound(ref[:, :, [3]], case.q, case.k, case.v, "bf16", rows=[3], causal=True)
    assert some == pytest.approx(got[:, :, [3]], rel=1e-12)


def test_an_error_twice_the_rounding_breaks_the_bound() -> None:
    case = make(8, (1, 1, 1, 4, 64, 8, 8))
    ref = attention(case.q, case.k, case.v).o
    wrong = attention(case.q, case.k[:, :, :-1], case.v[:, :, :-1]).o  # one key forgotten
    assert (np.abs(wrong - ref) > bound(ref, case.q, case.k, case.v, "bf16")).any()


def test_standard_rounds_p_and_o_but_never_in_fp32() -> None:
    case = make(9, (1, 1, 1, 64, 256, 16, 16))
    errors = {}
    for dtype in ("fp32", "fp16", "bf16"):
        q, k, v = (x.astype(DTYPES[dtype]) for x in (case.q, case.k, case.v))
        got, ref = standard(q, k, v, dtype).o, attention(q, k, v).o
        errors[dtype] = np.abs(got.astype(float) - ref).max()
    assert errors["fp32"] < 1e-6 < errors["fp16"] < errors["bf16"] < 1e-2


def test_standard_rounds_p_before_the_product() -> None:
    """Three equal keys: 5/3 is 1.6640625 in bf16, but 5 times 1/3 in bf16 is 1.671875."""
    zero, v = column(0, 0, 0), column(2, 2, 1)
    assert standard(zero[:, :, :1], zero, v, "bf16").o.astype(float).item() == 1.671875


def test_standard_in_e4m3_rounds_p_below_its_rows_largest() -> None:
    """Weights 1, 0.45 and 2^-19: 0.45 becomes 0.4375, the last is lost, and o is rounded last."""
    q, v = column(1), column(1, 2, 4096)
    k = column(0, math.log(0.45), -19 * math.log(2))
    got = standard(q, k, v, "e4m3", out_dtype="fp32", scale=1.0).o.item()
    total = 1 + 0.45 + 2.0**-19
    assert got == pytest.approx((1 + 2 * 0.4375) / total, rel=1e-6)
    rounded = standard(q, k, v, "e4m3", out_dtype="bf16", scale=1.0).o
    assert rounded.dtype == DTYPES["bf16"]
    assert rounded.astype(float).item() == pytest.approx(got, rel=2.0**-8)


def test_weights_in_e4m3_fill_their_range_whatever_their_size() -> None:
    rows = np.array([[1.0, 0.3, 0.0], [1e-6, 3e-7, 0.0], [0.0, 0.0, 0.0]], np.float32)
    got = reference.weights_e4m3(rows)
    assert got[0] == pytest.approx([1, 0.3125, 0])
    assert got[1] == pytest.approx(1e-6 * got[0])
    assert (got[2] == 0).all()


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_standard_in_e4m3_keeps_its_bound(spread: float) -> None:
    """So does every element; and three bits of P are not four: the bound is not ten times off."""
    case = make(5, (1, 2, 2, 33, 200, 16, 24))
    q = spread * case.q
    options = {"rows": None}
    ref = attention(q, case.k, case.v, **options).o
    got = standard(q, case.k, case.v, "e4m3", out_dtype="bf16").o.astype(float)
    limit = bound(ref, q, case.k, case.v, "e4m3", out_dtype="bf16")
    assert (np.abs(got - ref) <= limit).all()
    assert (np.abs(got - ref) > limit / 10).any()


def test_gradients_in_e4m3_are_refused() -> None:
    x = column(0)
    with pytest.raises(UsageError, match="e4m3"):
        reference.standard_gradients(x, x, x, x, x, "e4m3")


SCALES_SHAPES = {"tensor": (1, 1, 1, 1), "head": (2, 3, 1, 1), "block": (2, 3, 3, 1)}


@pytest.mark.parametrize("scales", SCALES_SHAPES)
def test_fp8_keeps_three_bits_of_mantissa(scales: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 70, 5))
    got = quantise(x, scales, block=32)
    assert (got.stored.shape, got.scales.shape) == (x.shape, SCALES_SHAPES[scales])
    assert got.scales.dtype == np.float32
    assert np.abs(got.stored.astype(float)).max() == 448
    smallest = got.scales.max() * 2.0**-9  # the step of e4m3's subnormals
    assert (np.abs(got.real() - x) <= np.maximum(2.0**-4 * np.abs(x), smallest / 2) * 1.001).all()


def test_finer_scales_lose_less_where_magnitudes_differ() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 64, 8))
    x[0, 1] *= 1e4
    x[0, :, :32] *= 1e4
    loss = {s: np.abs((quantise(x, s, block=32).real() - x) / x).mean() for s in SCALES_SHAPES}
    assert loss["block"] < loss["head"] < loss["tensor"]


@pytest.mark.parametrize("scales", SCALES_SHAPES)
def test_fp8_of_the_extremes(scales: str) -> None:
    x = np.zeros((1, 1, 4, 2))
    assert not quantise(x, scales).real().any()
    x[0, 0, 0] = [np.nan, np.inf]
    x[0, 0, 1] = [-3.0, 1.0]
    got = quantise(x, scales).real()[0, 0]
    assert np.isnan(got[0, 0])
    assert got[0, 1] == pytest.approx(3.0)  # saturates at the largest finite value
    assert got[1, 0] == pytest.approx(-3.0)
    assert quantise(x[:, :, :0], scales).real().shape == (1, 1, 0, 2)


def test_attention_over_fp8_is_close_on_normal_data() -> None:
    case = make(3, (1, 1, 2, 32, 128, 64, 64))
    ref = attention(case.q, case.k, case.v).o
    got = attention(*(quantise(x, "head").real() for x in (case.q, case.k, case.v))).o
    error = math.sqrt(np.mean((got - ref) ** 2))
    assert 1e-4 < error < 1e-2

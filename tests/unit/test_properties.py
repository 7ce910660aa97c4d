"""The library of properties itself: what it draws, how it judges, what it reports."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import planner, properties, reference
from fasim.errors import UsageError
from fasim.gpu import load
from fasim.plan import Plan, Tile
from fasim.problem import Problem
from fasim.properties import Case, Mismatch, expected, lay_out, verify, worst_error
from fasim.render import Kernel
from fasim.runners.numpy import NumpyRunner

Sketch = Callable[..., Kernel]


@given(data=st.data())
def test_cases_are_problems_the_kernel_serves(sketch: Sketch, data: Any) -> None:
    kernel = sketch(dtype="bf16", causal=True)
    case = data.draw(properties.cases(kernel.plan))
    problem = case.problem(kernel.plan)
    kernel.plan.launch_for(problem)
    arrays = case.arrays(kernel.plan)
    assert arrays["q"].shape == (case.batch, case.heads, case.seq, 16)
    assert arrays["v"].shape == (case.batch, case.kv_heads, case.seq_kv, 16)
    assert all(np.isfinite(x.astype(np.float64)).all() for x in arrays.values())


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "e4m3"])
@pytest.mark.parametrize("values", properties.VALUES)
def test_every_kind_of_values_has_a_finite_reference(
    sketch: Sketch, values: str, dtype: str
) -> None:
    kernel, case = sketch(dtype=dtype), Case(seq=5, seq_kv=40, values=values)
    want = expected(case.arrays(kernel.plan), case.problem(kernel.plan), values=values)
    assert np.isfinite(want.o).all()
    assert (want.o_tolerance > 0).all()


@pytest.mark.parametrize("scales", ["tensor", "head"])
def test_e4m3_inputs_come_with_scale_factors(sketch: Sketch, scales: str) -> None:
    """Stored times scale is what was drawn, up to three bits; heads have factors of their own."""
    kernel = sketch(dtype="e4m3", scales=scales)
    case = Case(batch=2, heads=6, kv_heads=3, seq=5, seq_kv=40, values="large")
    arrays, launch = case.arrays(kernel.plan), kernel.plan.launch_for(case.problem(kernel.plan))
    for name, (shape, dtype) in launch.inputs.items():
        assert arrays[name].shape == shape
        assert arrays[name].dtype == reference.DTYPES[dtype]
    plain = case.arrays(sketch(dtype="fp32").plan)
    real = properties.real(arrays)
    assert set(real) == {"q", "k", "v"}
    for name in "qkv":
        largest = np.abs(plain[name]).max()
        assert np.allclose(real[name], plain[name], rtol=2.0**-4, atol=2.0**-9 * largest / 448)
        assert np.unique(arrays[f"{name}_scale"]).size == arrays[f"{name}_scale"].size


def test_a_wrong_scale_factor_is_seen_in_the_reference(sketch: Sketch) -> None:
    kernel = sketch(dtype="e4m3", scales="head")
    case = Case(heads=2, seq=5, seq_kv=40)
    arrays, problem = case.arrays(kernel.plan), case.problem(kernel.plan)
    want = expected(arrays, problem)
    wrong = expected({**arrays, "v_scale": 1.5 * arrays["v_scale"]}, problem)
    with pytest.raises(Mismatch):
        worst_error("o", wrong.o, want.o, want.o_tolerance)


@pytest.fixture
def backward() -> Kernel:
    problem = Problem(dtype="bf16", causal=True, head_dim=16, pass_="bwd")
    tile = Tile(block_q=32, block_kv=32, warps=2, stages=2)
    plan = planner.plan(problem, load("h200"), "v2", tile=tile).plan
    assert plan
    return Kernel(plan.kernel.stem, "", plan)


@pytest.mark.parametrize("values", [v for v in properties.VALUES if v not in properties.HUGE])
def test_every_kind_of_values_has_finite_gradients(backward: Kernel, values: str) -> None:
    case = Case(heads=2, seq=50, seq_kv=40, values=values)
    arrays, problem = case.arrays(backward.plan), case.problem(backward.plan)
    assert list(arrays) == ["q", "k", "v", "do", "o", "lse"]
    for want, tolerance in properties.expected_gradients(arrays, problem).values():
        assert np.isfinite(want).all()
        assert (tolerance > 0).any()


def test_a_softcap_loosens_gradients_by_the_rounding_of_its_argument() -> None:
    """Of P and of the derivative, never of anything where scores are small beside the cap."""
    problem = Problem(batch=1, heads=1, seq=4, head_dim=16, dtype="fp32", pass_="bwd")
    x = np.ones((1, 1, 4, 16), np.float32)
    arrays = properties.after_forward(dict.fromkeys(("q", "k", "v", "do"), x), problem)

    def rounding(softcap: float) -> float:
        capped = problem.with_(softcap=softcap)
        return float(properties._weight_rounding(arrays, capped).max())

    plain = rounding(0.0)
    assert rounding(1e6) == pytest.approx(plain, rel=1e-4)
    assert plain < rounding(10.0) < 1.3 * plain


@pytest.mark.parametrize("shape", [(3, 2, 5), (3, 2, 5, 4), (7,)])
def test_packing_is_undone(shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape)).reshape(shape)
    packed = properties.pack(x)
    assert packed.ndim == max(x.ndim - 1, 1)
    back = x if x.ndim == 1 else properties._unpacked(packed, shape[0])
    assert (back == x).all()


class Gradients:
    """A runner that gives the float64 gradients, times a factor for each of them."""

    name = "float64"

    def __init__(self, **factors: float) -> None:
        self.factors = factors

    def run(self, kernel: Kernel, arrays: dict[str, Any], launch: Any) -> dict[str, Any]:
        options = {"causal": True, "scale": launch.scalars["scale"]}
        found = reference.gradients(*(arrays[n] for n in ("q", "k", "v", "do")), **options)
        return {
            name: (x * self.factors.get(name, 1.0)).astype(arrays["q"].dtype)
            for name, x in found._asdict().items()
        }


def test_right_gradients_hold_every_property(backward: Kernel) -> None:
    report = verify(backward, Gradients(), examples=5)
    report.check()
    names = {outcome.name for outcome in report.outcomes}
    assert "rows_without_keys_have_no_gradient" in names
    assert "permuting_keys_changes_nothing" not in names


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_wrong_gradient_is_found(backward: Kernel, name: str) -> None:
    report = verify(backward, Gradients(**{name: 1.05}), examples=5)
    assert report.failure
    assert report.failure.name == "matches_float64"
    assert report.failure.error.where.startswith(f"{name}[")


def test_a_property_of_the_other_pass_is_skipped_with_its_reason(backward: Kernel) -> None:
    replay = "seq=3 seq_kv=3 property=permuting_keys_changes_nothing"
    (outcome,) = verify(backward, Gradients(), replay=replay).outcomes
    assert outcome.skipped == "it speaks of fwd kernels"


def test_huge_scores_are_exact_in_fp32(sketch: Sketch) -> None:
    case, kernel = Case(values="huge", seq_kv=3), sketch(head_dim=256)
    arrays = case.arrays(kernel.plan)
    score = float(arrays["q"][0, 0, 0].astype(np.float64) @ arrays["k"][0, 0, 0])
    assert score == 256 * 133120.0**2
    assert np.float32(score) == score


@pytest.mark.parametrize("scale", properties.SCALES)
@pytest.mark.parametrize("head_dim", [1, 33, 256])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_scores_below_zero_lose_to_one_that_is_zero(
    sketch: Sketch, dtype: str, head_dim: int, scale: float
) -> None:
    scores = scores_of(sketch(dtype=dtype, head_dim=head_dim), "below", scale)
    assert scores.max() < -8
    assert -60 < np.median(scores) < -30


@pytest.mark.parametrize("scale", properties.SCALES)
@pytest.mark.parametrize("head_dim", [16, 33, 256])
@pytest.mark.parametrize(("values", "sign"), [("rising", 1), ("falling", -1)])
def test_the_maximum_moves_from_tile_to_tile_by_units(
    sketch: Sketch, values: str, sign: int, head_dim: int, scale: float
) -> None:
    scores = scores_of(sketch(dtype="fp16", head_dim=head_dim), values, scale)
    tiles = scores.reshape(-1, 3, 32).max(axis=2)
    assert (sign * np.diff(tiles, axis=1) > 1).all()
    assert abs(tiles).max() < 16, "no tile is so low that it is lost in rounding"


@pytest.mark.parametrize("scale", properties.SCALES)
@pytest.mark.parametrize("head_dim", [16, 33, 256])
def test_every_fifth_row_alone_sees_spikes(sketch: Sketch, head_dim: int, scale: float) -> None:
    """One tile each, more than the 14 times heavier that weights of V3 in e4m3 may grow."""
    kernel = sketch(dtype="fp16", head_dim=head_dim)
    case = Case(seq=20, seq_kv=96, values="normal", scale=scale)
    q, k = (case.arrays(kernel.plan)[name][0, 0, :, 4:].astype(np.float64) for name in ("q", "k"))
    spikes = np.zeros((20, 96))
    spikes[[0, 5, 10], [10, 42, 74]] = properties.SPIKE
    wanted = case.problem(kernel.plan).scale * q @ k.T + spikes
    np.testing.assert_allclose(scores_of(kernel, "spikes", scale), wanted, rtol=0, atol=0.02)
    assert math.log(14) + 3 < properties.SPIKE


def scores_of(kernel: Kernel, values: str, scale: float) -> Any:
    """Scores of 20 queries and three tiles of keys."""
    case = Case(seq=20, seq_kv=96, values=values, scale=scale)
    q, k = (case.arrays(kernel.plan)[name][0, 0].astype(np.float64) for name in ("q", "k"))
    return case.problem(kernel.plan).scale * q @ k.T


@pytest.mark.parametrize("layout", properties.LAYOUTS[1:])
@pytest.mark.parametrize(("dtype", "dim"), [(np.float16, 33), (np.float32, 40)])
def test_laid_out_arrays_lie_amid_nan_and_keep_their_alignment(
    layout: str, dtype: Any, dim: int
) -> None:
    x = np.arange(2 * 3 * 4 * dim, dtype=dtype).reshape(2, 3, 4, dim)
    view = lay_out(x, layout)
    assert np.array_equal(view, x)
    assert view.base is not None
    assert np.isnan(view.base).sum() == view.base.size - x.size
    assert all(step % math.gcd(dim * x.itemsize, 16) == 0 for step in view.strides[:3])
    assert view.strides[3] == x.itemsize


def test_few_outputs_are_judged_one_by_one(sketch: Sketch) -> None:
    kernel, case = sketch(dtype="fp16"), Case(seq=3, seq_kv=20)
    arrays, problem = case.arrays(kernel.plan), case.problem(kernel.plan)
    want = expected(arrays, problem)
    options = reference.options_of(problem)
    q, k, v = arrays.values()
    bound = reference.bound(want.o, q, k, v, "fp16", **options)
    assert (want.o_tolerance >= bound).all()
    assert (want.o_tolerance <= 1.02 * bound).all()


def test_many_outputs_are_judged_by_standard_attention(sketch: Sketch) -> None:
    kernel, case = sketch(dtype="bf16"), Case(heads=8, kv_heads=8, seq=64, seq_kv=90)
    arrays, problem = case.arrays(kernel.plan), case.problem(kernel.plan)
    want = expected(arrays, problem)
    q, k, v = arrays.values()
    standard = reference.standard(q, k, v, "bf16", **reference.options_of(problem)).o
    error = np.abs(standard.astype(np.float64) - want.o).max()
    assert want.o_tolerance.min() >= 2 * error
    assert want.o_tolerance.max() <= 2 * error + 3e-5


def test_fp32_rows_with_many_keys_are_held_to_a_millionth(sketch: Sketch) -> None:
    kernel, case = sketch(causal=True), Case(seq=40, seq_kv=1040)
    want = expected(case.arrays(kernel.plan), case.problem(kernel.plan))
    assert want.o_tolerance[0, 0, -17:].max() == want.o_tolerance[0, 0, -17:].min() == 1e-6
    assert want.o_tolerance[0, 0, 0].min() > 1e-6, "1,001 keys"


def test_visible_keys_are_those_of_the_reference() -> None:
    for seq, seq_kv in ((4, 2), (2, 4), (3, 3), (0, 2), (2, 0)):
        problem = Problem(heads=1, seq=seq, seq_kv=seq_kv, head_dim=1, causal=True)
        q, k = np.zeros((1, 1, seq, 1)), np.zeros((1, 1, seq_kv, 1))
        lse = reference.attention(q, k, k, causal=True).lse[0, 0]
        np.testing.assert_allclose(np.exp(lse), properties.visible_keys(problem))


@given(st.integers(0, 9), st.integers(0, 9), *[st.integers(-1, 6)] * 2)
def test_visible_keys_of_a_window(seq: int, seq_kv: int, left: int, right: int) -> None:
    problem = Problem(heads=1, seq=seq, seq_kv=seq_kv, head_dim=1, window=(left, right))
    q, k = np.zeros((1, 1, seq, 1)), np.zeros((1, 1, seq_kv, 1))
    lse = reference.attention(q, k, k, **reference.options_of(problem)).lse[0, 0]
    np.testing.assert_allclose(np.exp(lse), properties.visible_keys(problem))


def test_the_worst_element_is_named() -> None:
    got, want = np.zeros((1, 1, 2, 3)), np.zeros((1, 1, 2, 3))
    got[0, 0, 1, 2] = 0.5
    assert worst_error("o", got, want, 1.0) == 0.5
    with pytest.raises(Mismatch) as error:
        worst_error("o", got, want, 0.25)
    assert error.value.where == "o[0, 0, 1, 2]"
    assert error.value.why == "got 0.5, expected 0, tolerance 0.25"


@pytest.mark.parametrize("got", [np.nan, np.inf, 0.0])
def test_only_minus_infinity_is_minus_infinity(got: float) -> None:
    want = np.full((1, 1, 1), -np.inf)
    assert worst_error("lse", want, want, 1e-6) == 0
    with pytest.raises(Mismatch):
        worst_error("lse", np.full((1, 1, 1), got), want, 1e-6)


def test_nan_is_never_within_a_tolerance() -> None:
    with pytest.raises(Mismatch):
        worst_error("o", np.full((1, 1, 1, 1), np.nan), np.zeros((1, 1, 1, 1)), np.inf)


def test_a_report_says_that_numpy_ran_no_file(sketch: Sketch) -> None:
    report = verify(sketch(), NumpyRunner(), examples=5)
    assert report.ok
    assert not report.ran_file
    assert "never run" in report.note
    document = json.loads(json.dumps(report.to_json()))
    assert document["ran_file"] is False
    skipped = {p["property"]: p["skipped"] for p in document["properties"] if p["skipped"]}
    assert set(skipped) == {
        "poisoned_padding_never_leaks",
        "later_keys_change_nothing",
        "the_number_of_splits_changes_nothing",
        "an_endless_window_is_none",
        "an_endless_softcap_is_none",
        "a_bias_of_zero_is_none",
        "a_constant_on_a_row_moves_only_its_lse",
        "packed_sequences_are_those_one_by_one",
        "nan_stays_in_its_sequence",
        "bytes_moved_are_bytes_predicted",
        "matrix_instructions_do_the_flops_predicted",
        "main_loop_has_no_bank_conflicts",
    }
    assert document["executed"] is None


def test_the_same_seed_draws_the_same_inputs(sketch: Sketch) -> None:
    first, again = (verify(sketch(), NumpyRunner(), 8, seed=4) for _ in range(2))
    other = verify(sketch(), NumpyRunner(), 8, seed=5)
    assert first.histogram == again.histogram
    assert first.outcomes == again.outcomes
    assert first.histogram != other.histogram


def test_errors_are_counted_by_their_share_of_the_tolerance(sketch: Sketch) -> None:
    document = verify(sketch(), NumpyRunner(), 8).to_json()
    (found,) = (p for p in document["properties"] if p["property"] == "matches_float64")
    assert sum(found["errors"].values()) == found["cases"] == 8
    assert max(found["errors"]) == properties.tenths(found["worst"])
    assert [properties.tenths(share) for share in (0, 0.29, 0.9, 1)] == ["0.0", "0.2", "0.9", "0.9"]


@given(data=st.data())
def test_a_replay_line_is_read_back(sketch: Sketch, data: Any) -> None:
    case = data.draw(properties.cases(sketch().plan))
    error = Mismatch("off", "o[0]", 1.0, 2.0, 0.5)
    failure = properties.Failure("nan_stays_in_its_row", case, error)
    property_, read = properties.parse_replay(failure.replay)
    assert (property_.name, read) == (failure.name, case)


@pytest.mark.parametrize(
    "line",
    ["seq=x", "sequence=3", "property=is_fast", "values=odd", "layout=odd", "seed=-1", "3"],
)
def test_an_unreadable_replay_line_is_refused(sketch: Sketch, line: str) -> None:
    with pytest.raises(UsageError, match="cannot be read") as error:
        verify(sketch(), NumpyRunner(), replay=line)
    assert error.value.hint


def test_a_replay_line_may_leave_things_out(sketch: Sketch) -> None:
    report = verify(sketch(), NumpyRunner(), replay="seq=3 seq_kv=5")
    assert [(o.name, o.cases) for o in report.outcomes] == [("matches_float64", 1)]


def test_a_property_that_says_nothing_about_an_input_says_so(sketch: Sketch) -> None:
    line = "seq_kv=1 property=permuting_keys_changes_nothing"
    (outcome,) = verify(sketch(), NumpyRunner(), replay=line).outcomes
    assert outcome.skipped == "it says nothing about this input"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("property=poisoned_padding_never_leaks", "no memory"),
        ("property=later_keys_change_nothing seq=3", "other queries see other keys"),
    ],
)
def test_replaying_a_property_that_does_not_apply_skips_it(
    sketch: Sketch, line: str, why: str
) -> None:
    (outcome,) = verify(sketch(), NumpyRunner(), replay=line).outcomes
    assert why in outcome.skipped
    assert not outcome.cases


OPTIONS: tuple[dict[str, Any], ...] = (
    {"window": (9, 3)},
    {"softcap": 30.0},
    {"bias": "alibi"},
    {"bias": "dense", "dtype": "fp16"},
    {"bias": "dense_fp32", "dtype": "bf16"},
    {"varlen": True},
    {"dtype": "e4m3", "scales": "head"},
    {"algo": "v3", "dtype": "fp16"},
    {"algo": "v3", "dtype": "e4m3", "scales": "block", "in_dtype": "bf16", "incoherent": True},
)


def drawn(plan: Plan, count: int) -> Counter[str]:
    """The bins of so many cases, of a kernel that no runner need run."""
    found: Counter[str] = Counter()

    @hypothesis.settings(max_examples=count, database=None, deadline=None)
    @given(properties.cases(plan))
    def draw(case: Case) -> None:
        found.update(properties.bins(case, plan))

    draw()
    return found


def options_arrays(kernel: Kernel, **case: Any) -> tuple[dict[str, np.ndarray[Any, Any]], Problem]:
    made = Case(batch=2, heads=4, kv_heads=2, seq=9, seq_kv=7, **case)
    return made.arrays(kernel.plan), made.problem(kernel.plan)


@pytest.mark.parametrize(
    ("bias", "steps"),
    [
        ("usual", (True, True)),
        ("of_heads", (False, True)),
        ("of_batch", (True, False)),
        ("shared", (False, False)),
    ],
)
def test_a_bias_is_broadcast_by_a_stride_of_zero(
    sketch: Sketch, bias: str, steps: tuple[bool, bool]
) -> None:
    arrays, problem = options_arrays(sketch(bias="dense"), bias=bias)
    assert arrays["bias"].shape == (2, 4, 9, 7)
    assert tuple(step > 0 for step in arrays["bias"].strides[:2]) == steps
    assert problem.dense


def test_a_mask_hides_whole_rows_and_expects_nothing_of_them(sketch: Sketch) -> None:
    arrays, problem = options_arrays(sketch(bias="dense"), bias="mask")
    assert set(np.unique(arrays["bias"])) == {0.0, -np.inf}
    blind = np.isneginf(arrays["bias"]).all(axis=3)
    assert blind.any()
    want = expected(arrays, problem)
    assert (want.o[blind] == 0).all()
    assert np.isneginf(want.lse[blind]).all()


def test_the_usual_slopes_are_those_of_the_reference(sketch: Sketch) -> None:
    arrays, problem = options_arrays(sketch(bias="alibi"))
    qkv = [arrays[name] for name in ("q", "k", "v")]
    want = reference.attention(*qkv, **reference.options_of(problem))
    np.testing.assert_allclose(expected(arrays, problem).o, want.o, atol=1e-7)
    assert not np.allclose(options_arrays(sketch(bias="alibi"), bias="other")[0]["slopes"], 0.5)


def test_packing_and_unpacking_are_inverse() -> None:
    x = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    packed = properties.pack(x)
    assert (packed[4 + 1] == x[1, :, 1]).all()
    problem = Problem(batch=2, heads=3, seq=4, head_dim=5)
    outputs = {"o": packed, "lse": packed[..., 0].T}
    got = properties.unpack(outputs, problem)
    assert (got["o"] == x).all()
    assert (got["lse"] == x[..., 0]).all()


@pytest.mark.parametrize("layout", properties.LAYOUTS)
def test_packed_arrays_keep_their_values_in_every_layout(layout: str) -> None:
    x = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)
    got = properties.placed({"q": x, "slopes": x[0, 0]}, layout)
    assert (got["q"] == x).all()
    assert got["q"].strides[2] == 4
    assert (got["slopes"] == x[0, 0]).all()


def test_replay_lines_name_options_that_are_not_the_default() -> None:
    plain = Case(seq=3)
    assert "left" not in str(plain)
    assert "softcap" not in str(plain)
    case = Case(seq=3, left=4, right=0, softcap=1.0, bias="mask")
    assert properties.parse_replay(str(case))[1] == case


def test_a_small_catalogue_fills_every_bin(sketch: Sketch) -> None:
    total: Counter[str] = Counter()
    for seed, (algo, dtype, causal, dim) in enumerate(
        (algo, dtype, causal, dim)
        for algo, dtype, dim in (("v1", "fp32", 16), ("v2", "fp16", 33), ("v2", "bf16", 16))
        for causal in (False, True)
    ):
        kernel = sketch(algo=algo, dtype=dtype, causal=causal, head_dim=dim)
        total.update(verify(kernel, NumpyRunner(), 30, seed).histogram)
    for options in OPTIONS:
        total.update(drawn(sketch(**options).plan, 120))
    assert properties.empty_bins(total) == ()
    assert set(total) <= set(properties.BINS)
    del total["empty rows"]
    assert properties.empty_bins(total) == ("empty rows",)


def test_a_softcap_hides_the_rounding_of_large_scores_only() -> None:
    """Two products of a row: one far beyond the cap, one that cancels to nothing."""
    problem = Problem(seq=1, seq_kv=1, heads=1, head_dim=2, scale=1.0, softcap=1.0, dtype="bf16")
    q = np.full((1, 1, 1, 2), 64.0)
    far, cancelled = np.full((1, 1, 1, 2), 64.0), np.array([64.0, -64.0]).reshape(1, 1, 1, 2)
    small, large = (properties.score_rounding(q, k, problem).item() for k in (far, cancelled))
    assert large > 1000 * small
    without = properties.score_rounding(q, far, problem.with_(softcap=0.0)).item()
    assert large == pytest.approx(without, rel=1e-3)

"""The NumPy twin of kernels that quantise, against float64; and their plans, counted by hand."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fasim import gpu, planner, quantise, reference, render, show
from fasim.errors import UsageError
from fasim.model import footprint, traffic
from fasim.model.tiles import Tiles
from fasim.plan import KernelSpec, Plan, Tile
from fasim.problem import Problem

Array = NDArray[Any]

TILE = Tile(block_q=128, block_kv=128, warps=8, stages=2)
SHAPES = {"tensor": (1,), "head": (2, 3), "block": (2, 3, 3)}
DIMS = (16, 32, 64, 128, 256)


def problem(**options: Any) -> Problem:
    shape = {"batch": 2, "heads": 6, "kv_heads": 3, "seq": 300, "seq_kv": 200, "head_dim": 64}
    return Problem(dtype="e4m3", in_dtype="bf16", **{**shape, **options})


def plan_of(wanted: Problem) -> Plan:
    plan = planner.plan(wanted, gpu.load("h200"), "v3", tile=TILE).plan
    assert plan
    return plan


def hadamard(d: int) -> Array:
    """Sylvester's: H(2d) = [[H, H], [H, -H]]."""
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.block([[h, h], [h, -h]])
    return h


def drawn(seed: int, d: int = 64, seq: int = 300) -> Array:
    return np.random.default_rng(seed).standard_normal((2, 3, seq, d)).astype(np.float32)


@pytest.mark.parametrize("d", DIMS)
def test_a_rotation_is_a_signed_hadamard_transform(d: int) -> None:
    x = drawn(0, d, 5)
    want = x.astype(np.float64) * quantise.signs(d) @ hadamard(d) / math.sqrt(d)
    assert np.abs(quantise.rotate(x) - want).max() < 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("d", DIMS)
def test_a_rotation_changes_no_product_of_rows(d: int) -> None:
    q, k = drawn(0, d, 20).astype(np.float64), drawn(1, d, 30).astype(np.float64)
    turned = [quantise.rotate(x).astype(np.float64) for x in (q, k)]
    want, got = (a @ b.swapaxes(2, 3) for a, b in ((q, k), turned))
    assert np.abs(got - want).max() < 1e-5 * math.sqrt(d)


def test_an_outlier_is_spread_over_its_row() -> None:
    x = np.zeros((1, 1, 1, 64), np.float32)
    x[..., 17] = 80
    assert (np.abs(quantise.rotate(x)) == 10).all()


@pytest.mark.parametrize("d", DIMS)
def test_signs_are_balanced_and_those_of_the_kernel(d: int) -> None:
    signs = quantise.signs(d)
    assert set(signs) == {1, -1}
    assert abs(signs.sum()) <= 4 * math.sqrt(d)
    spec = plan_of(problem(head_dim=d, head_dim_v=64, incoherent=True)).kernel
    words = [int(word.rstrip("u"), 16) for word in render.signs(spec).split(", ")]
    bits = [words[column // 32] >> column % 32 & 1 for column in range(d)]
    assert (signs == 1 - 2 * np.array(bits)).all()
    assert np.float32(render.unit(spec).rstrip("f")) == quantise.unit_of(d)


@pytest.mark.parametrize("scales", SHAPES)
def test_scale_factors_have_the_shape_that_kernels_take(scales: str) -> None:
    stored, scale = quantise.quantise(drawn(0), scales)
    assert (stored.dtype, scale.dtype) == (ml_dtypes.float8_e4m3fn, np.float32)
    assert (stored.shape, scale.shape) == ((2, 3, 300, 64), SHAPES[scales])
    assert np.abs(stored.astype(np.float32)).max() == 448


@given(
    seed=st.integers(0, 99),
    scales=st.sampled_from(list(SHAPES)),
    size=st.floats(-30, 30),
    spread=st.floats(0, 4),
)
def test_the_twin_is_the_oracle_up_to_the_rounding_of_fp32(
    seed: int, scales: str, size: float, spread: float
) -> None:
    x = drawn(seed) * 2.0**size
    x *= np.exp(spread * np.random.default_rng(seed).standard_normal((2, 3, 300, 1)))
    x = x.astype(np.float32)
    stored, scale = quantise.quantise(x, scales)
    want = reference.quantise(x, scales)
    np.testing.assert_array_equal(scale, want.scales.reshape(scale.shape))
    got = stored.astype(np.float64)
    exact = np.clip(x / quantise.per_row(scale.astype(np.float64), 300), -448, 448)
    step = np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), 1e-9))), 2.0**-6) / 8
    assert (np.abs(got - exact) <= step * (0.5 + 1e-5)).all()
    assert (stored.view(np.uint8) == want.stored.view(np.uint8)).mean() > 0.999


def test_what_is_not_finite_does_not_count() -> None:
    x = np.zeros((1, 1, 4, 2), np.float32)
    x[0, 0, 0] = [np.nan, np.inf]
    x[0, 0, 1] = [-3, 1]
    stored, scale = quantise.quantise(x)
    assert scale == np.float32(3) / np.float32(448)
    got = stored.astype(np.float32)[0, 0]
    assert np.isnan(got[0, 0])
    assert (got[0, 1], got[1, 0]) == (448, -448)


@pytest.mark.parametrize("scales", SHAPES)
def test_zeros_and_no_rows(scales: str) -> None:
    stored, scale = quantise.quantise(np.zeros((1, 1, 3, 16), np.float32), scales)
    assert (stored.astype(np.float32) == 0).all()
    assert (scale == np.finfo(np.float32).tiny).all()
    stored, scale = quantise.quantise(np.zeros((2, 3, 0, 16), np.float32), scales)
    assert stored.shape == (2, 3, 0, 16)
    assert scale.shape == {**SHAPES, "block": (2, 3, 0)}[scales]


def test_a_problem_in_e4m3_is_stored_as_it_is() -> None:
    arrays = {"q": np.ones(3)}
    assert quantise.stored(arrays, Problem(dtype="e4m3")) == arrays


# ---- Plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", SHAPES)
def test_a_launch_quantises_first(scales: str) -> None:
    launch = plan_of(problem(scales=scales, head_dim_v=80)).launch_for()
    *before, main = launch.stages
    blocks = 2 * 6 * 3 + 2 * 2 * 3 * 2
    factors = {"tensor": 3, "head": 2 * (6 + 3 + 3), "block": blocks}[scales]
    names = {"block": ["quantise"]}.get(scales, ["largest", "scales", "quantise"])
    assert [stage.entry.removeprefix(f"{main.entry}_") for stage in before] == names
    grids = {"largest": blocks, "scales": factors, "quantise": blocks}
    assert [stage.grid for stage in before] == [grids[name] for name in names]
    assert {stage.block for stage in before} == {256}
    assert before[-1].smem_bytes == 96 * 128 + 64
    assert launch.inputs["q"] == ((2, 6, 300, 64), "bf16")
    assert set(launch.inputs) == {"q", "k", "v"}
    assert launch.workspaces["q8"] == ((2, 6, 300, 64), "e4m3")
    assert launch.workspaces["vt"] == ((6, 2, 97, 128), "e4m3")
    found = sum(math.prod(launch.workspaces[f"{name}_scale"][0]) for name in "qkv")
    assert found == factors
    assert ("most" in launch.workspaces) == (scales != "block")
    assert launch.boxes == {"q8": 64, "k8": 128, "vt": 96 + 8, "o": 64}


def test_wide_rows_take_more_threads() -> None:
    launch = plan_of(problem(head_dim=256, head_dim_v=64)).launch_for()
    assert [stage.block for stage in launch.stages[:3]] == [512] * 3


@pytest.mark.parametrize(("seq", "seq_kv"), [(0, 200), (300, 0)])
@pytest.mark.parametrize("scales", SHAPES)
def test_lengths_of_nothing(seq: int, seq_kv: int, scales: str) -> None:
    launch = plan_of(problem(scales=scales)).launch_for(
        problem(scales=scales, seq=seq, seq_kv=seq_kv)
    )
    assert all((stage.grid > 0) == (seq > 0) for stage in launch.stages)


def test_kernels_that_quantise_have_names_of_their_own() -> None:
    plain = plan_of(Problem(dtype="e4m3")).kernel
    made = plan_of(Problem(dtype="e4m3", in_dtype="bf16", incoherent=True)).kernel
    assert isinstance(plain, KernelSpec)
    assert plain.stem.startswith("v3_fwd_sm90a_e4m3_d128_full_")
    assert made.stem.startswith("v3_fwd_sm90a_e4m3_d128_full_frombf16_incoherent_")
    assert not {"in_dtype", "incoherent"} & set(plan_of(Problem(dtype="e4m3")).to_json()["kernel"])


@pytest.mark.parametrize(
    "change",
    [{"in_dtype": "fp16"}, {"in_dtype": "e4m3", "incoherent": False}, {"incoherent": False}],
)
def test_a_kernel_serves_its_own_inputs_only(change: dict[str, Any]) -> None:
    plan = plan_of(problem(incoherent=True))
    with pytest.raises(UsageError, match="cannot run this problem"):
        plan.launch_for(plan.problem.with_(**change))


@pytest.mark.parametrize("scales", SHAPES)
def test_bytes_by_hand(scales: str) -> None:
    asked = traffic.issued(problem(scales=scales), "v3", "fwd", Tiles.of([TILE])).at(0)
    passes, q, k = 1 if scales == "block" else 2, 2 * 6 * 300 * 64, 2 * 3 * 200 * 64
    given = {name: asked.reads[name] for name in "qkv"}
    assert given == {"q": passes * 2 * q, "k": passes * 2 * k, "v": passes * 2 * k}
    assert (asked.writes["q8"], asked.writes["k8"]) == (q, k)
    assert asked.reads["q8"] == q
    assert asked.reads["k8"] == 3 * 2 * k  # three tiles of queries, two heads of a group
    assert asked.writes["vt"] == 2 * 3 * 65 * 256
    blocks = 2 * 6 * 3 + 2 * 2 * 3 * 2
    assert asked.writes.get("most", 0) == 4 * blocks * (scales != "block")
    factors = {"tensor": 3, "head": 2 * 12, "block": blocks}[scales]
    assert sum(asked.writes[f"{name}_scale"] for name in "qkv") == 4 * factors
    workspace = q + k + 4 * factors + 4 * blocks * (scales != "block") + 2 * 3 * 65 * 256
    hbm = footprint.hbm(problem(scales=scales), "v3", "fwd")
    assert (hbm.workspace, hbm.inputs) == (workspace, 2 * (q + 2 * k))
    o = 2 * q
    assert footprint.compulsory(problem(scales=scales)) == hbm.inputs + o


def test_quantising_takes_time() -> None:
    """The bytes of the kernels before, at the speed of HBM, and their launches."""
    seconds = {
        in_dtype: planner.plan(
            Problem(dtype="e4m3", in_dtype=in_dtype, batch=4), gpu.load("h200"), "v3"
        ).time.seconds
        for in_dtype in ("e4m3", "bf16")
    }
    assert seconds["bf16"] > 1.02 * seconds["e4m3"]


def test_a_problem_says_what_it_is_made_of() -> None:
    assert show.shape(problem(incoherent=True)).endswith("head_dim 64, from bf16, rotated")
    assert "from" not in show.shape(Problem(dtype="e4m3"))

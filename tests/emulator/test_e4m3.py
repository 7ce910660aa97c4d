"""e4m3 in the emulator: how wrong a result is on the whole, which no single element tells."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fasim import accuracy, planner, properties, reference
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Case, Trial
from fasim.render import Kernel, parse, render
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]

pytestmark = pytest.mark.emulator

TILE = Tile(block_q=64, block_kv=64, warps=4)
CASE = Case(heads=2, kv_heads=1, seq=64, seq_kv=512)
BARELY = 1.05  # times the error of standard attention in e4m3


def kernel(**options: Any) -> Kernel:
    problem = Problem(dtype="e4m3", head_dim=64, out_dtype="fp32", **options)
    plan = planner.plan(problem, load("4090"), "v2", tile=TILE).plan
    assert plan
    return render(plan)


def v3_kernel(**options: Any) -> Kernel:
    problem = Problem(**{"dtype": "e4m3", "head_dim": 64, **options})
    plan = planner.plan(problem, load("h200"), "v3").plan
    assert plan
    return render(plan)


def rms(x: Array) -> float:
    return math.sqrt(np.mean(x.astype(np.float64) ** 2))


def errors(kernel: Kernel, case: Case) -> tuple[float, float]:
    """Root mean square errors of the kernel and of standard attention in e4m3."""
    trial = Trial(kernel, EmulatorRunner(), case)
    arrays = properties.real(trial.arrays)
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    options = reference.options_of(trial.problem)
    standard = reference.standard(q, k, v, "e4m3", out_dtype="fp32", **options)
    want = trial.expected.o
    return rms(trial.outputs["o"] - want), rms(standard.o - want)


@pytest.mark.parametrize("scales", ["tensor", "head"])
@pytest.mark.parametrize(
    ("values", "most"), [("normal", 2e-3), ("large", 2e-3), ("falling", 5e-3), ("mean", 1.2e-2)]
)
def test_the_error_is_that_of_p_in_e4m3(values: str, most: float, scales: str) -> None:
    """The weights' three bits are all that is lost: tiles and their sums add nothing.

    ``most`` is stated in docs/numerics.md.
    """
    ours, standard = errors(kernel(scales=scales), replace(CASE, values=values))
    assert ours <= BARELY * standard
    assert ours <= most


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize(
    ("values", "most"), [("normal", 2e-3), ("large", 3e-3), ("falling", 4e-3), ("mean", 8e-3)]
)
def test_the_error_of_v3_is_no_larger(values: str, most: float, scales: str) -> None:
    """Its weights have any size, which the sum of the rounded ones makes up for; scores come from
    sums of 14 bits, which shows where they are large. ``most`` is stated in docs/numerics.md."""
    case = replace(CASE, values=values)
    trial = Trial(v3_kernel(scales=scales), EmulatorRunner(), case)
    arrays, want = properties.real(trial.arrays), trial.expected
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    options = reference.options_of(trial.problem)
    standard = reference.standard(q, k, v, "e4m3", out_dtype="bf16", **options)
    ours = rms(trial.outputs["o"] - want.o)
    assert ours <= (1.25 if values == "large" else 1.1) * rms(standard.o - want.o)
    assert ours <= most


def test_blocks_of_keys_have_scale_factors_of_their_own() -> None:
    """Twice those of the second block are twice its values, and twice its scores."""
    trial = Trial(v3_kernel(scales="block"), EmulatorRunner(), CASE)
    arrays = {**trial.arrays}
    for name in ("k_scale", "v_scale"):
        arrays[name] = arrays[name].copy()
        arrays[name][:, :, 1] *= 2
    got, limits = trial.run(arrays), trial.expected_of(arrays, trial.problem)
    assert properties.worst_error("o", got["o"], *limits.wanted["o"]) <= 1
    assert properties.worst_error("lse", got["lse"], *limits.wanted["lse"]) <= 1
    with pytest.raises(properties.Mismatch):
        properties.worst_error("o", trial.outputs["o"], *limits.wanted["o"])


def test_the_log_sum_exp_of_v3_knows_no_rounded_weights() -> None:
    """It errs by that of scores alone: rounded weights would miss it by a hundred times as much."""
    trial = Trial(v3_kernel(), EmulatorRunner(), CASE)
    assert rms(trial.outputs["lse"] - trial.expected.lse) <= 1e-4


@pytest.mark.parametrize("algo", ["v2", "v3"])
def test_a_product_of_scale_factors_that_is_zero_hides_no_key(algo: str) -> None:
    """Without keys K's factor is the smallest number; times that of tiny queries it is none."""
    made = (kernel if algo == "v2" else v3_kernel)(causal=True, scales="head")
    trial = Trial(made, EmulatorRunner(), Case(seq=2, seq_kv=0, values="tiny"))
    assert np.prod([trial.arrays[f"{name}_scale"] for name in "qk"], dtype=np.float32) == 0
    assert (trial.outputs["o"].astype(np.float32) == 0).all()
    assert np.isneginf(trial.outputs["lse"]).all()


def test_constant_values_come_back_exactly() -> None:
    """However the weights were rounded: O is divided by the sum of the rounded ones."""
    trial = Trial(v3_kernel(), EmulatorRunner(), replace(CASE, values="large"))
    ones = np.ones_like(trial.arrays["v"])
    got = trial.run({**trial.arrays, "v": ones, "v_scale": np.ones(1, np.float32)})
    np.testing.assert_array_equal(got["o"].astype(np.float32), 1)


def small_weights(kernel: Kernel, depth: int = 8) -> float:
    """The output where the key seen first has weight 1 and value 0, and 511 others have weight
    exp(-depth), for which e4m3 has no number unless it is stretched, and value 1."""
    trial = Trial(kernel, EmulatorRunner(), Case(seq=1, seq_kv=512, scale=1.0))
    arrays = {name: np.zeros_like(x) for name, x in trial.arrays.items()}
    arrays["q"][..., 0] = 1
    arrays["k"][:, :, -1, 0] = depth
    arrays["v"][...] = 1
    arrays["v"][:, :, -1] = 0
    arrays |= {f"{name}_scale": np.ones(1, np.float32) for name in "qkv"}
    return float(trial.run(arrays)["o"][0, 0, 0, 0])


def test_many_small_weights_are_not_lost() -> None:
    right, stretch = kernel(), "kWeightExponent = 8.f;"
    mass = 511 * math.exp(-8)
    assert small_weights(right) == pytest.approx(mass / (1 + mass), rel=2.0**-4)
    assert right.source.count(stretch) == 1
    assert small_weights(parse(right.source.replace(stretch, "kWeightExponent = 0.f;"))) == 0


def test_v3_loses_what_is_far_below_and_no_more() -> None:
    """2^-15 of a row's largest weight, which is half a step of e4m3's smallest numbers."""
    right, stretch = v3_kernel(), "kWeightExponent = 5.f;"
    mass = 511 * math.exp(-7)
    assert small_weights(right, 7) == pytest.approx(mass / (1 + mass), rel=2.0**-4)
    assert right.source.count(stretch) == 1
    assert small_weights(parse(right.source.replace(stretch, "kWeightExponent = 0.f;")), 7) == 0
    assert reference.E4M3_LOST_LAZILY == 2.0**-10 / 2.0**5
    assert small_weights(right, 10) > 0  # exp(-10) is 2^-14.4
    assert small_weights(right, 11) == 0  # and exp(-11) 2^-15.9


@pytest.mark.parametrize(
    ("incoherent", "most"),
    [
        (False, {"normal": 3e-3, "outliers": 1.5e-2, "heavy": 1.6e-1, "drifting": 4e-2}),
        (True, {"normal": 3e-3, "outliers": 9.1e-3, "heavy": 1e-1, "drifting": 4e-2}),
    ],
)
def test_what_quantising_loses(incoherent: bool, most: dict[str, float]) -> None:
    """Against float64 on the inputs in bf16; rotated, outliers lose half as much."""
    options = {"in_dtype": "bf16", "scales": "block", "incoherent": incoherent, "head_dim": 128}
    measured = accuracy.measure(v3_kernel(**options), EmulatorRunner())
    found = {one.inputs: one for one in measured}
    assert found.keys() == most.keys()
    for name, one in found.items():
        assert one.kernel.rmse <= most[name]
        assert one.kernel.cosine > 0.994
        assert one.bf16.rmse < one.kernel.rmse / 10

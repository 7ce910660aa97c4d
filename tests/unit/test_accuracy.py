"""Errors on kinds of inputs: what is drawn, and what is counted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from fasim import accuracy, cli, planner, properties, reference
from fasim.accuracy import Errors
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import Kernel, render
from fasim.runners.numpy import NumpyRunner

WIDE = Problem(seq=4096, head_dim=64, dtype="e4m3", in_dtype="bf16")


def test_errors_by_hand() -> None:
    got = Errors.of(np.array([1.0, 2.0], np.float32), np.array([1.0, 1.0]))
    assert (got.rmse, got.largest) == (pytest.approx(math.sqrt(0.5)), 1.0)
    assert got.cosine == pytest.approx(3 / math.sqrt(10))
    assert Errors.of(np.zeros(2), np.zeros(2)).cosine == 1


def test_one_of_a_thousand_is_an_outlier() -> None:
    x = accuracy.drawn("outliers", WIDE)["q"].astype(np.float64)
    assert 1 + 0.1 - 0.02 < x.var() < 1 + 0.1 + 0.02
    assert 3e-4 < (np.abs(x) > 6).mean() < 8e-4  # 0.55 of the outliers


def test_a_drift_grows_along_the_sequence() -> None:
    x = accuracy.drawn("drifting", WIDE)["k"].astype(np.float64)
    assert x[:, :, :64].std() == pytest.approx(0.14, abs=0.01)
    assert x[:, :, -64:].std() == pytest.approx(2 - 0.01, abs=0.05)


def test_a_seed_draws_again_and_another_draws_others() -> None:
    first, again, other = (accuracy.drawn("heavy", WIDE, seed)["v"] for seed in (3, 3, 4))
    assert first.dtype == ml_dtypes.bfloat16
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("options", [{"in_dtype": "fp16", "incoherent": True}, {"scales": "head"}])
def test_every_distribution_is_measured(options: dict[str, object]) -> None:
    problem = Problem(**{"dtype": "e4m3", "head_dim": 32, "causal": True, **options})
    plan = planner.plan(problem, load("h200"), "v3").plan
    assert plan
    found = accuracy.measure(render(plan), NumpyRunner())
    assert [one.inputs for one in found] == list(accuracy.DISTRIBUTIONS)
    for one in found:
        assert 5 * one.bf16.rmse < one.kernel.rmse < one.rms
        assert one.kernel.cosine < one.bf16.cosine <= 1


def test_only_e4m3_is_measured(sketch: Callable[..., Kernel]) -> None:
    assert "e4m3" in accuracy.unmeasured(sketch(dtype="bf16"))
    assert accuracy.unmeasured(sketch(dtype="e4m3", scales="head")) == ""
    assert "bias" in accuracy.unmeasured(sketch(dtype="e4m3", bias="dense_fp32"))


def test_verify_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "verify --gpu h200 --algo v3 --dtype e4m3 --in-dtype bf16 --head-dim 16 --runner numpy"
    assert cli.run([*asked.split(), "--examples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "errors against float64 on the bf16 inputs" in shown
    assert all(name in shown for name in accuracy.DISTRIBUTIONS)
    assert cli.run([*asked.split(), "--examples", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {one["inputs"] for one in document["accuracy"]} == accuracy.DISTRIBUTIONS.keys()


def stored_rmse(seed: int, **options: object) -> float:
    """Of 128 queries at head_dim 128 and 8192 keys with outliers, in NumPy: standard attention with
    P in e4m3 on what V3 stores."""
    given = accuracy.drawn("outliers", Problem(heads=1, seq=8192, dtype="bf16"), seed)
    problem = Problem(**{"heads": 1, "seq": 8192, "dtype": "e4m3", "in_dtype": "bf16", **options})
    real = properties.real(given, problem)
    rows = range(0, 8192, 64)
    q, k, v = (real[name].astype(np.float32) for name in ("q", "k", "v"))
    got = reference.standard(q, k, v, "e4m3", out_dtype="bf16", rows=rows).o
    return accuracy.compared("outliers", got, given, problem, rows).kernel.rmse


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"scales": "block", "incoherent": True}, 9.1e-3),
        ({"scales": "block"}, 2.4e-2),
        ({"scales": "tensor"}, 2.4e-2),
    ],
)
def test_outliers_lose_no_more_than_in_the_paper(options: dict[str, object], most: float) -> None:
    """Table 3 of the FlashAttention-3 paper; docs/numerics.md has the mean over 20 seeds."""
    assert np.mean([stored_rmse(seed, **options) for seed in range(6)]) <= most

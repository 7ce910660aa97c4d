"""Problems: defaults, validation, JSON."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim.errors import UsageError
from fasim.problem import Problem

BAD: list[dict[str, Any]] = [
    {"batch": 0}, {"batch": True}, {"batch": 1.5}, {"heads": 0}, {"heads": 6, "kv_heads": 4},
    {"kv_heads": 0}, {"seq": -1}, {"seq": 2**31}, {"seq_kv": -5}, {"head_dim": 0},
    {"head_dim": 257}, {"head_dim_v": 300}, {"dtype": "fp8"}, {"dtype": 16},
    {"dtype": "fp16", "out_dtype": "fp32"}, {"dtype": "e4m3", "out_dtype": "e4m3"},
    {"causal": 1}, {"window": (-2, 0)}, {"window": (1,)}, {"window": (1.0, 2)}, {"window": 5},
    {"softcap": -1.0}, {"softcap": float("nan")}, {"softcap": float("inf")}, {"softcap": "a"},
    {"bias": "additive"}, {"scale": 0.0}, {"scale": -1.0}, {"scale": float("nan")},
    {"scales": "row"}, {"scales": "block"}, {"incoherent": True}, {"pass_": "backward"},
    {"dtype": "e4m3", "pass_": "bwd"}, {"dtype": "e4m3", "in_dtype": "fp32"},
    {"dtype": "fp16", "in_dtype": "bf16"}, {"dtype": "bf16", "in_dtype": "e4m3"},
    {"dtype": "e4m3", "incoherent": True},
    {"dtype": "e4m3", "in_dtype": "bf16", "incoherent": True, "head_dim": 96},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD, ids=str)
def test_each_bad_option_is_one_clear_error(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Problem(**options)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert "\n" not in caught.value.what


def test_defaults_follow_the_options_they_depend_on() -> None:
    p = Problem(heads=12, seq=100, head_dim=64)
    assert (p.kv_heads, p.seq_kv, p.head_dim_v, p.out_dtype) == (12, 100, 64, "fp16")
    assert p.scale == 0.125
    assert Problem(dtype="e4m3").out_dtype == "bf16"


def test_inputs_have_the_type_computed_in_unless_they_are_quantised() -> None:
    assert Problem(dtype="bf16").in_dtype == "bf16"
    problem = Problem(dtype="e4m3", in_dtype="bf16", incoherent=True)
    assert problem.quantises
    assert (problem.in_bytes, problem.element_bytes, problem.out_dtype) == (2, 1, "bf16")
    assert problem.with_(seq=7).in_dtype == "bf16"
    assert problem.with_(dtype="bf16", incoherent=False).in_dtype == "bf16"
    assert Problem(dtype="e4m3").with_(dtype="fp16").in_dtype == "fp16"
    assert Problem.from_json(problem.to_json()) == problem
    assert "in_dtype" not in Problem(dtype="e4m3").to_json()


def test_with_moves_dependent_defaults_and_keeps_explicit_values() -> None:
    assert Problem(seq=100).with_(seq=7).seq_kv == 7
    assert Problem(seq=100, seq_kv=50).with_(seq=7).seq_kv == 50
    assert Problem(scale=0.5).with_(head_dim=32).scale == 0.5


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, "full"),
        ({"causal": True}, "causal"),
        ({"window": (5, 0)}, "window"),
        ({"window": (-1, 0)}, "causal"),
        ({"window": (10**9, -1)}, "full"),
        ({"window": (5, 5), "causal": True}, "window"),
        ({"window": (-1, 3)}, "window"),
    ],
)
def test_mask_kind(options: dict[str, Any], mask: str) -> None:
    assert Problem(**options).mask == mask


@given(
    st.builds(
        dict, batch=st.integers(1, 9), seq=st.integers(0, 99), causal=st.booleans(),
        window=st.tuples(st.integers(-1, 9), st.integers(-1, 9)), softcap=st.floats(0, 9),
        head_dim=st.integers(1, 256), dtype=st.sampled_from(["fp32", "fp16", "bf16", "e4m3"]),
    )
)  # fmt: skip
def test_json_round_trip(options: dict[str, Any]) -> None:
    problem = Problem(**options)
    assert Problem.from_json(problem.to_json()) == problem


def test_unknown_json_entry_is_refused() -> None:
    with pytest.raises(UsageError, match="colour"):
        Problem.from_json({"colour": "red"})

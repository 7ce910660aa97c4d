"""Slopes and the ends of sequences."""

import numpy as np
import pytest

from fasim import gpu as gpus
from fasim import inputs, planner
from fasim.bench import random_inputs
from fasim.problem import Problem


def test_slopes_halve_from_head_to_head_where_there_are_eight() -> None:
    assert inputs.alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert inputs.alibi_slopes(16)[:2].tolist() == [np.float32(2**-0.5), 0.5]
    assert inputs.alibi_slopes(1).dtype == np.float32


def test_sequences_follow_each_other() -> None:
    assert inputs.cu_seqlens([3, 0, 2]).tolist() == [0, 3, 3, 5]
    assert inputs.cu_seqlens([]).tolist() == [0]
    assert inputs.cu_seqlens([1]).dtype == np.int32


@pytest.mark.parametrize("options", [{"bias": "alibi", "varlen": True}, {"bias": "dense"}, {}])
def test_what_is_timed_has_every_input(options: dict[str, object]) -> None:
    problem = Problem(batch=3, heads=2, seq=5, seq_kv=7, head_dim=16, **options)
    plan = planner.plan(problem, gpus.load("h200"), "v2").plan
    assert plan
    launch = plan.launch_for()
    arrays = random_inputs(launch)
    assert {name: x.shape for name, x in arrays.items()} == {
        name: shape for name, (shape, _) in launch.inputs.items()
    }
    if problem.varlen:
        assert arrays["cu_seqlens_k"].tolist() == [0, 7, 14, 21]
        assert arrays["slopes"].tolist() == [0.0625, 0.00390625]

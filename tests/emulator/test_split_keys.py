"""Split keys in the emulator: every way to group heads, any number of queries and of parts."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from thorough import share

from fasim import planner, properties
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Trial, parse_replay
from fasim.render import Kernel, render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

TILE = Tile(block_q=16, block_kv=64, warps=4, stages=2, step_kv=16)
KERNELS = {
    "bf16 causal": (Problem(head_dim=64, dtype="bf16", causal=True), TILE),
    "fp16 full": (Problem(head_dim=32, head_dim_v=16), TILE),
    "fp16 unaligned": (Problem(head_dim=33, head_dim_v=35, causal=True), TILE),
    "fp32 causal": (
        Problem(head_dim=32, dtype="fp32", causal=True),
        Tile(block_q=32, block_kv=128, warps=8, stages=2, step_kv=16),
    ),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)


@cache
def kernel_of(name: str) -> Kernel:
    problem, tile = KERNELS[name]
    plan = planner.plan(problem, load("h200"), "v2", tile=tile).plan
    assert plan
    assert plan.kernel.splits
    return render(plan)


def trial(name: str, line: str) -> Trial:
    return Trial(kernel_of(name), EmulatorRunner(workers=1), parse_replay(line)[1])


@each_kernel
def test_every_property_holds(name: str) -> None:
    properties.verify(kernel_of(name), EmulatorRunner(workers=1), examples=share(4), seed=1).check()


@each_kernel
@pytest.mark.parametrize("group", [1, 4, 8, 71])
@pytest.mark.parametrize("queries", [1, 3, 16])
def test_heads_of_a_group_share_rows(name: str, group: int, queries: int) -> None:
    line = f"heads={2 * group} kv_heads=2 seq={queries} seq_kv=150 layout=padded seed={group}"
    if group * queries > 300:
        line = line.replace(f"heads={2 * group} kv_heads=2", f"heads={group}")
    one = trial(name, line)
    properties.matches_float64(one)
    properties.bytes_moved_are_bytes_predicted(one)


@each_kernel
@pytest.mark.parametrize("splits", [1, 2, 3, 33, 70])
def test_a_fixed_number_of_parts_gives_fixed_bits(name: str, splits: int) -> None:
    """Whatever the order of warps and blocks; and the whole, up to rounding."""
    one = trial(name, "heads=3 kv_heads=1 seq=2 seq_kv=200")
    first, again = (one.run(one.arrays, splits=splits) for _ in range(2))
    for name_, x in first.items():
        assert x.tobytes() == again[name_].tobytes()
    properties._agree(one, first, one.outputs)


@each_kernel
def test_without_keys_the_output_is_0(name: str) -> None:
    one = trial(name, "heads=4 kv_heads=2 seq=3 seq_kv=0")
    got = one.run(one.arrays, splits=5)
    assert not got["o"].astype(np.float64).any()
    assert (got["lse"] == -np.inf).all()


def test_parts_of_huge_scores_keep_their_weights() -> None:
    """Scores near 1e11, all equal, so O is the mean of V. A part of 64 keys and one of 6 differ in
    their sums only, which a log-sum-exp in fp32 rounds away."""
    one = trial("bf16 causal", "seq=1 seq_kv=70 values=huge")
    arrays = dict(one.arrays)
    values = np.zeros(arrays["v"].shape)
    values[:, :, 64:] = 70.0
    arrays["v"] = values.astype(arrays["v"].dtype)
    got = one.run(arrays, splits=2)["o"].astype(np.float64)
    np.testing.assert_allclose(got, 6.0, rtol=0.01)


def test_workers_that_come_too_late_for_a_block_do_no_harm() -> None:
    """Two kernels of different size in a launch, more workers than cores: some find no block left,
    and are made ready for the next kernel all the same."""
    one = Trial(
        kernel_of("fp16 full"), EmulatorRunner(workers=16), parse_replay("heads=16 seq_kv=1")[1]
    )
    for _ in range(20):
        assert one.run(one.arrays, splits=1)["lse"].shape == (1, 16, 1)

"""Bugs planted in generated V3 kernels: a rule or a property must find each, under any schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from v3_bugs import (
    BUGS,
    FALLING,
    GROUPS,
    KERNELS,
    NOTHING,
    PLAIN,
    SEEDS,
    SEQUENCES,
    WINDOW,
    Bug,
    finder,
    kernel_of,
)

pytestmark = pytest.mark.emulator

CASES = {
    "window": WINDOW,
    "varlen": SEQUENCES,
    "again": GROUPS,
    "again varlen": replace(SEQUENCES, heads=4, kv_heads=2),
    "again wide": GROUPS,
}


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found_whatever_the_seed(bug: Bug) -> None:
    kernel = bug.planted()
    found = {bug.finder(kernel, seed) for seed in SEEDS[:: len(SEEDS) // 2]}
    assert found <= bug.finders, f"found by {found}"


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_found_in_the_right_kernel(name: str) -> None:
    """Neither where weights stay small nor where they are computed again."""
    case = CASES.get(name, PLAIN)
    for values in (PLAIN.values, FALLING.values, "large"):
        for seed in range(3):
            assert finder(kernel_of(name), replace(case, values=values, seed=seed)) == NOTHING

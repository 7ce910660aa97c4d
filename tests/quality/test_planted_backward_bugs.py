"""Bugs planted in the text of backward kernels: the emulator or a property must find each."""

from __future__ import annotations

from typing import Any

import pytest
from backward_bugs import BUGS, NOTHING, SEEDS, Bug, kernel_of

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found_whatever_the_seed(bug: Bug) -> None:
    kernel = bug.planted()
    assert kernel.edited
    found = {bug.finder(kernel, seed) for seed in SEEDS}
    assert found <= bug.finders, f"found by {found}"


# What the bugs were looked for with, each combination once.
SEARCHES = {(bug.kernel, bug.property.name, bug.case): bug for bug in BUGS}


@pytest.mark.parametrize(("kernel", "property_", "case"), SEARCHES)
def test_nothing_is_found_in_the_right_kernel(kernel: str, property_: str, case: Any) -> None:
    search = SEARCHES[kernel, property_, case]
    assert {search.finder(kernel_of(kernel), seed) for seed in range(3)} == {NOTHING}

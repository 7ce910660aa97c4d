"""Bugs planted in the text of backward kernels: the emulator or a property must find each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from backward_bugs import BUGS, NOTHING, PLANS, SEEDS, Bug, kernel_of

from fasim import properties
from fasim.emulator.program import Program
from fasim.errors import CheckFailed
from fasim.properties import Trial
from fasim.runners.emulator import EmulatorRunner

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


REPEATING = [name for name in PLANS if name.startswith(("ordered", "second_pass", "v1"))]


def test_additions_in_any_order_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed orders the blocks of a launch: of three or more that add to a tile other orders give
    other bits. A plan that promises the same ones is found out even without the rule that names
    the additions."""
    atomic, launch = kernel_of("bf16 causal"), Program.launch

    def without_the_rule(program: Program, *arguments: Any, ordered: bool, **options: Any) -> Any:
        return launch(program, *arguments, **options)

    monkeypatch.setattr(Program, "launch", without_the_rule)
    promised = replace(atomic.plan.kernel, deterministic=True)
    source = atomic.source.replace(atomic.stem, promised.stem)
    liar = replace(atomic, stem=promised.stem, source=source)
    liar = replace(liar, plan=replace(atomic.plan, kernel=promised))
    trial = Trial(liar, EmulatorRunner(workers=1), properties.Case(seq=40, seq_kv=200))
    with pytest.raises(CheckFailed, match="a second run gave other bits") as caught:
        properties.repeated_runs_are_identical(trial)
    assert caught.value.where.startswith("dq")


@pytest.mark.parametrize("name", REPEATING)
def test_what_promises_the_same_bits_gives_them_whatever_the_schedule(name: str) -> None:
    case = properties.Case(heads=2, kv_heads=1, seq=70, seq_kv=130, left=20, right=5)
    runner = EmulatorRunner(schedules=3, workers=2)
    properties.repeated_runs_are_identical(Trial(kernel_of(name), runner, case))

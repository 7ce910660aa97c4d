"""The canonical kernels, in the emulator: every property holds of each."""

from __future__ import annotations

import pytest
from thorough import share

from fasim import catalogue, properties
from fasim.plan import Plan
from fasim.properties import Report, Trial, parse_replay
from fasim.render import render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

EXAMPLES = 1  # of each property and seed

each_plan = pytest.mark.parametrize("plan", catalogue.plans(), ids=lambda plan: plan.kernel.stem)


@each_plan
@pytest.mark.parametrize("seed", range(share(3)))
def test_every_property_holds(plan: Plan, seed: int) -> None:
    report: Report = properties.verify(render(plan), EmulatorRunner(workers=1), EXAMPLES, seed)
    report.check()
    assert report.ran_file
    assert report.executed
    assert report.executed.launches > EXAMPLES


@each_plan
def test_schedules_give_the_same_bits(plan: Plan) -> None:
    """The runner compares them; a length that fills no tile, and two blocks of queries."""
    _, case = parse_replay(f"heads=2 kv_heads=1 seq={plan.kernel.tile.block_q + 3} seq_kv=150")
    runner = EmulatorRunner(schedules=3, workers=2)
    Trial(render(plan), runner, case).outputs  # noqa: B018
    assert runner.executed.launches == 3

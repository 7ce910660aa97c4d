"""V3 on rows that TMA does not take: copies by kernels of the file, launched and charged."""

from __future__ import annotations

from typing import Any

import pytest

from fasim import gpu, planner, report
from fasim.errors import UsageError
from fasim.model import footprint, timeline, traffic
from fasim.model.events import events
from fasim.model.tiles import Tiles
from fasim.plan import Plan, Tile, alignment, padded_tensors
from fasim.problem import Problem

TILE = Tile(block_q=128, block_kv=64, stages=2, warps=8, registers=240)


def asked(**options: Any) -> Problem:
    return Problem(**{"batch": 2, "heads": 4, "kv_heads": 2, "seq": 100, "seq_kv": 70, **options})


def planned(problem: Problem) -> Plan:
    plan = planner.plan(problem, gpu.load("h200"), "v3", tile=TILE).plan
    assert plan
    return plan


@pytest.mark.parametrize(
    ("d", "dv", "names"), [(40, 64, ""), (36, 64, "qk"), (64, 33, "vo"), (1, 255, "qkvo")]
)
def test_only_rows_of_other_lengths_are_padded(d: int, dv: int, names: str) -> None:
    problem = asked(head_dim=d, head_dim_v=dv)
    kernel = planned(problem).kernel
    assert "".join(padded_tensors(problem)) == "".join(kernel.padded_tensors) == names
    assert sorted(kernel.mapped.values()) == sorted(
        f"{name}_padded" if name in names else name for name in "qkvo"
    )


def test_a_launch_pads_before_and_cuts_after() -> None:
    plan = planned(asked(head_dim=36, head_dim_v=33))
    launch, stem = plan.launch_for(), plan.kernel.stem
    assert [stage.entry for stage in launch.stages] == [f"{stem}_pad", stem, f"{stem}_unpad"]
    of_q, of_k = 2 * 4 * 100, 2 * 2 * 70  # rows; five chunks each
    assert launch.stages[0].grid == -(-(5 * of_q + 10 * of_k) // 128)
    assert launch.stages[2].grid == -(-5 * of_q // 128)
    assert launch.workspaces["q_padded"] == ((2, 4, 100, 40), "fp16")
    assert launch.workspaces["v_padded"] == ((2, 2, 70, 40), "fp16")
    assert set(launch.boxes) == set(launch.workspaces)
    assert alignment("q", launch) == 2  # the kernel follows any strides


def test_the_copies_are_charged() -> None:
    odd, even = asked(head_dim=36, head_dim_v=64), asked(head_dim=40, head_dim_v=64)
    tiles, device = Tiles.of([TILE]), gpu.load("h200")
    moved = traffic.issued(odd, "v3", "fwd", tiles).at(0)
    wide = traffic.issued(even, "v3", "fwd", tiles).at(0)
    assert moved.reads["q_padded"] == moved.writes["q_padded"] == wide.reads["q"]
    assert moved.reads["q"] == 2 * 4 * 100 * 36 * 2
    assert moved.reads["v"] == wide.reads["v"]
    workspace = footprint.hbm(odd, "v3", "fwd").workspace
    assert workspace == (2 * 4 * 100 + 2 * 2 * 70) * 40 * 2
    times = [timeline.predict(p, device, "v3", "fwd", tiles, tiles.blocks_per_sm).at(0)
             for p in (odd, even)]  # fmt: skip
    launch = times[0].terms["launch"] - times[1].terms["launch"]
    assert launch == pytest.approx(times[1].terms["launch"])
    assert times[0].seconds > times[1].seconds + launch


def test_what_cannot_show_the_copies_says_so() -> None:
    problem = asked(head_dim=36)
    with pytest.raises(UsageError, match="V3 that pads rows has no events"):
        next(iter(events(problem, "v3", TILE)))
    device = gpu.load("h200")
    entry = planner.plan(problem, device, "v3", tile=TILE)
    with pytest.raises(UsageError, match="rows that it pads"):
        report.page(entry, device)

"""V3 on rows that TMA does not take: copies by kernels of the file, launched and charged."""

from __future__ import annotations

import math
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


E4M3_TILE = Tile(block_q=128, block_kv=128, stages=2, warps=8, registers=240)


def in_e4m3(**options: Any) -> Plan:
    problem = asked(dtype="e4m3", **options)
    plan = planner.plan(problem, gpu.load("h200"), "v3", tile=E4M3_TILE).plan
    assert plan
    return plan


@pytest.mark.parametrize(
    ("d", "dv", "in_dtype", "names"),
    [
        *((48, 40, "e4m3", ""), (40, 40, "e4m3", "qk"), (64, 33, "e4m3", "o")),
        *((1, 255, "e4m3", "qko"), (40, 40, "bf16", ""), (1, 255, "bf16", "o")),
    ],
)
def test_in_e4m3_v_is_never_padded(d: int, dv: int, in_dtype: str, names: str) -> None:
    """A kernel lays it out anew anyhow; where one quantises, so it does Q and K."""
    kernel = in_e4m3(head_dim=d, head_dim_v=dv, in_dtype=in_dtype).kernel
    assert "".join(kernel.padded_tensors) == names
    stored = {"q": "q8", "k": "k8"} if in_dtype == "bf16" else {"q": "q", "k": "k"}
    padded = {name: f"{name}_padded" for name in names}
    assert kernel.mapped == {**stored, "o": "o", **padded, "v": "vt"}


def test_a_launch_in_e4m3_pads_before_and_cuts_after() -> None:
    plan = in_e4m3(head_dim=36, head_dim_v=33)
    launch, stem = plan.launch_for(), plan.kernel.stem
    words = ("_pad", "_transpose", "", "_unpad")
    assert [stage.entry for stage in launch.stages] == [f"{stem}{word}" for word in words]
    of_q, of_k = 2 * 4 * 100, 2 * 2 * 70  # rows; of Q and K three chunks each, of O in 16 bits five
    assert launch.stages[0].grid == -(-3 * (of_q + of_k) // 128)
    assert launch.stages[3].grid == -(-5 * of_q // 128)
    assert launch.workspaces["q_padded"] == ((2, 4, 100, 48), "e4m3")
    assert launch.workspaces["o_padded"] == ((2, 4, 100, 40), "bf16")
    assert set(launch.boxes) == set(launch.workspaces) == {"q_padded", "k_padded", "o_padded", "vt"}
    assert alignment("q", launch) == 1  # the kernel follows any strides


def test_what_quantises_pads_by_itself() -> None:
    launch = in_e4m3(head_dim=36, head_dim_v=40, in_dtype="bf16", scales="block").launch_for()
    assert len(launch.stages) == 2
    assert launch.workspaces["k8"] == ((2, 2, 70, 48), "e4m3")
    assert "o" in launch.boxes


def test_the_copies_in_e4m3_are_charged() -> None:
    tiles, device = Tiles.of([E4M3_TILE]), gpu.load("h200")
    odd = asked(dtype="e4m3", head_dim=36, head_dim_v=33)
    moved = traffic.issued(odd, "v3", "fwd", tiles).at(0)
    assert moved.reads["q_padded"] == moved.writes["q_padded"] == 2 * 4 * 100 * 48
    assert moved.reads["o_padded"] == moved.writes["o_padded"] == 2 * 4 * 100 * 40 * 2
    assert moved.writes["o"] == 2 * 4 * 100 * 33 * 2
    made = traffic.issued(odd.with_(in_dtype="bf16", head_dim_v=40), "v3", "fwd", tiles).at(0)
    assert made.reads["q"] == 2 * (2 * 4 * 100 * 36 * 2)  # twice: one scale factor for all
    assert made.writes["q8"] == made.reads["q8"] == 2 * 4 * 100 * 48
    workspaces = in_e4m3(head_dim=36, head_dim_v=33).launch_for().workspaces
    sizes = {name: math.prod(shape) for name, (shape, _) in workspaces.items()}
    sizes["o_padded"] *= 2
    assert footprint.hbm(odd, "v3", "fwd").workspace == sum(sizes.values())
    even = odd.with_(head_dim=48, head_dim_v=40)
    launches = [
        timeline.predict(p, device, "v3", "fwd", tiles, tiles.blocks_per_sm).at(0).terms["launch"]
        for p in (odd, even)
    ]
    assert launches[0] == pytest.approx(2 * launches[1])  # four, two


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
    quantised = problem.with_(dtype="e4m3", in_dtype="bf16")
    for wanted, tile in ((problem, TILE), (quantised, E4M3_TILE)):
        entry = planner.plan(wanted, device, "v3", tile=tile)
        with pytest.raises(UsageError, match="rows that it pads"):
            report.page(entry, device)

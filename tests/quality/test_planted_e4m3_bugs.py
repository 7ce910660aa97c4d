"""Bugs of V3 in e4m3, planted in the text of the kernel: the order of V's keys, the sums of a tile,
scale factors, weights that outgrow their type. Each is found by a property or a rule of the
emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
from v3_bugs import NOTHING, PLAIN, RIGHT, finder

from fasim import planner
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Case
from fasim.render import Kernel, parse, render

pytestmark = pytest.mark.emulator

TILE = Tile(block_q=128, block_kv=128, warps=8, stages=2)
CASE = replace(PLAIN, seq_kv=400, values="normal")  # four tiles of keys
RISING = replace(CASE, values="falling")  # as the keys are walked, weights grow large


@cache
def kernel(scales: str = "head") -> Kernel:
    """Two parts of P V, and padded columns."""
    problem = Problem(head_dim=80, dtype="e4m3", scales=scales, causal=True)
    plan = planner.plan(problem, load("h200"), "v3", tile=TILE).plan
    assert plan
    return render(replace(plan, slots=1))


@dataclass(frozen=True)
class Bug:
    """``right`` stands in the kernel exactly once; ``wrong`` takes its place."""

    name: str
    right: str
    wrong: str
    found: tuple[str, ...] = (RIGHT,)
    case: Case = CASE
    scales: str = "head"

    def __str__(self) -> str:
        return self.name


SUM = "o[0][kColumn / 8 + i / 4][i % 4] += t[0][i / 4][i % 4];"
MOVED = "o[0][i / 4][i % 4] *= factor[i / 2 % 2];"
BUGS = (
    Bug("V's keys keep their order", "first_key + key_at(4 * i + j)", "first_key + 4 * i + j"),
    Bug(
        "the sums of a tile begin with those of the last",
        "if (step == 0) ptx::wgmma_m64k32_e4m3_fresh(sums, p[0][step], right);",
        "if (step == 0) ptx::wgmma_m64k32_e4m3(sums, p[0][step], right, true);",
    ),
    Bug(
        "the first columns are added before they are there",
        "  finish_products<kLeft>(t);\n",
        "",
        ("accumulator in flight",),
    ),
    Bug(
        "the last columns take the place of the first",
        "(slab * kRowsV + kColumn) * 128 + key",
        "slab * kRowsV * 128 + key",
    ),
    Bug("V's scale factor is left out", "work.value_factor / sum", "1.f / sum"),
    Bug("ones are twos", "words[0] = 0x38383838;", "words[0] = 0x40404040;"),
    Bug("what was summed keeps its reference", MOVED, "", case=RISING),
    Bug(
        "no weight is looked for",
        "add_up(sum, s) > kLargestWeight",
        "add_up(sum, s) > 1e30f",
        case=RISING,
    ),
    Bug(
        "K's blocks have no scale factor",
        "      multiply(s, key_factor);\n",
        "",
        scales="block",
    ),
    Bug(
        "the ones are scaled as V is",
        "kColumn + i / 4 * 8 < kDV ? value_factor : 1.f",
        "value_factor",
        scales="block",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    source = kernel(bug.scales).source
    assert source.count(bug.right) == 1, "the text to replace is not there once"
    planted = parse(source.replace(bug.right, bug.wrong))
    assert finder(planted, bug.case) in bug.found


@pytest.mark.parametrize("values", ["normal", "falling", "large"])
def test_nothing_is_found_in_the_right_kernel(values: str) -> None:
    assert finder(kernel(), replace(CASE, values=values)) == NOTHING

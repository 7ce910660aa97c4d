"""Bugs planted in kernels that split keys: the emulator or a property must find each.

``found`` is the rule that the emulator names or the property that fails; where the schedule decides
which of two rules is broken first, both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from fasim import planner, properties
from fasim.emulator.program import Fault
from fasim.errors import CheckFailed
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Case, Trial
from fasim.render import Kernel, parse, render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

NOTHING = "nothing"
TILE = Tile(block_q=16, block_kv=64, warps=4, stages=2, step_kv=16)
PROBLEMS = {
    "causal": Problem(head_dim=32, dtype="bf16", causal=True),
    "full": Problem(head_dim=48, dtype="fp16"),
}
USUAL = Case(heads=6, kv_heads=2, seq=7, seq_kv=200)  # 21 packed rows, 4 tiles of keys
NO_KEYS = replace(USUAL, seq_kv=0)
AT_AN_EDGE = replace(
    USUAL, seq_kv=195
)  # the first block's queries see 189 to 194 keys: 3 or 4 tiles
RISING = replace(USUAL, values="rising")


@dataclass(frozen=True)
class Bug:
    """``right`` stands in the kernel of that name exactly once; ``wrong`` takes its place."""

    name: str
    kernel: str
    right: str
    wrong: str
    found: str | tuple[str, ...]
    case: Case = USUAL

    def __str__(self) -> str:
        return self.name

    @property
    def finders(self) -> set[str]:
        return {self.found} if isinstance(self.found, str) else set(self.found)

    @property
    def property(self) -> properties.Property:
        by_name = {p.name: p for p in properties.PROPERTIES if p.name in self.finders}
        return next(iter(by_name.values()), properties.PROPERTIES[0])

    def finder(self, kernel: Kernel, seed: int) -> str:
        trial = Trial(kernel, EmulatorRunner(workers=1), replace(self.case, seed=seed))
        try:
            self.property.check(trial)
        except Fault as fault:
            return fault.rule
        except CheckFailed:
            return self.property.name
        return NOTHING


BUGS = (
    Bug(
        "parts overwrite keys that others still read",
        "causal",
        "  __syncthreads();  // Q and the ring are free for the parts\n",
        "",
        "race",
    ),
    Bug(
        "a row is merged before all warps have left their parts",
        "full",
        "row);\n  __syncthreads();\n  for (int r",
        "row);\n  for (int r",
        ("race", "uninitialised read"),
    ),
    Bug(
        "every warp scores the same keys",
        "full",
        "slot(2 * j) + warp * kStepKV * kD",
        "slot(2 * j)",
        "matches_float64",
    ),
    Bug(
        "every warp takes the same values",
        "causal",
        "slot(2 * j + 1) + warp * kStepKV * kDV",
        "slot(2 * j + 1)",
        "matches_float64",
    ),
    Bug(
        "the last part ends a tile early",
        "full",
        "kv_tiles * (split + 1) / splits - first_tile",
        "kv_tiles / splits",
        "the_number_of_splits_changes_nothing",
    ),
    Bug(
        "parts overlap",
        "full",
        "kv_tiles * (split + 1) / splits - first_tile",
        "(kv_tiles + splits - 1) / splits",
        ("the_number_of_splits_changes_nothing", "out of bounds"),
    ),
    Bug(
        "rows are packed queries first and read heads first",
        "causal",
        "const i64 head = (first_row + row) % group, query = (first_row + row) / group;",
        "const i64 head = row % group, query = row / group;",
        "matches_float64",
    ),
    Bug(
        "the mask takes packed rows for queries",
        "causal",
        "visible_keys((first_row + tile_row(i)) / group, seq_q, seq_kv)",
        "visible_keys(first_row + tile_row(i), seq_q, seq_kv)",
        "matches_float64",
    ),
    Bug(
        "the block looks no further than its first query",
        "causal",
        "const int last_query = (first_row + rows - 1) / group;",
        "const int last_query = first_row / group;",
        "matches_float64",
        AT_AN_EDGE,
    ),
    Bug(
        "the mask is left out where the first row needs none",
        "causal",
        "const int unmasked = visible_keys(first_row / group, seq_q, seq_kv);",
        "const int unmasked = visible_keys(last_query, seq_q, seq_kv);",
        "matches_float64",
        AT_AN_EDGE,
    ),
    Bug(
        "a part keeps the sum of one lane",
        "full",
        "const float sum = quad_sum(row.sum[i / 2][i % 2]);\n    if (threadIdx.x",
        "const float sum = row.sum[i / 2][i % 2];\n    if (threadIdx.x",
        "matches_float64",
    ),
    Bug(
        "warps merge without their maxima",
        "full",
        "const float weight = ptx::ex2((part[kDV] - reference_of(max)) * scale_log2);",
        "const float weight = 1.f;",
        "matches_float64",
        RISING,
    ),
    Bug(
        "parts without keys poison the maximum",
        "causal",
        "(m_part[first + lane] - reference_of(max))",
        "(m_part[first + lane] - max)",
        "matches_float64",
        NO_KEYS,
    ),
    Bug(
        "splits merge without their maxima",
        "full",
        "weight = ptx::ex2((m_part[first + lane] - reference_of(max)) * scale_log2);",
        "weight = 1.f;",
        "matches_float64",
        RISING,
    ),
    Bug(
        "the sum counts a split once more for every lane",
        "full",
        "    if (first + lane < splits) {\n      weight",
        "    {\n      weight",
        ("out of bounds", "uninitialised read", "matches_float64", "undefined arithmetic"),
    ),
    Bug(
        "only the first 32 parts are combined",
        "full",
        "for (int first = 0; first < splits; first += 32) {",
        "for (int first = 0; first < 1; first += 32) {",
        "the_number_of_splits_changes_nothing",
    ),
    Bug(
        "rows past the last are stored",
        "causal",
        "for (int r = warp; r < rows; r += kWarps)",
        "for (int r = warp; r < kBlockQ; r += kWarps)",
        ("out of bounds", "race"),
    ),
    Bug(
        "keys past the last are copied",
        "full",
        "seq_kv - key);\n    } else",
        "kBlockKV);\n    } else",
        "out of bounds",
        replace(USUAL, layout="contiguous", heads=3, kv_heads=1),
    ),
)


@cache
def kernel_of(name: str) -> Kernel:
    plan = planner.plan(PROBLEMS[name], load("a100-80gb"), "v2", tile=TILE).plan
    assert plan
    return render(plan)


def planted(bug: Bug) -> Kernel:
    source = kernel_of(bug.kernel).source
    assert source.count(bug.right) == 1, f"{bug}: the text to replace is not there once"
    return parse(source.replace(bug.right, bug.wrong))


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found_whatever_the_seed(bug: Bug) -> None:
    kernel = planted(bug)
    found = {bug.finder(kernel, seed) for seed in range(4)}
    assert found <= bug.finders, f"found by {found}"


SEARCHES = {(bug.kernel, bug.property.name, bug.case): bug for bug in BUGS}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=str)
def test_nothing_is_found_in_the_right_kernel(search: Bug) -> None:
    assert {search.finder(kernel_of(search.kernel), seed) for seed in range(2)} == {NOTHING}

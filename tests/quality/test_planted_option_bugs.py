"""Bugs of one line planted in kernels that have options: a property must name each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from thorough import share

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
SEEDS = range(share(5, of=2))
RIGHT = "matches_float64"
COUNTED = "bytes_moved_are_bytes_predicted"
PACKED = "packed_sequences_are_those_one_by_one"

V1 = Tile(block_q=32, block_kv=32, warps=2, step_kv=16)
V2 = Tile(block_q=32, block_kv=16, warps=2)
BF16: dict[str, Any] = {"head_dim": 32, "dtype": "bf16"}
KERNELS: dict[str, tuple[str, Tile, Problem]] = {
    "v2 window": ("v2", V2, Problem(**BF16, window=(20, 5))),
    "v1 window": ("v1", V1, Problem(**BF16, window=(20, 5))),
    "v2 softcap": ("v2", V2, Problem(**BF16, causal=True, softcap=1.0)),
    "v2 alibi": ("v2", V2, Problem(**BF16, bias="alibi")),
    "v2 dense": ("v2", V2, Problem(**BF16, bias="dense")),
    "v1 dense": ("v1", V1, Problem(**BF16, bias="dense_fp32")),
    "v2 varlen": ("v2", V2, Problem(**BF16, varlen=True)),
    "v1 varlen": ("v1", V1, Problem(**BF16, varlen=True)),
}
PLAIN = Case(batch=2, heads=2, kv_heads=1, seq=40, seq_kv=50)
WINDOW = replace(PLAIN, left=20, right=5)
WIDE = replace(PLAIN, seq=70, seq_kv=100, left=7, right=3)
CAPPED = replace(PLAIN, softcap=1.0)
MASKED = replace(PLAIN, bias="mask")
MORE = replace(PLAIN, batch=3)


@dataclass(frozen=True)
class Bug:
    """``right`` stands in the kernel exactly once; with ``wrong`` in its place ``found`` fails."""

    name: str
    kernel: str
    right: str
    wrong: str
    found: str
    case: Case = PLAIN
    unless: tuple[str, ...] = ()  # in some of the inputs

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def planted(self) -> Kernel:
        source = kernel_of(self.kernel).source
        assert source.count(self.right) == 1, f"{self}: the text to replace is not there once"
        return parse(source.replace(self.right, self.wrong))

    def finder(self, kernel: Kernel, seed: int) -> str:
        by_name = {p.name: p for p in properties.PROPERTIES}
        usual = PACKED if "varlen" in self.kernel else RIGHT  # a broken rule shows in any launch
        property_ = by_name.get(self.found, by_name[usual])
        try:
            property_.check(Trial(kernel, EmulatorRunner(workers=1), replace(self.case, seed=seed)))
        except Fault as fault:
            return fault.rule
        except CheckFailed:
            return property_.name
        return NOTHING


@cache
def kernel_of(name: str) -> Kernel:
    algo, tile, problem = KERNELS[name]
    plan = planner.plan(problem, load("a100-80gb"), algo, tile=tile).plan
    assert plan
    return render(plan)


FINISH = "      finish_scores(s, terms);\n"
MASK = """      if (key + kBlockKV > visible_keys(warp_query, seq_q, seq_kv)) {
        mask_scores(s, warp_query, key, seq_q, seq_kv);
      }
"""
BUGS = (
    Bug(
        "one key too many on the left",
        "v2 window",
        "- span.window_left)",
        "- span.window_left - 1)",
        RIGHT,
        WINDOW,
    ),
    Bug(
        "the right side is forgotten",
        "v2 window",
        "column < first || column >= limit",
        "column < first",
        RIGHT,
        WINDOW,
    ),
    Bug(
        "the left side is forgotten",
        "v1 window",
        "column < first || column >= limit",
        "column >= limit",
        RIGHT,
        WINDOW,
    ),
    Bug(
        "the mask looks at the first row's left side",
        "v2 window",
        "first_visible(query + kWarpRows - 1, span)",
        "first_visible(query, span)",
        RIGHT,
        WINDOW,
    ),
    Bug(
        "tiles left of the window are visited",
        "v2 window",
        "first_visible(first_query, span) / kBlockKV;",
        "0;",
        COUNTED,
        WIDE,
    ),
    Bug(
        "a tile of the window is skipped",
        "v2 window",
        "first_visible(first_query, span) / kBlockKV;",
        "(first_visible(first_query, span) + kBlockKV - 1) / kBlockKV;",
        RIGHT,
        WIDE,
    ),
    Bug(
        "what precedes the window is merged",
        "v1 window",
        "const bool before = j == first;",
        "const bool before = j == 0;",
        "uninitialised read",
        WIDE,
    ),
    Bug(
        "steps left of the window are taken",
        "v1 window",
        "max(0, from / kStepKV * kStepKV - first_key);",
        "0;",
        "matrix_instructions_do_the_flops_predicted",
        WIDE,
    ),
    Bug("softcap after the mask", "v2 softcap", FINISH + MASK, MASK + FINISH, RIGHT, CAPPED),
    Bug(
        "softcap of the unscaled score",
        "v2 softcap",
        "soft_sign(score * terms.scale_by_cap)",
        "soft_sign(score)",
        RIGHT,
        CAPPED,
    ),
    Bug(
        "the score leaves without its cap",
        "v2 softcap",
        "return terms.cap_log2 * soft",
        "return kLog2e * soft",
        RIGHT,
        replace(CAPPED, softcap=30.0),
    ),
    Bug(
        "cubic term of the wrong sign",
        "v2 softcap",
        "-3.3333148e-1f",
        "3.3333148e-1f",
        RIGHT,
        CAPPED,
    ),
    Bug(
        "distance from the diagonal of the first key",
        "v2 alibi",
        "lane / 4 + seq_kv - seq_q - key",
        "lane / 4 - key",
        RIGHT,
    ),
    Bug(
        "distances right of the diagonal are negative",
        "v2 alibi",
        "fabsf(aligned - (n / 2 * 8 + n % 2))",
        "aligned - (n / 2 * 8 + n % 2)",
        RIGHT,
    ),
    Bug("the slope of another head", "v2 alibi", "slopes[head]", "slopes[kv_head]", RIGHT),
    Bug("slopes in natural units", "v2 alibi", "slopes[head] * kLog2e", "slopes[head]", RIGHT),
    Bug(
        "the bias of another head",
        "v2 dense",
        "head * bias_strides.head;",
        "kv_head * bias_strides.head;",
        RIGHT,
    ),
    Bug(
        "every sequence has the first one's bias",
        "v1 dense",
        "bias += batch * bias_strides.batch + ",
        "bias += ",
        RIGHT,
    ),
    Bug("the bias is in natural units", "v2 dense", "fmaf(b, kLog2e, ", "(b + ", RIGHT),
    Bug(
        "a hidden key that is NaN",
        "v2 dense",
        "b == -kInfinity ? b : fmaf",
        "fmaf",
        "nan_stays_in_its_row",
        MASKED,
        (NOTHING,),
    ),
    Bug(
        "the bias beyond the last key is read",
        "v2 dense",
        "if (column + 1 < columns) pair.y",
        "pair.y",
        "out of bounds",
        replace(PLAIN, seq_kv=51),
    ),
    Bug(
        "the bias beyond the last row is read",
        "v1 dense",
        "row < seq_q ? seq_kv - first : 0",
        "seq_kv - first",
        "out of bounds",
    ),
    Bug(
        "pairs at odd addresses",
        "v2 dense",
        "% 2 == 0;",
        "% 1 == 0;",
        "misaligned access",
        replace(PLAIN, seq_kv=51),
    ),
    Bug(
        "keys of the first sequence", "v2 varlen", "  k += sequence.k * k_strides.seq;\n", "", RIGHT
    ),
    Bug(
        "LSE of the first sequence",
        "v2 varlen",
        "i64(head) * total_q + sequence.q + first_query",
        "i64(head) * total_q + first_query",
        "race",
    ),
    Bug(
        "blocks past the end work",
        "v2 varlen",
        "  if (first_query >= seq_q) return;",
        "",
        PACKED,
        MORE,
    ),
    Bug(
        "a short sequence runs into the next",
        "v2 varlen",
        "min(kBlockQ, seq_q - first_query)",
        "min(kBlockQ, longest_q - first_query)",
        "race",
        MORE,
        ("out of bounds",),
    ),
    Bug(
        "keys past the end of a sequence",
        "v2 varlen",
        "cu_seqlens_k[i + 1] - k}",
        "cu_seqlens_k[i + 1] - k + 1}",
        PACKED,
    ),
    Bug(
        "statistics of the first sequence",
        "v1 varlen",
        "i64(head) * total_q + sequence.q;",
        "i64(head) * total_q;",
        "race",
    ),
)

# What the bugs were looked for with, each combination once.
SEARCHES = {(bug.kernel, bug.found, bug.case): bug for bug in BUGS}

each_bug = pytest.mark.parametrize("bug", BUGS, ids=str)


@each_bug
def test_a_planted_bug_is_found(bug: Bug) -> None:
    found = {bug.finder(bug.planted(), seed) for seed in SEEDS}
    assert bug.found in found
    assert found <= {bug.found, *bug.unless}


@pytest.mark.parametrize(("kernel", "found", "case"), SEARCHES)
def test_nothing_is_found_in_the_right_kernel(kernel: str, found: str, case: Case) -> None:
    bug = SEARCHES[kernel, found, case]
    assert bug.finder(kernel_of(kernel), 0) == NOTHING

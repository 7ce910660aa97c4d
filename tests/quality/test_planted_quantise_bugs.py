"""Bugs of the kernels that quantise, planted in the text of V3 in e4m3 from bf16: the rotation,
scale factors, the layout of V, tails, barriers. Each is found by a property or a rule of the
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
from fasim.render import Kernel, parse, render

pytestmark = pytest.mark.emulator

TILE = Tile(block_q=128, block_kv=128, warps=8, stages=2)
CASE = replace(PLAIN, batch=2, heads=4, kv_heads=2, seq_kv=300, values="normal")
RACE, UNWRITTEN, OUTSIDE = "race", "uninitialised read", "out of bounds"


@cache
def kernel(scales: str) -> Kernel:
    problem = Problem(
        **{"head_dim": 64, "head_dim_v": 80, "causal": True},
        **{"dtype": "e4m3", "in_dtype": "bf16", "scales": scales, "incoherent": True},
    )
    plan = planner.plan(problem, load("h200"), "v3", tile=TILE).plan
    assert plan
    return render(plan)


@dataclass(frozen=True)
class Bug:
    """``right`` stands in the kernel exactly once; ``wrong`` takes its place."""

    name: str
    right: str
    wrong: str
    found: tuple[str, ...] = (RIGHT,)
    scales: str = "block"

    def __str__(self) -> str:
        return self.name


READ = "tile + transposed_at(column, place));"
BUGS = (
    Bug("rows are not rotated", "  rotate(share);\n", ""),
    Bug("columns keep their signs", "row < rows, share.flips(j));", "row < rows);"),
    Bug(
        "the signs of a chunk are another's",
        ">> chunk(j) % 4 * 8 & 0xff",
        ">> chunk(j) / 2 % 2 * 8 & 0xff",
    ),
    Bug(
        "rows grow",
        "scale, warps, rows.count) * share.kUnit;\n    Element",
        "scale, warps, rows.count);\n    Element",
    ),
    Bug(
        "a stage of the transform is left out",
        "apart = 1; apart < share.kLanes",
        "apart = 2; apart < share.kLanes",
    ),
    Bug(
        "sums twice", "const float difference = low - high;", "const float difference = low + high;"
    ),
    Bug(
        "neighbours both get the sum",
        "threadIdx.x & apart ? -1.f : 1.f",
        "threadIdx.x & apart ? 1.f : 1.f",
    ),
    Bug("the largest of a warp only", "x = fmaxf(x, warps[i]);", "x = x;"),
    Bug("the largest of half a warp", "lanes = 16; lanes > 0", "lanes = 8; lanes > 0"),
    Bug(
        "warps do not wait for the others' largest",
        "= x;\n  __syncthreads();\n",
        "= x;\n",
        (RACE, UNWRITTEN),
    ),
    Bug("magnitudes have a sign", "fmaxf(found, fabsf(x[", "fmaxf(found, (x["),
    Bug(
        "numbers above 448",
        "constexpr float kLargest = 448.f;",
        "constexpr float kLargest = 1000.f;",
    ),
    Bug(
        "Q and K are not scaled",
        "share.x[i][j][n] * inverse;\n      E",
        "share.x[i][j][n];\n      E",
    ),
    Bug("V is not scaled", "return share.x[i][j][n] * inverse; };", "return share.x[i][j][n]; };"),
    Bug("V's keys keep their order", "key_at(share.place() + j)", "share.place() + j"),
    Bug(
        "V's keys beyond the last",
        "key < rows && column < kHeadDimV",
        "column < kHeadDimV",
        (OUTSIDE,),
    ),
    Bug(
        "V's columns beyond the last", "key < rows && column < kHeadDimV", "key < rows", (OUTSIDE,)
    ),
    Bug(
        "the tile is read before it is there",
        "  }\n  __syncthreads();\n  for (int n",
        "  }\n  for (int n",
        (RACE, UNWRITTEN),
    ),
    Bug("chunks are not permuted back", READ, "tile + column * kBlockRows + place);"),
    Bug("ones are twos", "kOnes = 0x38383838;", "kOnes = 0x40404040;"),
    Bug(
        "rows past the end are loaded",
        "from + row * stride + column, row < rows,",
        "from + row * stride + column, true,",
        (OUTSIDE,),
    ),
    Bug(
        "rows past the end are stored",
        "      if (share.row(i) >= rows) continue;\n",
        "",
        (RACE, OUTSIDE),
    ),
    Bug(
        "blocks share a scale",
        "i64(part.head) * blocks_of(seq) + part.block;",
        "i64(part.head) * blocks_of(seq);",
        (RACE,),
    ),
    Bug("the batch is forgotten", "batch * strides.batch + ", ""),
    Bug(
        "K is Q",
        "rows_of(part, k, k_strides, kv_heads, seq_kv);",
        "rows_of(part, q, q_strides, kv_heads, seq_kv);",
    ),
    Bug("Q's largest are K's", "most += q_heads * blocks_of(seq_q);", "most += 0;", scales="head"),
    Bug("a head takes all blocks", "most[i64(part.head) * count + i]", "most[i]", scales="head"),
    Bug("heads share a scale", "return part.head; }", "return 0; }", scales="head"),
    Bug(
        "the first blocks only",
        "i = threadIdx.x; i < count",
        "i = threadIdx.x; i < 1",
        scales="tensor",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    source = kernel(bug.scales).source
    assert source.count(bug.right) == 1, "the text to replace is not there once"
    planted = parse(source.replace(bug.right, bug.wrong))
    assert finder(planted, CASE) in bug.found


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
def test_nothing_is_found_in_the_right_kernel(scales: str) -> None:
    assert finder(kernel(scales), CASE) == NOTHING

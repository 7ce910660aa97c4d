"""Bugs of V3 in e4m3, planted in the text of the kernel: V laid out anew, the sums of a tile, scale
factors, rows that are done again. Each is found by a property or a rule of the emulator, under
every seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from thorough import share
from v3_bugs import LATE, NOTHING, PLAIN, RIGHT, finder

from fasim import planner
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Case, Trial
from fasim.render import Kernel, parse, render
from fasim.runners.emulator import EmulatorRunner

pytestmark = pytest.mark.emulator

SEEDS = range(share(5, of=2))
TWO = Tile(block_q=128, block_kv=128, warps=8, stages=2, registers=240)
THREE = Tile(block_q=192, block_kv=128, warps=12, stages=2, registers=160)
KERNELS: dict[str, tuple[Tile, dict[str, Any]]] = {
    "one round": (TWO, {"head_dim": 80}),  # of P V: rows are done again behind it
    "two rounds": (TWO, {"head_dim": 80, "head_dim_v": 144}),  # of unequal width, and before it
    "narrow rows": (TWO, {"head_dim": 80, "head_dim_v": 44}),  # of words, no whole squares
    "causal": (TWO, {"head_dim": 80, "causal": True}),
    "three, causal": (THREE, {"head_dim": 80, "causal": True}),
    "O in Q": (TWO, {"head_dim": 256}),  # a part of O leaves by the place of its queries
    "blocks": (THREE, {"head_dim": 80, "scales": "block"}),
    "blocks, softcap": (TWO, {"head_dim": 80, "scales": "block", "softcap": 30.0}),
}
# A part of a tile, which is walked first, and three whole ones: only the first is looked at.
CASE = replace(PLAIN, seq_kv=400, values="normal")
SPIKES = replace(CASE, values="spikes")
LOOKED_AT = replace(SPIKES, seq_kv=144)  # every tile is: no row is done again
FEW_ROWS = replace(CASE, seq=260, seq_kv=260)
MANY_TILES = replace(CASE, seq=300, seq_kv=200)
NO_ROWS = replace(CASE, heads=3, kv_heads=3, seq=150, seq_kv=200)
FEW_QUERIES = replace(CASE, seq=60, seq_kv=900)
AGAIN = "a row is done again though all tiles are looked at"


@cache
def kernel(name: str) -> Kernel:
    tile, options = KERNELS[name]
    problem = Problem(dtype="e4m3", **{"scales": "head"} | options)
    plan = planner.plan(problem, load("h200"), "v3", tile=tile).plan
    assert plan
    return render(replace(plan, slots=1))


@dataclass(frozen=True)
class Bug:
    """``right`` stands in the kernel exactly once; ``wrong`` takes its place."""

    name: str
    right: str
    wrong: str
    found: tuple[str, ...] = (RIGHT,)
    kernel: str = "one round"
    case: Case = CASE

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def planted(self) -> Kernel:
        source = kernel(self.kernel).source
        assert source.count(self.right) == 1, f"{self}: the text to replace is not there once"
        return parse(source.replace(self.right, self.wrong))


def found_in(kernel: Kernel, case: Case) -> str:
    """What finds something: a rule, a property, nothing, or products for rows done again where
    there should be none."""
    if (found := finder(kernel, case)) != NOTHING or case.seq_kv != LOOKED_AT.seq_kv:
        return found
    trial = Trial(kernel, EmulatorRunner(workers=1), case)
    return AGAIN if "mma" in trial.execution.operations else NOTHING


LAID_OUT = (
    Bug("V's keys keep their order", "v + key_at(j) * v_strides.seq", "v + j * v_strides.seq"),
    Bug(
        "the last keys are those in order",
        "inside = key_at(j) < keys_left",
        "inside = j < keys_left",
        ("out of bounds", RIGHT),
        case=replace(CASE, seq_kv=405),
    ),
    Bug(
        "all squares are of the first keys",
        "  v += (first_key + key) * v_strides.seq + column;",
        "  v += first_key * v_strides.seq + column;",
    ),
    Bug(
        "words of four keys change places",
        "make_uint4(keys[0][j], keys[1][j], keys[2][j], keys[3][j]);",
        "make_uint4(keys[0][j], keys[2][j], keys[1][j], keys[3][j]);",
    ),
    Bug(
        "columns change places",
        "x[1] = __byte_perm(low01, low23, 0x7632);",
        "x[1] = __byte_perm(low01, low23, 0x6732);",
    ),
    Bug(
        "V's slabs follow each other head by head",
        "const int head = slab / slabs, first_key = slab % slabs * kSlabColumns;",
        "const int all = batch * kv_heads;\n"
        "  const int head = slab % all, first_key = slab / all * kSlabColumns;",
        case=replace(CASE, batch=2),
    ),
    Bug(
        "the last keys' slab comes first",
        "map, full, 0, row, slab, head",
        "map, full, 0, row, 0, head",
    ),
    Bug(
        "there is no row of ones",
        "  if (column == 0) {\n    *reinterpret_cast",
        "  if (false) {\n    *reinterpret_cast",
        ("uninitialised read",),
    ),
    Bug("ones are twos", "kOnes = 0x38383838;", "kOnes = 0x40404040;"),
    Bug(
        "V's padding is not zero",
        "columns_left = kHeadDimV - column;",
        "columns_left = kSquare;",
        ("out of bounds", RIGHT),
    ),
    Bug(
        "V's last columns are those of a whole square",
        "u32 piece = i < count ?",
        "u32 piece = count > 0 ?",
        ("out of bounds", RIGHT),
        "narrow rows",
    ),
    Bug(
        "V's columns stand in other words",
        "x[i / 4] |= piece",
        "x[i % 4] |= piece",
        kernel="narrow rows",
    ),
    Bug(
        "threads beyond the last slab go on",
        "  if (slab >= batch * kv_heads * slabs) return;\n",
        "",
        ("out of bounds",),
        case=replace(CASE, seq_kv=300),  # three slabs of 48 threads
    ),
)
PRODUCTS = (
    Bug(
        "the sums of a tile begin with scores",
        "if (step == 0) ptx::wgmma_m64k32_e4m3_fresh(flat(t), p[0][step], right);",
        "if (step == 0) ptx::wgmma_m64k32_e4m3(flat(t), p[0][step], right, true);",
        (RIGHT, "uninitialised read"),
    ),
    Bug(
        "sums are added before they are there",
        "  finish_products<0>(t);\n",
        "",
        ("accumulator in flight",),
    ),
    Bug(
        "the second round is that of the first columns",
        "further(v, kColumn * 128 + step * 32)",
        "further(v, step * 32)",
        kernel="two rounds",
    ),
    Bug(
        "the second round is added to the first columns",
        "o[0][kColumn / 8 + i / 4][i % 4];",
        "o[0][i / 4][i % 4];",
        kernel="two rounds",
    ),
    Bug("V's scale factor is left out", "work.value_factor / sum", "1.f / sum"),
)
LET_GO = "    ptx::mbarrier_arrive(&shared.empty_k[slot]);\n"
CHECK = "    add_values(o, p,"
TELLS = "    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(&shared."
HAVE_READ = "    __syncwarp();  // all lanes have read what they read themselves\n"
EARLY = ("stage still read", "arrival mismatch", "deadlock", *LATE)
DONE_AGAIN = (
    Bug(
        "no weight is looked for",
        "fmaxf(sum[0], sum[1]) > kLargestWeight",
        "fmaxf(sum[0], sum[1]) > 1e30f",
        case=SPIKES,
    ),
    Bug("the largest weight is not the largest", "+ 0x02020202;", "+ 0x01010101;", case=SPIKES),
    Bug(
        "a row looks at the other's weights",
        "p[0][i / 2][i % 2 * 2 + half] + 0x02020202",
        "p[0][i / 2][i % 2 * 2 + 1 - half] + 0x02020202",
        case=SPIKES,
    ),
    Bug(
        "what was summed keeps its reference",
        "o[0][i / 4][i % 4] *= factor[i / 2 % 2];",
        "(void)factor;",
        case=SPIKES,
    ),
    Bug(
        "lower forgets the sums so far",
        "    row.sum[half] *= factor[half];\n",
        "",
        case=SPIKES,
    ),
    Bug(
        "lower keeps the sum of the first weights",
        "sum[half] = moves[half] ? 0.f : sum[half];",
        "(void)sum;",
        case=SPIKES,
    ),
    Bug(
        "lower leaves the fresh weights out of the sum",
        "if (moves[i % 2] && i < 2) sum[i] += fresh_sum[i];",
        "if (false) sum[i] += fresh_sum[i];",
        case=SPIKES,
    ),
    Bug(
        "lower keeps the first weights",
        "fresh[i] = moves[i % 2] ? fresh[i] : p[0][0][i];",
        "fresh[i] = p[0][0][i];",
        case=SPIKES,
    ),
    Bug(
        "lower begins at the next 32 keys",
        "p[0][i / 4][i % 4] = i + 4 < kBlockKV / 8 ? p[0][(i + 4) / 4][i % 4] : fresh[i % 4];",
        "if (i + 4 < kBlockKV / 8) p[0][i / 4][i % 4] = p[0][(i + 4) / 4][i % 4];",
        case=SPIKES,
    ),
    Bug(
        "few_values forgets every second row",
        "const float next = renewed[i / 2] ? sums[i] : t[0][0][i];",
        "const float next = renewed[0] ? sums[i] : t[0][0][i];",
        case=SPIKES,
    ),
    Bug(
        "few_values is left out",
        "          (few_values(t, p, moves, shared.v[slot]), ...);\n",
        "",
        case=SPIKES,
    ),
    Bug(
        "few_values takes other columns",
        "chunk_address(v, 8 * n + lane % 8,",
        "chunk_address(v, lane % 8,",
        case=SPIKES,
    ),
    Bug(
        "few_scores takes the warp's rows for the first",
        "16 * warp + lane % 16",
        "lane % 16",
        case=SPIKES,
    ),
    Bug(
        "scores done again are those of the first keys",
        "few_scores(few, q_rows, shared.k[slot], 32 * step);",
        "few_scores(few, q_rows, shared.k[slot], 0);",
        case=SPIKES,
    ),
    Bug(
        "nobody looks",
        "return due && !(last && tile >= 4);",
        "return false;",
        (AGAIN,),
        case=LOOKED_AT,
    ),
    Bug(
        "a tile beyond those all see is not looked at",
        "const bool due = tile <= 0 ||",
        "const bool due = tile > 0 &&",
        (AGAIN,),
        "causal",
        LOOKED_AT,
    ),
    Bug(
        "a warp tells of V before its lanes have read it again",
        HAVE_READ,
        "",
        ("stage still read",),
        case=SPIKES,
    ),
    Bug(
        "a warp tells of K before its lanes have read it again",
        HAVE_READ,
        "",
        ("stage still read",),
        "two rounds",
        SPIKES,
    ),
)
RELEASED = (
    Bug(
        "K is released before the check",
        CHECK,
        TELLS + "empty_k[slot]);\n" + CHECK,
        EARLY,
        case=SPIKES,
    ),
    Bug(
        "K is never released",
        LET_GO,
        "",
        ("deadlock",),
    ),
    Bug(
        "V is released before it was multiplied",
        CHECK,
        TELLS + "empty_v[slot]);\n" + CHECK,
        EARLY,
    ),
    Bug(
        "nobody waits for V",
        "    if constexpr (kOneRound) await_values(n);",
        "",
        (*LATE, "race", "uninitialised read"),
    ),
    Bug(
        "nobody waits for the next K",
        "      if (tile > last_tile) await_keys(n + 1);\n",
        "",
        (*LATE, "race", "uninitialised read"),
    ),
    Bug(
        "nobody waits for the first K",
        "    if (tile >= first) await_keys(n);\n",
        "",
        (*LATE, "race", "uninitialised read"),
    ),
)
PASSED_BY = (  # of three consumers the first sees none of the last keys, the last has no rows
    Bug(
        "tiles that nobody sees are not passed by",
        "    pass_by(seen().end);\n",
        "",
        ("matrix_instructions_do_the_flops_predicted",),
        "three, causal",
        FEW_ROWS,
    ),
    Bug(
        "a tile too many is passed by",
        "return {(keys + kBlockKV - 1) / kBlockKV, 0};",
        "return {keys / kBlockKV, 0};",
        kernel="three, causal",
        case=FEW_ROWS,
    ),
    Bug(
        "what is passed by is not awaited",
        "      await_keys(n);\n      await_values(n);\n      release(n);\n",
        "      release(n);\n",
        ("deadlock", "stage still read", "arrival mismatch", *LATE, "race"),
        "three, causal",
        FEW_QUERIES,
    ),
    Bug(
        "what is passed by is not released",
        "      await_values(n);\n      release(n);\n",
        "      await_values(n);\n",
        ("deadlock",),
        "three, causal",
        FEW_ROWS,
    ),
)
O_IN_Q = (
    Bug(
        "Q's place is given back before O has left it",
        "      ptx::cp_async_bulk_wait_group_read<0>();\n      ptx::mbarrier_arrive",
        "      ptx::mbarrier_arrive",
        ("store in flight",),
        "O in Q",
        MANY_TILES,
    ),
    Bug(
        "Q's place is never given back",
        "    owes = true;\n",
        "",
        ("deadlock",),
        "O in Q",
        MANY_TILES,
    ),
    Bug(
        "who has no rows keeps Q's place",
        "      give_back();\n      await_keys(n);\n",
        "      await_keys(n);\n",
        ("deadlock",),
        "O in Q",
        NO_ROWS,
    ),
    Bug(
        "O leaves by the place of the next queries",
        "                 (round - 2) % kQStages);",
        "                 (round - 1) % kQStages);",
        ("stage still read", *LATE, "race", RIGHT),
        "O in Q",
        MANY_TILES,
    ),
    Bug(
        "the other part of O is that of the first place",
        "if (part == 0) return shared.o[consumer];",
        "return shared.o[consumer];",
        (RIGHT, *LATE, "race"),
        "O in Q",
        MANY_TILES,
    ),
)
ROUNDS = (
    Bug(
        "sums join O while they are made",
        "    finish_products<1>(before);\n",
        "",
        ("accumulator in flight",),
        "two rounds",
    ),
    Bug(
        "the last sums join O while they are made",
        "    finish_products<0>(before);\n",
        "",
        ("accumulator in flight",),
        "two rounds",
    ),
)
BLOCKS = (
    Bug(
        "Q's scale factor is that of the first consumer",
        "return work.score_factor[warpgroup];",
        "return work.score_factor[0];",
        kernel="blocks",
    ),
    Bug(
        "Q's scale factors are those of tiles",
        "max(work.first_query + 64 * i, 0) / kScaleBlock",
        "(work.first_query / kBlockQ)",
        kernel="blocks",
        case=replace(CASE, seq=300),
    ),
    Bug(
        "K's factor is in the exponents twice",  # left out, all rows outgrow it and are done again
        "float factor[2] = {scale_log2 * unit,",
        "float factor[2] = {scale_log2 * unit * unit,",
        kernel="blocks",
    ),
    Bug(
        "scores that are looked at have no factor of K's",
        "      multiply(s, half, unit);\n",
        "",
        kernel="blocks",
    ),
    Bug(
        "scores that were looked at have K's factor twice",
        "      factor[half] = scale_log2;\n",
        "",
        kernel="blocks",
    ),
    Bug(
        "scores computed again have no factor of K's",
        "      multiply(few, normal_factor(shared.key_factors[slot]));"
        "  // again, lest it be kept\n",
        "",
        kernel="blocks",
        case=SPIKES,
    ),
    Bug(
        "K's blocks have no scale factor beside a softcap",
        "    multiply(s, key_factor);\n",
        "",
        kernel="blocks, softcap",
    ),
    Bug(
        "V's blocks have no scale factor",
        "kColumn + i / 4 * 8 < kDV ? by : 1.f",
        "1.f",
        kernel="blocks",
    ),
    Bug(
        "the ones are scaled as V is",
        "kColumn + i / 4 * 8 < kDV ? by : 1.f",
        "by",
        kernel="blocks",
    ),
    Bug(
        "scale factors are read behind their release",
        HAVE_READ,
        "",
        ("race", "stage still read"),
        kernel="blocks",
    ),
)
BUGS = (*LAID_OUT, *PRODUCTS, *DONE_AGAIN, *RELEASED, *PASSED_BY, *O_IN_Q, *ROUNDS, *BLOCKS)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found_whatever_the_seed(bug: Bug) -> None:
    planted = bug.planted()
    found = {found_in(planted, replace(bug.case, seed=seed)) for seed in SEEDS}
    assert found <= set(bug.found), f"found by {found}"


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("values", ["normal", "falling", "large", "spikes"])
def test_nothing_is_found_in_the_right_kernel(values: str, name: str) -> None:
    for seed in SEEDS:
        assert found_in(kernel(name), replace(CASE, values=values, seed=seed)) == NOTHING
    assert found_in(kernel(name), replace(LOOKED_AT, values=values)) == NOTHING

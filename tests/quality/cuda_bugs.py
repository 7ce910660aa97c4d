"""Bugs of one line that attention kernels really have, and what must find each.

A bug is planted in the text of a rendered kernel. ``found`` is the rule that the emulator names, or
the property that fails; where the schedule decides which of two rules is broken first, both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

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

NOTHING = "nothing"
SEEDS = range(share(20))  # each draws the inputs and the schedule

SMALL = Tile(block_q=32, block_kv=16, warps=2)
WIDER = Tile(block_q=32, block_kv=32, warps=2)
STEPPED = Tile(block_q=32, block_kv=32, warps=2, step_kv=16)
PLANS: dict[str, tuple[str, Tile, Problem]] = {
    "v2 bf16 causal": ("v2", SMALL, Problem(head_dim=32, dtype="bf16", causal=True)),
    "v2 fp16 full": ("v2", replace(SMALL, stages=2), Problem(head_dim=48, head_dim_v=32)),
    "v2 pairs": (
        *("v2", replace(WIDER, stages=2)),
        Problem(head_dim=144, head_dim_v=32, dtype="bf16", causal=True),
    ),
    "v2 fp32 causal": ("v2", SMALL, Problem(head_dim=32, dtype="fp32", causal=True)),
    "v1 bf16 causal": ("v1", STEPPED, Problem(head_dim=32, dtype="bf16", causal=True)),
    "v1 fp16 full": ("v1", STEPPED, Problem(head_dim=40, head_dim_v=24)),
    "v1 fp32 full": ("v1", STEPPED, Problem(head_dim=32, dtype="fp32")),
    "v2 turing": ("v2", SMALL, Problem(head_dim=32, causal=True)),
    "v2 e4m3": ("v2", WIDER, Problem(head_dim=64, dtype="e4m3", scales="head")),
}
GPUS = {"v2 turing": "t4", "v2 e4m3": "4090"}  # of the others: a100-80gb

POWERS = """const float x = ptx::ex2(fmaf(s[n][2 * half], scale_log2, -shift[half]));
    const float y = ptx::ex2(fmaf(s[n][2 * half + 1], scale_log2, -shift[half]));"""
USUAL = Case(heads=2, kv_heads=1, seq=40, seq_kv=50)
ONE_HEAD = replace(USUAL, heads=1)
AMID_NAN = replace(ONE_HEAD, layout="padded")  # what lies past a row or the last one is no tensor's
GROUPS = replace(USUAL, heads=4, kv_heads=2)
NO_KEYS = replace(USUAL, seq_kv=0)
BELOW, RISING, FALLING, HUGE = (
    replace(USUAL, values=values) for values in ("below", "rising", "falling", "huge")
)
MORE_QUERIES = replace(USUAL, seq=60, seq_kv=40)
MORE_KEYS = replace(USUAL, seq_kv=100)
WHOLE_TILES = replace(USUAL, seq_kv=64)


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
        return f"{self.kernel}: {self.name}"

    @property
    def finders(self) -> set[str]:
        return {self.found} if isinstance(self.found, str) else set(self.found)

    @property
    def property(self) -> properties.Property:
        """The one that must fail; for a broken rule the first, which any launch will do for."""
        by_name = {p.name: p for p in properties.PROPERTIES if p.name in self.finders}
        return next(iter(by_name.values()), properties.PROPERTIES[0])

    def planted(self) -> Kernel:
        source = kernel_of(self.kernel).source
        assert source.count(self.right) == 1, f"{self}: the text to replace is not there once"
        return parse(source.replace(self.right, self.wrong))

    def finder(self, kernel: Kernel, seed: int) -> str:
        """What finds something in the kernel: a rule, the property, or NOTHING."""
        trial = Trial(kernel, EmulatorRunner(workers=1), replace(self.case, seed=seed))
        try:
            self.property.check(trial)
        except Fault as fault:
            return fault.rule
        except CheckFailed:
            return self.property.name
        return NOTHING


@cache
def kernel_of(name: str) -> Kernel:
    """The right kernel."""
    algo, tile, problem = PLANS[name]
    plan = planner.plan(problem, load(GPUS.get(name, "a100-80gb")), algo, tile=tile).plan
    assert plan
    return render(plan)


# ---- Order: barriers, copies in the background, lanes -------------------------------------------

ORDER = (
    Bug(
        "a tile is read before all warps have copied theirs",
        "v2 bf16 causal",
        "    __syncthreads();\n    load(t",
        "    load(t",
        ("race", "uninitialised read"),
    ),
    Bug(
        "a slot is refilled while others read it",
        "v2 fp16 full",
        "    __syncthreads();\n    load(t + kSlots - 1);",
        "    load(t + kSlots - 1);\n    __syncthreads();",
        ("race", "copy in flight"),
    ),
    Bug(
        "slots of a pair are refilled while others read them",
        "v2 pairs",
        "    __syncthreads();\n    load(t + kSlots - 2);",
        "    load(t + kSlots - 2);\n    __syncthreads();",
        ("race", "copy in flight"),
        MORE_KEYS,
    ),
    Bug(
        "a pair is read before all warps have copied theirs",
        "v2 pairs",
        "    __syncthreads();\n    load(t",
        "    load(t",
        ("race", "uninitialised read"),
    ),
    Bug(
        "a warp waits for the pair before the one it reads",
        "v2 pairs",
        "ptx::cp_async_wait_group<kSlots / 2 - 2>();",
        "ptx::cp_async_wait_group<kSlots / 2 - 1>();",
        "copy in flight",
    ),
    Bug(
        "only one warp goes to the barrier",
        "v2 fp32 causal",
        "    __syncthreads();\n    load(t",
        "    if (threadIdx.x < 32) __syncthreads();\n    load(t",
        ("race", "uninitialised read"),
    ),
    Bug(
        "O overwrites a Q that others are still copying",
        "v2 bf16 causal",
        "  __syncthreads();  // Q's tile is free for O\n",
        "",
        "race",
        NO_KEYS,
    ),
    Bug(
        "nobody waits for the copies",
        "v2 bf16 causal",
        "    ptx::cp_async_wait_group<kSlots - 2>();\n",
        "",
        "copy in flight",
    ),
    Bug(
        "the wait leaves one group too many in flight",
        "v2 fp16 full",
        "ptx::cp_async_wait_group<kSlots - 2>();",
        "ptx::cp_async_wait_group<kSlots - 1>();",
        "copy in flight",
    ),
    Bug(
        "the wait leaves one group too many in flight",
        "v2 fp32 causal",
        "ptx::cp_async_wait_group<kSlots - 2>();",
        "ptx::cp_async_wait_group<kSlots - 1>();",
        "copy in flight",
    ),
    Bug(
        "the copies are in no group",
        "v2 fp32 causal",
        "    ptx::cp_async_commit_group();  // an empty group keeps the count in step\n",
        "",
        "copy in flight",
    ),
    Bug(
        "tiles that do not exist make no group, and the count falls behind",
        "v2 fp16 full",
        "    ptx::cp_async_commit_group();  // an",
        "    if (t < 2 * kv_tiles) ptx::cp_async_commit_group();  // an",
        "copy in flight",
    ),
    Bug(
        "the block exits while Q is on its way",
        "v2 bf16 causal",
        "  ptx::cp_async_wait_group<0>();\n",
        "",
        "copy in flight",
        NO_KEYS,
    ),
    Bug(
        "the wait comes after the barrier",
        "v2 fp16 full",
        "    ptx::cp_async_wait_group<kSlots - 2>();\n    __syncthreads();\n",
        "    __syncthreads();\n    ptx::cp_async_wait_group<kSlots - 2>();\n",
        ("race", "copy in flight"),
    ),
    Bug(
        "V is taken from the slot of K, which is being refilled",
        "v2 bf16 causal",
        "accumulate(o_acc, p, slot(2 * j + 1));",
        "accumulate(o_acc, p, slot(2 * j));",
        ("copy in flight", "race"),
    ),
    Bug(
        "V is taken from the slot before it, in a ring of four",
        "v2 fp16 full",
        "accumulate(o_acc, p, slot(2 * j + 1));",
        "accumulate(o_acc, p, slot(2 * j + 3));",
        "copy in flight",
    ),
    Bug(
        "the first tile of V is never loaded",
        "v2 fp32 causal",
        "} else if (t < 2 * kv_tiles) {",
        "} else if (t > 1 && t < 2 * kv_tiles) {",
        "uninitialised read",
    ),
    Bug(
        "lanes read O before the rest of their warp has laid it out",
        "v2 bf16 causal",
        "  __syncwarp();\n  for (int i = lane",
        "  for (int i = lane",
        "race",
    ),
    Bug(
        "lanes read O before the rest of their warp has laid it out",
        "v1 fp32 full",
        "  __syncwarp();\n  for (int i = lane",
        "  for (int i = lane",
        "race",
    ),
    Bug(
        "one lane skips a shuffle",
        "v2 fp16 full",
        "  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));",
        "  if (threadIdx.x != 5) x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));",
        "lanes diverge",
    ),
    Bug(
        "lanes without rows leave before their warp is done",
        "v1 bf16 causal",
        "      Accumulator o_tile;\n",
        "      if (tile_row(1) >= rows) return;\n      Accumulator o_tile;\n",
        "lanes diverge",
        replace(USUAL, seq=44),
    ),
    Bug(
        "lanes ask for a statistic only where they have a row",
        "v1 bf16 causal",
        "first ? -kInfinity : load_statistic(m",
        "first || tile_row(i) >= rows ? -kInfinity : load_statistic(m",
        "lanes diverge",
        replace(USUAL, seq=44),
    ),
    Bug(
        "keys are replaced while others read them",
        "v1 bf16 causal",
        "    __syncthreads();  // everyone is done with the previous keys and values\n",
        "",
        "race",
    ),
    Bug(
        "Q is replaced while others read it",
        "v1 fp16 full",
        "      __syncthreads();  // Q's tile is free\n",
        "",
        "race",
    ),
    Bug(
        "Q is read before all warps have copied theirs",
        "v1 fp32 full",
        "      __syncthreads();\n\n      Accumulator",
        "\n      Accumulator",
        "uninitialised read",
    ),
    Bug(
        "O overwrites a Q that others still read",
        "v1 fp16 full",
        "        __syncthreads();  // Q's tile is free for O\n",
        "",
        "race",
    ),
)

# ---- Memory: bounds, alignment, what nobody wrote, whose it is ----------------------------------

MEMORY = (
    Bug(
        "rows past the last are written, over the next head's",
        "v2 bf16 causal",
        "if (row < rows) *reinterpret_cast<Word*>",
        "*reinterpret_cast<Word*>",
        ("race", "out of bounds"),
        GROUPS,
    ),
    Bug(
        "one row past the last is written",
        "v2 fp16 full",
        "if (row < rows) *reinterpret_cast<Word*>",
        "if (row <= rows) *reinterpret_cast<Word*>",
        "out of bounds",
        ONE_HEAD,
    ),
    Bug(
        "the LSE of rows past the last is written",
        "v1 fp16 full",
        "    if (threadIdx.x % 4 == 0 && tile_row(i) < rows) {",
        "    if (threadIdx.x % 4 == 0) {",
        "out of bounds",
        ONE_HEAD,
    ),
    Bug(
        "partial rows past the last are written",
        "v1 bf16 causal",
        "    if (tile_row(i) >= rows) continue;\n",
        "",
        "out of bounds",
        ONE_HEAD,
    ),
    Bug(
        "rows past the last are merged with what lies there",
        "v1 fp32 full",
        "const bool known = !first && tile_row(i) < rows;",
        "const bool known = !first;",
        "out of bounds",
        ONE_HEAD,
    ),
    Bug(
        "keys past the last are read",
        "v2 fp32 causal",
        "const bool valid = row < rows && col < kValidCols;",
        "const bool valid = col < kValidCols;",
        "out of bounds",
        AMID_NAN,
    ),
    Bug(
        "columns past the last are read",
        "v1 fp16 full",
        "const bool valid = row < rows && col < kValidCols;",
        "const bool valid = row < rows;",
        "out of bounds",
        AMID_NAN,
    ),
    Bug(
        "copies begin one element late",
        "v2 bf16 causal",
        "copy<kBytes>(at(row, col), source + i * kColStep, valid);",
        "copy<kBytes>(at(row, col), source + i * kColStep + 1, valid);",
        ("misaligned access", "out of bounds"),
    ),
    Bug(
        "V is walked in the strides of K",
        "v2 fp16 full",
        "const Element* source = v + key * v_strides.seq;",
        "const Element* source = v + key * k_strides.seq;",
        "out of bounds",
        AMID_NAN,
    ),
    Bug(
        "the ring has one slot more than shared memory",
        "v2 bf16 causal",
        "t % kSlots * kSlotElements",
        "t % (kSlots + 1) * kSlotElements",
        "out of bounds",
    ),
    Bug(
        "two blocks write the same rows",
        "v2 fp32 causal",
        "(kCausal ? q_blocks - 1 - turn : turn) * kBlockQ;",
        "(q_blocks - 1) * kBlockQ;",
        "race",
    ),
    Bug(
        "a group of heads is one too short",
        "v2 bf16 causal",
        "return {first_head + place % members,",
        "return {first_head + place % max(1, members - 1),",
        ("race", "outputs_are_fully_written"),
        GROUPS,
    ),
    Bug(
        "blocks take the heads of others",
        "v2 bf16 causal",
        "return {first_head + place % members,",
        "return {first_head + place / members % members,",
        ("race", "outputs_are_fully_written"),
        GROUPS,
    ),
    Bug(
        "all heads write the first one's O",
        "v1 fp32 full",
        "  o += batch * o_strides.batch + head * o_strides.head;",
        "  o += batch * o_strides.batch;",
        "race",
    ),
    Bug(
        "O is written over Q",
        "v2 bf16 causal",
        "store_output(reinterpret_cast<Output*>(smem_raw), o_acc, o,",
        "store_output(reinterpret_cast<Output*>(smem_raw), o_acc, const_cast<Output*>(q),",
        "write to an input",
    ),
    Bug(
        "the first step reads O, m and l",
        "v1 fp16 full",
        "scale_log2, rows, j == 0);",
        "scale_log2, rows, false);",
        "uninitialised read",
    ),
    Bug(
        "O, m and l are not left for the next step",
        "v1 bf16 causal",
        "store_partial(o_tile, row, o_rows, m + first_row, l + first_row, rows);",
        "",
        "uninitialised read",
    ),
    Bug(
        "one row of registers too many is reset",
        "v2 fp16 full",
        "  for (int i = 0; i < 2 * kRowTiles; ++i) {\n    row.max",
        "  for (int i = 0; i <= 2 * kRowTiles; ++i) {\n    row.max",
        "undefined arithmetic",
    ),
    Bug(
        "the last row of O is skipped",
        "v2 fp32 causal",
        "if (row < rows) *reinterpret_cast<Word*>",
        "if (row < rows - 1) *reinterpret_cast<Word*>",
        "outputs_are_fully_written",
    ),
    Bug(
        "the last row's LSE is skipped",
        "v2 bf16 causal",
        "threadIdx.x % 4 == 0 && tile_row(i) < rows",
        "threadIdx.x % 4 == 0 && tile_row(i) < rows - 1",
        "outputs_are_fully_written",
    ),
    Bug(
        "whole tiles of keys have no last one",
        "v1 fp32 full",
        "const int last = max(0, (keys - 1) / kBlockKV);",
        "const int last = max(0, keys / kBlockKV);",
        "outputs_are_fully_written",
        WHOLE_TILES,
    ),
)

# ---- Values: legal, and wrong -------------------------------------------------------------------

VALUES = (
    Bug(
        "the tail of the keys is not masked",
        "v2 fp16 full",
        "if (key + kBlockKV > visible_keys(warp_query, seq_q, seq_kv)) {",
        "if (false) {",
        "matches_float64",
        BELOW,
    ),
    Bug(
        "the tail of the keys is not masked",
        "v1 fp32 full",
        "if (first_key + step + kStepKV > visible_keys(warp_query, seq_q, seq_kv)) {",
        "if (false) {",
        "matches_float64",
        BELOW,
    ),
    Bug(
        "a query does not see its own key",
        "v2 bf16 causal",
        "query + 1 - seq_q + seq_kv",
        "query - seq_q + seq_kv",
        "matches_float64",
    ),
    Bug(
        "a query sees the key after its own",
        "v2 fp32 causal",
        "query + 1 - seq_q + seq_kv",
        "query + 2 - seq_q + seq_kv",
        "matches_float64",
    ),
    Bug(
        "the causal mask is aligned top-left",
        "v1 bf16 causal",
        "query + 1 - seq_q + seq_kv",
        "query + 1",
        "matches_float64",
    ),
    Bug(
        "the mask takes column t for 2t",
        "v2 bf16 causal",
        "- key - lane % 4 * 2;",
        "- key - lane % 4;",
        "matches_float64",
    ),
    Bug(
        "the mask takes rows g and g + 8 for each other",
        "v2 fp32 causal",
        "s[i / 2][n / 2][i % 2 * 2 + n % 2] = -kInfinity",
        "s[i / 2][n / 2][(1 - i % 2) * 2 + n % 2] = -kInfinity",
        "matches_float64",
    ),
    Bug(
        "the registers of K are swapped",
        "v2 bf16 causal",
        "s[i][n / 8], a[i], b[0], b[1]",
        "s[i][n / 8], a[i], b[1], b[0]",
        "matches_float64",
    ),
    Bug(
        "V is loaded as K is, not transposed",
        "v2 fp16 full",
        "ptx::ldmatrix_x4_trans(b",
        "ptx::ldmatrix_x4(b",
        "matches_float64",
    ),
    Bug(
        "weights of neighbouring keys are swapped",
        "v1 fp16 full",
        "(pair[part % 2 * 2], pair[part % 2 * 2 + 1])",
        "(pair[part % 2 * 2 + 1], pair[part % 2 * 2])",
        "matches_float64",
    ),
    Bug(
        "weights of rows g and g + 8 are swapped",
        "v1 bf16 causal",
        "(pair[part % 2 * 2], pair[part % 2 * 2 + 1])",
        "(pair[2 - part % 2 * 2], pair[3 - part % 2 * 2])",
        "matches_float64",
    ),
    Bug(
        "rows g and g + 8 of O are swapped",
        "v2 fp32 causal",
        "pair[i % 2 * 2], pair[i % 2 * 2 + 1]);",
        "pair[2 - i % 2 * 2], pair[3 - i % 2 * 2]);",
        "matches_float64",
    ),
    Bug(
        "a lane borrows another key's weight",
        "v1 fp32 full",
        "__shfl_sync(~0u, held, (lane & ~3) + k / 2)",
        "__shfl_sync(~0u, held, (lane & ~3) + k % 4)",
        "matches_float64",
    ),
    Bug(
        "K is permuted when copied and not when read",
        "v2 bf16 causal",
        "ptx::smem_address(chunk_at<kD>(k_tile",
        "ptx::smem_address(chunk_at<kD, false>(k_tile",
        "matches_float64",
    ),
    Bug(
        "V is permuted when copied and not when read",
        "v1 fp32 full",
        "constexpr bool kSwizzledV = false;",
        "constexpr bool kSwizzledV = true;",
        "matches_float64",
    ),
    Bug(
        "every step takes the first keys of the tile",
        "v1 fp16 full",
        "scores(s, q_tile, k_tile + step * kD);",
        "scores(s, q_tile, k_tile);",
        "matches_float64",
    ),
    Bug(
        "the scores begin with what was there",
        "v2 fp16 full",
        "  zero(s);\n",
        "",
        "matches_float64",
    ),
    Bug(
        "O begins with what was there",
        "v1 bf16 causal",
        "      zero(o_tile);\n",
        "",
        "matches_float64",
    ),
    Bug(
        "maximum and sum begin with what was there",
        "v2 fp32 causal",
        "  reset(row);\n",
        "",
        "matches_float64",
    ),
    Bug(
        "O is not rescaled to a new maximum",
        "v2 bf16 causal",
        "o[n / 2][2 * half + n % 2] *= rescale;",
        ";",
        "matches_float64",
        replace(USUAL, seq=70, seq_kv=150, values="large"),
    ),
    Bug(
        "the sum is not rescaled to a new maximum",
        "v2 fp32 causal",
        "row.sum[tile][half] * rescale + sum",
        "row.sum[tile][half] + sum",
        "matches_float64",
        FALLING,
    ),
    Bug(
        "the sum is not rescaled to a new maximum",
        "v1 fp16 full",
        "row.sum[tile][half] * rescale + sum",
        "row.sum[tile][half] + sum",
        "matches_float64",
        RISING,
    ),
    Bug(
        "the rescaling is upside down",
        "v2 fp16 full",
        "ptx::ex2((max[half] - reference) * scale_log2)",
        "ptx::ex2((reference - max[half]) * scale_log2)",
        "matches_float64",
    ),
    Bug(
        "the scores are not scaled",
        "v2 bf16 causal",
        "ptx::ex2(fmaf(s[n][2 * half], scale_log2, -shift[half]))",
        "ptx::ex2(s[n][2 * half] - shift[half])",
        "matches_float64",
    ),
    Bug(
        "scores are scaled before the maximum is subtracted",
        "v2 fp32 causal",
        "weight = ptx::ex2((weight - reference) * scale_log2)",
        "weight = ptx::ex2(fmaf(weight, scale_log2, -(reference * scale_log2)))",
        "matches_float64",
        HUGE,
    ),
    Bug(
        "lanes of a quad keep maxima of their own",
        "v2 fp16 full",
        "  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));",
        "  return x;",
        "matches_float64",
    ),
    Bug(
        "half of a row's sum is forgotten",
        "v1 fp32 full",
        "  return x + __shfl_xor_sync(~0u, x, 2);",
        "  return x;",
        "matches_float64",
    ),
    Bug(
        "a row that sees no key subtracts minus infinity from itself",
        "v2 bf16 causal",
        "return max == -kInfinity ? 0.f : max;",
        "return max;",
        "matches_float64",
        MORE_QUERIES,
    ),
    Bug(
        "a guard against exponents far below 0 hides NaN",
        "v2 bf16 causal",
        POWERS,
        POWERS.replace("ptx::ex2(", "fmaxf(0.f, ptx::ex2(").replace("]));", "])));"),
        "nan_stays_in_its_row",
    ),
    Bug(
        "the LSE lacks the maximum",
        "v1 bf16 causal",
        "(max * scale_log2 + ptx::lg2(sum)) * kLn2",
        "ptx::lg2(sum) * kLn2",
        "matches_float64",
    ),
    Bug(
        "the LSE is to base 2",
        "v2 fp32 causal",
        "(max * scale_log2 + ptx::lg2(sum)) * kLn2",
        "max * scale_log2 + ptx::lg2(sum)",
        "matches_float64",
    ),
    Bug(
        "the first tile of keys is left out",
        "v2 fp16 full",
        "const int kv_tiles = (keys + kBlockKV - 1) / kBlockKV;",
        "const int kv_tiles = keys / kBlockKV;",
        "matches_float64",
    ),
    Bug(
        "query heads take the keys of others",
        "v2 fp32 causal",
        "const int kv_head = head / (heads / kv_heads);",
        "const int kv_head = head % kv_heads;",
        "matches_float64",
        GROUPS,
    ),
    Bug(
        "query heads take the keys of others",
        "v1 fp16 full",
        "const int kv_head = head / (heads / kv_heads);",
        "const int kv_head = head % kv_heads;",
        "matches_float64",
        GROUPS,
    ),
    Bug(
        "m and l are merged for each other",
        "v1 fp32 full",
        "merge(o_tile, row, o_rows, m + first_row, l + first_row,",
        "merge(o_tile, row, o_rows, l + first_row, m + first_row,",
        "matches_float64",
    ),
    Bug(
        "O so far is merged by its sum, not by its weight",
        "v1 bf16 causal",
        "const float old_weight = old_sum * ptx::ex2((old_max - reference_of(max)) * scale_log2);",
        "const float old_weight = old_sum;",
        "matches_float64",
        RISING,
    ),
    Bug(
        "tiles that no query sees are loaded and masked",
        "v2 bf16 causal",
        "const int keys = max(0, visible_keys(last_query, seq_q, seq_kv));",
        "const int keys = seq_kv;",
        "bytes_moved_are_bytes_predicted",
    ),
    Bug(
        "rows of a tile lie in the same banks",
        "v2 bf16 causal",
        "return chunk ^ (row / (8 / kGroup) % kGroup);",
        "return chunk;",
        "main_loop_has_no_bank_conflicts",
    ),
)

# ---- Before Ampere: no copies in the background, matrix instructions 8 deep ---------------------

TURING = (
    Bug(
        "a slot is refilled while others read it",
        "v2 turing",
        "    __syncthreads();\n    load(t + kSlots - 1);",
        "    load(t + kSlots - 1);\n    __syncthreads();",
        "race",
    ),
    Bug(
        "the second half of a product takes the keys of the first",
        "v2 turing",
        "ptx::mma_m16n8k8_f16(d, last, b1);",
        "ptx::mma_m16n8k8_f16(d, last, b0);",
        "matches_float64",
    ),
    Bug(
        "half of a fragment is taken for one of its rows",
        "v2 turing",
        "first[2] = {a[0], a[1]}, last[2] = {a[2], a[3]};",
        "first[2] = {a[0], a[2]}, last[2] = {a[1], a[3]};",
        "matches_float64",
    ),
    Bug(
        "the second of two floats is rounded into the low half",
        "v2 turing",
        "return ptx::cvt_f16(low) | u32(ptx::cvt_f16(high)) << 16;",
        "return ptx::cvt_f16(high) | u32(ptx::cvt_f16(low)) << 16;",
        "matches_float64",
    ),
)

# ---- e4m3: four keys a register, scale factors, weights that fill the range ----------------------

E4M3 = (
    Bug(
        "odd columns are read from even ones",
        "v2 e4m3",
        "odd_high = __byte_perm(v[2], v[3], 0x7531);",
        "odd_high = __byte_perm(v[2], v[3], 0x6420);",
        "matches_float64",
    ),
    Bug(
        "the weights of a step's first keys are taken for its last",
        "v2 e4m3",
        "const float (&later)[4] = s[tile][n + 1];",
        "const float (&later)[4] = s[tile][n];",
        "matches_float64",
    ),
    Bug(
        "a matrix load reads half of the keys twice",
        "v2 e4m3",
        "chunk_at<kDV>(v_tile, threadIdx.x % 32, 0)",
        "chunk_at<kDV>(v_tile, threadIdx.x % 16, 0)",
        "matches_float64",
    ),
    Bug(
        "each tile of keys replaces what those before it gave",
        "v2 e4m3",
        "sum[1] += odd[",
        "sum[1] = odd[",
        "matches_float64",
        RISING,
    ),
    Bug(
        "weights are stretched beyond the largest number",
        "v2 e4m3",
        "kWeightExponent = 8.f;",
        "kWeightExponent = 10.f;",
        "matches_float64",
    ),
    Bug(
        "the stretch stays in the log-sum-exp",
        "v2 e4m3",
        "(max * scale_log2 + ptx::lg2(sum) - kWeightExponent) * kLn2;",
        "(max * scale_log2 + ptx::lg2(sum)) * kLn2;",
        "matches_float64",
    ),
    Bug(
        "the values' scale factor is forgotten",
        "v2 e4m3",
        "sum == 0.f ? 0.f : v_factor / sum;",
        "sum == 0.f ? 0.f : 1.f / sum;",
        "matches_float64",
    ),
    Bug(
        "keys are scaled by the factor of their query's head",
        "v2 e4m3",
        "k_scale[batch * kv_heads + kv_head];",
        "k_scale[batch * heads + head];",
        "out of bounds",
        GROUPS,
    ),
    Bug(
        "all batches are scaled as the first",
        "v2 e4m3",
        "k_scale[batch * kv_heads + kv_head];",
        "k_scale[kv_head];",
        "matches_float64",
        replace(USUAL, batch=2),
    ),
)

BUGS = (*ORDER, *MEMORY, *VALUES, *TURING, *E4M3)

"""Bugs of one line that a backward kernel could have, and what must find each.

As in cuda_bugs.py: a bug is planted in the text of a rendered kernel; ``found`` is the rule that
the emulator names, or the property that fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

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
SEEDS = range(share(6, of=2))  # each draws the inputs and the schedule

TILE = Tile(block_q=32, block_kv=32, warps=2, stages=2)
SHARED = Tile(block_q=64, block_kv=32, warps=2, stages=3, p_in="shared")
FOUR = Tile(block_q=64, block_kv=32, warps=4, stages=2, p_in="shared", sharers=4)
FP32 = Tile(block_q=16, block_kv=32, warps=4, stages=3, p_in="shared")
BF16: dict[str, Any] = {"head_dim": 32, "dtype": "bf16", "pass_": "bwd"}
V1_TILE = replace(TILE, stages=1)
SMALL = Problem(head_dim=32, dtype="bf16", causal=True, pass_="bwd")
REPEATS = SMALL.with_(deterministic=True)
PLANS: dict[str, tuple[str, Tile, Problem]] = {
    "bf16 causal": ("h200", TILE, Problem(head_dim=32, dtype="bf16", causal=True, pass_="bwd")),
    "fp16 full": ("a100-80gb", TILE, Problem(head_dim=40, head_dim_v=24, pass_="bwd")),
    "P in shared": ("h200", SHARED, Problem(head_dim=64, head_dim_v=32, dtype="bf16", pass_="bwd")),
    "four share": ("h200", FOUR, Problem(head_dim=64, head_dim_v=48, dtype="bf16", pass_="bwd")),
    "window": ("h200", TILE, Problem(**BF16, window=(20, 5))),
    "softcap": ("a100-80gb", TILE, Problem(**BF16, softcap=1.0)),
    "alibi": ("h200", TILE, Problem(**BF16, bias="alibi")),
    "dense": ("a100-80gb", TILE, Problem(**BF16, bias="dense")),
    "varlen": ("h200", TILE, Problem(**BF16, causal=True, varlen=True)),
    "fp32": ("a100-80gb", FP32, Problem(head_dim=48, dtype="fp32", pass_="bwd")),
    "ordered": ("h200", TILE, REPEATS),
    "second_pass": ("h200", TILE, REPEATS),
    "second_pass, P in shared": ("h200", SHARED, REPEATS.with_(head_dim=64, head_dim_v=32)),
    "second_pass, four share": ("h200", FOUR, REPEATS.with_(head_dim=64)),
    "ordered, four share": ("h200", FOUR, REPEATS.with_(head_dim=64)),
    "ordered, window": ("h200", TILE, REPEATS.with_(causal=False, window=(20, 5))),
    "ordered, varlen": ("h200", TILE, REPEATS.with_(varlen=True)),
    "second_pass, window": (
        *("h200", TILE),
        REPEATS.with_(causal=False, window=(20, 5), softcap=1.0),
    ),
    "second_pass, dense": ("a100-80gb", TILE, REPEATS.with_(causal=False, bias="dense")),
    "v1": ("h200", V1_TILE, SMALL),
    "v1, window": ("h200", V1_TILE, SMALL.with_(causal=False, window=(20, 5))),
    "v1, varlen": ("h200", V1_TILE, SMALL.with_(varlen=True)),
    "v1, P in shared": ("h200", replace(V1_TILE, block_q=64, p_in="shared"), SMALL),
}
USUAL = Case(heads=2, kv_heads=1, seq=40, seq_kv=50)
MORE_QUERIES = replace(USUAL, seq=60, seq_kv=40)
LONG = replace(USUAL, heads=1, seq=100, seq_kv=64)
LONG_SHARED = replace(LONG, seq=200)
LONG_ROWS = replace(LONG, seq=64, seq_kv=200)
WINDOW = replace(USUAL, seq=150, seq_kv=130, left=20, right=5)
CAPPED = replace(USUAL, softcap=1.0)
MASKED = replace(USUAL, bias="mask")
MORE = replace(USUAL, batch=3)
MANY = replace(USUAL, heads=6, kv_heads=3, seq=150, seq_kv=150)


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
    gpu, tile, problem = PLANS[name]
    form = name.partition(",")[0] if problem.deterministic else ""
    algo = "v1" if name.startswith("v1") else "v2"
    entry = planner.plan(problem, load(gpu), algo, tile=tile, form=form)
    assert entry.plan
    return render(entry.plan)


MATCHES, BYTES = "matches_float64", "bytes_moved_are_bytes_predicted"
PACKED = "packed_sequences_are_those_one_by_one"
ARRIVED = """    ptx::cp_async_wait_group<0>();
    __syncthreads();
    load(t + 1);
"""
NEXT = "    __syncthreads();\n    load(t + 1);\n"
MAKES = "    add_dv_dk(t - 1);\n"
FREED = "    __syncthreads();  // the slot of tile t - 1 is free, and P's place\n"
FREES = MAKES + FREED
Q_ARRIVED = (
    "  __syncthreads();"
    "  // Q has arrived, even where there was no step, and its tile is free for dQ\n"
)
KEYS_LEFT = (
    "    __syncthreads();"
    "  // dK and dV of the previous keys have left through the tiles of K and V\n"
)


BUGS = (
    Bug(
        "the tile of queries is not waited for", "bf16 causal",
        ARRIVED, NEXT, "copy in flight",
    ),
    Bug(
        "no barrier between the steps", "bf16 causal",
        ARRIVED, ARRIVED.replace("    __syncthreads();\n", ""), ("race", "uninitialised read"),
    ),
    Bug(
        "the next tile is loaded before the barrier", "fp16 full",
        NEXT, "    load(t + 1);\n    __syncthreads();\n", "race", LONG,
    ),
    Bug(
        "one tile of dS for two", "fp16 full",
        "return weight_tiles + t % 2 * kWeightElements;", "return weight_tiles;", "race",
    ),
    Bug(
        "one slot of Q and dO for two", "bf16 causal",
        "const auto q_slot = [&](int t) { return slots + t % kSlots * kSlotElements; };",
        "const auto q_slot = [&](int t) { return slots; };", ("race", "copy in flight"),
    ),
    Bug(
        "one slot of L and D for two", "bf16 causal",
        "return statistics + t % kSlots * 2 * kBlockQ;", "return statistics;",
        ("race", "copy in flight"),
    ),
    Bug(
        "K is overwritten while dQ reads it", "bf16 causal",
        "  __syncthreads();  // the tiles of K and V are free for dK and dV\n", "", "race",
    ),
    Bug(
        "dQ starts as it is", "bf16 causal",
        "    dq_tile[i] = make_float4(0.f, 0.f, 0.f, 0.f);\n", "", "uninitialised read",
    ),
    Bug(
        "half of dQ is zeroed", "fp16 full",
        "i < kBlockQ * kD / 4; i += kThreads", "i < kBlockQ * kD / 8; i += kThreads",
        "uninitialised read",
    ),
    Bug(
        "dQ is added to by plain stores", "fp16 full",
        "ptx::red_add_f32(unit + unit_place(i, r), x[r]);", "unit[unit_place(i, r)] += x[r];",
        "race",
    ),
    Bug(
        "the last tile of dS is forgotten", "fp16 full",
        "  finish_tile(steps - 1);\n", "", MATCHES,
    ),
    Bug(
        "dS a step too late", "bf16 causal",
        "    finish_tile(t - 1);\n", "    finish_tile(t - 2);\n", ("race", MATCHES),
    ),
    Bug(
        "keys past the end keep their weight", "fp16 full",
        "row < span.seq_kv ? first_query_of(row, span) - column : kQueries;",
        "first_query_of(row, span) - column;", MATCHES, replace(USUAL, values="below"),
    ),
    Bug(
        "P of hidden pairs is kept", "bf16 causal",
        "      if (masked) mask_weights<kStepQ>(s, warp_key, query + step, span);\n",
        "", MATCHES,
    ),
    Bug(
        "a NaN of a hidden pair is kept", "bf16 causal",
        "if (masked) mask_weights<kPartQ>(dp, warp_key, query + step + part, span);",
        "", "nan_stays_in_its_row", MORE_QUERIES,
    ),
    Bug(
        "causal aligned top-left", "bf16 causal",
        "return kCausal ? key + span.seq_q - span.seq_kv : 0;", "return kCausal ? key : 0;",
        (MATCHES, BYTES), MORE_QUERIES,
    ),
    Bug(
        "tiles on the diagonal run no mask", "bf16 causal",
        "last >= span.seq_kv || query < first_query_of(last, span);", "last >= span.seq_kv;",
        MATCHES,
    ),
    Bug(
        "a warp's last key is not asked for", "bf16 causal",
        "const int last = key + kWarpKeys - 1;", "const int last = key;", MATCHES,
    ),
    Bug(
        "the first tile of queries is left out", "bf16 causal",
        "first_query_of(first_key, span)) / kBlockQ;",
        "first_query_of(first_key, span)) / kBlockQ + (first_key > 0);", MATCHES,
        replace(USUAL, seq=64, seq_kv=64),
    ),
    Bug(
        "the head is that of the block's own number", "bf16 causal",
        "any_head % kv_heads;", "blockIdx.x / kv_tiles % kv_heads;",
        ("race", "outputs_are_fully_written"), MANY,
    ),
    Bug(
        "a group of heads is one too short", "bf16 causal",
        "const int members = head < rest ? rest : together;",
        "const int members = max(1, (head < rest ? rest : together) - 1);",
        ("race", "outputs_are_fully_written"), MANY,
    ),
    Bug(
        "queries of the second pass take the head of the block's own number", "second_pass",
        "head = any_head % heads;", "head = blockIdx.x / q_blocks % heads;",
        ("race", "outputs_are_fully_written"), MANY,
    ),
    Bug(
        "tiles that see nothing are walked", "bf16 causal",
        "max(0, first_query_of(first_key, span)) / kBlockQ;", "0;", BYTES,
        replace(USUAL, seq=64, seq_kv=64),
    ),
    Bug(
        "one head of the group for all", "bf16 causal",
        "return kv_head * group + t / q_tiles;", "return kv_head * group;", MATCHES,
    ),
    Bug(
        "the groups of heads are interleaved", "bf16 causal",
        "return kv_head * group + t / q_tiles;", "return kv_head + t / q_tiles * kv_heads;",
        MATCHES, replace(USUAL, heads=4, kv_heads=2),
    ),
    Bug(
        "D is added", "fp16 full",
        "weight * (x - (i % 2 ? d.y : d.x));", "weight * (x + (i % 2 ? d.y : d.x));", MATCHES,
    ),
    Bug(
        "D of the wrong query", "fp16 full",
        "weight * (x - (i % 2 ? d.y : d.x));", "weight * (x - d.x);", MATCHES,
    ),
    Bug(
        "L in the other base", "bf16 causal",
        "{-kLog2e * l.x, -kLog2e * l.y}", "{-l.x, -l.y}", MATCHES,
    ),
    Bug(
        "dK without the scale", "bf16 causal",
        "dk_acc, scale, dk + row", "dk_acc, 1.f, dk + row", MATCHES,
    ),
    Bug(
        "dQ without the scale", "fp16 full",
        "x[r] = scale * source[unit_place(i, r)];", "x[r] = source[unit_place(i, r)];", MATCHES,
    ),
    Bug(
        "dQ put in order with its row tiles too close", "fp16 full",
        "i / (kUnitCols / 8) * 16 + lane / 4;", "i / (kUnitCols / 8) * 8 + lane / 4;",
        ("outputs_are_fully_written", MATCHES),
    ),
    Bug(
        "D of rows past the end is written", "bf16 causal",
        "if (valid && threadIdx.x % kRowThreads == 0)", "if (threadIdx.x % kRowThreads == 0)",
        ("race", "out of bounds"),
    ),
    Bug(
        "O's stride for the gradient's", "bf16 causal",
        "dO + query * do_strides.seq, valid);", "dO + query * q_strides.head, valid);",
        ("out of bounds", "uninitialised read"),
    ),
    Bug(
        "keys past the last are read", "bf16 causal",
        "const int keys = min(kBlockKV, seq_kv - first_key);", "const int keys = kBlockKV;",
        "out of bounds",
    ),
    Bug(
        "queries past the last are read", "fp16 full",
        "const int rows = seq_q - int(query);", "const int rows = kBlockQ;", "out of bounds",
    ),
    Bug(
        "rows of dS not permuted alike", "bf16 causal",
        "Element* chunk = chunk_at<kBlockQ>(tile, row, query / 8 + 2 * step + part / 2);",
        "Element* chunk = chunk_at<kBlockQ, false>(tile, row, query / 8 + 2 * step + part / 2);",
        MATCHES,
    ),
    Bug(
        "dV from the other rounding", "fp16 full",
        "accumulate_step<kDV>(dv_acc, p, do_slot(t) + step * kDV);",
        "accumulate_step<kDV>(dv_acc, ds, do_slot(t) + step * kDV);", MATCHES,
    ),
    Bug(
        "two slots of Q and dO where three are needed", "P in shared",
        "const auto q_slot = [&](int t) { return slots + t % kSlots * kSlotElements; };",
        "const auto q_slot = [&](int t) { return slots + t % 2 * kSlotElements; };",
        ("race", "copy in flight"), LONG_SHARED,
    ),
    Bug(
        "one tile of P for two", "P in shared",
        "return weight_tiles + (2 + t % 2) * kWeightElements;",
        "return weight_tiles + 2 * kWeightElements;", "race", LONG_SHARED,
    ),
    Bug(
        "both warps have the same queries", "P in shared",
        "for (int step = warp_part() * kStepQ;", "for (int step = 0;",
        ("race", "uninitialised read", MATCHES),
    ),
    Bug(
        "both warps have the same columns", "P in shared",
        "const int chunk = warp_column(0) / 8 + lane / 16;", "const int chunk = lane / 16;",
        MATCHES,
    ),
    Bug(
        "rows leave before the other warp's columns are there", "P in shared",
        "  if constexpr (kSplit > 1) {\n    __syncthreads();",
        "  if constexpr (kSplit > 1) {\n    ", "race",
    ),
    Bug(
        "the slot is filled before every warp has read it", "four share",
        FREED, "", "race", LONG_SHARED,
    ),
    Bug(
        "the slot is filled before dV and dK are made", "four share",
        FREES + "    load(t + 1);\n", "    __syncthreads();\n    load(t + 1);\n" + MAKES,
        ("race", "copy in flight"), LONG_SHARED,
    ),
    Bug(
        "dV and dK of the last tile are forgotten", "four share",
        "  add_dv_dk(steps - 1);\n", "", MATCHES,
    ),
    Bug(
        "two warps to a quarter of the columns", "four share",
        "(i / 2 * kSplit + warp_part()) * 16", "(i / 2 * kSplit + warp_part() / 2) * 16",
        ("race", MATCHES), LONG_SHARED,
    ),
    Bug(
        "one tile of dS for two", "four share",
        "return weight_tiles + t % 2 * kWeightElements;", "return weight_tiles;",
        "race", LONG_SHARED,
    ),
    Bug(
        "the slot is filled before every warp has read it", "second_pass, four share",
        "    __syncthreads();  // the slot of tile t - 1 is free\n", "", "race", LONG_ROWS,
    ),
    Bug(
        "one query too few sees a key", "window",
        "span.window_left + 1);", "span.window_left);", MATCHES, WINDOW,
    ),
    Bug(
        "the window's right side is forgotten", "window",
        "- span.seq_kv - span.window_right;", "- span.seq_kv;", MATCHES, WINDOW,
    ),
    Bug(
        "queries beyond the window are kept", "window",
        "place < first || place >= end", "place < first", MATCHES, WINDOW,
    ),
    Bug(
        "tiles at the window's end run no mask", "window",
        "  if (query + kBlockQ > end_query_of(key, span)) return true;\n", "", MATCHES, WINDOW,
    ),
    Bug(
        "the walk ends with the first key's window", "window",
        "end_query_of(first_key + keys - 1, span);", "end_query_of(first_key, span);",
        (MATCHES, BYTES), WINDOW,
    ),
    Bug(
        "the walk does not end with the window", "window",
        "end_query_of(first_key + keys - 1, span);", "seq_q;", BYTES, WINDOW,
    ),
    Bug(
        "dS without the softcap's derivative", "softcap",
        "      damp(s, derivative);\n", "", MATCHES, CAPPED,
    ),
    Bug(
        "dV with the softcap's derivative", "softcap",
        "      round_weights<kStepQ>(p, s, 0);\n      damp(s, derivative);\n",
        "      damp(s, derivative);\n      round_weights<kStepQ>(p, s, 0);\n", MATCHES, CAPPED,
    ),
    Bug(
        "the derivative of the unscaled score", "softcap",
        "soft_tail(s[tile][n][i % 4] * terms.scale_by_cap);", "soft_tail(s[tile][n][i % 4]);",
        MATCHES, CAPPED,
    ),
    Bug(
        "one head's slope for all", "alibi",
        "slopes[head] * kLog2e", "slopes[kv_head * group] * kLog2e", MATCHES,
    ),
    Bug(
        "distances aligned top-left", "alibi",
        "float(query + span.seq_kv - span.seq_q - key)", "float(query - key)", MATCHES,
    ),
    Bug(
        "one row's bias for all", "dense",
        "terms.bias[query * terms.stride + key]", "terms.bias[key]", MATCHES,
    ),
    Bug(
        "the bias is read past its end", "dense",
        "if (key < span.seq_kv && query < span.seq_q)", "if (query < span.seq_q)",
        ("out of bounds", BYTES),
    ),
    Bug(
        "one head's bias for all", "dense",
        "+ head * bias_strides.head;", "+ kv_head * bias_strides.head;", MATCHES,
        replace(USUAL, heads=4, kv_heads=2),
    ),
    Bug(
        "rows that the bias hides whole have weights", "dense",
        "score == -kInfinity ? -0.f : ", "", MATCHES, MASKED,
    ),
    Bug(
        "a NaN passes where the bias hides", "dense",
        "hidden(weight) ? 0.f : ", "", "nan_stays_in_its_row", MASKED,
    ),
    Bug(
        "dQ of a sequence in its neighbour's tiles", "varlen",
        "(sequence.q / kBlockQ + batch + query_at(t) / kBlockQ) * heads + head;",
        "(sequence.q / kBlockQ + query_at(t) / kBlockQ) * heads + head;",
        (PACKED, "uninitialised read"), MORE,
    ),
    Bug(
        "keys of the neighbour are written", "varlen",
        "const int keys = min(kBlockKV, seq_kv - first_key);", "const int keys = kBlockKV;",
        ("race", "out of bounds", PACKED), MORE,
    ),
    Bug(
        "L of the packed rows of another head", "varlen",
        "const i64 row = i64(head) * total_q + sequence.q + query;",
        "const i64 row = i64(kv_head) * total_q + sequence.q + query;", PACKED, MORE,
    ),
    Bug(
        "blocks past a sequence's keys go on", "varlen",
        "  if (first_key >= seq_kv) return;  // the grid is for the longest\n", "",
        ("race", "out of bounds", PACKED), replace(MORE, seq_kv=100),
    ),
    Bug(
        "weights of the wrong half", "fp32",
        "const int row = warp_keys() + 16 * row_tile + 8 * half + lane / 4;",
        "const int row = warp_keys() + 16 * row_tile + lane / 4;",
        ("race", "uninitialised read", MATCHES),
    ),
    Bug(
        "a warp adds the last block of columns twice", "fp32",
        "(i / 2 * kSplit + warp_part()) * 16", "(i / 2 * kSplit) * 16",
        ("race", MATCHES),
    ),
    Bug(
        "a turn too late", "ordered",
        "const int turn = first_key / kBlockKV;", "const int turn = first_key / kBlockKV + 1;",
        "deadlock",
    ),
    Bug(
        "the turns of the other end", "ordered",
        "const int turn = first_key / kBlockKV;",
        "const int turn = kv_tiles - 1 - first_key / kBlockKV;", "deadlock",
    ),
    Bug(
        "counters start where they were", "ordered",
        "  if (threadIdx.x == 0) turns[1 + blockIdx.x] = 0;",
        "  if (false) turns[1 + blockIdx.x] = 0;",
        "uninitialised read",
    ),
    Bug(
        "numbers start where they were", "ordered",
        "  if (blockIdx.x == 0 && threadIdx.x == 1) turns[0] = 0;", "  if (false) turns[0] = 0;",
        "uninitialised read",
    ),
    Bug(
        "counters start at one", "ordered",
        "turns[1 + blockIdx.x] = 0;", "turns[1 + blockIdx.x] = 1;", "deadlock",
    ),
    Bug(
        "a turn ends without a release", "ordered",
        "if (threadIdx.x == 0) ptx::red_release_add_u32(counter, 1);",
        "if (threadIdx.x == 0) ptx::atom_add_u32(counter, 1);", "unordered addition",
    ),
    Bug(
        "a turn ends a barrier too early", "ordered",
        "    finish_turn(t - 2);\n", "    finish_turn(t - 1);\n", "unordered addition", LONG,
    ),
    Bug(
        "a turn is taken without asking", "ordered",
        "return threadIdx.x != kThreads - 1 ||", "return true ||",
        ("unordered addition", BYTES),
    ),
    Bug(
        "the turn is asked for behind the barrier", "ordered",
        "    await_turn(t - 1);\n    __syncthreads();\n    load(t + 1);\n    finish_turn(t - 2);\n"
        "    in_turn = is_turn(counter(t), turn);\n",
        "    __syncthreads();\n    load(t + 1);\n    finish_turn(t - 2);\n"
        "    if (t > 0) wait_for_turn(counter(t - 1), turn);\n", "unordered addition",
    ),
    Bug(
        "the last turn is not ended", "ordered",
        "  finish_turn(steps - 1);\n", "", "deadlock",
    ),
    Bug(
        "all blocks have one number", "ordered",
        "*place = ptx::atom_add_u32(started, 1);", "*place = ptx::atom_add_u32(started, 0);",
        ("race", "deadlock", "unordered addition"),
    ),
    Bug(
        "numbers are read before they are there", "ordered",
        "ptx::atom_add_u32(started, 1);\n  __syncthreads();", "ptx::atom_add_u32(started, 1);",
        ("race", "uninitialised read"),
    ),
    Bug(
        "heads side by side, but as if there were more", "ordered",
        "const int abreast = min(kAbreast, all_heads - first_head);",
        "const int abreast = kAbreast;", ("race", "deadlock", "out of bounds", BYTES),
    ),
    Bug(
        "the queries of a tile past the last are walked", "ordered",
        "return (last_tile - t % q_tiles) * kBlockQ;",
        "return (last_tile + 1 - t % q_tiles) * kBlockQ;",
        ("out of bounds", "deadlock", "race", "uninitialised read", "unordered addition", MATCHES),
    ),
    Bug(
        "L of the wrong rows", "second_pass",
        "-kLog2e * lse[2 * tile + r / 2]", "-kLog2e * lse[2 * tile + r % 2]", MATCHES,
    ),
    Bug(
        "D of the wrong rows", "second_pass",
        "(x - delta[2 * tile + r / 2]);", "(x - delta[0]);", MATCHES,
    ),
    Bug(
        "a key too many", "second_pass",
        "if (place > last) ds", "if (place > last + 1) ds", MATCHES,
    ),
    Bug(
        "the diagonal is not masked", "second_pass",
        "const bool masked = crosses_mask_of_rows(first_query, key, span);",
        "const bool masked = false;", MATCHES,
    ),
    Bug(
        "the last keys are not seen", "second_pass",
        "const int steps = max(0, last_key + kBlockQ) / kBlockQ;",
        "const int steps = max(0, last_key) / kBlockQ;", (MATCHES, BYTES),
        replace(USUAL, seq=65, seq_kv=65),
    ),
    Bug(
        "rows past the end of L are read", "second_pass",
        "threadIdx.x % 4 == 0 && row_of(i) < rows;", "threadIdx.x % 4 == 0;",
        ("out of bounds", BYTES),
    ),
    Bug(
        "every lane of a quad reads L", "second_pass",
        "const bool reads = threadIdx.x % 4 == 0 && row_of(i) < rows;",
        "const bool reads = row_of(i) < rows;", BYTES,
    ),
    Bug(
        "dQ by itself without the scale", "second_pass",
        "(q_tile, dq_acc, scale, dq", "(q_tile, dq_acc, 1.f, dq", MATCHES,
    ),
    Bug(
        "Q arrives when dQ has taken its place", "second_pass",
        Q_ARRIVED,
        "", ("race", "copy in flight"), replace(USUAL, seq=100, seq_kv=20),
    ),
    Bug(
        "dQ is made of dS that is not there yet", "second_pass, P in shared",
        Q_ARRIVED,
        "", ("race", "uninitialised read"),
    ),
    Bug(
        "one tile of dS for two in the second pass", "second_pass, P in shared",
        "return ds_tiles + t % 2 * kWeightElements;", "return ds_tiles;", "race",
        replace(LONG, seq=200, seq_kv=200),
    ),
    Bug(
        "Q and dO are not there yet", "v1",
        "      __syncthreads();  // they are there, and dS of the previous queries is done with\n",
        "", ("race", "uninitialised read"),
    ),
    Bug(
        "dS is not there yet", "v1",
        "      __syncthreads();  // dS of all warps is there, and Q and dO are done with\n", "",
        ("race", "uninitialised read"),
    ),
    Bug(
        "dK leaves before the next keys may come", "v1",
        KEYS_LEFT,
        "", "race", replace(LONG, seq=32),
    ),
    Bug(
        "dQ of the first keys is read", "v1",
        "const bool first = first_key <= 0;", "const bool first = false;", "uninitialised read",
    ),
    Bug(
        "dQ never leaves", "v1",
        "first_key + kBlockKV > last_key_of", "first_key > last_key_of",
        ("outputs_are_fully_written", MATCHES),
    ),
    Bug(
        "dQ leaves a tile of keys too early", "v1",
        "first_key + kBlockKV > last_key_of", "first_key + 2 * kBlockKV > last_key_of",
        (MATCHES, "uninitialised read", BYTES), replace(USUAL, seq=64, seq_kv=64),
    ),
    Bug(
        "what the keys before gave is forgotten", "v1",
        "x[0] += before.x, ", "", MATCHES,
    ),
    Bug(
        "queries that see nothing keep what was there", "v1",
        "dq[i / kHeadDim * dq_stride + i % kHeadDim] = 0;", "",
        ("outputs_are_fully_written", "rows_without_keys_have_no_gradient", MATCHES),
        replace(USUAL, seq=100, seq_kv=20),
    ),
    Bug(
        "only the first keys find no dQ", "v1, window",
        "first_key <= first_key_of(query, span);", "first_key <= 0;", "uninitialised read", WINDOW,
    ),
    Bug(
        "dQ leaves in the rows of the first sequence", "v1, varlen",
        "const i64 dq_row = q_row * apart + head;", "const i64 dq_row = query * apart + head;",
        ("race", "outputs_are_fully_written", PACKED), MORE,
    ),
    Bug(
        "the next queries come while these are at work", "v1, P in shared",
        "      __syncthreads();  // Q and dO are done with\n", "", "race", LONG_SHARED,
    ),
    Bug(
        "the turns of a window count from the first keys", "ordered, window",
        "first_key / kBlockKV - first_key_of(query_at(t), span) / kBlockKV;",
        "first_key / kBlockKV;", "deadlock", WINDOW,
    ),
    Bug(
        "the turn of every tile is that of the first", "ordered, window",
        "- first_key_of(query_at(t), span)", "- first_key_of(query_at(0), span)",
        "deadlock", WINDOW,
    ),
    Bug(
        "the sequences of a batch share counters", "ordered, varlen",
        "turns + 1 + (batch * heads + head_at(t))", "turns + 1 + head_at(t)",
        ("deadlock", "unordered addition", PACKED), MORE,
    ),
    Bug(
        "blocks without keys take no number", "ordered, varlen",
        "longest_q > 0 ? take_number(turns, smem_raw) : blockIdx.x;", "blockIdx.x;",
        ("deadlock", BYTES), MORE,
    ),
    Bug(
        "keys before the window are kept", "second_pass, window",
        "place > last || place < first", "place > last", MATCHES, WINDOW,
    ),
    Bug(
        "tiles at the window's start run no mask", "second_pass, window",
        "  if (key < first_key_of(query + warp_keys() + kWarpKeys - 1, span)) return true;\n", "",
        MATCHES, WINDOW,
    ),
    Bug(
        "the walk begins with the first keys", "second_pass, window",
        "const int first_tile = first_key_of(first_query, span) / kBlockQ;",
        "const int first_tile = 0;", BYTES, WINDOW,
    ),
    Bug(
        "dQ of the second pass without the softcap's derivative", "second_pass, window",
        "weights_of_rows(s, row_lse, 1.f);\n      damp(s, derivative);\n",
        "weights_of_rows(s, row_lse, 1.f);\n", MATCHES, replace(WINDOW, softcap=1.0),
    ),
    Bug(
        "queries and keys of a bias are exchanged", "second_pass, dense",
        "column + n / 2 * 8 + n % 2, query + row_of(i), span);",
        "query + row_of(i), column + n / 2 * 8 + n % 2, span);", MATCHES,
        replace(USUAL, seq=40, seq_kv=40),
    ),
    Bug(
        "a NaN passes where the bias hides in the second pass", "second_pass, dense",
        "const float weight = p[tile][first / 8 + n][r];\n    x = hidden(weight) ? 0.f : ",
        "const float weight = p[tile][first / 8 + n][r];\n    x = ", "nan_stays_in_its_row", MASKED,
    ),
)  # fmt: skip

"""What has to fit: shared memory and registers of a block, HBM of the whole problem.

Symbols: M = block_q, N = block_kv, D, D_v = head dimensions padded to 16, e = bytes an element.
Shared memory is exact. Registers are a bound from above, to be held against the compiler's report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fasim.gpu import Gpu
from fasim.model.tiles import MMA_ROWS, Ints, Tiles, ceil_div, padded, round_up
from fasim.plan import (
    HOPPER_SMEM,
    LAZY_DTYPES,
    MOST_COLUMNS,
    V3,
    WARP,
    columns_under_way,
    keeps_q,
    padded_tensors,
    row_blocks,
    scale_shapes,
    transposed_shape,
    transposes,
    v3_layouts,
    v3_smem,
    weight_tiles,
    widened,
)
from fasim.problem import Problem

# Registers of a thread besides its accumulators: addresses, loop state, softmax statistics ...
BASE_REGISTERS = 41
# ... and the Q, K and V fragments of one mma step, some of the next step's among them.
FRAGMENTS = 16
# A ring of more than two slots keeps its places.
RING_REGISTERS = 8
# V1 merges its O with the one in HBM. Held to fewer registers than it takes by itself ptxas spills
# a few addresses, so V1 gets what it takes: so many an accumulator, from the second number of
# accumulators on all there are. Beyond the third it would spill in earnest.
V1_BASE = 88
V1_PER_ACCUMULATOR = {"fp32": 2.6, "fp16": 1.2, "bf16": 1.2}
V1_SMALL, V1_MOST, V1_MOST_WITH_OPTIONS = 100, 144, 136
MOST_REGISTERS = 255
# Blocks of fewer than four warps copy more a thread.
SMALL_BLOCK_REGISTERS = 20
# Rows longer than 256 bytes need more addresses, as do rows longer than 128 bytes beside more than
# 64 scores a thread; a causal mask a limit for every 16 scores; more than 128 scores more loads in
# flight, one for 2.
WIDE_REGISTERS, SCORES_PER_LIMIT = 8, 16
# Beside so few scores a thread of 32 rows a warp, V2 in 16 bits makes those addresses and a ring's
# places anew; compiled for Blackwell it spills them.
FEW_SCORES = 32
FP32_REGISTERS = 28  # wider fragments, the weights of four keys
MANY_SCORES, SCORES_PER_LOAD = 128, 2
# Lazy weights: beyond so many scores, or values held at once, ptxas spills some of these.
MOST_LAZY_SCORES, MOST_HELD, LAZY_REGISTERS = 112, 208, 32
# What the options of the scores keep besides: limits, factors, addresses, values on their way.
OPTION_REGISTERS = {"window": 12, "softcap": 4, "ALiBi": 8, "dense bias": 24, "sequences": 8}
# What the compiler uses when it may, to have more loads in flight: fitted to nvcc 13.0.
WANTED_BASE, WANTED_PER_ACCUMULATOR = 62, 1.17
# Split keys: limits of packed rows, this warp's place in a tile; fp32 spills a few addresses with
# fewer than the second number.
SPLIT_REGISTERS = {"fp32": 40, "fp16": 8, "bf16": 8, "e4m3": 8}
# What some types take besides on some architectures, forward. Before Ampere, where nothing copies
# in the background, values on their way, and with more than so many keys a step weights that are
# rounded one by one. In e4m3 the sums of a tile: by major compute capability so many beside up to
# 64, 128, 192 or 256 columns of O, and so many a key. Hopper computes such products in fp16.
COPIED_REGISTERS, FEW_KEYS = 16, 56
SUMS_REGISTERS = {8: (0, 0, 24, 32), 9: (32, 56, 48, 48), 12: (8, 24, 32, 32)}
SUMS_PER_KEY = {8: 0.0, 9: 0.5, 12: 0.25}
AMPERE, BLACKWELL = (8, 0), 12
# V1's and V2's backward kernels, whose LSE and D wait in shared memory: what they need, and what
# they make do with where that is all that is left. Fitted to nvcc 13.0.
V2_BACKWARD_REGISTERS, V2_BACKWARD_LEAST = 72, 64
# What its options keep besides.
BACKWARD_OPTION_REGISTERS = {"window": 4, "softcap": 8, "ALiBi": 4, "dense bias": 8, "sequences": 0}
# What turns keep beside so many columns of dK and dV, and where a window moves them if
# there is room.
TURN_REGISTERS, TURN_COLUMNS, TURN_WINDOW_REGISTERS = 8, 256, 12
SECOND_PASS_FP32 = 8  # what rows of queries keep besides
# V1's plain copies on the way, in blocks of fewer than eight warps, in fp32 also of fewer than
# four; what it keeps besides in fp32, and beside rows of more than so many columns there.
V1_BACKWARD_COPIES, V1_BACKWARD_FP32_COPIES = 16, 20
V1_BACKWARD_FP32, V1_BACKWARD_FP32_WIDE, V1_FP32_COLUMNS = 36, 64, 224
# In 16 bits for packed windows where warps share keys, for windows where a warp has 32 for itself
# or is one of two.
V1_BACKWARD_PACKED, V1_BACKWARD_WINDOW = 32, 4
# V3: what the compiler needs beside accumulators and weights; backward, what FlashAttention-3's
# published tiles leave it.
V3_BASE, WGMMA_SLACK = 32, 28
E4M3_BASE, ROUNDED_SUMS = 10, 2
# What its options keep besides; a bias in fp32 on its way more for every key beyond the first
# number, and one that meets a softcap's polynomials. Fitted to nvcc 13.0.
V3_OPTION_REGISTERS = {"window": 12, "softcap": 0, "ALiBi": 8, "dense bias": 12, "sequences": 8}
# In e4m3 the loader finds the tiles of a packed sequence, and consumers keep nothing. A dense bias
# is on its way beside O, S and addresses: fewer spill. It goes before the limits of a window come.
E4M3_OPTION_REGISTERS = {**V3_OPTION_REGISTERS, "sequences": 0, "dense bias": 40}
V3_FP32_BIAS_KEYS, V3_FP32_BIAS_PER_KEY = 32, 0.25
V3_CAPPED_BIAS_KEYS, V3_CAPPED_BIAS_PER_KEY = 48, 0.5
# What packed rows keep besides, beside scores of more than so many keys.
V3_PACKED_KEYS, V3_PACKED_REGISTERS = 144, 8
# V3: mbarriers and alignment of the tiles to 1024 bytes.
BARRIER_BYTES = 1024

DRIVER_BYTES = 6 * 2**30 // 10  # context, code and allocator slack: 0.6 GiB
MAX_SEQ = 2**31 - 1024  # the longest a Problem may have


@dataclass(frozen=True, kw_only=True)
class HbmBytes:
    """Bytes that are alive together at the peak of a pass.

    ``saved`` is what the forward pass leaves for the backward: P (standard), O and LSE (flash).
    """

    inputs: int
    outputs: int
    s_and_p: int = 0
    saved: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.inputs + self.outputs + self.s_and_p + self.saved + self.workspace


def smem_bytes(problem: Problem, algo: str, pass_: str, tiles: Tiles) -> Ints:
    """Dynamic shared memory of one block, in bytes."""
    return np.asarray(_SMEM[algo, pass_](problem, tiles))


def registers(
    problem: Problem, algo: str, pass_: str, tiles: Tiles, capability: tuple[int, int] = AMPERE
) -> Ints:
    """Registers one thread (V3: one consumer thread) needs on a GPU of that compute capability:
    with fewer, some would spill."""
    needed = np.asarray(_REGISTERS[algo, pass_](problem, tiles))
    for more in arch_registers(problem, algo, pass_, tiles, capability).values():
        needed = needed + more
    return needed


def arch_registers(
    problem: Problem, algo: str, pass_: str, tiles: Tiles, capability: tuple[int, int]
) -> dict[str, Ints]:
    """What a type takes besides on some architectures, by the reason."""
    if pass_ == "bwd" or algo in V3:
        return {}
    if capability < AMPERE:
        return _turing_registers(problem, algo, tiles)
    if problem.dtype != "e4m3":
        spilled = remade_registers(problem, tiles) * (capability[0] >= BLACKWELL)
        return {"addresses on Blackwell": spilled} if algo == "v2" else {}
    major = capability[0] if capability[0] in SUMS_REGISTERS else BLACKWELL
    by_columns = SUMS_REGISTERS[major][(problem.head_dim_v - 1) // 64]
    sums = by_columns + SUMS_PER_KEY[major] * tiles.step_kv
    return {"sums of a tile": sums.astype(np.int64)}


def _turing_registers(problem: Problem, algo: str, tiles: Tiles) -> dict[str, Ints]:
    """Copies pass through registers, and weights are rounded one by one; V1 has room for fewer
    accumulators."""
    rounding = np.maximum(tiles.step_kv - FEW_KEYS, 0) * (problem.dtype == "fp16")
    passing = COPIED_REGISTERS + rounding
    if algo != "v1":
        return {"values on their way": passing}
    taken = _v1_fwd_registers(problem, tiles)
    accumulators = _accumulators(problem, tiles)
    room = np.maximum(MOST_REGISTERS - taken, 0)
    beyond = np.maximum(accumulators - V1_MOST_WITH_OPTIONS, 0) * (taken <= MOST_REGISTERS)
    return {"values on their way": np.minimum(passing, room), "on Turing": beyond}


def granted(
    problem: Problem,
    algo: str,
    pass_: str,
    tiles: Tiles,
    cap: Ints,
    capability: tuple[int, int] = AMPERE,
) -> Ints:
    """Registers to let the compiler use, at most ``cap``: what it wants where there is room for
    more than it needs. V1's and V2's backward kernels get all there is room for, as they want more
    than that; V3's get what they need."""
    needed = registers(problem, algo, pass_, tiles, capability)
    if pass_ == "bwd" and algo != "v3":
        return np.asarray(np.maximum(needed, cap))
    if algo in V3:
        return needed
    tiles = _with_all_rows(tiles) if algo == "v2_split" else tiles
    wanted = WANTED_BASE + WANTED_PER_ACCUMULATOR * _accumulators(problem, tiles)
    return np.asarray(np.minimum(round_up(np.maximum(needed, wanted.astype(np.int64)), 8), cap))


def _v1_fwd_smem(problem: Problem, tiles: Tiles) -> Any:
    """The Q tile, through which O leaves, one K and one V block."""
    d, dv, e = _dims(problem)
    return _q_tile(problem, tiles) + tiles.block_kv * (d + dv) * e


def _v2_fwd_smem(problem: Problem, tiles: Tiles) -> Any:
    """The Q tile, through which O leaves, and a ring of 2 x stages slots for K and V."""
    d, dv, e = _dims(problem)
    return _q_tile(problem, tiles) + 2 * tiles.stages * tiles.block_kv * max(d, dv) * e


def _v3_fwd_smem(problem: Problem, tiles: Tiles) -> Any:
    """Tiles of Q, O on its way out, stages of K and V, in slabs of 128-byte rows: the first layout
    that fits a block."""

    def of_first(kept: bool) -> Any:
        sizes = [v3_smem(problem, tiles, one) for one in v3_layouts(problem, kept)]
        return np.select([size <= HOPPER_SMEM for size in sizes], sizes, default=sizes[-1])

    return np.where(keeps_q(problem, tiles), of_first(True), of_first(False))


def _q_tile(problem: Problem, tiles: Tiles) -> Any:
    d, dv, e = _dims(problem)
    return tiles.block_q * max(d * e, dv * problem.out_bytes)


def _v1_bwd_smem(problem: Problem, tiles: Tiles) -> Any:
    """K and V stay; one tile of Q and dO with their fp32 L and D; one of dS, and of P where that
    goes through shared memory."""
    d, dv, e = _dims(problem)
    m, n = tiles.block_q, tiles.block_kv
    return ((n + m) * (d + dv) + tiles.sharing * m * n) * e + 8 * m


def _v2_bwd_smem(problem: Problem, tiles: Tiles) -> Any:
    """K and V stay; stages of Q and dO with their fp32 L and D; tiles of dS, and of P where that
    goes through shared memory. dK and dV leave through K and V."""
    d, dv, e = _dims(problem)
    m, n = tiles.block_q, tiles.block_kv
    walked = tiles.stages * m * ((d + dv) * e + 8)
    return n * (d + dv) * e + walked + weight_tiles(tiles.sharing) * m * n * e


def _second_pass_smem(problem: Problem, tiles: Tiles) -> Any:
    """V2's, without dS where P stays in registers too. The kernel of dQ makes do with that."""
    unshared = 2 * tiles.block_q * tiles.block_kv * problem.element_bytes * ~tiles.p_shared
    return _v2_bwd_smem(problem, tiles) - unshared


def _v3_bwd_smem(problem: Problem, tiles: Tiles) -> Any:
    """FA3's map: K and V stay, stages of Q and dO, dS, and an fp32 slab through which dQ leaves."""
    d, dv, e = _dims(problem)
    m, n = tiles.block_q, tiles.block_kv
    shared = n * (d + dv) + tiles.stages * m * (d + dv) + m * n
    return shared * e + m * d * 4 + BARRIER_BYTES


def _accumulators(problem: Problem, tiles: Tiles) -> Ints:
    """fp32 accumulators of O and S; P packs into S."""
    return tiles.rows_per_warp * (padded(problem.head_dim_v, problem.dtype) + tiles.step_kv) // 32


def _scores(tiles: Tiles) -> Ints:
    """Scores a thread holds."""
    return tiles.rows_per_warp * tiles.step_kv // 32


def _mma_fwd_registers(problem: Problem, tiles: Tiles) -> Ints:
    """Accumulators, fragments, the rest."""
    return _accumulators(problem, tiles) + FRAGMENTS + BASE_REGISTERS + _special(problem, tiles)


def _with_all_rows(tiles: Tiles) -> Tiles:
    """Tiles of which every warp owns as many rows as a tile of split keys has in all."""
    return replace(tiles, block_q=tiles.block_q * tiles.warps)


def _v2_split_registers(problem: Problem, tiles: Tiles) -> Ints:
    """V2's, of all the rows."""
    return _mma_fwd_registers(problem, _with_all_rows(tiles)) + SPLIT_REGISTERS[problem.dtype]


def _v2_fwd_registers(problem: Problem, tiles: Tiles) -> Ints:
    """In 16 bits weights lie beside their scores until no row has to move its reference."""
    needed = _mma_fwd_registers(problem, tiles) + lazy_registers(problem, tiles)
    return np.asarray(needed - remade_registers(problem, tiles))


def lazy_registers(problem: Problem, tiles: Tiles) -> Ints:
    """What keeps tiles away whose lazy weights would not fit beside the rest; 0 for all others."""
    held = _accumulators(problem, tiles) + tiles.step_kv // 4  # the weights of 16 rows
    crowded = (_scores(tiles) > MOST_LAZY_SCORES) | (held > MOST_HELD)
    return np.asarray(LAZY_REGISTERS * crowded * (problem.dtype in LAZY_DTYPES))


def remade_registers(problem: Problem, tiles: Tiles) -> Ints:
    """Of the addresses of long rows and the places of a ring those that are kept nowhere."""
    few = (_scores(tiles) <= FEW_SCORES) & (tiles.rows_per_warp > MMA_ROWS)
    long_rows = max(problem.head_dim, problem.head_dim_v) > 128 and problem.dtype in LAZY_DTYPES
    kept = WIDE_REGISTERS + RING_REGISTERS * (tiles.stages > 1)
    return np.asarray(kept * few * long_rows)


def _special(problem: Problem, tiles: Tiles) -> Ints:
    """What masks, long rows, deep rings and small blocks add."""
    longest, scores = max(problem.head_dim, problem.head_dim_v), _scores(tiles)
    limits = scores // SCORES_PER_LIMIT * problem.causal
    wide = WIDE_REGISTERS * ((longest > 128) | ((longest > 64) & (scores > 64)))
    small = SMALL_BLOCK_REGISTERS * (tiles.warps < 4) + FP32_REGISTERS * (problem.dtype == "fp32")
    loads = np.maximum(scores - MANY_SCORES, 0) // SCORES_PER_LOAD
    options = sum(option_registers(problem).values())
    return np.asarray(limits + wide + small + loads + options + RING_REGISTERS * (tiles.stages > 1))


def option_registers(problem: Problem) -> dict[str, int]:
    """OPTION_REGISTERS of the options that a problem has."""
    return {name: OPTION_REGISTERS[name] for name in _options(problem)}


def backward_option_registers(problem: Problem) -> dict[str, int]:
    """The same of V1's and V2's backward kernels."""
    return {name: BACKWARD_OPTION_REGISTERS[name] for name in _options(problem)}


def v3_option_registers(problem: Problem, tiles: Tiles) -> dict[str, Ints]:
    """The same of V3's forward kernel."""
    none = np.zeros(len(tiles), np.int64)
    if problem.dtype == "e4m3":
        each = {**E4M3_OPTION_REGISTERS, **({"window": 0} if problem.dense else {})}
        return {name: none + each[name] for name in _options(problem)}
    kept: dict[str, Ints] = {name: none + V3_OPTION_REGISTERS[name] for name in _options(problem)}
    if problem.bias == "dense_fp32":
        keys = np.maximum(tiles.block_kv - V3_FP32_BIAS_KEYS, 0)
        kept["biases on their way"] = (V3_FP32_BIAS_PER_KEY * keys).astype(np.int64)
    if problem.dense and problem.softcap:
        keys = np.maximum(tiles.block_kv - V3_CAPPED_BIAS_KEYS, 0)
        kept["biases beside a softcap"] = (V3_CAPPED_BIAS_PER_KEY * keys).astype(np.int64)
    return kept


def _options(problem: Problem) -> tuple[str, ...]:
    asked = {
        "window": problem.mask == "window",
        "softcap": problem.softcap > 0,
        "ALiBi": problem.bias == "alibi",
        "dense bias": problem.dense,
        "sequences": problem.varlen,
    }
    return tuple(name for name, wanted in asked.items() if wanted)


def _v1_fwd_registers(problem: Problem, tiles: Tiles) -> Ints:
    """V2's, or what V1 takes by itself where that is more."""
    accumulators = _accumulators(problem, tiles)
    taken = v1_base(problem) + V1_PER_ACCUMULATOR[problem.dtype] * accumulators
    rounded = np.minimum(round_up(taken.astype(np.int64), 8), MOST_REGISTERS)
    needed = np.where(accumulators < V1_SMALL, rounded, MOST_REGISTERS)
    excess = np.maximum(accumulators - v1_most(problem), 0)
    return np.asarray(np.maximum(needed, _mma_fwd_registers(problem, tiles)) + excess)


def v1_base(problem: Problem) -> int:
    """What V1 takes besides its accumulators."""
    return V1_BASE + sum(option_registers(problem).values())


def v1_most(problem: Problem) -> int:
    """Accumulators beyond which V1 would spill."""
    return V1_MOST_WITH_OPTIONS if option_registers(problem) else V1_MOST


def _v1_bwd_registers(problem: Problem, tiles: Tiles) -> Any:
    wide = max(problem.head_dim, problem.head_dim_v) > V1_FP32_COLUMNS
    needed = _v2_bwd_registers(problem, tiles) + V1_BACKWARD_COPIES * (tiles.warps < 8)
    if problem.dtype != "fp32":
        window, alone = problem.mask == "window", ~tiles.p_shared & (tiles.bwd_keys > MMA_ROWS)
        packed = tiles.p_shared & (window and problem.varlen)
        few = alone | (tiles.warps < 4)
        return needed + V1_BACKWARD_PACKED * packed + V1_BACKWARD_WINDOW * (few & window)
    kept = V1_BACKWARD_FP32_WIDE if wide else V1_BACKWARD_FP32
    return needed + kept + V1_BACKWARD_FP32_COPIES * (tiles.warps < 4)


def _v2_bwd_registers(problem: Problem, tiles: Tiles) -> Any:
    """The warp's part of dK and dV for the whole pass, S of a step of queries and dP of a part of
    them."""
    queries = tiles.query_step + tiles.query_part
    accumulators = tiles.bwd_keys * (gradient_columns(problem, tiles) + queries) // WARP
    kept = accumulators + sum(backward_option_registers(problem).values())
    needed = np.minimum(kept + V2_BACKWARD_REGISTERS, MOST_REGISTERS)
    return np.maximum(needed, kept + V2_BACKWARD_LEAST)


def _v2_ordered_registers(problem: Problem, tiles: Tiles) -> Any:
    wide = gradient_columns(problem, tiles) > TURN_COLUMNS
    needed = _v2_bwd_registers(problem, tiles) + TURN_REGISTERS * wide
    moving = TURN_WINDOW_REGISTERS * (problem.mask == "window")
    return np.maximum(needed, np.minimum(needed + moving, MOST_REGISTERS))


def _second_pass_registers(problem: Problem, tiles: Tiles) -> Any:
    fp32 = SECOND_PASS_FP32 * (problem.dtype == "fp32")
    return _v2_bwd_registers(problem, tiles) + fp32


def gradient_columns(problem: Problem, tiles: Tiles) -> Ints:
    """Columns of dK and dV that a warp of V2's backward kernel has: warps that share keys take
    turns at blocks of 16."""
    blocks = (width // 16 for width in _dims(problem)[:2])
    return np.asarray(sum(16 * ceil_div(n, tiles.sharing) for n in blocks))


def _v3_fwd_registers(problem: Problem, tiles: Tiles) -> Any:
    """A warpgroup of 128 threads owns 64 rows: S N/2, O D_v/2, P N e/8, and Q D/4 where it is kept;
    in e4m3 the sums of a tile take the registers of S, and O has the sums of rounded weights."""
    p = tiles.block_kv * problem.element_bytes // 8
    o = padded(problem.head_dim_v, problem.dtype) // 2
    options = sum(v3_option_registers(problem, tiles).values())
    if problem.dtype == "e4m3":
        s = np.maximum(tiles.block_kv // 2, tile_sums(problem, tiles))
        return s + o + ROUNDED_SUMS + p + E4M3_BASE + options
    q = padded(problem.head_dim) // 4 * keeps_q(problem, tiles)
    return tiles.block_kv // 2 + o + p + q + V3_BASE + options


def packed_registers(tiles: Tiles) -> Ints:
    """What V3 keeps besides where rows are packed."""
    return np.asarray(V3_PACKED_REGISTERS * (tiles.block_kv > V3_PACKED_KEYS))


def _v3_packed_registers(problem: Problem, tiles: Tiles) -> Any:
    return _v3_fwd_registers(problem, tiles) + packed_registers(tiles)


def tile_sums(problem: Problem, tiles: Tiles) -> Any:
    """Registers of V3's sums of one tile in e4m3."""
    sums = {n: columns_under_way(problem.head_dim_v, n) // 2 for n in MOST_COLUMNS}
    return np.where(tiles.warps == 12, sums[12], sums[8])


def _v3_bwd_registers(problem: Problem, tiles: Tiles) -> Any:
    return _bwd_accumulators(problem, tiles) + WGMMA_SLACK


def _bwd_accumulators(problem: Problem, tiles: Tiles) -> Any:
    """dK and dV for the whole pass, and the larger of S with dP and of dQ."""
    d, dv, _ = _dims(problem)
    m, n = tiles.block_q, tiles.block_kv
    return (n * (d + dv) + np.maximum(2 * m * n, m * d)) // tiles.threads


def _dims(problem: Problem) -> tuple[int, int, int]:
    d, dv = (padded(n, problem.dtype) for n in (problem.head_dim, problem.head_dim_v))
    return d, dv, problem.element_bytes


_Count = Callable[[Problem, Tiles], Any]
_SMEM: dict[tuple[str, str], _Count] = {
    ("v1", "fwd"): _v1_fwd_smem,
    ("v2", "fwd"): _v2_fwd_smem,
    ("v2_split", "fwd"): _v2_fwd_smem,
    **{(name, "fwd"): _v3_fwd_smem for name in V3},
    ("v1", "bwd"): _v1_bwd_smem,
    **dict.fromkeys((("v2", "bwd"), ("v2_ordered", "bwd")), _v2_bwd_smem),
    ("v2_second_pass", "bwd"): _second_pass_smem,
    ("v3", "bwd"): _v3_bwd_smem,
}
_REGISTERS: dict[tuple[str, str], _Count] = {
    ("v1", "fwd"): _v1_fwd_registers,
    ("v2", "fwd"): _v2_fwd_registers,
    ("v2_split", "fwd"): _v2_split_registers,
    ("v3", "fwd"): _v3_fwd_registers,
    ("v3_packed", "fwd"): _v3_packed_registers,
    ("v1", "bwd"): _v1_bwd_registers,
    ("v2", "bwd"): _v2_bwd_registers,
    ("v2_ordered", "bwd"): _v2_ordered_registers,
    ("v2_second_pass", "bwd"): _second_pass_registers,
    ("v3", "bwd"): _v3_bwd_registers,
}


@dataclass(frozen=True)
class Tensors:
    """Bytes of every array an attention call may touch."""

    q: int
    k: int
    v: int
    o: int
    lse: int
    bias: int  # a dense one, not broadcast
    scores: int  # one seq x seq_kv matrix per head, as standard attention stores S or P

    @classmethod
    def of(cls, problem: Problem) -> Tensors:
        p, e = problem, problem.element_bytes
        rows, keys = p.batch * p.heads * p.seq, p.batch * p.kv_heads * p.seq_kv
        score_bytes = p.out_bytes if p.dtype == "e4m3" else e
        return cls(
            q=rows * p.head_dim * e,
            k=keys * p.head_dim * e,
            v=keys * p.head_dim_v * e,
            o=rows * p.head_dim_v * p.out_bytes,
            lse=rows * 4,
            bias=rows * p.seq_kv * p.bias_bytes * p.dense,
            scores=rows * p.seq_kv * score_bytes,
        )

    @property
    def kv(self) -> int:
        return self.k + self.v


def compulsory(problem: Problem) -> int:
    """Bytes no forward pass can avoid: Q, K and V read once, O written once."""
    return given(problem) + Tensors.of(problem).o


def given(problem: Problem) -> int:
    """Bytes of Q, K and V as they come, before they are quantised."""
    t = Tensors.of(problem)
    return (t.q + t.kv) // problem.element_bytes * problem.in_bytes


def hbm(problem: Problem, algo: str, pass_: str) -> HbmBytes:
    """HBM that the pass needs at its peak, in bytes."""
    return (_standard_hbm if algo == "standard" else _flash_hbm)(problem, algo, pass_)


def _standard_hbm(problem: Problem, algo: str, pass_: str) -> HbmBytes:
    """S and P live together forward; P, dP and dS backward."""
    t = Tensors.of(problem)
    if pass_ == "fwd":
        return HbmBytes(inputs=t.q + t.kv + t.bias, outputs=t.o, s_and_p=2 * t.scores)
    outputs = t.q + t.kv + (t.o if pass_ == "train" else 0)
    return HbmBytes(inputs=t.q + t.kv + t.o, outputs=outputs, s_and_p=2 * t.scores, saved=t.scores)


def _flash_hbm(problem: Problem, algo: str, pass_: str) -> HbmBytes:
    """O and LSE are all that a backward pass needs besides its inputs."""
    t = Tensors.of(problem)
    forward = _v1_workspace(problem) if algo == "v1" else 0
    if transposes(algo, problem.dtype):
        forward = math.prod(transposed_shape(problem)) + _quantised_workspace(problem)
    if algo == "v3":
        forward += _padded_workspace(problem)
    if pass_ == "fwd":
        return HbmBytes(inputs=given(problem) + t.bias, outputs=t.o + t.lse, workspace=forward)
    backward = _dq_workspace(problem, algo)
    return HbmBytes(
        inputs=t.q + t.kv + t.o + t.bias,  # dO is as large as O
        outputs=t.q + t.kv,
        saved=t.o + t.lse,
        workspace=max(forward, backward) if pass_ == "train" else backward,
    )


def _padded_workspace(problem: Problem) -> int:
    """Copies of what has rows that TMA does not take."""
    wide = vars(Tensors.of(widened(problem)))
    return sum(wide[name] for name in padded_tensors(problem))


def _quantised_workspace(problem: Problem) -> int:
    """Q and K in e4m3, scale factors, and the largest numbers of blocks that share one."""
    if not problem.quantises:
        return 0
    t = Tensors.of(widened(problem))
    factors = sum(map(math.prod, scale_shapes(problem).values()))
    return t.q + t.k + 4 * (factors + sum(row_blocks(problem)) * (problem.scales != "block"))


def _v1_workspace(problem: Problem) -> int:
    """V1 keeps O, m and l in HBM between its steps, in fp32."""
    return problem.batch * problem.heads * problem.seq * 4 * (problem.head_dim_v + 2)


def parts_bytes(problem: Problem, splits: Ints) -> Ints:
    """Bytes of what splits of the keys leave of every row: O, m and l in fp32."""
    return problem.batch * problem.heads * problem.seq * splits * 4 * (problem.head_dim_v + 2)


def merge_bytes(problem: Problem, tiles: Tiles) -> Ints:
    """Shared memory in which the warps of a block of split keys leave their parts: rows of O, m and
    l in fp32, padded to 8 floats so that 8 rows lie in 8 bank groups."""
    columns = padded(problem.head_dim_v, problem.dtype) + 8
    return np.asarray(tiles.warps * tiles.block_q * columns * 4)


def _dq_workspace(problem: Problem, algo: str) -> int:
    """dQ accumulates in fp32 over rows padded to 128, unless a second pass makes it in registers;
    D = rowsum(dO * O) is a float a row; where blocks take turns, a tile has a counter."""
    heads = problem.batch * problem.heads
    delta, padded_rows = heads * problem.seq * 4, heads * int(round_up(problem.seq, 128))
    if algo == "v2_second_pass":
        return delta
    counters = 4 * (padded_rows // MMA_ROWS + 1) * (algo == "v2_ordered")
    return padded_rows * 4 * padded(problem.head_dim) + delta + counters


def budget(gpu: Gpu, reserve: int = 0) -> int:
    """HBM bytes left for attention: capacity less 0.6 GiB for the driver and ``reserve``."""
    return gpu.hbm_bytes - DRIVER_BYTES - reserve


def max_seq(problem: Problem, algo: str, pass_: str, gpu: Gpu, reserve: int = 0) -> int:
    """Longest ``seq`` that fits (``seq_kv`` moves along where both are equal); 0 if none does."""
    limit = budget(gpu, reserve)

    def fits(seq: int) -> bool:
        seq_kv = seq if problem.seq_kv == problem.seq else problem.seq_kv
        return hbm(replace(problem, seq=seq, seq_kv=seq_kv), algo, pass_).total <= limit

    low, high = 0, MAX_SEQ
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

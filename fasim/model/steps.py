"""Clocks of one step: one q tile against one K/V tile on one SM, pipe by pipe.

Symbols: M = block_q, N = block_kv, D, D_v = padded head dimensions, e = bytes an element. Every
term is work over rate, as if its pipe had the SM to itself; timeline.py combines them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fasim.model.silicon import Rates
from fasim.model.tiles import Reals, Tiles, padded, round_up
from fasim.plan import LAZY_DTYPES, QUERY_STEP, V3, transposed_rows
from fasim.problem import Problem

# Instructions an element of S costs besides its exponential: max, fused multiply-add, add, half a
# conversion, and the issue of ex2 itself.
SOFTMAX_INSTRUCTIONS = 5.5
# What an option adds to an element of S, counted in templates/device/score.cuh: instructions, and
# exponentials or reciprocals among them.
SOFTCAP_INSTRUCTIONS, SOFTCAP_MUFU = 14.0, 2
ALIBI_INSTRUCTIONS, DENSE_INSTRUCTIONS = 3.0, 6.0
# V2 in 16 bits looks for no maximum but in the first tile of a row, and needs one instruction for
# the difference and its scale.
LAZY_SAVES = 2.0
# Backward: multiply-add, issue of ex2, dP - D, product with P, two half conversions.
BACKWARD_INSTRUCTIONS = 6.0
# Share of the shorter of exponentials and other instructions that shows beside the longer.
# Fitted to one measurement: 1246 clocks for a 128 x 128 online softmax on an H200.
ISSUE_SHOWS = 0.3
# e4m3: one conversion is two instructions. From the same loop with e4m3 P: 1395 clocks.
E4M3_SOFTMAX = 1.12
# V3 in e4m3, whose warpgroups do one thing after the other: instructions a sum of a tile costs on
# its way to O, and the share of the products' time that shows, as other instructions run at half
# their rate beside products. Fitted to 36 times of one H200 (4 % off on average, 10 % at most).
E4M3_COLUMN, E4M3_SHOWS = 1.0, 0.27
# TMA's rows of 96 and 80 bytes against those of 128. Fitted to three times of one H200.
LINE_BYTES, SECTOR_BYTES, CROSSING_LINES, CROSSING_SECTORS = 128, 32, 1.4, 2.3
# fp32 fragments are read 16 or 8 bytes a lane with 4 lanes apart: an eighth of a wavefront is new.
FP32_REREAD = 8
# fp32 reductions into L2 (dQ of the backward) against reads: 3.7 of 9 TB/s measured on an H200.
REDUCE_SHARE = 0.4
WARPGROUP = 4  # warps


@dataclass(frozen=True)
class Step:
    """Clocks per pipe, arrays as long as the tiles."""

    tensor: Reals
    softmax: Reals
    smem: Reals
    l2: Reals
    fill_bytes: Any  # that one step loads

    @property
    def longest(self) -> Reals:
        return np.asarray(np.maximum(self.longest_on_chip, self.l2))

    @property
    def longest_on_chip(self) -> Reals:
        return np.asarray(np.maximum(self.tensor, np.maximum(self.softmax, self.smem)))

    @property
    def serial(self) -> Reals:
        """Every phase after the other, the copies aside."""
        return self.tensor + self.softmax + self.smem


def step(problem: Problem, rates: Rates, algo: str, pass_: str, tiles: Tiles) -> Step:
    """The pipes of one step of a flash kernel."""
    return _STEPS[algo, pass_](_Shape(problem, tiles), rates)


class _Shape:
    def __init__(self, problem: Problem, tiles: Tiles) -> None:
        self.tiles = tiles
        self.m, self.n = tiles.block_q, tiles.block_kv
        self.d = padded(problem.head_dim, problem.dtype)
        self.dv = padded(problem.head_dim_v, problem.dtype)
        self.e, self.dtype = problem.element_bytes, problem.dtype
        self.scores = self.m * self.n
        capped = problem.softcap > 0
        self.mufu = 1 + SOFTCAP_MUFU * capped
        self.options = (
            SOFTCAP_INSTRUCTIONS * capped
            + ALIBI_INSTRUCTIONS * (problem.bias == "alibi")
            + DENSE_INSTRUCTIONS * problem.dense
        )
        self.instructions = SOFTMAX_INSTRUCTIONS + self.options
        self.kv_bytes = self.n * (self.d + self.dv) * self.e
        self.fetched = sum(_fetched(n * self.e) for n in (problem.head_dim, problem.head_dim_v))
        self.q_bytes = self.m * self.d * self.e
        self.rows_bytes = self.m * (self.d + self.dv) * self.e  # Q and dO

    @property
    def groups(self) -> Any:
        """Consumer warpgroups of V3."""
        return self.tiles.warps // WARPGROUP


def _busy(shape: _Shape) -> Any:
    """Share of the four schedulers that have a warp at all."""
    return np.minimum(1.0, shape.tiles.warps * np.maximum(shape.tiles.blocks_per_sm, 1) / 4)


def _softmax(shape: _Shape, rates: Rates) -> Any:
    """Exponentials beside the other instructions, with the rescaling of O."""
    exponentials = shape.mufu * shape.scores / rates.mufu
    issue = (shape.instructions * shape.scores + shape.m * shape.dv) / rates.lanes
    return _beside(exponentials, issue) * (E4M3_SOFTMAX if shape.dtype == "e4m3" else 1.0)


def _lazy_softmax(shape: _Shape, rates: Rates) -> Any:
    """As _softmax, but O is not rescaled."""
    exponentials = shape.mufu * shape.scores / rates.mufu
    issue = (shape.instructions - LAZY_SAVES) * shape.scores / rates.lanes
    return _beside(exponentials, issue)


def _softmax_bwd(shape: _Shape, rates: Rates) -> Any:
    """The derivative of a softcap costs nothing of note beside its tanh."""
    exponentials = shape.mufu * shape.scores / rates.mufu
    instructions = BACKWARD_INSTRUCTIONS + shape.options
    return _beside(exponentials, instructions * shape.scores / rates.lanes)


def _beside(a: Any, b: Any) -> Any:
    return np.maximum(a, b) + ISSUE_SHOWS * np.minimum(a, b)


def _mma_fwd(shape: _Shape, rates: Rates) -> Step:
    """Every warp reads all of K and V and its own rows of Q, Q once per step_kv keys."""
    reread = FP32_REREAD if shape.dtype == "fp32" else 1
    q_reads = shape.q_bytes * (shape.n // shape.tiles.step_kv)
    smem = shape.tiles.warps * shape.kv_bytes * reread + q_reads + shape.kv_bytes
    busy = _busy(shape)
    return Step(
        tensor=2 * shape.scores * (shape.d + shape.dv) / rates.matmul_flops / busy,
        softmax=_softmax(shape, rates) / busy,
        smem=smem / rates.smem_bytes,
        l2=shape.kv_bytes / rates.l2_bytes,
        fill_bytes=shape.kv_bytes,
    )


def _split_fwd(shape: _Shape, rates: Rates) -> Step:
    """Every warp reads its own keys of K and V, all of Q, and rescales an O of its own."""
    step, rows = _mma_fwd(shape, rates), shape.tiles.warps - 1
    reread = FP32_REREAD if shape.dtype == "fp32" else 1
    again = rows * (shape.q_bytes - shape.kv_bytes * reread)  # against one warp's
    rescaled = rows * shape.m * shape.dv / rates.lanes / _busy(shape)
    q_once = shape.q_bytes * (shape.n // shape.tiles.step_kv - 1)
    smem = step.smem + (again - q_once) / rates.smem_bytes
    return replace(step, softmax=step.softmax + rescaled, smem=smem)


def _v2_fwd(shape: _Shape, rates: Rates) -> Step:
    step = _mma_fwd(shape, rates)
    if shape.dtype not in LAZY_DTYPES:
        return step
    return replace(step, softmax=_lazy_softmax(shape, rates) / _busy(shape))


def _v1_fwd(shape: _Shape, rates: Rates) -> Step:
    """V2's step, but a Q tile arrives instead of K and V; timeline.py adds the copies."""
    step = _mma_fwd(shape, rates)
    arriving = (shape.q_bytes - shape.kv_bytes) / rates.smem_bytes
    return replace(step, smem=step.smem + arriving, l2=0 * step.l2)


def _wgmma_fwd(shape: _Shape, rates: Rates) -> Step:
    """Every warpgroup reads K and V from shared memory, and its rows of Q. What shows of the
    softmax are its exponentials, and what an option adds: the rest of it is lean; in e4m3 also
    the addition of a tile's sums to O, and half of the products."""
    smem = shape.groups * shape.kv_bytes + shape.q_bytes + shape.kv_bytes
    options = shape.options * shape.scores / rates.lanes
    softmax = _beside(shape.mufu * shape.scores / rates.mufu, options)
    columns = transposed_rows(shape.dv) if shape.dtype == "e4m3" else shape.dv
    tensor = 2 * shape.scores * (shape.d + columns) / rates.matmul_flops
    if shape.dtype == "e4m3":
        sums = E4M3_COLUMN * shape.m * columns / rates.lanes
        softmax = softmax + sums + E4M3_SHOWS * tensor
    return Step(
        tensor=tensor,
        softmax=softmax,
        smem=smem / rates.smem_bytes,
        l2=np.asarray(shape.n * shape.fetched / rates.l2_bytes),
        fill_bytes=shape.kv_bytes,
    )


def _fetched(row_bytes: int) -> float:
    """What a row that TMA brings costs, in bytes on their way from L2: whole lines, more of them
    where rows begin anywhere in a line or a sector."""
    row, lines = round_up(row_bytes, 16), round_up(row_bytes, LINE_BYTES)
    if row % LINE_BYTES == 0 or LINE_BYTES % row == 0:
        return float(lines)
    return float(lines * (CROSSING_LINES if row % SECTOR_BYTES == 0 else CROSSING_SECTORS))


def _bwd(shape: _Shape, rates: Rates, smem: Any) -> Step:
    """Five matmuls; Q and dO arrive, dQ leaves as an fp32 reduction into L2."""
    reduced = 4 * shape.m * shape.d / (REDUCE_SHARE * rates.l2_bytes)
    flops = 2 * shape.scores * (3 * shape.d + 2 * shape.dv)
    return Step(
        tensor=flops / rates.matmul_flops,
        softmax=_softmax_bwd(shape, rates),
        smem=smem / rates.smem_bytes,
        l2=shape.rows_bytes / rates.l2_bytes + reduced,
        fill_bytes=shape.rows_bytes,
    )


def _v2_bwd(shape: _Shape, rates: Rates) -> Step:
    """Every warp reads Q and dO twice, or its share of them where some share keys; its keys of K
    once per step of queries, of V once per part of one; dQ's units of QUERY_STEP queries by 32
    columns read dS and K; dS is written. Warps that share keys all read P and dS from shared
    memory."""
    m, n, d, e, split = shape.m, shape.n, shape.d, shape.e, shape.tiles.sharing
    walked = 2 * shape.tiles.warps // split * shape.rows_bytes
    own = (m // shape.tiles.query_step * d + m // shape.tiles.query_part * shape.dv) * n * e
    own = own + (2 * split + 1) * shape.scores * e * (split > 1)  # and P written
    units = _unit_reads(shape)
    written = shape.scores * e + shape.rows_bytes
    busy = _busy(shape)
    reread = FP32_REREAD if shape.dtype == "fp32" else 1
    step = _bwd(shape, rates, (walked + own + units) * reread + written)
    return replace(step, tensor=step.tensor / busy, softmax=step.softmax / busy)


def _unit_reads(shape: _Shape) -> Any:
    """K once for the rows of a unit of dQ, dS once for its 32 columns."""
    rows = shape.m // np.minimum(shape.m, QUERY_STEP)
    return (rows * shape.n * shape.d + shape.scores * np.maximum(shape.d // 32, 1)) * shape.e


def _v1_bwd(shape: _Shape, rates: Rates) -> Step:
    """V2's step; timeline.py adds the copies."""
    step = _v2_bwd(shape, rates)
    return replace(step, l2=0 * step.l2)


def _main_of_two(shape: _Shape, rates: Rates) -> Step:
    """V2's step without dQ, and without dS in shared memory where P is in registers."""
    whole, split = _v2_bwd(shape, rates), shape.tiles.sharing
    left_out = _unit_reads(shape) + shape.scores * shape.e * (split == 1)
    flops = 2 * shape.scores * (2 * shape.d + 2 * shape.dv)
    return replace(
        whole,
        tensor=flops / rates.matmul_flops / _busy(shape),
        smem=whole.smem - left_out / rates.smem_bytes,
        l2=shape.rows_bytes / rates.l2_bytes,
    )


def query_step(problem: Problem, rates: Rates, tiles: Tiles) -> Step:
    """A step of the kernel that makes dQ alone: block_kv queries, which warps own as they own keys
    elsewhere, against block_q keys. Every warp reads K twice and V once, or its share of them where
    some share queries; its rows of Q once per step of keys, those of dO once per part of one; dS
    passes through shared memory where warps share queries."""
    shape = _Shape(problem, tiles)
    m, n, d, dv, e, split = shape.m, shape.n, shape.d, shape.dv, shape.e, tiles.sharing
    walked = tiles.warps // split * m * (2 * d + dv) * e
    own = (m // tiles.query_step * d + m // tiles.query_part * dv) * n * e
    own = own + (1 + split) * shape.scores * e * (split > 1)
    smem = walked + own + shape.rows_bytes
    busy = _busy(shape)
    return Step(
        tensor=2 * shape.scores * (2 * d + dv) / rates.matmul_flops / busy,
        softmax=_softmax_bwd(shape, rates) / busy,
        smem=smem / rates.smem_bytes,
        l2=shape.rows_bytes / rates.l2_bytes,
        fill_bytes=shape.rows_bytes,
    )


def _wgmma_bwd(shape: _Shape, rates: Rates) -> Step:
    """Every warpgroup reads Q twice, dO twice and K once; K, V and dS are read once as the other
    operand; dS and the fp32 slab of dQ are written, the slab is read to leave."""
    k_bytes, ds_bytes = shape.n * shape.d * shape.e, shape.scores * shape.e
    per_group = 2 * shape.rows_bytes + k_bytes
    slab = 2 * 4 * shape.m * shape.d
    once = shape.kv_bytes + 2 * ds_bytes + slab + shape.rows_bytes
    return _bwd(shape, rates, shape.groups * per_group + once)


_STEPS: dict[tuple[str, str], Callable[[_Shape, Rates], Step]] = {
    ("v1", "fwd"): _v1_fwd,
    ("v2", "fwd"): _v2_fwd,
    ("v2_split", "fwd"): _split_fwd,
    **{(name, "fwd"): _wgmma_fwd for name in V3},
    ("v1", "bwd"): _v1_bwd,
    **dict.fromkeys((("v2", "bwd"), ("v2_ordered", "bwd")), _v2_bwd),
    ("v2_second_pass", "bwd"): _main_of_two,
    ("v3", "bwd"): _wgmma_bwd,
}

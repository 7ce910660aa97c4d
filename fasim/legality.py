"""What makes a tile illegal: one rule each, with the sentence that says why and by how much.

A tile is judged by the rules in order, and the first it breaks is its reason. Adding a limit means
adding a rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fasim.gpu import Gpu
from fasim.model import footprint
from fasim.model.occupancy import register_cap, residency
from fasim.model.tiles import Bools, Ints, Tiles, ceil_div, padded
from fasim.plan import (
    FORMS,
    LOADER_THREADS,
    SLAB_BYTES,
    V3,
    V3_BLOCKS,
    WARPGROUP,
    WARPGROUP_ROWS,
    backward_stages,
    least_query_step,
    matrix_granule,
    split_count,
    ungroupable,
    unpackable,
)
from fasim.problem import Problem

KIB = 1024
MAX_GRID = 2**31 - 1
# setmaxnreg of a consumer, by the number of consumer warpgroups: as in FlashAttention-3, and what
# three blocks with one have on an SM.
CONSUMER_REGISTERS = {1: 136, 2: 240, 3: 160}
PRODUCT_REGISTERS = 30  # that a wgmma needs beside the numbers it sums
ROWS_PER_WARP = (16, 32)
SPLIT_FP32_COLUMNS = 128


@dataclass(frozen=True)
class Case:
    """Tiles under judgement and what the model says about them."""

    problem: Problem
    gpu: Gpu
    algo: str
    pass_: str
    tiles: Tiles
    threads: Ints  # of a whole block
    smem: Ints
    registers: Ints  # a thread; V3: a consumer thread
    launch_registers: Ints  # a thread, when the block starts
    blocks_per_sm: Ints
    limiter: Any
    cap: Ints  # registers a thread may have

    @classmethod
    def of(cls, problem: Problem, gpu: Gpu, algo: str, pass_: str, tiles: Tiles) -> Case:
        smem = footprint.smem_bytes(problem, algo, pass_, tiles)
        capability = gpu.compute_capability
        registers = footprint.registers(problem, algo, pass_, tiles, capability)
        threads = tiles.threads + (LOADER_THREADS if algo in V3 else 0)
        together = _of_groups(tiles, V3_BLOCKS)  # blocks on an SM
        launch = register_cap(gpu, threads, together) if algo in V3 else registers
        blocks, limiter = residency(gpu, threads, launch, smem)
        share = register_cap(gpu, threads, blocks)
        if algo == "v2_split":
            tiles = tiles.split(_split_counts(problem, tiles, gpu.sm_count * blocks))
        if algo in V3 and pass_ == "fwd":
            granted = _of_groups(tiles, CONSUMER_REGISTERS)
        else:
            granted = footprint.granted(problem, algo, pass_, tiles, share, capability)
        resident = tiles.resident(np.maximum(blocks, 1)).granted(granted)
        cap = register_cap(gpu, threads, 1)
        if algo in V3:
            cap = _of_groups(tiles, CONSUMER_REGISTERS)
        return cls(
            *(problem, gpu, algo, pass_, resident, threads, smem),
            *(registers, launch, blocks, limiter, cap),
        )

    def __len__(self) -> int:
        return len(self.tiles)

    def take(self, where: Any) -> Case:
        """The tiles that a mask or an array of indices names."""
        arrays = ("threads", "smem", "registers", "launch_registers", "blocks_per_sm", "limiter")
        picked = {name: getattr(self, name)[where] for name in (*arrays, "cap")}
        return replace(self, tiles=self.tiles.take(where), **picked)

    @property
    def kv_granule(self) -> int:
        """Keys of one matmul step over N: 16 for 16-bit and fp32 tiles, 32 for e4m3."""
        return matrix_granule(self.problem.dtype)

    @property
    def grid(self) -> Ints:
        """Blocks of a launch: per head one (V1), or one a q tile, backward one a K/V tile (V2: of a
        kv head); split keys: one a part of a q tile of packed rows; V3 forward, of packed rows
        too: those that the GPU runs at once, if there are tiles for all."""
        p, tiles = self.problem, self.tiles
        heads = p.batch * p.heads
        if self.algo == "v2_split":
            return _packed_blocks(p, tiles) * tiles.splits
        if self.algo == "v3_packed":
            return np.minimum(_packed_blocks(p, tiles), self.gpu.sm_count * self.blocks_per_sm)
        forward = self.pass_ == "fwd"
        if not forward and self.algo != "v3":
            heads = p.batch * p.kv_heads
        if self.algo == "v1":
            return np.full(len(tiles), heads * min(p.seq if forward else p.seq_kv, 1))
        blocks = heads * np.asarray(
            ceil_div(p.seq, tiles.block_q) if forward else ceil_div(p.seq_kv, tiles.block_kv)
        )
        if self.algo == "v3" and forward:
            return np.asarray(np.minimum(blocks, self.gpu.sm_count * self.blocks_per_sm))
        return blocks


def _packed_blocks(problem: Problem, tiles: Tiles) -> Ints:
    rows = problem.group * problem.seq
    return np.asarray(problem.batch * problem.kv_heads * ceil_div(rows, tiles.block_q))


def _split_counts(problem: Problem, tiles: Tiles, slots: Ints) -> Ints:
    """The number of parts a launch takes, for every tile."""
    key_tiles = ceil_div(problem.seq_kv, tiles.block_kv)
    counts = zip(key_tiles, _packed_blocks(problem, tiles), slots, strict=True)
    return np.array([split_count(*map(int, count)) for count in counts], dtype=np.int64)


def _of_groups(tiles: Tiles, values: Mapping[int, int]) -> Ints:
    """Of V3's tiles what is given by their number of consumer warpgroups; 0 for other numbers."""
    groups = tiles.warps // WARPGROUP
    return np.select([groups == n for n in values], list(values.values()), default=0)


@dataclass(frozen=True)
class Rule:
    """``legal`` marks the tiles that keep it; ``sentence`` tells tile i why it does not."""

    legal: Callable[[Case], Bools]
    sentence: Callable[[Case, int], str]


def _whole_mma_rows() -> Rule:
    """An mma has 16 rows, and a warp owns whole ones."""
    return Rule(
        lambda c: c.tiles.block_q % (16 * c.tiles.warps) == 0,
        lambda c, i: (
            f"block_q {c.tiles.block_q[i]} is no multiple of 16 rows x {_warps(c, i)}"
            f" = {16 * c.tiles.warps[i]}"
        ),
    )


def _whole_packed_rows() -> Rule:
    """Every warp has all the rows, one or two mma tiles of them."""
    return Rule(
        lambda c: np.isin(c.tiles.block_q, ROWS_PER_WARP),
        lambda c, i: f"block_q {c.tiles.block_q[i]} is not the 16 or 32 rows that split keys take",
    )


def _shared_keys() -> Rule:
    """Warps share a tile's keys, whole matmul steps each."""
    return Rule(
        lambda c: (
            (c.tiles.step_kv * c.tiles.warps == c.tiles.block_kv)
            & (c.tiles.step_kv % c.kv_granule == 0)
            & (c.tiles.warps > 1)
        ),
        lambda c, i: (
            f"block_kv {c.tiles.block_kv[i]} is not {c.tiles.step_kv[i]} keys, a multiple of"
            f" {c.kv_granule}, for each of {_warps(c, i)}"
        ),
    )


def _fp32_columns() -> Rule:
    """ptxas loads the values of more columns ahead than fit the registers, at any cap."""
    return Rule(
        lambda c: (
            (c.problem.dtype != "fp32")
            | (np.full(len(c), max(c.problem.head_dim, c.problem.head_dim_v)) <= SPLIT_FP32_COLUMNS)
        ),
        lambda c, i: f"with more than {SPLIT_FP32_COLUMNS} fp32 columns split keys would spill",
    )


def _parts_fit() -> Rule:
    """The warps merge where Q and the ring were."""
    return Rule(
        lambda c: footprint.merge_bytes(c.problem, c.tiles) <= c.smem,
        lambda c, i: (
            f"the parts of {_warps(c, i)} need"
            f" {footprint.merge_bytes(c.problem, c.tiles)[i] / KIB:.1f} KiB, the tiles have"
            f" {c.smem[i] / KIB:.1f}"
        ),
    )


def _whole_warpgroup_rows() -> Rule:
    """A warpgroup owns the 64 rows of a wgmma."""
    return Rule(
        lambda c: c.tiles.block_q * WARPGROUP == c.tiles.warps * WARPGROUP_ROWS,
        lambda c, i: (
            f"block_q {c.tiles.block_q[i]} is not 64 rows for each of"
            f" {c.tiles.warps[i] / WARPGROUP:g} consumer warpgroups"
        ),
    )


def _whole_keys() -> Rule:
    """PV sums over keys in steps of the matmul's k."""
    return Rule(
        lambda c: c.tiles.block_kv % c.kv_granule == 0,
        lambda c, i: (
            f"block_kv {c.tiles.block_kv[i]} is no multiple of the {c.kv_granule} keys"
            f" of one {c.problem.dtype} matmul step"
        ),
    )


def _whole_steps() -> Rule:
    """V1 walks its block of keys in steps, at least two of them: it is built around the loop."""
    return Rule(
        lambda c: (
            (c.tiles.block_kv % c.tiles.step_kv == 0)
            & (c.tiles.step_kv % 16 == 0)
            & (c.tiles.block_kv > c.tiles.step_kv)
        ),
        lambda c, i: (
            f"block_kv {c.tiles.block_kv[i]} is not two or more whole steps of"
            f" {c.tiles.step_kv[i]} keys, themselves a multiple of 16"
        ),
    )


def _whole_slabs() -> Rule:
    """Where wgmma multiplies bytes V is transposed, in slabs of 128 keys; of more keys its sums
    would keep too few bits."""
    return Rule(
        lambda c: (c.tiles.block_kv == SLAB_BYTES) | np.full(len(c), c.problem.dtype != "e4m3"),
        lambda c, i: f"block_kv {c.tiles.block_kv[i]} is not one slab of {SLAB_BYTES} keys of V",
    )


def _packs() -> Rule:
    """Packed rows are whole boxes of whole queries, and their scores know no head."""
    return Rule(
        lambda c: np.full(len(c), not (unpackable(c.problem) or ungroupable(c.problem))),
        lambda c, i: unpackable(c.problem) or ungroupable(c.problem),
    )


def _one_step() -> Rule:
    """Only V1 keeps more keys in shared memory than it scores at once."""
    return Rule(
        lambda c: c.tiles.step_kv == c.tiles.block_kv,
        lambda c, i: f"step_kv {c.tiles.step_kv[i]} differs from block_kv {c.tiles.block_kv[i]}",
    )


def _one_stage() -> Rule:
    return Rule(
        lambda c: c.tiles.stages == 1,
        lambda c, i: f"{c.tiles.stages[i]} stages, but v1 copies and computes in turn",
    )


def _instruction_width() -> Rule:
    return Rule(
        lambda c: c.tiles.block_kv <= 256,
        lambda c, i: f"block_kv {c.tiles.block_kv[i]} exceeds the 256 columns of a wgmma",
    )


def _consumers() -> Rule:
    """One warpgroup computes in the forward pass in 16 bits only."""

    def numbers(case: Case) -> list[int]:
        lone = case.pass_ == "fwd" and case.problem.dtype != "e4m3"
        return [n for n in CONSUMER_REGISTERS if n > 1 or lone]

    return Rule(
        lambda c: np.isin(c.tiles.warps, [WARPGROUP * n for n in numbers(c)]),
        lambda c, i: f"{c.tiles.warps[i]} consumer warps are not {numbers(c)[0]} to 3 warpgroups",
    )


def _one_product() -> Rule:
    """ptxas holds each wgmma in 16 bits to what a thread starts with, whatever setmaxnreg adds."""

    def needed(case: Case) -> Ints:
        columns = np.maximum(padded(case.problem.head_dim_v), case.tiles.block_kv)
        return np.asarray((columns // 2 + PRODUCT_REGISTERS) * (case.problem.dtype != "e4m3"))

    return Rule(
        lambda c: needed(c) <= c.launch_registers,
        lambda c, i: (
            f"a product needs {needed(c)[i]} registers, and a thread starts with"
            f" {c.launch_registers[i]}"
        ),
    )


def _together() -> Rule:
    """Blocks with one consumer hide each other's waits: one alone would hide none."""
    return Rule(
        lambda c: c.blocks_per_sm >= _of_groups(c.tiles, V3_BLOCKS),
        lambda c, i: (
            f"{_of_groups(c.tiles, V3_BLOCKS)[i]} blocks are to share an SM, and"
            f" {c.blocks_per_sm[i]} of {c.smem[i] / KIB:.1f} KiB fit"
        ),
    )


def _threads() -> Rule:
    return Rule(
        lambda c: c.threads <= c.gpu.threads_per_block,
        lambda c, i: f"{c.threads[i]} threads exceed {c.gpu.threads_per_block} per block",
    )


def _shared_memory() -> Rule:
    return Rule(
        lambda c: c.smem <= c.gpu.smem_per_block,
        lambda c, i: (
            f"shared memory {c.smem[i] / KIB:.1f} KiB exceeds {c.gpu.smem_per_block / KIB:.1f} KiB"
        ),
    )


def _registers() -> Rule:
    return Rule(
        lambda c: c.registers <= c.cap,
        lambda c, i: f"registers {c.registers[i]} per thread exceed {c.cap[i]}",
    )


def _rows_per_warp() -> Rule:
    """The templates unroll one or two mma tiles of rows a warp."""
    return Rule(
        lambda c: np.isin(c.tiles.rows_per_warp, ROWS_PER_WARP),
        lambda c, i: f"{c.tiles.rows_per_warp[i]} rows per warp are not 16 or 32",
    )


def _sharers() -> Rule:
    """Four warps that share keys are made for what leaves two no room: long rows in 16 bits."""

    def legal(case: Case) -> Bools:
        tiles, made = case.tiles, case.algo != "v1" and case.problem.dtype != "fp32"
        usual = tiles.sharing == np.where(tiles.p_shared, 2, 1)
        return np.asarray(usual | (tiles.frees & tiles.p_shared & made))

    return Rule(
        legal,
        lambda c, i: (
            f"{c.tiles.sharing[i]} warps share keys, not one with P in registers, else two, or four"
            " in 16 bits of v2"
        ),
    )


def _keys_per_warp() -> Rule:
    """A backward warp owns the keys whose dK and dV it holds, one or two mma tiles of them."""
    return Rule(
        lambda c: (
            np.isin(c.tiles.bwd_keys, ROWS_PER_WARP)
            & (c.tiles.bwd_keys * c.tiles.warps == c.tiles.block_kv * c.tiles.sharing)
        ),
        lambda c, i: (
            f"block_kv {c.tiles.block_kv[i]} is not 16 or 32 keys for each of {_warps(c, i)}"
        ),
    )


def _whole_query_steps() -> Rule:
    """Warps that share keys score as many queries each, whole matmul steps at a time."""

    def step(case: Case) -> Ints:
        tiles = case.tiles
        least = least_query_step(case.problem.dtype, tiles.bwd_keys, tiles.sharing)
        return np.asarray(np.maximum(tiles.query_step, least) * tiles.sharing)

    return Rule(
        lambda c: (c.tiles.block_q % step(c) == 0) & (c.tiles.block_q % 16 == 0),
        lambda c, i: f"block_q {c.tiles.block_q[i]} is no multiple of 16 and of {step(c)[i]}",
    )


def _fp32_shares() -> Rule:
    """Without matrix instructions the operands of every product take registers of their own."""
    return Rule(
        lambda c: c.tiles.p_shared | np.full(len(c), c.problem.dtype != "fp32"),
        lambda c, i: "P stays in registers, where backward in fp32 has no room for it",
    )


def _two_stages() -> Rule:
    """One tile is at work while the next arrives; where two warps share keys the last still is."""
    return Rule(
        lambda c: c.tiles.stages == backward_stages(c.tiles.sharing),
        lambda c, i: (
            f"{c.tiles.stages[i]} stages, but a backward pass holds"
            f" {backward_stages(c.tiles.sharing[i])} tiles of Q"
        ),
    )


def _resident() -> Rule:
    return Rule(
        lambda c: c.blocks_per_sm > 0,
        lambda c, i: (
            f"no block fits an SM: {c.threads[i]} threads with {c.launch_registers[i]} registers"
            f" and {c.smem[i] / KIB:.1f} KiB"
        ),
    )


def _grid() -> Rule:
    return Rule(
        lambda c: c.grid <= MAX_GRID,
        lambda c, i: f"grid {c.grid[i]} exceeds {MAX_GRID} blocks",
    )


def _warps(case: Case, index: int) -> str:
    warps = int(case.tiles.warps[index])
    return f"{warps} warp{'s' * (warps > 1)}"


_LIMITS = (_threads(), _shared_memory(), _registers(), _resident(), _grid())
_MMA = (_whole_mma_rows(), _whole_keys())
_FORWARD = (_threads(), _shared_memory(), _registers(), _rows_per_warp(), _resident(), _grid())
_OWNED = (
    *(_sharers(), _keys_per_warp(), _whole_query_steps()),
    *(_one_step(), _fp32_shares()),
)
_KEYS = (*_OWNED, _two_stages())
_LAUNCHED = (_together(), _one_product())
_V3 = (_consumers(), _whole_keys(), _instruction_width(), _one_step())

RULES: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("v1", "fwd"): (*_MMA, _one_stage(), _whole_steps(), *_FORWARD),
    ("v2", "fwd"): (*_MMA, _one_step(), *_FORWARD),
    ("v2_split", "fwd"): (
        *(_whole_packed_rows(), _shared_keys(), _fp32_columns(), _parts_fit()),
        *_LIMITS,
    ),
    ("v3", "fwd"): (*_V3, _whole_warpgroup_rows(), _whole_slabs(), *_LIMITS, *_LAUNCHED),
    ("v3_packed", "fwd"): (_packs(), *_V3, _whole_warpgroup_rows(), *_LIMITS, *_LAUNCHED),
    ("v1", "bwd"): (*_OWNED, _one_stage(), *_LIMITS),
    **{(name, "bwd"): (*_KEYS, *_LIMITS) for name in ("v2", *(f"v2_{form}" for form in FORMS))},
    ("v3", "bwd"): (*_V3, *_LIMITS),
}


def broken(case: Case) -> Ints:
    """For every tile the place of the first rule it breaks, or the number of rules if none."""
    rules = RULES[case.algo, case.pass_]
    first = np.full(len(case), len(rules), dtype=np.int64)
    for place in reversed(range(len(rules))):
        first[~rules[place].legal(case)] = place
    return first


def legal(case: Case) -> Bools:
    """Which tiles keep every rule."""
    return np.asarray(broken(case) == len(RULES[case.algo, case.pass_]))


def sentence(case: Case, index: int, place: int) -> str:
    """Why tile ``index`` breaks rule ``place``."""
    return RULES[case.algo, case.pass_][place].sentence(case, index)

"""The tiles that the planner tries, and the completions of a tile that it is asked to judge.

Nothing here is filtered: legality.py says which of them a GPU can run, and why not the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace

from fasim.errors import UsageError
from fasim.gpu import Gpu
from fasim.legality import CONSUMER_REGISTERS, ROWS_PER_WARP
from fasim.model.footprint import option_registers
from fasim.model.tiles import Tiles, ceil_div, padded
from fasim.plan import (
    BACKWARD_STAGES,
    FOUR,
    V3,
    WARPGROUP,
    WARPGROUP_ROWS,
    Tile,
    backward_stages,
)
from fasim.problem import DTYPE_BYTES, Problem

WARPS = (1, 2, 4, 8)
KEYS = tuple(range(16, 257, 16))
# A wider step leaves fp32 fragments too few registers: on an H200, 27 % slower a key at 96 keys.
FP32_KEYS = (16, 32, 48, 64)
E4M3_KEYS = tuple(range(32, 257, 32))
V1_KEYS = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
V1_STEPS = (32, 64)
SPLIT_WARPS, SPLIT_KEYS, SPLIT_STAGES = (4, 8), (16, 32), (1, 2, 3, 4)
V3_STAGES = (2, 3, 4)
BACKWARD_QUERIES = (32, 64, 128)
MOST_GRADIENT_COLUMNS = 304  # of dK and dV together, where a warp has 16 keys for itself
BACKWARD_BLOCKS = (32, 48, 64, 80, 96, 112, 128)


def candidates(problem: Problem, gpu: Gpu, algo: str, pass_: str) -> Tiles:
    """Every tile that is tried."""
    keys = {"e4m3": E4M3_KEYS, "fp32": FP32_KEYS}.get(problem.dtype, KEYS)
    if algo in V3:
        return _v3_candidates(pass_, keys)
    if algo == "v2_split":
        return _split_candidates()
    if pass_ == "bwd":
        wide = _wide(problem)
        four = wide and problem.dtype != "fp32"
        return _v1_bwd_candidates(wide) if algo == "v1" else _v2_bwd_candidates(wide, four)
    return _v1_candidates(problem, gpu) if algo == "v1" else _v2_candidates(keys)


@functools.cache
def _v2_candidates(keys: tuple[int, ...]) -> Tiles:
    return Tiles.of(
        [
            Tile(block_q=rows * warps, block_kv=n, stages=stages, warps=warps)
            for warps, rows, n, stages in itertools.product(WARPS, ROWS_PER_WARP, keys, (1, 2))
        ]
    )


@functools.cache
def _split_candidates() -> Tiles:
    """Rows of one or two mma tiles; keys for a mma step or two of every warp."""
    choices = itertools.product(SPLIT_WARPS, ROWS_PER_WARP, SPLIT_KEYS, SPLIT_STAGES)
    return Tiles.of(
        [
            Tile(block_q=rows, block_kv=keys * warps, stages=stages, warps=warps, step_kv=keys)
            for warps, rows, keys, stages in choices
        ]
    )


def _v1_candidates(problem: Problem, gpu: Gpu) -> Tiles:
    """Larger blocks than V2's, scored in steps; the paper's own block is among them."""
    paper_keys = rounded_paper_tile(problem, gpu).block_kv
    return _v1_grid(paper_keys, problem.dtype == "fp32", bool(option_registers(problem)))


@functools.cache
def _v1_grid(paper_keys: int, fp32: bool, options: bool) -> Tiles:
    """A single warp would spill over O and its merge. fp32 also tries blocks of 32 keys, the only
    ones that fit a small shared memory at large head dimensions; kernels with options steps of 16
    keys, the only ones that leave them registers there."""
    pairs = [(n, s) for n in sorted({*V1_KEYS, paper_keys}) for s in V1_STEPS if n % s == 0 < n - s]
    pairs += [(32, 16)] * fp32 + [(64, 16), (128, 16)] * options
    return Tiles.of(
        [
            Tile(block_q=rows * warps, block_kv=n, warps=warps, step_kv=step)
            for warps, rows, (n, step) in itertools.product(WARPS[1:], ROWS_PER_WARP, pairs)
        ]
    )


@functools.cache
def _v3_candidates(pass_: str, keys: tuple[int, ...]) -> Tiles:
    if pass_ == "bwd":
        shapes = itertools.product(BACKWARD_BLOCKS, BACKWARD_BLOCKS, (8, 12), (1, 2))
        return Tiles.of([Tile(block_q=m, block_kv=n, warps=w, stages=s) for m, n, w, s in shapes])
    options = itertools.product(CONSUMER_REGISTERS, keys, V3_STAGES)
    return Tiles.of(
        [
            Tile(block_q=WARPGROUP_ROWS * n, block_kv=k, warps=WARPGROUP * n, stages=stages)
            for n, k, stages in options
        ]
    )


def _wide(problem: Problem) -> bool:
    """Whether dK and dV of 16 keys would leave a warp no registers or a block no shared memory."""
    columns = padded(problem.head_dim) + padded(problem.head_dim_v)
    return columns > MOST_GRADIENT_COLUMNS or problem.dtype == "fp32"


def _bwd_tiles(wide: bool) -> list[Tile]:
    """A warp owns 16 or 32 keys, or two own 32 together: P in shared memory. Wide rows also take
    fewer queries at once, and two warps that own 16 keys together."""
    queries = (16, *BACKWARD_QUERIES) if wide else BACKWARD_QUERIES
    alone = itertools.product(queries, ROWS_PER_WARP, (2, 4, 8), ("registers",))
    shared = itertools.product(queries, (8, 16)[not wide :], (2, 4, 8), ("shared",))
    return [
        Tile(block_q=m, block_kv=n * w, warps=w, p_in=p)
        for m, n, w, p in (*alone, *shared)
        if wide or p == "registers" or m > BACKWARD_QUERIES[0]
    ]


@functools.cache
def _v1_bwd_candidates(wide: bool) -> Tiles:
    return Tiles.of(_bwd_tiles(wide))


@functools.cache
def _v2_bwd_candidates(wide: bool, four: bool) -> Tiles:
    """A stage more where two warps share keys; in wide rows of 16 bits also four that share 32."""
    tiles = _bwd_tiles(wide)
    if four:
        of_four = Tile(block_q=16 * FOUR, block_kv=32, warps=FOUR, p_in="shared", sharers=FOUR)
        tiles += [replace(of_four, block_kv=32 * n, warps=FOUR * n) for n in (1, 2)]
    return Tiles.of([replace(tile, stages=backward_stages(tile.sharing)) for tile in tiles])


def paper_tile(smem_elements: int, head_dim: int) -> tuple[int, int]:
    """(B_r, B_c) of the FlashAttention paper for an SRAM of that many elements:
    B_c = ceil(M / 4d), B_r = min(B_c, d)."""
    block_kv = int(ceil_div(smem_elements, 4 * head_dim))
    return min(block_kv, head_dim), block_kv


def rounded_paper_tile(problem: Problem, gpu: Gpu) -> Tile:
    """The paper's tile for one block's shared memory, rounded down to whole matmul steps."""
    elements = gpu.smem_per_block // DTYPE_BYTES[problem.dtype]
    rows, keys = paper_tile(elements, problem.head_dim)
    block_q = max(16, 2 ** (rows.bit_length() - 1))
    block_kv = max(64, keys // 64 * 64)
    warps = max(1, min(4, block_q // 16))
    return Tile(block_q=block_q, block_kv=block_kv, warps=warps, step_kv=64)


def judged(tile: Tile | tuple[int, int], algo: str, pass_: str) -> Tiles:
    """The tile asked for; where only its shape is given, every completion of it.

    Raises UsageError for counts that are not positive.
    """
    whole = tile if isinstance(tile, Tile) else Tile(block_q=tile[0], block_kv=tile[1])
    counts = (whole.block_q, whole.block_kv, whole.stages, whole.warps, whole.keys_per_step)
    if min(counts) < 1:
        raise UsageError(
            f"{whole} with {whole.warps} warps and {whole.stages} stages is not a tile",
            hint="give two positive numbers, block_q x block_kv: --tile 128x64",
        )
    if isinstance(tile, Tile):
        return Tiles.of([tile])
    block_q, block_kv = tile
    steps = [s for s in (16, *V1_STEPS) if block_kv % s == 0 < block_kv - s] or [block_kv]
    name = algo if pass_ == "fwd" else algo.partition("_")[0]
    choices: Iterable[tuple[int, int, int, str]] = {
        ("v1", "fwd"): itertools.product(WARPS, (1,), steps, ("registers",)),
        ("v2", "fwd"): itertools.product(WARPS, (1, 2), (0,), ("registers",)),
        ("v2_split", "fwd"): [
            (w, s, block_kv // w, "registers")
            for w, s in itertools.product(SPLIT_WARPS, SPLIT_STAGES)
            if block_kv % w == 0
        ]
        or [(1, 1, 0, "registers")],
        **{
            (name, "fwd"): itertools.product((4, 8, 12), V3_STAGES, (0,), ("registers",))
            for name in V3
        },
        ("v1", "bwd"): itertools.product((2, 4, 8), (1,), (0,), ("registers", "shared")),
        ("v2", "bwd"): itertools.product(
            (2, 4, 8), (BACKWARD_STAGES, BACKWARD_STAGES + 1), (0,), ("registers", "shared")
        ),
        ("v3", "bwd"): itertools.product((8, 12), (1, 2), (0,), ("registers",)),
    }[name, pass_]
    tiles = [
        Tile(block_q=block_q, block_kv=block_kv, warps=w, stages=s, step_kv=k, p_in=p)
        for w, s, k, p in choices
    ]
    if (name, pass_) == ("v2", "bwd"):
        shared = [tile for tile in tiles if (tile.p_in, tile.stages) == ("shared", BACKWARD_STAGES)]
        tiles += [replace(tile, sharers=FOUR) for tile in shared if tile.warps >= FOUR]
    return Tiles.of(tiles)

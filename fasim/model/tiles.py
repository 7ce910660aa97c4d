"""Many tiles at once: a struct of arrays, one entry per candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fasim.plan import (
    FOUR,
    QUERY_STEP,
    WARP,
    WARPGROUP_ROWS,
    Tile,
    matrix_granule,
    passes_by,
)
from fasim.problem import Problem

MMA_ROWS = 16  # of a matrix instruction
Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Equally long arrays of what a Tile holds; ``step_kv`` is resolved, never 0."""

    block_q: Ints
    block_kv: Ints
    stages: Ints
    warps: Ints
    step_kv: Ints
    p_shared: Bools
    sharing: Ints  # warps of a backward pass that share keys
    registers: Ints
    blocks_per_sm: Ints  # resident together; 1 until occupancy.py has judged the tile
    splits: Ints  # parts of the keys; 1 until their count is known, and where nothing splits

    @classmethod
    def of(cls, tiles: Sequence[Tile]) -> Tiles:
        return cls(
            block_q=_ints(t.block_q for t in tiles),
            block_kv=_ints(t.block_kv for t in tiles),
            stages=_ints(t.stages for t in tiles),
            warps=_ints(t.warps for t in tiles),
            step_kv=_ints(t.keys_per_step for t in tiles),
            p_shared=np.array([t.p_in == "shared" for t in tiles], dtype=np.bool_),
            sharing=_ints(t.sharing for t in tiles),
            registers=_ints(t.registers for t in tiles),
            blocks_per_sm=np.ones(len(tiles), dtype=np.int64),
            splits=np.ones(len(tiles), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.block_q)

    def tile(self, index: int) -> Tile:
        """One entry as a Tile; ``step_kv`` 0 where it equals ``block_kv``."""
        step, keys = int(self.step_kv[index]), int(self.block_kv[index])
        return Tile(
            block_q=int(self.block_q[index]),
            block_kv=keys,
            stages=int(self.stages[index]),
            warps=int(self.warps[index]),
            step_kv=0 if step == keys else step,
            p_in="shared" if self.p_shared[index] else "registers",
            registers=int(self.registers[index]),
            sharers=FOUR if self.frees[index] else 0,
        )

    def take(self, where: npt.NDArray[Any]) -> Tiles:
        """The entries that a mask or an array of indices names."""
        return Tiles(**{f.name: getattr(self, f.name)[where] for f in fields(self)})

    def resident(self, blocks_per_sm: Ints) -> Tiles:
        """The same tiles with another residency."""
        return replace(self, blocks_per_sm=blocks_per_sm)

    def split(self, splits: Ints) -> Tiles:
        """The same tiles with the keys in other numbers of parts."""
        return replace(self, splits=splits)

    def granted(self, registers: Ints) -> Tiles:
        """The same tiles with other register caps."""
        return replace(self, registers=registers)

    @property
    def threads(self) -> Ints:
        """Threads that compute; V3 adds a producer warpgroup to them."""
        return self.warps * WARP

    @property
    def frees(self) -> Bools:
        """Whether a slot of Q and dO is given back within the step."""
        return np.asarray(self.sharing == FOUR)

    @property
    def bwd_keys(self) -> Ints:
        """Keys of a warp of a backward pass, which it may share with another."""
        keys: Ints = self.block_kv * self.sharing // self.warps
        return keys

    @property
    def query_step(self) -> Ints:
        """Queries that a warp of a backward pass scores at once."""
        step: Ints = np.minimum(QUERY_STEP, self.block_q // self.sharing)
        return step

    @property
    def query_part(self) -> Ints:
        """Queries whose dP it makes at once: of 32 keys half a step, or 16 where four warps share
        them."""
        part = self.query_step * MMA_ROWS // np.maximum(self.bwd_keys, 1)
        return np.where(self.frees, MMA_ROWS, np.maximum(part, 1))

    def rows_apart(self, algo: str, problem: Problem) -> Ints:
        """Rows that skip forward what none of them sees: a warp's of V2 in 16 bits, a warpgroup's
        of V3 that passes tiles by, else a tile."""
        if algo == "v3":
            return np.where(passes_by(problem, self), WARPGROUP_ROWS, self.block_q)
        by_warp = (algo, problem.dtype != "fp32") == ("v2", True)
        return self.rows_per_warp if by_warp else self.block_q

    @property
    def rows_per_warp(self) -> Ints:
        return self.block_q // self.warps


def _ints(values: Any) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def ceil_div(a: Any, b: Any) -> Any:
    """Ceiling of a / b for whole numbers or arrays of them, b positive."""
    return -(-a // b)


def round_up(a: Any, granule: Any) -> Any:
    """The smallest multiple of ``granule`` that is at least ``a``."""
    return ceil_div(a, granule) * granule


def padded(head_dim: int, dtype: str = "fp16") -> int:
    """A head dimension as the kernels hold it: a multiple of 16, the k of one mma; e4m3: of 32."""
    return int(round_up(head_dim, matrix_granule(dtype)))

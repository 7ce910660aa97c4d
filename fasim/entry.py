"""What planning found for one algorithm: a tile and why, limits, bytes, FLOPs and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fasim.model.footprint import HbmBytes
from fasim.model.timeline import Times
from fasim.model.traffic import Bytes
from fasim.plan import SCHEMA, Plan, Tile, variant_of
from fasim.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One algorithm on one problem and GPU.

    Where ``available`` is false only the problem, memory and ``reason`` are filled in.
    ``generable`` says whether fasim writes this kernel; if not, ``reason`` names what is missing.
    ``train`` holds its passes in ``fwd`` and ``bwd`` and their totals in itself.
    """

    problem: Problem
    gpu: str
    algo: str
    pass_: str
    arch: str
    hbm: HbmBytes
    fits: bool
    max_seq: int
    useful_flops: int
    available: bool = True
    generable: bool = False
    reason: str = ""
    tile: Tile | None = None
    plan: Plan | None = None
    splits: int = 0  # parts of the keys; 0 where the kernel does not split them
    packed: bool = False  # V3: whether a tile has the rows of all heads that share keys
    dq: str = "atomic"  # how a backward pass of V2 sums it
    grid: int = 0
    block: int = 0
    smem_bytes: int = 0
    registers: int = 0
    blocks_per_sm: int = 0
    limiter: str = ""
    issued: Bytes | None = None
    dram: Bytes | None = None
    paper: int | None = None
    executed_flops: int = 0
    time: Any = None  # Times of numbers; None when not available
    rejected: tuple[tuple[str, str], ...] = ()
    alternatives: tuple[Entry, ...] = ()
    reasons: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    fwd: Entry | None = None
    bwd: Entry | None = None

    @property
    def variant(self) -> str:
        """The algorithm under the name of its equations in the model."""
        return variant_of(self.algo, self.splits > 0, self.dq, self.packed)

    def to_json(self) -> dict[str, Any]:
        """The entry as a ``fasim.plan/1`` document; ``Plan.from_json`` reads it when generable."""
        document = {"schema": SCHEMA, "problem": self.problem.to_json(), **self._body()}
        passes = {"fwd": self.fwd, "bwd": self.bwd}
        document |= {name: part.to_json() for name, part in passes.items() if part}
        return (self.plan.to_json() if self.plan else {}) | document

    def _body(self) -> dict[str, Any]:
        return {
            "gpu": {"name": self.gpu, "arch": self.arch},
            "algo": self.algo,
            "pass": self.pass_,
            "available": self.available,
            "generable": self.generable,
            "reason": self.reason,
            "tile": asdict(self.tile) if self.tile else None,
            "launch": self._launch_json(),
            "footprint": self._footprint_json(),
            "traffic": self._traffic_json(),
            "flops": {"useful": self.useful_flops, "executed": self.executed_flops},
            "occupancy": {"blocks_per_sm": self.blocks_per_sm, "limiter": self.limiter},
            "time": _times_json(self.time),
            "reasons": list(self.reasons),
            "assumed": list(self.assumed),
            "rejected": [{"tile": tile, "reason": reason} for tile, reason in self.rejected],
            "alternatives": [other._alternative_json() for other in self.alternatives],
        }

    def _launch_json(self) -> dict[str, Any]:
        return {
            "grid": self.grid,
            "block": self.block,
            "smem_bytes": self.smem_bytes,
            "splits": self.splits,
            **({} if self.dq == "atomic" else {"dq": self.dq}),
            **({"packed": True} if self.packed else {}),
            "arch": self.arch,
        }

    def _footprint_json(self) -> dict[str, Any]:
        return {
            "smem_bytes": self.smem_bytes,
            "registers_per_thread": self.registers,
            "hbm_bytes": asdict(self.hbm) | {"total": self.hbm.total},
            "fits": self.fits,
            "max_seq": self.max_seq,
        }

    def _traffic_json(self) -> dict[str, Any]:
        return {
            "issued": _bytes_json(self.issued),
            "dram": _bytes_json(self.dram),
            "paper": self.paper,
        }

    def _alternative_json(self) -> dict[str, Any]:
        """What differs between tiles of one problem."""
        body = self._body()
        shared = ("gpu", "algo", "pass", "available", "reasons", "assumed", "rejected")
        return {k: v for k, v in body.items() if k not in (*shared, "alternatives")}


def _bytes_json(moved: Bytes | None) -> dict[str, Any] | None:
    if moved is None:
        return None
    both = {"read": moved.read, "write": moved.write}
    tensors = {"reads": dict(moved.reads), "writes": dict(moved.writes)}
    return both | (tensors if moved.reads else {})


def _times_json(times: Times | None) -> dict[str, Any] | None:
    return asdict(times) if times else None

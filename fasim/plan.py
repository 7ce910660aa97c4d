"""The freeze point: a Plan says everything a kernel is, and nothing after it chooses again.

``kernel`` is compile time: it is hashed, and its stem names file, symbol and cache folder.
``Launch`` is run time: ``plan.launch_for(problem)`` derives it for any shape the kernel can do.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fasim.errors import UsageError
from fasim.problem import DTYPE_BYTES, Problem

SCHEMA = "fasim.plan/1"
WARP = 32

POINTERS = {
    "v1": ("q", "k", "v", "o", "lse", "o_acc", "m", "l"),
    "v2": ("q", "k", "v", "o", "lse"),
}
SIZES = ("heads", "kv_heads", "seq_q", "seq_kv")
STRIDED = ("q", "k", "v", "o")
Scalar = int | float | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one thread block works. ``stages`` counts K/V tile pairs in shared memory, ``warps`` the
    warps that compute, ``step_kv`` the keys scored at a time (V1 keeps more in shared memory than
    its registers can score at once), ``registers`` what a thread may use: the compiler is held to it."""

    block_q: int
    block_kv: int
    stages: int = 1
    warps: int = 4
    step_kv: int = 0  # 0: block_kv
    p_in: str = "registers"  # or "shared" (V3)
    registers: int = 255

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def keys_per_step(self) -> int:
        return self.step_kv or self.block_kv

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv}"


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Everything known at compile time."""

    algo: str
    pass_: str
    arch: str
    dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    tile: Tile
    mask: str = "full"
    softcap: bool = False
    bias: str = "none"
    pack_gqa: bool = False
    scales: str = "none"
    varlen: bool = False
    deterministic: bool = False
    splits: bool = False

    @property
    def digest(self) -> str:
        """8 hex digits over every field: equal kernels share it, others do not."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def stem(self) -> str:
        """Readable name of file, symbol, cache folder and test."""
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"v{self.head_dim_v}"
        words = [self.algo, self.pass_, self.arch.replace("_", ""), self.dtype, dims, self.mask]
        return "_".join([*words, self.digest])

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """(name, type) in the order of the kernel's parameter list: pointers, sizes, strides, scale.
        Types: ptr, i32, f32, and i64x3, a struct of three int64 (batch, head, seq)."""
        pointers = [(name, "ptr") for name in POINTERS[self.algo]]
        sizes = [(name, "i32") for name in SIZES]
        strides = [(f"{name}_strides", "i64x3") for name in STRIDED]
        return (*pointers, *sizes, *strides, ("scale_log2", "f32"))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch: a 1-D grid, the block, dynamic shared memory, the value of every non-pointer
    argument, and the shapes of what the kernel writes (outputs) or needs (workspaces)."""

    grid: int
    block: int
    smem_bytes: int
    scalars: Mapping[str, Scalar]
    outputs: Mapping[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype)
    workspaces: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel, the problem it was planned for, and what the planner promised about it."""

    problem: Problem
    gpu: str
    kernel: KernelSpec
    smem_bytes: int  # dynamic shared memory of one block

    @property
    def registers(self) -> int:
        """Per thread: what the compiler may use, and about what it does."""
        return self.kernel.tile.registers

    def launch_for(
        self, problem: Problem | None = None, strides: Mapping[str, tuple[int, ...]] | None = None
    ) -> Launch:
        """The launch of this kernel on ``problem`` (default: the planned one).

        ``strides`` gives (batch, head, seq) strides in elements of q, k, v or o where they are not
        those of a contiguous (batch, heads, seq, head_dim) array.
        Raises UsageError if the kernel was not built for this problem.
        """
        problem = problem or self.problem
        self._check_serves(problem)
        tile = self.kernel.tile
        return Launch(
            grid=self._grid(problem),
            block=tile.threads,
            smem_bytes=self.smem_bytes,
            scalars=self._scalars(problem, strides or {}),
            outputs=self._outputs(problem),
            workspaces=self._workspaces(problem),
        )

    def _check_serves(self, problem: Problem) -> None:
        wanted = {name: getattr(self.kernel, name) for name in _COMPILED_IN}
        for name, built in wanted.items():
            asked = getattr(problem, name)
            if asked != built:
                raise UsageError(
                    f"{self.kernel.stem} cannot run this problem",
                    why=f"it was built for {name} {built}, the problem has {asked}",
                    hint="plan and generate a kernel for this problem",
                )

    def _grid(self, problem: Problem) -> int:
        """V1 is parallel over batch and heads, V2 also over blocks of queries."""
        q_blocks = math.ceil(problem.seq / self.kernel.tile.block_q)
        per_head = min(q_blocks, 1) if self.kernel.algo == "v1" else q_blocks
        return problem.batch * problem.heads * per_head

    def _scalars(
        self, problem: Problem, strides: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Scalar]:
        sizes = (problem.heads, problem.kv_heads, problem.seq, problem.seq_kv)
        steps = {
            f"{name}_strides": tuple(strides.get(name, contiguous_strides(shape)[:3]))
            for name, shape in tensor_shapes(problem).items()
        }
        return {**dict(zip(SIZES, sizes, strict=True)), **steps, **self._factors(problem)}

    def _factors(self, problem: Problem) -> dict[str, Scalar]:
        """Softmax scale times log2(e): exp(scale * s) is one exp2 of one product."""
        return {"scale_log2": problem.scale * math.log2(math.e)}

    def _outputs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        shape = tensor_shapes(problem)["o"]
        return {"o": (shape, self.kernel.out_dtype), "lse": (shape[:3], "fp32")}

    def _workspaces(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """V1 keeps O, m and l in HBM between its steps over K and V."""
        if self.kernel.algo != "v1":
            return {}
        shape = tensor_shapes(problem)["o"]
        return {"o_acc": (shape, "fp32"), "m": (shape[:3], "fp32"), "l": (shape[:3], "fp32")}

    def to_json(self) -> dict[str, Any]:
        kernel = asdict(self.kernel)
        kernel["pass"] = kernel.pop("pass_")
        return {
            "schema": SCHEMA,
            "problem": self.problem.to_json(),
            "gpu": {"name": self.gpu, "arch": self.kernel.arch},
            "kernel": kernel,
            "smem_bytes": self.smem_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of to_json; extra entries are ignored. Raises UsageError for anything malformed."""
        try:
            return cls._from_json(data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                "this is not a fasim plan",
                why=f"{type(error).__name__}: {error}",
                hint="make one with `fasim plan --json -o plan.json`",
            ) from error

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> Plan:
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema is {data['schema']!r}, not {SCHEMA!r}")
        kernel = dict(data["kernel"])
        kernel["pass_"] = kernel.pop("pass")
        kernel["tile"] = _typed(Tile, kernel["tile"])
        return cls(
            problem=Problem.from_json(data["problem"]),
            gpu=str(data["gpu"]["name"]),
            kernel=_typed(KernelSpec, kernel),
            smem_bytes=int(data["smem_bytes"]),
        )


_COMPILED_IN = ("dtype", "out_dtype", "head_dim", "head_dim_v", "mask", "bias", "varlen")


def tensor_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of q, k, v and o as (batch, heads, seq, head_dim)."""
    p = problem
    return {
        "q": (p.batch, p.heads, p.seq, p.head_dim),
        "k": (p.batch, p.kv_heads, p.seq_kv, p.head_dim),
        "v": (p.batch, p.kv_heads, p.seq_kv, p.head_dim_v),
        "o": (p.batch, p.heads, p.seq, p.head_dim_v),
    }


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def copy_bytes(head_dim: int, dtype: str) -> int:
    """Widest copy (16, 8, 4 or 2 bytes) to which every row of a contiguous tensor is aligned."""
    return math.gcd(head_dim * DTYPE_BYTES[dtype], 16)


def _typed(cls: type[Any], data: Mapping[str, Any]) -> Any:
    """A dataclass from JSON, checking that every value has the type its field was declared with."""
    for f in fields(cls):
        if f.name in data and type(data[f.name]).__name__ != f.type:
            raise ValueError(f"{f.name} must be {f.type}, not {data[f.name]!r}")
    return cls(**data)

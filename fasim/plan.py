"""The freeze point: a Plan says everything a kernel is, and nothing after it chooses again.

``kernel`` is compile time: it is hashed, and its stem names file, symbol and cache folder.
``Launch`` is run time: ``plan.launch_for(problem)`` derives it for any shape the kernel can do.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fasim.errors import UsageError
from fasim.problem import DTYPE_BYTES, Problem

SCHEMA = "fasim.plan/1"
WARP = 32

POINTERS = {  # by algorithm and pass; every kernel of a file takes the same parameters
    ("v1", "fwd"): ("q", "k", "v", "o", "lse", "o_acc", "m", "l"),
    ("v2", "fwd"): ("q", "k", "v", "o", "lse"),
    ("v2", "bwd"): ("q", "k", "v", "o", "do", "lse", "delta", "dq_acc", "dq", "dk", "dv"),
}
SIZES = ("heads", "kv_heads", "seq_q", "seq_kv")
STRIDED = {"fwd": ("q", "k", "v", "o"), "bwd": ("q", "k", "v", "o", "do")}
FACTORS = {"fwd": ("scale_log2",), "bwd": ("scale_log2", "scale")}
# What the templates make: a plan that asks for anything else is refused where it is read.
MADE: dict[str, tuple[str | bool, ...]] = {
    "algo": ("v1", "v2"),
    "pass_": ("fwd", "bwd"),
    "dtype": ("fp32", "fp16", "bf16"),
    "out_dtype": ("fp32", "fp16", "bf16"),
    "mask": ("full", "causal"),
    "softcap": (False,),
    "bias": ("none",),
    "pack_gqa": (False,),
    "scales": ("none",),
    "varlen": (False,),
    "deterministic": (False,),
    "splits": (False,),
}
BACKWARD_DTYPES = ("fp16", "bf16")  # it multiplies on the tensor cores
BACKWARD_STAGES = 2  # tiles of Q and dO in shared memory
QUERY_STEP = 32  # queries that a backward pass scores at once
# Least and most of a tile's numbers: a block has up to 1024 threads, __maxnreg__ takes 24 to 255.
TILE_RANGES = {
    "block_q": (1, 4096),
    "block_kv": (1, 4096),
    "keys_per_step": (1, 4096),
    "stages": (1, 256),
    "warps": (1, 32),
    "registers": (24, 255),
}
Scalar = int | float | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one thread block works. ``stages`` counts K/V tile pairs in shared memory, ``warps`` the
    warps that compute, ``step_kv`` the keys scored at a time (V1 keeps more in shared memory than
    its registers can score at once), ``registers`` what the compiler may use for a thread."""

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
    def sharing(self) -> int:
        """Warps of a backward pass that share keys: two where P goes through shared memory."""
        return 2 if self.p_in == "shared" else 1

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
        """(name, type) in the order of the parameter list: pointers, sizes, strides, scale.
        Types: ptr, i32, f32, and i64x3, a struct of three int64 (batch, head, seq)."""
        pointers = [(name, "ptr") for name in POINTERS[self.algo, self.pass_]]
        sizes = [(name, "i32") for name in SIZES]
        strides = [(f"{name}_strides", "i64x3") for name in STRIDED[self.pass_]]
        factors = [(name, "f32") for name in FACTORS[self.pass_]]
        return (*pointers, *sizes, *strides, *factors)

    def repeats(self, output: str) -> bool:
        """Whether an output has the same bits in every run: all that is not summed by atomic
        additions, which come in any order."""
        return self.deterministic or output != "dq"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One kernel of a file, launched: its symbol, a 1-D grid, the block, dynamic shared memory."""

    entry: str
    grid: int
    block: int
    smem_bytes: int = 0


Arrays = Mapping[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One run of a file: its kernels in their order, the value of every non-pointer argument, and
    the shapes of what they read (inputs), write (outputs) or need (workspaces)."""

    stages: tuple[Stage, ...]
    scalars: Mapping[str, Scalar]
    inputs: Arrays
    outputs: Arrays
    workspaces: Arrays = field(default_factory=dict)


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

        ``strides`` gives (batch, head, seq) strides in elements of q, k, v, o or do where they are
        not those of a contiguous (batch, heads, seq, head_dim) array.
        Raises UsageError if the kernel was not built for this problem.
        """
        problem = problem or self.problem
        self._check_serves(problem)
        return Launch(
            stages=self._stages(problem),
            scalars=self._scalars(problem, strides or {}),
            inputs=self._inputs(problem),
            outputs=self._outputs(problem),
            workspaces=self._workspaces(problem),
        )

    def _check_serves(self, problem: Problem) -> None:
        wanted = {name: getattr(problem, name) for name in _COMPILED_IN}
        wanted["softcap"] = problem.softcap > 0
        for name, asked in wanted.items():
            built = getattr(self.kernel, name)
            if asked != built:
                raise UsageError(
                    f"{self.kernel.stem} cannot run this problem",
                    why=f"it was built for {name} {built}, the problem has {asked}",
                    hint="plan and generate a kernel for this problem",
                )

    def _stages(self, problem: Problem) -> tuple[Stage, ...]:
        """A backward pass has a kernel before and one after its main one."""
        stem, threads = self.kernel.stem, self.kernel.tile.threads
        main = Stage(
            entry=stem, grid=self._grid(problem), block=threads, smem_bytes=self.smem_bytes
        )
        if self.kernel.pass_ == "fwd":
            return (main,)
        blocks = problem.batch * problem.heads * self._q_blocks(problem)
        before, after = (
            Stage(entry=f"{stem}_{name}", grid=blocks, block=threads)
            for name in ("prepare", "finish")
        )
        return before, main, after

    def _q_blocks(self, problem: Problem) -> int:
        return math.ceil(problem.seq / self.kernel.tile.block_q)

    def _grid(self, problem: Problem) -> int:
        """V1 is parallel over batch and heads, V2 also over blocks of queries; backward over the
        heads and blocks of keys."""
        if self.kernel.pass_ == "bwd":
            kv_blocks = math.ceil(problem.seq_kv / self.kernel.tile.block_kv)
            return problem.batch * problem.kv_heads * kv_blocks
        q_blocks = self._q_blocks(problem)
        per_head = min(q_blocks, 1) if self.kernel.algo == "v1" else q_blocks
        return problem.batch * problem.heads * per_head

    def _scalars(
        self, problem: Problem, strides: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Scalar]:
        sizes = (problem.heads, problem.kv_heads, problem.seq, problem.seq_kv)
        shapes = tensor_shapes(problem)
        steps = {
            f"{name}_strides": tuple(strides.get(name, contiguous_strides(shapes[name])[:3]))
            for name in STRIDED[self.kernel.pass_]
        }
        return {**dict(zip(SIZES, sizes, strict=True)), **steps, **self._factors(problem)}

    def _factors(self, problem: Problem) -> dict[str, Scalar]:
        """Softmax scale times log2(e): exp(scale * s) is one exp2 of one product. The gradients of
        Q and K take the plain scale."""
        factors = {"scale_log2": problem.scale * math.log2(math.e), "scale": problem.scale}
        return {name: factors[name] for name in FACTORS[self.kernel.pass_]}

    def _inputs(self, problem: Problem) -> Arrays:
        """A backward pass reads what the forward one left, and the gradient of O."""
        shapes, dtype = tensor_shapes(problem), self.kernel.dtype
        if self.kernel.pass_ == "fwd":
            return {name: (shapes[name], dtype) for name in ("q", "k", "v")}
        given = {name: (shapes[name], dtype) for name in ("q", "k", "v", "o", "do")}
        return {**given, "lse": (shapes["o"][:3], "fp32")}

    def _outputs(self, problem: Problem) -> Arrays:
        shapes = tensor_shapes(problem)
        if self.kernel.pass_ == "bwd":
            return {f"d{name}": (shapes[name], self.kernel.dtype) for name in ("q", "k", "v")}
        shape = shapes["o"]
        return {"o": (shape, self.kernel.out_dtype), "lse": (shape[:3], "fp32")}

    def _workspaces(self, problem: Problem) -> Arrays:
        """V1 keeps O, m and l in HBM between its steps over K and V; backward D = rowsum(dO * O),
        and dQ in whole tiles until all blocks have added to it."""
        if self.kernel.pass_ == "bwd":
            heads = (problem.batch, problem.heads)
            rows = self._q_blocks(problem) * self.kernel.tile.block_q
            tiles = (*heads, rows, padded(problem.head_dim))
            return {"delta": ((*heads, problem.seq), "fp32"), "dq_acc": (tiles, "fp32")}
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
        """Inverse of to_json; extra entries are ignored.

        Raises UsageError for anything malformed, and for a kernel that no template makes or that
        does not serve the problem beside it. Whether the tile fits a GPU is not asked here.
        """
        try:
            plan = cls._from_json(data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                "this is not a fasim plan",
                why=f"{type(error).__name__}: {error}",
                hint="make one with `fasim plan --json -o plan.json`",
            ) from error
        if why := next(plan._nonsense(), ""):
            raise senseless(why)
        plan._check_serves(plan.problem)
        return plan

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
            smem_bytes=_whole(data["smem_bytes"]),
        )

    def _nonsense(self) -> Iterator[str]:
        """What no edit by hand may ask for, as far as it shows without the model."""
        kernel = self.kernel
        for name, made in MADE.items():
            if (value := getattr(kernel, name)) not in made:
                yield f"no template makes a kernel with {name.rstrip('_')} {value!r}"
        if not re.fullmatch(r"sm_\d+[af]?", kernel.arch):
            yield f"arch {kernel.arch!r} is not of the form sm_80"
        if self.smem_bytes < 1:
            yield f"smem_bytes is {self.smem_bytes}"
        if (kernel.algo, kernel.pass_) not in POINTERS:
            yield f"no template makes the backward pass of {kernel.algo}"
        if kernel.pass_ == "bwd" and kernel.dtype not in BACKWARD_DTYPES:
            yield f"no template makes a backward pass in {kernel.dtype}"
        yield from _ragged(kernel.tile, kernel.pass_)


def _ragged(tile: Tile, pass_: str) -> Iterator[str]:
    """Why a tile cannot be compiled: a number out of range, parts that do not make it whole."""
    for name, (least, most) in TILE_RANGES.items():
        if not least <= (value := getattr(tile, name)) <= most:
            yield f"{name} is {value}, not between {least} and {most}"
    if pass_ == "bwd":
        yield from _ragged_bwd(tile)
    elif tile.block_q % (16 * tile.warps):
        yield f"block_q {tile.block_q} is not whole 16-row steps for each of {tile.warps} warps"
    if tile.block_kv % tile.keys_per_step or tile.keys_per_step % 16:
        yield f"block_kv {tile.block_kv} is not whole steps of {tile.keys_per_step} keys, 16 each"
    if tile.p_in not in (("registers", "shared") if pass_ == "bwd" else ("registers",)):
        yield f"no template keeps P in {tile.p_in!r}"


def _ragged_bwd(tile: Tile) -> Iterator[str]:
    """The same where a warp owns keys, and queries come 32 at a time through two slots."""
    if tile.warps % tile.sharing or tile.block_kv * tile.sharing % (16 * tile.warps):
        yield f"block_kv {tile.block_kv} is not whole 16-key steps for each of {tile.warps} warps"
    if tile.block_q % (step := QUERY_STEP * tile.sharing):
        yield f"block_q {tile.block_q} is not whole steps of {step} queries"
    if tile.stages != (stages := BACKWARD_STAGES + tile.sharing - 1):
        yield f"{tile.stages} stages, but a backward pass with P in {tile.p_in} has {stages}"
    if tile.keys_per_step != tile.block_kv:
        yield f"step_kv {tile.step_kv}, but a backward pass scores all keys at once"


def senseless(why: str, where: str = "") -> UsageError:
    """A plan that can be read, and means nothing that can be built."""
    hint = "plan again with `fasim plan`; --tile MxN asks for a tile of your own"
    return UsageError("this plan makes no sense", where=where, why=why, hint=hint)


_COMPILED_IN = ("dtype", "out_dtype", "head_dim", "head_dim_v", "mask", "bias", "varlen")


def tensor_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of q, k, v, o and the gradient of o as (batch, heads, seq, head_dim)."""
    p = problem
    return {
        "q": (p.batch, p.heads, p.seq, p.head_dim),
        "k": (p.batch, p.kv_heads, p.seq_kv, p.head_dim),
        "v": (p.batch, p.kv_heads, p.seq_kv, p.head_dim_v),
        "o": (p.batch, p.heads, p.seq, p.head_dim_v),
        "do": (p.batch, p.heads, p.seq, p.head_dim_v),
    }


def padded(head_dim: int) -> int:
    """head_dim rounded up to whole matrix instructions."""
    return -(-head_dim // 16) * 16


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def copy_bytes(head_dim: int, dtype: str) -> int:
    """Widest copy (16, 8, 4 or 2 bytes) to which every row of a contiguous tensor is aligned."""
    return math.gcd(head_dim * DTYPE_BYTES[dtype], 16)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _typed(cls: type[Any], data: Mapping[str, Any]) -> Any:
    """A dataclass from JSON, checking that every value has the type its field was declared with."""
    for f in fields(cls):
        if f.name in data and type(data[f.name]).__name__ != f.type:
            raise ValueError(f"{f.name} must be {f.type}, not {data[f.name]!r}")
    return cls(**data)

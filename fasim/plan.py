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
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from fasim.errors import UsageError
from fasim.problem import DTYPE_BYTES, QUANTISED, Problem
from fasim.rounds import heads_together

SCHEMA = "fasim.plan/1"
WARP = 32

_GIVEN, _GRADIENTS = ("q", "k", "v", "o", "do", "lse"), ("dq", "dk", "dv")
SCALE_INPUTS = ("q_scale", "k_scale", "v_scale")  # of e4m3: real values are stored * scale
_QUANTISED = ("q", "k", "v", "q8", "k8", "vt", *SCALE_INPUTS)
POINTERS = {  # by algorithm and pass; every kernel of a file takes the same parameters
    ("v1", "fwd"): ("q", "k", "v", "o", "lse", "o_acc", "m", "l"),
    ("v2", "fwd"): ("q", "k", "v", "o", "lse"),
    ("v2_split", "fwd"): ("q", "k", "v", "o", "lse", "o_part", "m_part", "l_part"),
    ("v3", "fwd"): ("lse",),
    ("v3_packed", "fwd"): ("lse",),
    ("v3_e4m3", "fwd"): ("v", "vt", "lse"),
    ("v3_blocks", "fwd"): (*_QUANTISED, "lse"),
    ("v3_heads", "fwd"): (*_QUANTISED, "most", "lse"),
    ("v1", "bwd"): (*_GIVEN, "delta", "dq_acc", *_GRADIENTS),
    ("v2", "bwd"): (*_GIVEN, "delta", "dq_acc", *_GRADIENTS),
    ("v2_ordered", "bwd"): (*_GIVEN, "delta", "dq_acc", "turns", *_GRADIENTS),
    ("v2_second_pass", "bwd"): (*_GIVEN, "delta", *_GRADIENTS),
}
SIZES = ("heads", "kv_heads", "seq_q", "seq_kv")
PACKED_SIZES = {
    "fwd": ("heads", "kv_heads", "longest_q", "total_q"),
    "bwd": ("heads", "kv_heads", "longest_q", "longest_k", "total_q"),
}
V3_SIZES = ("batch", *SIZES, "heads_together")
V3_GROUPED_SIZES = (*V3_SIZES, "group_log2")
V3_PACKED_SIZES = (
    "batch",
    "heads",
    "kv_heads",
    "longest_q",
    "longest_k",
    "total_q",
    "heads_together",
)
PADDED = "_padded"  # after the name of a tensor: its copy in rows that TMA takes
STRIDED = {"fwd": ("q", "k", "v", "o"), "bwd": ("q", "k", "v", "o", "do")}
SCALE_BLOCK = 128  # rows that share a scale factor where blocks have their own
# Read by those with the option.
OPTION_INPUTS = ("slopes", "bias", "cu_seqlens_q", "cu_seqlens_k", *SCALE_INPUTS)
# What the templates make: a plan that asks for anything else is refused where it is read.
MADE: dict[str, tuple[str | bool, ...]] = {
    "algo": ("v1", "v2", "v3"),
    "pass_": ("fwd", "bwd"),
    "dtype": ("fp32", "fp16", "bf16", "e4m3"),
    "out_dtype": ("fp32", "fp16", "bf16"),
    "mask": ("full", "causal", "window"),
    "softcap": (False, True),
    "bias": ("none", "alibi", "dense", "dense_fp32"),
    "pack_gqa": (False, True),
    "scales": ("none", "tensor", "head", "block"),
    "varlen": (False, True),
    "deterministic": (False, True),
    "splits": (False, True),
    "dq": ("atomic", "ordered", "second_pass"),
    "in_dtype": ("", *QUANTISED),
    "incoherent": (False, True),
}
E4M3_VARIANTS = (("v2", "fwd"), ("v3", "fwd"))
V3_DTYPES = {"fp16": ("fp16",), "bf16": ("bf16",), "e4m3": ("fp16", "bf16")}  # to which of O
LAZY_DTYPES = ("fp16", "bf16")  # V2 moves their softmax reference only where a weight grows large
# How V2 backward sums dQ so that every run gives the same bits: additions in the order of the keys,
# or a kernel of its own that adds in registers.
FORMS = ("ordered", "second_pass")
V3 = ("v3", "v3_packed")  # variants: a tile's rows are the queries of a head, or of all of a group
PACKED = ("v2_split", "v3_packed")  # variants whose rows are those of all heads of a group
PACKINGS = ("packed", "unpacked")
# Variants that start the longest tiles of several heads first. Where additions are ordered, a block
# waits for others of its head, which have an order of their own.
LONGEST_FIRST = (("v2", "fwd"), ("v2", "bwd"), ("v2_second_pass", "bwd"))
ABREAST = 16  # heads whose blocks start side by side where additions are ordered
LONG_ROW = 128  # columns; longer rows have a form of their own where they are no power of two
BACKWARD_STAGES = 2  # tiles of Q and dO in shared memory, one more where two warps share keys
FOUR = 4  # warps of a backward pass that share keys, where two would have no room
QUERY_STEP = 32  # queries that a backward warp scores at once, where its share has as many
LEAST_QUERY_STEP = {"fp32": 8, "fp16": 16, "bf16": 16}  # for each 16 keys of the warp
# V3: warps of a group that multiplies together, and the rows it multiplies; threads of the group
# that loads; columns of a tile's slabs, rows of 128 bytes; the most shared memory of a block.
WARPGROUP, WARPGROUP_ROWS, LOADER_THREADS = 4, 64, 128
# V3's consumers that keep Q: registers of each beside S, P, O and Q, those that an option may take
# besides, and the most of all that compile without spills (180 tiles, nvcc 13.0).
KEPT_BASE, KEPT_OPTION, MOST_KEPT = 32, 8, 232
# V3's thread blocks on an SM, by their consumer warpgroups: those of one come in threes.
V3_BLOCKS = {1: 3, 2: 1, 3: 1}
SLAB_BYTES, HOPPER_SMEM = 128, 232448
# V3 in e4m3: a row of ones joins those of V transposed, whose keys fill whole slabs; threads of a
# block that transposes, and the bytes that each does.
ONES, TRANSPOSERS, TRANSPOSED_BYTES = 1, 64, 256
TMA_BOX_ROWS = 256  # at most
IDLE_SPARES = 0.2  # of a tile's time, for each consumer in e4m3 that has no rows (docs/kernels.md)
# Of P V that V3 multiplies at once, by the computing warps: all of so many, else rounds of up to
# so many, of which two are under way. More would spill.
ONE_ROUND, MOST_COLUMNS = {8: 136, 12: 96}, {8: 56, 12: 72}
PADDERS, PADDED_BYTES = 128, 16  # threads of a block that pads rows, and the bytes of each
# V3 from 16 bits: threads of a block that quantises SCALE_BLOCK rows of up to so many columns, and
# bytes in which its warps leave their largest numbers.
QUANTISERS = {128: 256, 256: 512}
QUANTISER_TAIL_BYTES = 64
# Incoherent processing: the sign of each column, a bit each, drawn once.
SIGNS = hashlib.sha256(b"incoherent").digest()
TMA_BYTES = 16  # a tensor's address and its strides are multiples
V3_TAIL_BYTES = 1024  # barriers and what else lies behind the tiles
# Split keys: parts of a row at most, and what a block costs beside its tiles of keys, in tiles.
MOST_SPLITS = 128
ENDS_TILES = 2
MOST_ROWS = 2**31 - 4096  # of one K/V head: packed rows are int32
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
    warps that compute, ``step_kv`` the keys a warp scores at a time (V1 keeps more in shared memory
    than its registers can score at once; where keys are split, the warps share a tile's keys),
    ``registers`` what the compiler may use for a thread, ``sharers`` the warps of a backward pass
    that share keys."""

    block_q: int
    block_kv: int
    stages: int = 1
    warps: int = 4
    step_kv: int = 0  # 0: block_kv
    p_in: str = "registers"  # or "shared"
    registers: int = 255
    sharers: int = 0  # 0: two where P goes through shared memory, else one

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def sharing(self) -> int:
        """Warps of a backward pass that share keys."""
        return self.sharers or (2 if self.p_in == "shared" else 1)

    @property
    def frees(self) -> bool:
        """Whether a slot of Q and dO is given back within the step: dV and dK are made first."""
        return self.sharing == FOUR

    @property
    def query_step(self) -> int:
        """Queries that a warp of a backward pass scores at once."""
        return min(QUERY_STEP, self.block_q // self.sharing)

    @property
    def keys_per_step(self) -> int:
        return self.step_kv or self.block_kv

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv}"


def transposes(algo: str, dtype: str) -> bool:
    """Whether a kernel of the file lays out V anew, with the keys contiguous: wgmma multiplies
    bytes only so."""
    return (algo, dtype) == ("v3", "e4m3")


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
    dq: str = "atomic"  # of a backward pass of V2: how the parts of dQ are summed
    in_dtype: str = ""  # of Q, K and V where the file quantises them
    incoherent: bool = False

    @property
    def variant(self) -> str:
        """The algorithm under the name of its template and of its equations in the model."""
        packed = self.pack_gqa and self.algo == "v3"
        return variant_of(self.algo, self.splits, self.dq, packed)

    @property
    def form(self) -> str:
        """Which of its algorithm's forms it is, as the planner takes it; "" if it has one."""
        if (self.algo, self.pass_) == ("v3", "fwd"):
            return PACKINGS[not self.pack_gqa]
        return self.dq if self.deterministic else ""

    @property
    def transposes(self) -> bool:
        return transposes(self.algo, self.dtype)

    @property
    def quantises(self) -> bool:
        """Whether kernels of the file make e4m3 of inputs in 16 bits."""
        return self.in_dtype != ""

    @property
    def quantisers(self) -> int:
        """Threads of a block that quantises."""
        return quantisers(self)

    @property
    def parameters(self) -> str:
        """The variant under which POINTERS knows what it takes."""
        if self.quantises:
            return "v3_blocks" if self.scales == "block" else "v3_heads"
        return f"{self.variant}_e4m3" if self.transposes else self.variant

    @property
    def padded_tensors(self) -> tuple[str, ...]:
        """Those of Q, K, V and O that the kernel copies to, or O from, rows that TMA takes."""
        return padded_tensors(self) if (self.algo, self.pass_) == ("v3", "fwd") else ()

    @property
    def mapped(self) -> dict[str, str]:
        """The array whose map V3 takes for each tensor: what TMA moves. In e4m3 that of V is
        transposed, by a kernel before; where that quantises, Q and K are what it made."""
        if (self.algo, self.pass_) != ("v3", "fwd"):
            return {}
        names = {name: name for name in ("q", "k", "v", "o")}
        names |= {name: f"{name}{PADDED}" for name in self.padded_tensors}
        names |= {"v": "vt"} if self.transposes else {}
        return names | ({"q": "q8", "k": "k8"} if self.quantises else {})

    @property
    def rescored(self) -> tuple[str, ...]:
        """The arrays whose rows a warp of V3 in 16 bits reads again where scores are gone that it
        needs: Q and K as TMA finds them."""
        gone = self.algo == "v3" and rescores(self) and not self.tiles_stay
        return (self.mapped["q"], self.mapped["k"]) if gone else ()

    @property
    def tiles_stay(self) -> bool:
        """See the function of that name."""
        return self.algo == "v3" and tiles_stay(self, self.tile)

    @property
    def streams(self) -> bool:
        """See the function of that name."""
        return self.algo == "v3" and streams(self, self.tile)

    @property
    def ragged_first(self) -> bool:
        """See the function of that name."""
        return self.variant == "v3" and ragged_first(self)

    @property
    def few_together(self) -> int:
        """Heads that V3 at least hands out together: blocks that walk the same keys at once are
        slower (docs/kernels.md)."""
        return 3 if self.scaled else 2

    @property
    def o_in_q(self) -> bool:
        """See the function of that name."""
        return self.variant == "v3" and o_in_q(self, self.tile)

    @property
    def warps_release_q(self) -> bool:
        """Whether every warp of V3 gives Q's place back by itself, and not a warpgroup as one."""
        return (self.scaled and not self.o_in_q) or self.tiles_stay or self.keeps_q

    @property
    def passes_by(self) -> bool:
        """See the function of that name."""
        return self.variant == "v3" and bool(passes_by(self, self.tile))

    @property
    def keeps_q(self) -> bool:
        """See the function of that name."""
        return self.algo == "v3" and bool(keeps_q(self, self.tile))

    @property
    def pointers(self) -> tuple[str, ...]:
        """Arrays that every kernel of the file takes by address, but for those of options."""
        copied = self.padded_tensors
        found = (*copied, *(f"{name}{PADDED}" for name in copied), *self.rescored)
        return (*dict.fromkeys(found), *POINTERS[self.parameters, self.pass_])

    @property
    def digest(self) -> str:
        """8 hex digits over every field: equal kernels share it, others do not. A field that came
        later counts where it has another value than all earlier kernels, which keep their names."""
        text = json.dumps(_distinguishing(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def stem(self) -> str:
        """Readable name of file, symbol, cache folder and test."""
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"v{self.head_dim_v}"
        words = [self.algo, self.pass_, self.arch.replace("_", ""), self.dtype, dims, self.mask]
        options = {
            "softcap": self.softcap,
            self.bias: self.bias != "none",
            "varlen": self.varlen,
            "split": self.splits,
            "packed": self.variant == "v3_packed",
            self.dq: self.dq != "atomic",
            f"from{self.in_dtype}": self.quantises,
            "incoherent": self.incoherent,
        }
        words += [name.replace("_", "") for name, on in options.items() if on]
        return "_".join([*words, self.digest])

    @property
    def threads(self) -> int:
        """Of a block: those that compute, in V3 also those that load."""
        return self.tile.threads + LOADER_THREADS * (self.algo == "v3")

    @property
    def turing(self) -> bool:
        """Built for compute capability 7.5: copies go through registers, matrix instructions are 8
        deep, and conversions take one float."""
        return self.arch == "sm_75"

    @property
    def cp_async(self) -> bool:
        """Whether its copies run in the background: from sm_80 on, but for V1's."""
        return self.algo != "v1" and not self.turing

    @property
    def lazy(self) -> bool:
        """Whether weights may outgrow 1, relative to an earlier maximum: not the range of e4m3."""
        return self.algo == "v2" and not self.splits and self.dtype in LAZY_DTYPES

    @property
    def odd_rows(self) -> bool:
        """Whether V2 gives rows of Q and K that are long and no power of two a form of their own:
        S unrolled whole, rows copied by few threads. Compiled for sm_100 that spills 8 bytes at
        160 columns under a causal mask."""
        columns = padded(self.head_dim, self.dtype)
        odd = columns > LONG_ROW and columns & (columns - 1) != 0
        forward = self.lazy and self.pass_ == "fwd" and self.cp_async
        return odd and forward and self.arch != "sm_100"

    @property
    def paired(self) -> bool:
        """Whether K and V of a step arrive together: one barrier a step instead of two, where a
        ring has room for the next step's."""
        return self.odd_rows and self.tile.stages > 1

    @property
    def longest_first(self) -> bool:
        """Whether V2 starts the longest tiles of several heads before shorter ones."""
        return starts_longest(self.variant, self.pass_, self.mask)

    @property
    def scaled(self) -> bool:
        """Whether Q, K and V come with scale factors."""
        return self.scales != "none"

    @property
    def granule(self) -> int:
        """Columns, and keys, that one step of a matrix product takes."""
        return matrix_granule(self.dtype)

    @property
    def mma_depth(self) -> int:
        """Columns that one matrix instruction takes."""
        return 8 if self.turing else self.granule

    @property
    def plain(self) -> bool:
        """Full or causal attention without any other option."""
        asked = (self.mask == "window", self.softcap, self.bias != "none", self.varlen)
        return not any(asked)

    @property
    def bias_dtype(self) -> str:
        """Of a dense bias: that of the inputs or fp32; "" without one."""
        given = self.in_dtype or self.dtype
        return {"dense": given, "dense_fp32": "fp32"}.get(self.bias, "")

    @property
    def option_inputs(self) -> tuple[str, ...]:
        """Arrays that only a kernel with the option reads."""
        bias = {"none": (), "alibi": ("slopes",)}.get(self.bias, ("bias",))
        ends = ("cu_seqlens_q", "cu_seqlens_k") if self.varlen else ()
        given = self.scaled and not self.quantises
        return bias + ends + (SCALE_INPUTS if given else ())

    @property
    def factors(self) -> tuple[str, ...]:
        """What scores are multiplied by: softmax scale times log2(e), so that exp(scale s) is one
        exp2 of one product; with a softcap scale / cap before its tanh and cap log2(e) after. The
        gradients of Q and K take the plain scale."""
        scores = ("softcap_scale", "softcap_log2") if self.softcap else ("scale_log2",)
        return (*scores, "scale") if self.pass_ == "bwd" else scores

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """(name, type) in the order of the parameter list: maps, pointers, sizes, strides, factors,
        window. Types: map, a tensor's for TMA, ptr, i32, f32, and i64x3, a struct of three int64
        (batch, head, seq)."""
        maps = [(f"{name}_map", "map") for name in self.mapped.values()]
        names = (*self.pointers, *self.option_inputs)
        pointers = [(name, "ptr") for name in names]
        lengths = PACKED_SIZES[self.pass_] if self.varlen else SIZES
        names = (*lengths, *["splits"] * self.splits, *["heads_together"] * self.longest_first)
        if self.algo == "v3":
            names = self._v3_sizes
        sizes = [(name, "i32") for name in names]
        strided = STRIDED[self.pass_]
        if self.algo == "v3":
            copied = tuple(name for name in self.padded_tensors if name != "o")
            given = ("q", "k", "v") if self.quantises else (*copied, "v")
            strided = given if self.transposes else copied
            strided += self.rescored
        strided += ("bias",) if self.bias_dtype else ()
        strides = [(f"{name}_strides", "i64x3") for name in strided]
        factors = [(name, "f32") for name in self.factors]
        windows = ("window_left", "window_right") if self.mask == "window" else ()
        more = [(name, "i32") for name in windows]
        return (*maps, *pointers, *sizes, *strides, *factors, *more)

    @property
    def _v3_sizes(self) -> tuple[str, ...]:
        if self.pack_gqa:
            return V3_GROUPED_SIZES
        copies_keys = self.scaled or set(self.padded_tensors) & {"k", "v"}
        sizes = V3_PACKED_SIZES if self.varlen else V3_SIZES
        unused = () if copies_keys else ("longest_k",)
        return (*(n for n in sizes if n not in unused), *["group"] * bool(self.rescored))

    @property
    def asks_slots(self) -> bool:
        """Whether a launch depends on how many thread blocks the GPU runs at once."""
        return self.splits or self.algo == "v3" or self.longest_first

    def repeats(self, output: str) -> bool:
        """Whether an output has the same bits in every run: all that is not summed by atomic
        additions, which come in any order."""
        return self.deterministic or self.algo == "v1" or output != "dq"

    @property
    def last_stage(self) -> str:
        """The kernel of a backward file that follows the main one: it rounds dQ, or makes it."""
        if self.dq == "second_pass":
            return "queries"
        return "finish" if self.algo == "v2" else ""


LATER = ("dq", "in_dtype", "incoherent")  # fields that earlier kernels did not have


def _distinguishing(kernel: KernelSpec) -> dict[str, Any]:
    """Its fields, but for those that came later and have the value of all earlier kernels."""
    values = asdict(kernel)
    for name in LATER:
        if values[name] == KernelSpec.__dataclass_fields__[name].default:
            del values[name]
    if not kernel.tile.sharers:
        del values["tile"]["sharers"]
    return values


def backward_stages(sharing: Any) -> Any:
    """Tiles of Q and dO that V2's backward pass holds, by the warps that share keys: where two do,
    the last is still at work while one is and the next arrives; four give its slot back first."""
    return BACKWARD_STAGES + (sharing == 2)


def weight_tiles(sharing: Any) -> Any:
    """Tiles of dS and P in its shared memory: two of dS, as dQ comes a step late; none of P where
    it stays in registers, two where dV does too, else one."""
    return 2 + (sharing > 1) + (sharing == 2)


def least_query_step(dtype: str, keys: Any, sharing: Any) -> Any:
    """The fewest queries a warp of a backward pass with so many keys scores at once."""
    least = LEAST_QUERY_STEP.get(dtype, QUERY_STEP)
    return least * (keys // 16 * (sharing < FOUR) + (sharing == FOUR))


def starts_longest(variant: str, pass_: str, mask: str) -> bool:
    """Whether a kernel of V2 takes heads together and starts their longest tiles first: those of a
    causal mask differ, and the last to start should be short. Those of a window are much alike."""
    return mask == "causal" and (variant, pass_) in LONGEST_FIRST


def variant_of(algo: str, splits: bool, dq: str, packed: bool = False) -> str:
    """An algorithm with split keys, packed rows or one of FORMS for its dQ has its own name."""
    if splits:
        return f"{algo}_split"
    if packed:
        return f"{algo}_packed"
    return algo if dq == "atomic" else f"{algo}_{dq}"


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
    """One run of a file: its kernels in their order, the value of every argument passed by value,
    and the shapes of what they read (inputs), write (outputs) or need (workspaces). ``boxes`` has
    the rows that TMA moves of a tensor at once, where a kernel takes its map; ``groups`` the heads
    that stand side by side in them, where they do."""

    stages: tuple[Stage, ...]
    scalars: Mapping[str, Scalar]
    inputs: Arrays
    outputs: Arrays
    workspaces: Arrays = field(default_factory=dict)
    boxes: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel, the problem it was planned for, and what the planner promised about it."""

    problem: Problem
    gpu: str
    kernel: KernelSpec
    smem_bytes: int  # dynamic shared memory of one block
    slots: int = 0  # split keys, V3, V2 longest first: thread blocks that the GPU runs at once
    l2_bytes: int = 0  # V2 longest first: of the GPU

    @property
    def registers(self) -> int:
        """Per thread: what the compiler may use, and about what it does."""
        return self.kernel.tile.registers

    def launch_for(
        self,
        problem: Problem | None = None,
        strides: Mapping[str, tuple[int, ...]] | None = None,
        tokens: tuple[int, int] | None = None,
        splits: int = 0,
    ) -> Launch:
        """The launch of this kernel on ``problem`` (default: the planned one).

        ``strides`` gives (batch, head, seq) strides in elements of q, k, v, o or do where they are
        not those of a contiguous (batch, heads, seq, head_dim) array. A varlen kernel runs
        ``batch`` sequences of at most seq queries and seq_kv keys; ``tokens`` says how many there
        are of each in all (default: every sequence has the most), and arrays are
        (tokens, heads, head_dim).
        ``splits`` is for kernels that split keys: parts to divide them into, 0 for as many as serve
        the GPU best.
        Raises UsageError if the kernel was not built for this problem.
        """
        problem = problem or self.problem
        self._check_serves(problem)
        splits = (splits or self._splits(problem)) if self.kernel.splits else 1
        tokens = tokens or (problem.batch * problem.seq, problem.batch * problem.seq_kv)
        shapes = packed_shapes(problem, tokens) if self.kernel.varlen else tensor_shapes(problem)
        wide = {f"{n}{PADDED}": self._padded(n, shapes) for n in self.kernel.padded_tensors}
        steps = {**_strides({**shapes, **wide}), **(strides or {})}
        return Launch(
            stages=self._stages(problem, splits),
            scalars=self._scalars(problem, steps, tokens, splits),
            inputs=self._inputs(problem, shapes, tokens),
            outputs=self._outputs(shapes),
            workspaces=self._workspaces(problem, shapes, tokens, splits),
            boxes=self._boxes() if self.kernel.algo == "v3" else {},
            groups=dict.fromkeys("qo", problem.group) if self.kernel.variant == "v3_packed" else {},
        )

    def _boxes(self) -> dict[str, int]:
        """A consumer's rows of Q and O, a tile's of K and V, or some of V transposed."""
        rows, keys = WARPGROUP_ROWS, self.kernel.tile.block_kv
        of_v = value_box_rows(self.kernel.head_dim_v) if self.kernel.transposes else keys
        boxes = {"q": rows, "k": keys, "v": of_v, "o": rows}
        return {array: boxes[name] for name, array in self.kernel.mapped.items()}

    def _stages(self, problem: Problem, splits: int) -> tuple[Stage, ...]:
        """The kernel; where it splits keys, then the one that combines: a warp a row. Where rows
        are padded, and backward, one before and one after it."""
        stem, threads = self.kernel.stem, self.kernel.threads
        grid, heads = self._blocks(problem) * splits, problem.batch * problem.heads
        main = Stage(entry=stem, grid=grid, block=threads, smem_bytes=self.smem_bytes)
        if self.kernel.splits:
            return main, Stage(entry=f"{stem}_combine", grid=heads * problem.seq, block=WARP)
        if self.kernel.pass_ == "fwd":
            padding, cutting = self._padding(problem)
            return *padding, *self._laying_out(problem), main, *cutting
        blocks = heads * self._q_blocks(problem)
        before = Stage(entry=f"{stem}_prepare", grid=blocks, block=threads)
        return before, main, *self._after_main(problem, blocks)

    def _laying_out(self, problem: Problem) -> tuple[Stage, ...]:
        """The kernels that quantise, or the one that lays out V anew."""
        if self.kernel.quantises:
            return self._quantise(problem)
        if not self.kernel.transposes:
            return ()
        slabs = problem.batch * problem.kv_heads * value_slabs(problem) if lays_out(problem) else 0
        grid = -(-slabs * transposers(problem.head_dim_v) // TRANSPOSERS)
        return (Stage(entry=f"{self.kernel.stem}_transpose", grid=grid, block=TRANSPOSERS),)

    def _padding(self, problem: Problem) -> list[tuple[Stage, ...]]:
        """The kernels that copy rows to, and those of O from, rows that TMA takes: a thread for
        PADDED_BYTES of a padded row, if all sequences are as long as the longest. None where
        nothing is padded."""
        stages: list[tuple[Stage, ...]] = []
        shapes = tensor_shapes(problem)
        for word, tensors in (("pad", "qkv"), ("unpad", "o")):
            copied = [name for name in self.kernel.padded_tensors if name in tensors]
            wide = {name: self._padded(name, shapes) for name in copied}
            size = sum(DTYPE_BYTES[self._type(n)] * math.prod(x) for n, x in wide.items())
            grid = -(-size // (PADDED_BYTES * PADDERS))
            stage = Stage(entry=f"{self.kernel.stem}_{word}", grid=grid, block=PADDERS)
            stages.append((stage,) if copied else ())
        return stages

    def _type(self, name: str) -> str:
        return self.kernel.out_dtype if name == "o" else self.kernel.dtype

    def _padded(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of a tensor in rows that TMA takes."""
        *outer, width = shapes[name]
        return (*outer, takable(width, self._type(name)))

    def _quantise(self, problem: Problem) -> tuple[Stage, ...]:
        """The kernels that make e4m3: one a block of rows, which finds the scale factors of heads
        and tensors in two launches before."""
        stem, threads = self.kernel.stem, self.kernel.quantisers
        blocks = sum(row_blocks(problem)) if lays_out(problem) else 0
        tile = SCALE_BLOCK * padded(self.kernel.head_dim_v, self.kernel.dtype)
        bytes_ = {"largest": 0, "scales": 0, "quantise": tile}
        shapes = scale_shapes(problem).values()
        factors = sum(map(math.prod, shapes)) if lays_out(problem) else 0
        stages = tuple(
            Stage(
                entry=f"{stem}_{name}",
                grid=factors if name == "scales" else blocks,
                block=threads,
                smem_bytes=more + QUANTISER_TAIL_BYTES,
            )
            for name, more in bytes_.items()
        )
        return stages[2:] if self.kernel.scales == "block" else stages

    def _after_main(self, problem: Problem, blocks: int) -> tuple[Stage, ...]:
        """Backward, dQ is rounded; or made, by blocks of as many queries as others have keys."""
        name, threads = self.kernel.last_stage, self.kernel.tile.threads
        if not name:
            return ()
        entry, smem = f"{self.kernel.stem}_{name}", 0
        if name == "queries":
            per_head = math.ceil(problem.seq / self.kernel.tile.block_kv)
            blocks, smem = problem.batch * problem.heads * per_head, self.smem_bytes
        return (Stage(entry=entry, grid=blocks, block=threads, smem_bytes=smem),)

    def _splits(self, problem: Problem) -> int:
        key_tiles = math.ceil(problem.seq_kv / self.kernel.tile.block_kv)
        return split_count(key_tiles, self._blocks(problem), self.slots)

    def _check_serves(self, problem: Problem) -> None:
        wanted = {name: getattr(problem, name) for name in _COMPILED_IN}
        wanted["softcap"] = problem.softcap > 0
        wanted["in_dtype"] = problem.in_dtype if problem.quantises else ""
        wanted["scales"] = problem.scales if problem.dtype == "e4m3" else "none"
        if self.kernel.mask == "window":
            del wanted["mask"]  # open on both sides it is none, open on the left a causal one
        for name, asked in wanted.items():
            built = getattr(self.kernel, name)
            if asked != built:
                raise UsageError(
                    f"{self.kernel.stem} cannot run this problem",
                    why=f"it was built for {name} {built}, the problem has {asked}",
                    hint="plan and generate a kernel for this problem",
                )
        if problem.deterministic and not self.kernel.repeats("dq") and self.kernel.pass_ == "bwd":
            raise UsageError(
                f"{self.kernel.stem} cannot run this problem",
                why="it adds to dQ in any order, the problem asks for the same bits in every run",
                hint="plan and generate a kernel for this problem",
            )
        if self.kernel.variant == "v3_packed" and (why := ungroupable(problem)):
            raise UsageError(
                f"{self.kernel.stem} cannot run this problem",
                why=why,
                hint="plan it again: a kernel that does not pack rows suits it",
            )
        if self.kernel.splits and problem.group * problem.seq > MOST_ROWS:
            raise UsageError(
                f"{self.kernel.stem} cannot run this problem",
                why=f"{problem.group} heads x {problem.seq} queries exceed {MOST_ROWS} packed rows",
                hint="plan it again: a kernel that does not split keys suits it",
            )

    def _q_blocks(self, problem: Problem) -> int:
        rows = problem.seq * (problem.group if self.kernel.pack_gqa else 1)
        return math.ceil(rows / self.kernel.tile.block_q)

    def _heads(self, problem: Problem) -> int:
        """Whose rows are cut into tiles: of packed rows those of K and V."""
        return problem.batch * (problem.kv_heads if self.kernel.pack_gqa else problem.heads)

    def _blocks(self, problem: Problem) -> int:
        """V1 is parallel over batch and heads, V2 also over blocks of queries; a block of packed
        rows serves every head that shares its keys; backward over the heads and blocks of keys."""
        if self.kernel.pass_ == "bwd":
            kv_blocks = math.ceil(problem.seq_kv / self.kernel.tile.block_kv)
            per_head = min(kv_blocks, 1) if self.kernel.algo == "v1" else kv_blocks
            return problem.batch * problem.kv_heads * per_head
        q_blocks = self._q_blocks(problem)
        per_head = min(q_blocks, 1) if self.kernel.algo == "v1" else q_blocks
        blocks = self._heads(problem) * per_head
        return min(blocks, self.slots) if self.kernel.algo == "v3" else blocks

    def _scalars(
        self,
        problem: Problem,
        strides: Mapping[str, tuple[int, ...]],
        tokens: tuple[int, int],
        splits: int,
    ) -> dict[str, Scalar]:
        p = problem
        values: dict[str, Scalar] = {
            **dict(zip(SIZES, (p.heads, p.kv_heads, p.seq, p.seq_kv), strict=True)),
            **{"longest_q": p.seq, "longest_k": p.seq_kv, "total_q": tokens[0], "splits": splits},
            **{"batch": p.batch, "heads_together": self._heads_together(p)},
            **{"group": p.group, "group_log2": p.group.bit_length() - 1},
            "bias_strides": contiguous_strides((p.batch, p.heads, p.seq, p.seq_kv))[:3],
            **{f"{name}_strides": tuple(steps) for name, steps in strides.items()},
            **_factors(problem),
            **_window(problem),
        }
        kinds = self.kernel.arguments
        return {name: values[name] for name, kind in kinds if kind not in ("ptr", "map")}

    def _heads_together(self, problem: Problem) -> int:
        """Heads whose tiles are handed out together, the longest first."""
        if self.kernel.longest_first:
            return self._longest_together(problem)
        q_blocks, blocks = self._q_blocks(problem), self._blocks(problem)
        costs = tuple(self._tile_cost(problem, q) for q in reversed(range(q_blocks)))
        alone = not self.kernel.scaled and 2 * q_blocks > blocks  # a head fills half of the GPU
        fewest = 1 if alone else self.kernel.few_together
        return heads_together(costs, self._heads(problem), blocks, fewest)

    def _tile_cost(self, problem: Problem, q_block: int) -> float:
        """What a tile of queries of V3 costs, in steps of all its consumers: its tiles of keys, and
        another for its beginning and end. In e4m3 consumers without rows leave theirs to others."""
        group, tile = problem.group if self.kernel.pack_gqa else 1, self.kernel.tile
        before = int(rows_before(problem, self.kernel.variant, self.kernel.pass_, tile.block_q))
        first = q_block * tile.block_q - before
        end = min(first + tile.block_q, problem.seq * group)
        lacking = (tile.block_q - (end - max(first, 0))) // WARPGROUP_ROWS
        idle = IDLE_SPARES * lacking * (self.kernel.dtype == "e4m3")
        first_key, end_key = problem.keys_seen(max(first, 0) // group, (end - 1) // group)
        steps = math.ceil(end_key / tile.block_kv) - first_key // tile.block_kv
        return max(steps, 1) * (1 - idle) + 1

    def _longest_together(self, problem: Problem) -> int:
        """Heads whose tiles V2 starts together, the longest first: as many as fill the GPU twice,
        if what their blocks walk fits in half of the L2, else as many as fill it once. Those are at
        work together anyway, and the long tiles of the next group start where short ones of this
        one end. Whole fillings end evenly, others do not: blocks of one to 128 steps played on the
        places of an H200 end 0.0 to 0.3 mean blocks after even work, with half a filling more up
        to 1.4 (docs/kernels.md). Unlike V3's rounds they need not be filled exactly."""
        heads = self._tiled_heads(problem)
        tiles = self._blocks(problem) // max(heads, 1)
        twice, once = (n * self.slots // max(tiles, 1) for n in (2, 1))
        fits = math.ceil(twice / self._sharing(problem)) * self._walked(problem)
        return max(1, min(twice if 2 * fits <= self.l2_bytes else once, heads))

    def _tiled_heads(self, problem: Problem) -> int:
        """Heads whose tiles the main kernel's blocks are."""
        backward = self.kernel.pass_ == "bwd"
        return problem.batch * problem.kv_heads if backward else self._heads(problem)

    def _sharing(self, problem: Problem) -> int:
        """Heads that walk the same tensors: forward those that share K and V."""
        return problem.group if self.kernel.pass_ == "fwd" else 1

    def _walked(self, problem: Problem) -> int:
        """Bytes that all blocks of a head walk: K and V; backward Q, dO, L, D and perhaps dQ in
        fp32 of all heads that share its keys."""
        p = problem
        row = (p.head_dim + p.head_dim_v) * DTYPE_BYTES[self.kernel.dtype]
        if self.kernel.pass_ == "fwd":
            return p.seq_kv * row
        dq = 4 * padded(p.head_dim, self.kernel.dtype) * (self.kernel.dq == "atomic")
        return p.group * p.seq * (row + 8 + dq)

    def _inputs(
        self, problem: Problem, shapes: Mapping[str, tuple[int, ...]], tokens: tuple[int, int]
    ) -> Arrays:
        """A backward pass reads what the forward one left, and the gradient of O."""
        p, kernel = problem, self.kernel
        options: dict[str, tuple[tuple[int, ...], str]] = {
            "slopes": ((p.heads,), "fp32"),
            "bias": ((p.batch, p.heads, p.seq, p.seq_kv), kernel.bias_dtype),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ((p.batch + 1,), "int32")),
            **{name: (shape, "fp32") for name, shape in scale_shapes(problem, tokens).items()},
        }
        given = ("q", "k", "v", "o", "do") if kernel.pass_ == "bwd" else ("q", "k", "v")
        dtype = kernel.in_dtype or kernel.dtype
        tensors = {name: (shapes[name], dtype) for name in given}
        if kernel.pass_ == "bwd":
            tensors["lse"] = (_rows(shapes["o"]), "fp32")
        return tensors | {name: options[name] for name in kernel.option_inputs}

    def _outputs(self, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
        if self.kernel.pass_ == "bwd":
            return {f"d{name}": (shapes[name], self.kernel.dtype) for name in ("q", "k", "v")}
        return {"o": (shapes["o"], self.kernel.out_dtype), "lse": (_rows(shapes["o"]), "fp32")}

    def _workspaces(
        self,
        problem: Problem,
        shapes: Mapping[str, tuple[int, ...]],
        tokens: tuple[int, int],
        splits: int,
    ) -> Arrays:
        """V1 keeps O, m and l in HBM between its steps over K and V; splits leave theirs there;
        backward D = rowsum(dO * O), and dQ in whole tiles until all blocks have added to it, with
        the turns they have taken where they take turns."""
        rows, columns = _rows(shapes["o"]), self.kernel.head_dim_v
        if self.kernel.pass_ == "bwd":
            turns = 1 + problem.batch * problem.heads * self._q_blocks(problem)
            kinds = {
                "delta": (rows, "fp32"),
                "dq_acc": (self._dq_tiles(problem, tokens), "fp32"),
                "turns": ((turns,), "int32"),
            }
            used = POINTERS[self.kernel.variant, "bwd"]
            return {name: kind for name, kind in kinds.items() if name in used}
        if self.kernel.splits:
            parts = (*rows, splits)
            o_part = ((*parts, columns), "fp32")
            return {"o_part": o_part, "m_part": (parts, "fp32"), "l_part": (parts, "fp32")}
        if self.kernel.algo != "v1":
            names = self.kernel.padded_tensors
            wide = {f"{n}{PADDED}": (self._padded(n, shapes), self._type(n)) for n in names}
            return {**wide, **self._laid_out(problem, shapes, tokens)}
        return {"o_acc": ((*rows, columns), "fp32"), "m": (rows, "fp32"), "l": (rows, "fp32")}

    def _laid_out(
        self, problem: Problem, shapes: Mapping[str, tuple[int, ...]], tokens: tuple[int, int]
    ) -> Arrays:
        """V transposed; of what quantises also Q and K in e4m3, scale factors, and where several
        blocks share those the largest magnitude of each."""
        if not self.kernel.transposes:
            return {}
        vt = {"vt": (transposed_shape(problem, tokens[1]), self.kernel.dtype)}
        if not self.kernel.quantises:
            return vt
        stored = {f"{n}8": (self._padded(n, shapes), self.kernel.dtype) for n in ("q", "k")}
        factors = {name: (shape, "fp32") for name, shape in scale_shapes(problem, tokens).items()}
        shared = self.kernel.scales != "block"
        return {
            **stored,
            **factors,
            **({"most": ((sum(row_blocks(problem)),), "fp32")} if shared else {}),
            **vt,
        }

    def _dq_tiles(self, problem: Problem, tokens: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the fp32 dQ. Every packed sequence begins in a tile of its own."""
        rows, columns = self.kernel.tile.block_q, padded(problem.head_dim)
        if self.kernel.varlen:
            return (tokens[0] // rows + problem.batch, problem.heads, rows, columns)
        return (problem.batch, problem.heads, self._q_blocks(problem) * rows, columns)

    def to_json(self) -> dict[str, Any]:
        kernel = _distinguishing(self.kernel)
        kernel["pass"] = kernel.pop("pass_")
        return {
            "schema": SCHEMA,
            "problem": self.problem.to_json(),
            "gpu": {"name": self.gpu, "arch": self.kernel.arch},
            "kernel": kernel,
            "smem_bytes": self.smem_bytes,
            **({"slots": self.slots} if self.kernel.asks_slots else {}),
            **({"l2_bytes": self.l2_bytes} if self.kernel.longest_first else {}),
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
            slots=_whole(data.get("slots", 0)),
            l2_bytes=_whole(data.get("l2_bytes", 0)),
        )

    def _nonsense(self) -> Iterator[str]:
        """What no edit by hand may ask for, as far as it shows without the model."""
        kernel = self.kernel
        for name, made in MADE.items():
            if (value := getattr(kernel, name)) not in made:
                yield f"no template makes a kernel with {name.rstrip('_')} {value!r}"
        if kernel.varlen and kernel.bias_dtype:
            yield "no template makes a kernel with varlen and a dense bias"
        if not re.fullmatch(r"sm_\d+[af]?", kernel.arch):
            yield f"arch {kernel.arch!r} is not of the form sm_80"
        if self.smem_bytes < 1:
            yield f"smem_bytes is {self.smem_bytes}"
        packed = kernel.variant == "v3_packed"
        if kernel.splits != (kernel.pack_gqa and not packed) or (
            kernel.splits and kernel.algo != "v2"
        ):
            yield "only V2 splits keys, and only with the heads of a group packed"
        if (kernel.variant, kernel.pass_) not in POINTERS:
            yield f"no template makes the backward pass of {kernel.variant}"
        if kernel.pass_ == "bwd" and kernel.dtype == "fp32" and kernel.tile.p_in != "shared":
            yield "no template makes a backward pass in fp32 with P in registers"
        if kernel.tile.sharers and kernel.tile.sharers != FOUR:
            yield f"sharers is {kernel.tile.sharers}, not 0 or {FOUR}"
        if kernel.tile.frees:
            yield from _nonsense_of_four(kernel)
        if kernel.deterministic != (kernel.dq != "atomic"):
            yield f"deterministic is {kernel.deterministic}, but dq is {kernel.dq}"
        if kernel.splits and not kernel.plain:
            yield "only plain attention has split keys: no window, softcap, bias or varlen"
        if kernel.scaled != (kernel.dtype == "e4m3"):
            yield f"scales {kernel.scales!r} in {kernel.dtype}: e4m3 has them, and nothing else"
        if kernel.scales == "block" and not kernel.transposes:
            yield f"no template makes {kernel.variant} with scale factors of blocks"
        if kernel.dtype == "e4m3" and (kernel.variant, kernel.pass_) not in E4M3_VARIANTS:
            yield f"no template makes the {kernel.variant} {kernel.pass_} kernel in e4m3"
        if kernel.bias_dtype == "e4m3":
            yield "no template makes a kernel with a dense bias in e4m3"
        if kernel.turing and (kernel.dtype == "bf16" or kernel.splits or kernel.pass_ == "bwd"):
            yield "sm_75 has no bf16, and no template splits keys or makes a backward pass there"
        if kernel.quantises and not kernel.transposes:
            yield f"no template makes {kernel.variant} in {kernel.dtype} from {kernel.in_dtype}"
        if kernel.incoherent and not kernel.quantises:
            yield "incoherent processing belongs to kernels that quantise their inputs"
        if kernel.algo == "v3":
            yield from _nonsense_v3(kernel)
        if (kernel.splits or kernel.algo == "v3") and self.slots < 1:
            yield f"slots is {self.slots}"
        yield from _ragged(kernel)


def split_count(key_tiles: int, blocks: int, slots: int) -> int:
    """Parts to divide the keys of ``blocks`` thread blocks into, of which ``slots`` run at once.

    A wave lasts as long as its longest part; the count of the least waves x tiles is taken, the
    smallest of equals, at most one part a tile.
    """

    def tiles_in_turn(splits: int) -> int:
        waves = math.ceil(blocks * splits / max(slots, 1))
        return waves * (math.ceil(key_tiles / splits) + ENDS_TILES)

    return min(range(1, max(1, min(key_tiles, MOST_SPLITS)) + 1), key=tiles_in_turn)


def _ragged(kernel: KernelSpec) -> Iterator[str]:
    """Why a tile cannot be compiled: a number out of range, parts that do not make it whole."""
    tile, backward = kernel.tile, kernel.pass_ == "bwd"
    for name, (least, most) in TILE_RANGES.items():
        if not least <= (value := getattr(tile, name)) <= most:
            yield f"{name} is {value}, not between {least} and {most}"
    if backward:
        yield from _ragged_bwd(tile, kernel)
    elif kernel.splits:
        yield from _ragged_split(tile)
    elif kernel.algo == "v3":
        yield from _ragged_v3(tile)
    elif tile.block_q % (16 * tile.warps):
        yield f"block_q {tile.block_q} is not whole 16-row steps for each of {tile.warps} warps"
    if tile.block_kv % tile.keys_per_step or tile.keys_per_step % kernel.granule:
        steps = f"whole steps of {tile.keys_per_step} keys, {kernel.granule} each"
        yield f"block_kv {tile.block_kv} is not {steps}"
    if tile.p_in not in (("registers", "shared") if backward else ("registers",)):
        yield f"no template keeps P in {tile.p_in!r}"


def _nonsense_of_four(kernel: KernelSpec) -> Iterator[str]:
    if (kernel.algo, kernel.pass_) != ("v2", "bwd") or kernel.dtype == "fp32":
        yield "only V2's backward pass in 16 bits has four warps that share keys"
    if kernel.tile.p_in != "shared":
        yield "four warps share keys, but P stays in registers"


def _nonsense_v3(kernel: KernelSpec) -> Iterator[str]:
    if kernel.arch != "sm_90a":
        yield f"V3 is made for sm_90a, not {kernel.arch}"
    if kernel.out_dtype not in V3_DTYPES.get(kernel.dtype, ()):
        yield f"no template makes V3 from {kernel.dtype} to {kernel.out_dtype}"
    if kernel.pack_gqa and (why := unpackable(kernel)):
        yield why
    if kernel.transposes and kernel.tile.warps == WARPGROUP:
        yield "V3 in e4m3 has two or three consumer warpgroups"
    if kernel.transposes and kernel.tile.block_kv != SLAB_BYTES:
        yield f"block_kv {kernel.tile.block_kv} is not one slab of {SLAB_BYTES} keys of V"


def _ragged_v3(tile: Tile) -> Iterator[str]:
    """The same where warpgroups multiply 64 rows each, with keys as wide as one instruction."""
    whole = tile.block_q * WARPGROUP == tile.warps * WARPGROUP_ROWS
    if tile.warps % WARPGROUP or tile.warps // WARPGROUP not in V3_BLOCKS or not whole:
        yield f"block_q {tile.block_q} is not 64 rows for each of 1 to 3 warpgroups"
    if tile.block_kv > 256:
        yield f"block_kv {tile.block_kv} exceeds the 256 columns of a wgmma"
    if tile.keys_per_step != tile.block_kv:
        yield f"step_kv {tile.step_kv}, but V3 scores all keys of a tile at once"


def _ragged_split(tile: Tile) -> Iterator[str]:
    """The same where the warps share a tile's keys, and each has all of its rows."""
    if tile.block_q % 16:
        yield f"block_q {tile.block_q} is not whole 16-row steps"
    if tile.keys_per_step * tile.warps != tile.block_kv:
        yield f"block_kv {tile.block_kv} is not {tile.keys_per_step} for each of {tile.warps} warps"


def _ragged_bwd(tile: Tile, kernel: KernelSpec) -> Iterator[str]:
    """The same where a warp owns keys, and queries come a step of at least so many at a time, V2's
    through two slots or three."""
    if tile.warps % tile.sharing or tile.block_kv * tile.sharing % (16 * tile.warps):
        yield f"block_kv {tile.block_kv} is not whole 16-key steps for each of {tile.warps} warps"
    keys = tile.block_kv * tile.sharing // tile.warps
    least = least_query_step(kernel.dtype, keys, tile.sharing)
    step = max(tile.query_step, least) * tile.sharing
    if tile.block_q % 16 or tile.block_q % step:
        yield f"block_q {tile.block_q} is not whole steps of {step} queries, 16 each"
    stages = 1 if kernel.algo == "v1" else backward_stages(tile.sharing)
    if tile.stages != stages:
        yield f"{tile.stages} stages, but a backward pass with P in {tile.p_in} has {stages}"
    if tile.keys_per_step != tile.block_kv:
        yield f"step_kv {tile.step_kv}, but a backward pass scores all keys at once"


def senseless(why: str, where: str = "") -> UsageError:
    """A plan that can be read, and means nothing that can be built."""
    hint = "plan again with `fasim plan`; --tile MxN asks for a tile of your own"
    return UsageError("this plan makes no sense", where=where, why=why, hint=hint)


_COMPILED_IN = (
    *("dtype", "out_dtype", "head_dim", "head_dim_v", "mask", "bias", "varlen"),
    "incoherent",
)


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


def scale_shapes(
    problem: Problem, tokens: tuple[int, int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of the scale factors of q, k and v: one for all, one a head or one a block of rows; of
    packed sequences (of ``tokens`` queries and keys in all) one a sequence and head, or (blocks,
    heads), as ``packed_blocks`` counts them."""
    p = problem
    of_q, of_k = tokens or (p.batch * p.seq, p.batch * p.seq_kv)
    if p.scales == "block" and p.varlen:
        blocks = {"q_scale": (of_q, p.heads)}
        blocks |= dict.fromkeys(("k_scale", "v_scale"), (of_k, p.kv_heads))
        return {name: (packed_blocks(p, n), heads) for name, (n, heads) in blocks.items()}
    if p.scales == "block":
        shapes = zip(SCALE_INPUTS, tensor_shapes(p).values(), strict=False)
        return {name: (*x[:2], math.ceil(x[2] / SCALE_BLOCK)) for name, x in shapes}
    heads = dict(zip(SCALE_INPUTS, (p.heads, p.kv_heads, p.kv_heads), strict=True))
    return {name: (1,) if p.scales == "tensor" else (p.batch, n) for name, n in heads.items()}


def row_blocks(problem: Problem) -> tuple[int, int, int]:
    """Blocks of SCALE_BLOCK rows of q, k and v; those of v transposed, which has one at least."""
    p = problem
    rows, keys = math.ceil(p.seq / SCALE_BLOCK), math.ceil(p.seq_kv / SCALE_BLOCK)
    heads = p.batch * p.kv_heads
    return p.batch * p.heads * rows, heads * keys, heads * value_slabs(p)


def quantisers(work: KernelSpec | Problem) -> int:
    """Threads of a block that quantises."""
    widest = max(work.head_dim, work.head_dim_v)
    return next(threads for width, threads in QUANTISERS.items() if widest <= width)


def matrix_granule(dtype: str) -> int:
    """Elements in 32 bytes of a row, the depth of a matrix product's step (fp32 as 16 bits)."""
    return 32 if dtype == "e4m3" else 16


def unpackable(work: KernelSpec | Problem) -> str:
    """Why no V3 kernel for it packs the rows of a group of heads into one tile; "" if one may."""
    reasons = {
        "the backward pass has no tiles of packed rows": work.pass_ != "fwd",
        f"V3 packs rows in 16 bits only, not in {work.dtype}": work.dtype not in LAZY_DTYPES,
        "rows of several heads have several slopes or biases": work.bias != "none",
        "packed sequences do not begin at whole boxes of packed rows": work.varlen,
        "rows that are padded are copied head by head": bool(padded_tensors(work)),
    }
    return next((why for why, applies in reasons.items() if applies), "")


def ungroupable(problem: Problem) -> str:
    """Why V3 cannot pack this problem's groups of heads; "" if it can."""
    if WARPGROUP_ROWS % problem.group:
        return f"groups of {problem.group} heads do not divide the {WARPGROUP_ROWS} rows of a box"
    if (rows := problem.group * problem.seq) > MOST_ROWS:
        return f"{rows} packed rows of a K/V head exceed {MOST_ROWS}"
    return ""


def padded_tensors(work: KernelSpec | Problem) -> tuple[str, ...]:
    """Tensors of a V3 forward whose contiguous rows TMA cannot take: they are copied to rows of
    whole TMA_BYTES before, O back after. In e4m3 V is laid out anew anyhow, and where the kernel
    quantises so are Q and K."""
    d, dv, dtype = work.head_dim, work.head_dim_v, work.dtype
    types = {"q": (d, dtype), "k": (d, dtype), "v": (dv, dtype), "o": (dv, work.out_dtype)}
    made = ("q", "k", "v") if work.quantises else ("v",) if dtype == "e4m3" else ()
    rows = {name: kind for name, kind in types.items() if name not in made}
    return tuple(name for name, (n, kind) in rows.items() if takable(n, kind) != n)


def takable(head_dim: int, dtype: str) -> int:
    """head_dim rounded up to rows that TMA takes."""
    count = TMA_BYTES // DTYPE_BYTES[dtype]
    return -(-head_dim // count) * count


def widened(problem: Problem) -> Problem:
    """The problem as V3's main kernel sees it where rows are padded: Q and K, and O, have rows that
    TMA takes."""
    d = takable(problem.head_dim, problem.dtype)
    dv = takable(problem.head_dim_v, problem.out_dtype)
    return replace(problem, head_dim=d, head_dim_v=dv)


def slabs(head_dim: int, dtype: str = "fp16") -> int:
    """Slabs of 128-byte rows that a tile of V3 is cut into."""
    return math.ceil(head_dim * DTYPE_BYTES[dtype] / SLAB_BYTES)


def rescores(work: KernelSpec | Problem) -> bool:
    """Whether V3's warps compute scores again where weights outgrow their range: in 16 bits, unless
    a dense bias would have to be read again as well."""
    return work.dtype != "e4m3" and work.bias in ("none", "alibi")


def keeps_q(work: KernelSpec | Problem, tile: Any) -> Any:
    """Whether V3's consumers keep their rows of Q in registers: two in 16 bits that have them left
    beside S, P and O. ``tile`` may be a Tile or arrays of what it holds."""
    if not rescores(work):
        return tile.warps < 0
    options = (work.mask == "window") + (work.bias == "alibi") + work.varlen
    rows = padded(work.head_dim_v) // 2 + padded(work.head_dim) // 4
    needed = tile.block_kv * 3 // 4 + rows + KEPT_BASE + KEPT_OPTION * options
    return (tile.warps == 2 * WARPGROUP) & (needed <= MOST_KEPT)


def tiles_stay(work: KernelSpec | Problem, tile: Tile) -> bool:
    """Whether V3's tiles of Q and K stay in shared memory until their scores are weighed, as warps
    may need them again: in 16 bits three consumers have no registers for addresses, and one has
    other blocks beside it."""
    return rescores(work) and tile.warps != 2 * WARPGROUP


class V3Layout(NamedTuple):
    """What V3 has in shared memory: tiles of Q, parts in which O leaves, and stages of K beside
    those of V."""

    q_stages: int
    parts: int
    more_keys: int = 0


def v3_layouts(work: KernelSpec | Problem, kept: bool) -> list[V3Layout]:
    """In the order of preference; the first that fits is taken. A second Q hides where the next
    tile comes from; where registers keep Q one is enough, and its place serves another K, which is
    awaited more than V. Parts of O wait for each other. In e4m3 the second Q comes first, as O
    leaves before the next products start."""
    count = slabs(work.head_dim_v)
    parts = [n for n in range(2, count + 1) if count % n == 0]
    first = [V3Layout(1, 1, 1)] if kept else [V3Layout(2, 1)]
    in_parts = [V3Layout(2, n) for n in parts if work.dtype == "e4m3"]
    return [*first, *in_parts, V3Layout(1, 1), *(V3Layout(1, n) for n in parts)]


def v3_layout(work: KernelSpec | Problem, tile: Tile) -> V3Layout:
    """The one of a kernel or a problem."""
    choices = v3_layouts(work, keeps_q(work, tile))
    fitting = (choice for choice in choices if v3_smem(work, tile, choice) <= HOPPER_SMEM)
    return next(fitting, choices[-1])


def streams(work: KernelSpec | Problem, tile: Tile) -> bool:
    """Whether a consumer of V3 starts the first scores of the next tile of queries before the last
    values of this one: not in e4m3, where their sums take the registers of scores, nor where the
    next Q takes the place of this one, and is awaited while O leaves."""
    return work.dtype != "e4m3" and not crowded(work, tile)


def o_in_q(work: KernelSpec | Problem, tile: Tile) -> bool:
    """Whether all parts of V3's O but the first leave by the place of their queries, which is given
    back under the next ones' first scores: in e4m3, whose other Q is there by then."""
    layout = v3_layout(work, tile)
    fits = (layout.parts - 1) * (slabs(work.head_dim_v) // layout.parts) <= slabs(
        work.head_dim, work.dtype
    )
    return work.dtype == "e4m3" and layout.q_stages == 2 and layout.parts > 1 and fits


def ragged_first(work: KernelSpec | Problem) -> bool:
    """Whether of V3's tiles of queries it is the first that may lack rows: under a causal mask it
    sees the fewest keys. Packed sequences have others' rows there, a dense bias none to read."""
    return work.mask == "causal" and not work.varlen and not work.bias.startswith("dense")


def rows_before(problem: Problem, variant: str, pass_: str, block_q: Any) -> Any:
    """Those that a kernel's first tile of queries lacks at its front: whole warpgroups of them, in
    V3's forward pass alone. ``block_q`` may be an array."""
    lacks = (variant, pass_) == ("v3", "fwd") and ragged_first(problem)
    return -problem.seq % block_q // WARPGROUP_ROWS * WARPGROUP_ROWS * lacks


def passes_by(work: KernelSpec | Problem, tile: Any) -> Any:
    """Whether a consumer of V3 passes by tiles of keys of which none of its rows sees any: in e4m3
    always. In 16 bits a causal mask has some for the first of two consumers; where the next scores
    are under way, or rows are packed, there is no place for it, and a dense bias would be read.
    Three keep their tiles until softmax is over. ``tile`` may be a Tile or arrays of what it holds.
    """
    if work.dtype == "e4m3":
        return tile.warps > 0
    has_such = work.mask == "causal" and not work.bias.startswith("dense")
    return (tile.warps == 2 * WARPGROUP) & has_such & crowded(work, tile)


def crowded(work: KernelSpec | Problem, tile: Any) -> Any:
    """Whether V3's shared memory has no room for two tiles of Q beside O in one piece, where it
    needs two: in 16 bits Q has one place then, in e4m3 O leaves in parts. ``tile`` may be a Tile or
    arrays of what it holds."""
    needs_two = keeps_q(work, tile) ^ True  # "not", of arrays too
    return needs_two & (v3_smem(work, tile, V3Layout(2, 1)) > HOPPER_SMEM)


def v3_smem(work: KernelSpec | Problem, tile: Any, layout: V3Layout) -> Any:
    """Bytes of V3's shared memory: tiles of Q, O in 16 bits or a part of it, stages of K and V.
    ``tile`` may be a Tile or arrays of what it holds."""
    d = slabs(work.head_dim, work.dtype)
    rows = tile.block_q * (layout.q_stages * d + slabs(work.head_dim_v) // layout.parts)
    keys = (tile.stages + layout.more_keys) * tile.block_kv * d
    values = tile.stages * v3_value_rows(work, tile)
    return (rows + keys + values) * SLAB_BYTES + V3_TAIL_BYTES


def v3_value_rows(work: KernelSpec | Problem, tile: Any) -> Any:
    """Rows of 128 bytes of a tile of V in V3's shared memory."""
    if work.dtype == "e4m3":
        return transposed_rows(work.head_dim_v) * (tile.block_kv // SLAB_BYTES)
    return tile.block_kv * slabs(work.head_dim_v, work.dtype)


def transposed_rows(head_dim_v: int) -> int:
    """Rows of V transposed as a product takes them: whole matrix steps, and 8 with the ones."""
    return padded(head_dim_v, "e4m3") + 8


def value_box_rows(head_dim_v: int) -> int:
    """Rows of V transposed that TMA brings at once, at most 256: an equal part, of whole 8."""
    rows = transposed_rows(head_dim_v)
    parts = (n for n in range(1, rows) if rows % (8 * n) == 0 and rows // n <= TMA_BOX_ROWS)
    return rows // next(parts)


def columns_at_once(head_dim_v: int, warps: int) -> int:
    """Columns of P V that a round of V3's products has in e4m3; the first has what is over."""
    rows = transposed_rows(head_dim_v)
    if rows <= ONE_ROUND[warps]:
        return rows
    most = MOST_COLUMNS[warps]
    return most if rows % most != 8 else most - 16  # a round of 8 alone costs spills


def columns_under_way(head_dim_v: int, warps: int) -> int:
    """Those of two rounds, if there are two: their sums take the scores' registers."""
    return min(transposed_rows(head_dim_v), 2 * columns_at_once(head_dim_v, warps))


def transposed_shape(problem: Problem, tokens: int | None = None) -> tuple[int, ...]:
    """(batch x kv_heads, slabs, rows, keys of a slab) of V transposed; of packed sequences, of
    ``tokens`` keys in all, (slabs, kv_heads, rows, keys of a slab)."""
    p, rows = problem, padded(problem.head_dim_v, "e4m3") + ONES
    if p.varlen:
        slabs = packed_blocks(p, p.batch * p.seq_kv if tokens is None else tokens)
        return (slabs, p.kv_heads, rows, SLAB_BYTES)
    return (p.batch * p.kv_heads, value_slabs(p), rows, SLAB_BYTES)


def value_slabs(problem: Problem) -> int:
    """Slabs of V transposed that a head of a sequence fills. Without keys there is one of zeros,
    unless sequences are packed."""
    return math.ceil(max(problem.seq_kv, not problem.varlen) / SLAB_BYTES)


def packed_blocks(problem: Problem, tokens: int) -> int:
    """Blocks of 128 packed rows. Those of sequence i, whose first token is t, begin at number
    t // 128 + i: so each has enough, and knows its own from where it begins."""
    return tokens // SCALE_BLOCK + problem.batch


def transposers(head_dim_v: int) -> int:
    """Threads that transpose a slab of V."""
    return padded(head_dim_v, "e4m3") * SLAB_BYTES // TRANSPOSED_BYTES


def lays_out(problem: Problem) -> bool:
    """Whether V is laid out anew: not where no query asks for it. Packed sequences are not asked
    one by one."""
    return problem.seq > 0 or problem.varlen


def padded(head_dim: int, dtype: str = "fp16") -> int:
    """head_dim rounded up to whole steps of a matrix product."""
    granule = matrix_granule(dtype)
    return -(-head_dim // granule) * granule


def packed_shapes(problem: Problem, tokens: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of q, k, v, o and the gradient of o as (tokens, heads, head_dim): sequences one after
    the other."""
    of_q, of_k = tokens
    total = {"q": of_q, "k": of_k, "v": of_k, "o": of_q, "do": of_q}
    shapes = tensor_shapes(problem)
    return {name: (n, shapes[name][1], shapes[name][3]) for name, n in total.items()}


def kernel_strides(steps: tuple[int, ...]) -> tuple[int, ...]:
    """(batch, head, seq) as a kernel takes them, from the strides of a (batch, heads, seq, dim)
    array or of a packed (tokens, heads, dim) one."""
    return (0, steps[1], steps[0]) if len(steps) == 3 else tuple(steps[:3])


def _strides(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: kernel_strides(contiguous_strides(shape)) for name, shape in shapes.items()}


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of what o has one number a row of: head by head, packed or not."""
    return (shape[1], shape[0]) if len(shape) == 3 else shape[:3]


def _factors(problem: Problem) -> dict[str, Scalar]:
    """Values of KernelSpec.factors."""
    cap, log2e = problem.softcap or math.inf, math.log2(math.e)
    return {
        "scale": problem.scale,
        "scale_log2": problem.scale * log2e,
        "softcap_scale": problem.scale / cap,
        "softcap_log2": cap * log2e,
    }


def _window(problem: Problem) -> dict[str, Scalar]:
    """Keys left and right of the aligned one; an open side is as wide as it can matter."""
    left, right = problem.reach
    return {
        "window_left": min(left, problem.seq_kv) if left >= 0 else problem.seq_kv,
        "window_right": min(right, problem.seq) if right >= 0 else problem.seq,
    }


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def alignment(name: str, launch: Launch) -> int:
    """Bytes to which the rows of an input must be aligned: those of the widest copy, if it is
    copied at all, else an element's; 0 if the kernel takes it contiguous only."""
    shape, dtype = launch.inputs[name]
    if name in launch.boxes:
        return TMA_BYTES
    if f"{name}{PADDED}" in launch.workspaces:
        return DTYPE_BYTES[dtype]
    if f"{name}_strides" not in launch.scalars:
        return 0
    return DTYPE_BYTES[dtype] if name in OPTION_INPUTS else copy_bytes(shape[-1], dtype)


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

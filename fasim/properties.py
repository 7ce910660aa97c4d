"""What every attention kernel must do, as properties over any runner.

Hypothesis draws shapes, layouts and values (``cases``); each property is a sentence that holds for
all of them (``PROPERTIES``); ``verify`` tries them on one kernel and reports the smallest input
that breaks one, with a line that replays it. The tests and ``fasim verify`` share this file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from fasim import inputs, quantise, reference
from fasim.emulator import trace
from fasim.errors import CheckFailed, FasimError, UsageError
from fasim.model import flops, traffic
from fasim.model.tiles import Tiles
from fasim.plan import (
    SCALE_BLOCK,
    SCALE_INPUTS,
    WARPGROUP_ROWS,
    KernelSpec,
    Launch,
    Plan,
    Tile,
    tensor_shapes,
)
from fasim.problem import DTYPE_BYTES, Problem
from fasim.reference import DTYPES, UNIT_ROUNDOFF, Options
from fasim.render import Kernel
from fasim.runners import Counting, DeviceFault, Runner, Tracing

if TYPE_CHECKING:
    from fasim.emulator.program import Execution

Array = NDArray[Any]
Outputs = Mapping[str, Array]

SCHEMA = "fasim.verify/1"
MANY_OUTPUTS = 4096  # from here on the largest error is a statistic, below it may be luck
MANY_KEYS = 1024
STRICT_FP32 = 1e-6  # the articles' figure, for rows that see as many keys
MAX_WORK = 1 << 19  # query-key pairs of one case: the reference stays quick
LAYOUTS = ("contiguous", "padded", "tokens")
GROUPS = (1, 2, 3, 4, 8)
SCALES = (0.0, 1.0, 0.03125)
SOFTCAPS = (1.0, 30.0, 50.0)
SLOPES = ("usual", "other")  # of ALiBi
BIASES = ("usual", "of_heads", "of_batch", "shared", "mask")  # how a dense one is shaped or filled
BOUNDLESS = 1e7  # a softcap that no score feels
LARGEST = {"fp32": 3.4e38, "fp16": 65504.0, "bf16": 3.38e38, "e4m3": reference.E4M3_MAX}
DEPTH = 45.0  # how far "below" 0 scores lie: exp(-45) is nothing beside exp(0)
# Products of e4m3 by wgmma are summed in 14 bits: all that an instruction adds is cut to 13
# fraction bits below the largest. On an H200 sums of 256 products of one sign lose 2.1e-3.
E4M3_SUM_UNIT = 2.0**-13
SPIKE = 6.5  # exp of it is the weight of 400 unit-normal scores
RISE = 4.0  # by how much "rising" scores grow from one tile of keys to the next


# ---- Inputs -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input. ``scale`` 0 is the default, 1/sqrt(head_dim); ``seed`` draws the values, and the
    schedules of a runner that has them.

    ``left``, ``right``: the window, of a kernel that has one; ``softcap`` 0 is the planned one;
    ``bias``: usual is ALiBi's slopes, or a number for every score of every head. Packed sequences
    are ``batch`` of the same length, so that every property reads like those of an array.

    ``layout``: contiguous (batch, heads, seq, head_dim); padded, the same between NaN rows and
    columns; tokens, (batch, seq, heads, head_dim) between NaN rows and columns.
    """

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    seq: int = 1
    seq_kv: int = 1
    values: str = "normal"
    layout: str = "contiguous"
    scale: float = 0.0
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    bias: str = "usual"
    seed: int = 0

    def __str__(self) -> str:
        shown = {name: value for name, value in asdict(self).items() if self._said(name)}
        return " ".join(f"{name}={value}" for name, value in shown.items())

    def _said(self, name: str) -> bool:
        """Options that most kernels do not have are named only when they are not the default."""
        return name not in _OPTIONS or getattr(self, name) != getattr(Case, name)

    def problem(self, plan: Plan) -> Problem:
        sizes = ("batch", "heads", "kv_heads", "seq", "seq_kv")
        changes: dict[str, Any] = {name: getattr(self, name) for name in sizes}
        scale = self.scale or 1 / math.sqrt(plan.kernel.head_dim)
        if plan.kernel.mask == "window":
            changes |= {"window": (self.left, self.right), "causal": False}
        if plan.kernel.softcap:
            changes["softcap"] = self.softcap or plan.problem.softcap
        return plan.problem.with_(**changes, scale=scale)

    def arrays(self, plan: Plan) -> dict[str, Array]:
        """The kernel's inputs, contiguous: q, k and v in its type, e4m3 with their scale factors;
        slopes or a bias broadcast to its shape; backward also do, unit normal, and the o and lse
        that belong to them."""
        problem, rng = self.problem(plan), np.random.default_rng(self.seed)
        shapes = tensor_shapes(problem)
        drawn = {name: rng.standard_normal(shapes[name]) for name in ("q", "k", "v")}
        made = VALUES[self.values](drawn, problem, plan.kernel.tile)
        if plan.kernel.pass_ == "bwd":
            made["do"] = rng.standard_normal(shapes["do"])
        if plan.kernel.scaled and not plan.kernel.quantises:
            arrays = quantised(made, plan.kernel.scales)
        else:
            dtype = DTYPES[plan.kernel.in_dtype or plan.kernel.dtype]
            arrays = {name: x.astype(dtype) for name, x in made.items()}
        if problem.bias == "alibi":
            arrays["slopes"] = self._slopes(rng)
        elif problem.dense:
            arrays["bias"] = self._dense(rng, DTYPES[plan.kernel.bias_dtype])
        return after_forward(arrays, problem) if plan.kernel.pass_ == "bwd" else arrays

    def _slopes(self, rng: np.random.Generator) -> Array:
        other = rng.uniform(0, 0.5, self.heads).astype(np.float32)
        return other if self.bias == "other" else inputs.alibi_slopes(self.heads)

    def _dense(self, rng: np.random.Generator, dtype: Any) -> Array:
        """Unit-normal numbers; or a mask, 0 or -inf, that also hides everything from some rows."""
        batch = 1 if self.bias in ("of_heads", "shared") else self.batch
        heads = 1 if self.bias in ("of_batch", "shared") else self.heads
        x = rng.standard_normal((batch, heads, self.seq, self.seq_kv))
        if self.bias == "mask":
            hidden = (x > 0.5) | (rng.random((batch, heads, self.seq, 1)) < 0.25)
            x = np.where(hidden, -np.inf, 0)
        return np.broadcast_to(x.astype(dtype), (self.batch, self.heads, *x.shape[2:]))

    def rng(self) -> np.random.Generator:
        """Choices a property makes (a permutation, a cut), apart from those of the values."""
        return np.random.default_rng([self.seed, 1])


def quantised(made: Mapping[str, Array], scales: str) -> dict[str, Array]:
    """q, k and v in e4m3, and their scale factors in the shapes that a kernel takes."""
    found = {name: reference.quantise(x, scales) for name, x in made.items()}
    if scales == "block":
        factors = {f"{name}_scale": x.scales[..., 0] for name, x in found.items()}
        return {**{name: x.stored for name, x in found.items()}, **factors}
    factors = {f"{name}_scale": x.scales[..., 0, 0] for name, x in found.items()}
    if scales == "tensor":
        factors = {name: x.ravel() for name, x in factors.items()}
    return {**{name: x.stored for name, x in found.items()}, **factors}


def real(arrays: Mapping[str, Array], problem: Problem | None = None) -> dict[str, Array]:
    """The same inputs with q, k and v as the numbers that they stand for, once those of a
    ``problem`` that quantises its inputs are stored."""
    values = quantise.stored(arrays, problem) if problem else dict(arrays)
    stored = dict(values)
    for name in ("q", "k", "v"):
        if (scale := values.pop(f"{name}_scale", None)) is not None:
            rows = quantise.per_row(scale.astype(np.float64), stored[name].shape[2])
            values[name] = stored[name].astype(np.float64) * rows
    return values


def after_forward(arrays: Mapping[str, Array], problem: Problem) -> dict[str, Array]:
    """The inputs of a backward pass: those given, and o and lse as a perfect forward pass leaves
    them, rounded to their types."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    o, lse = reference.attention(q, k, v, **options_of(arrays, problem))
    with np.errstate(over="ignore"):
        return {**arrays, "o": o.astype(q.dtype), "lse": lse.astype(np.float32)}


_OPTIONS = ("left", "right", "softcap", "bias")
Values = Callable[[dict[str, Array], Problem, Tile], dict[str, Array]]


def _peaked(x: dict[str, Array], problem: Problem, tile: Tile) -> dict[str, Array]:
    """Rows of q and k that nearly select one key in head_dim."""
    d = problem.head_dim
    rows = {name: 4 * np.eye(d)[np.arange(x[name].shape[2]) % d] for name in ("q", "k")}
    return {**x, **{name: 0.1 * x[name] + row for name, row in rows.items()}}


def _huge(x: dict[str, Array], problem: Problem, tile: Tile) -> dict[str, Array]:
    """Scores near 1e11, all equal and exact in fp32: the exponent must still be 0."""
    number = 16640.0 if "fp16" in (problem.in_dtype, problem.out_dtype) else 133120.0
    return {name: np.full(y.shape, number) for name, y in x.items()}


def _below(x: dict[str, Array], problem: Problem, tile: Tile) -> dict[str, Array]:
    """Scores far below 0, that of a key past the end: left unmasked, its row is lost to it."""
    mean = (1 + math.sqrt(2 / math.pi)) ** 2  # of a product of two 1 + |x|
    size = math.sqrt(DEPTH / (mean * problem.scale * problem.head_dim))
    return {"q": size * (1 + abs(x["q"])), "k": -size * (1 + abs(x["k"])), "v": x["v"]}


def _rising(x: dict[str, Array], problem: Problem, tile: Tile) -> dict[str, Array]:
    """Scores that grow along the keys: of two tiles the later holds the maximum."""
    size = 1 / math.sqrt(problem.scale * problem.head_dim)
    rise = RISE / tile.block_kv * np.arange(problem.seq_kv)[:, None]
    return {"q": size * (1 + 0.1 * x["q"]), "k": size * (rise + x["k"]), "v": x["v"]}


def _falling(x: dict[str, Array], problem: Problem, tile: Tile) -> dict[str, Array]:
    """The same the other way round. One of the two moves the maximum at every step of a kernel, the
    other at none, whichever way it walks."""
    rising = _rising(x, problem, tile)
    return {**rising, "k": rising["k"][:, :, ::-1]}


def _spikes(x: dict[str, Array], problem: Problem, tile: Tile) -> dict[str, Array]:
    """Every fifth row sees one key of every fourth tile as heavy as all others together; what a
    kernel does for it must not show in its neighbours, who see nothing of that key."""
    size, count = math.sqrt(SPIKE / problem.scale), min(4, problem.head_dim)
    keys, rows = np.arange(problem.seq_kv)[:, None], np.arange(problem.seq)[:, None]
    hit = keys % tile.block_kv == tile.block_kv // 3
    spiked = {name: x[name].copy() for name in ("q", "k")}
    of = np.arange(count)  # the columns in which rows and tiles meet
    spiked["q"][..., :count] = size * ((rows % 5 == 0) & (rows // 5 % count == of))
    spiked["k"][..., :count] = size * (hit & (keys // tile.block_kv % count == of))
    return {**spiked, "v": x["v"]}


VALUES: dict[str, Values] = {
    "normal": lambda x, *_: x,
    "large": lambda x, *_: {"q": 8 * x["q"], "k": 8 * x["k"], "v": x["v"]},
    "equal": lambda x, *_: {**{n: np.full(x[n].shape, 0.5) for n in ("q", "k")}, "v": x["v"]},
    "peaked": _peaked,
    "huge": _huge,
    "tiny": lambda x, *_: {"q": 2.0**-20 * x["q"], "k": 2.0**-20 * x["k"], "v": x["v"]},
    "mean": lambda x, *_: {"q": x["q"] + 1, "k": x["k"] + 1, "v": x["v"] + 4},
    "below": _below,
    "rising": _rising,
    "falling": _falling,
    "spikes": _spikes,
}
EXACT_SCORES = ("equal", "huge")  # every key has the same score, whatever the order of the sum

HUGE = ("huge",)  # their lse does not fit fp32: no P, and so no gradient, comes back from it


def lay_out(x: Array, layout: str) -> Array:
    """The values of a (batch, heads, seq, head_dim) array in another place in memory.

    What lies between its rows is NaN. Rows stay 16 bytes apart from where they were, so alignment
    does not change. Kernels take other arrays, such as lse, contiguous only: they stay.
    """
    if layout == "contiguous" or x.ndim != 4:
        return x
    batch, heads, seq, dim = x.shape
    pad = 16 // x.itemsize
    if layout == "padded":
        buffer = np.full((batch, heads, seq + 2, dim + 2 * pad), np.nan, x.dtype)
        view = buffer[:, :, 1 : seq + 1, pad : pad + dim]
    else:
        buffer = np.full((batch, seq + 2, heads, dim + 2 * pad), np.nan, x.dtype)
        view = buffer[:, 1 : seq + 1, :, pad : pad + dim].transpose(0, 2, 1, 3)
    view[...] = x
    return view


def cases(plan: Plan) -> st.SearchStrategy[Case]:
    """Inputs for a kernel: lengths around its tiles, small enough for a quick reference."""
    tile, kernel = plan.kernel.tile, plan.kernel
    values = [name for name in VALUES if name not in _impossible(kernel)]
    biases = {"none": ("usual",), "alibi": SLOPES}.get(kernel.bias, BIASES)
    sides = _sides(tile) if kernel.mask == "window" else st.just(-1)
    packed = kernel.variant == "v3_packed"
    groups = [n for n in GROUPS if not packed or WARPGROUP_ROWS % n == 0]
    return st.builds(
        _sized,
        batch=st.sampled_from((1, 2)),
        kv_heads=st.sampled_from((1, 2, 3)),
        group=st.sampled_from(groups),
        seq=_lengths(tile.block_q // (max(groups) if packed else 1)),
        seq_kv=_lengths(tile.block_kv, tile.keys_per_step),
        values=st.sampled_from(values),
        layout=st.sampled_from(LAYOUTS),
        scale=st.sampled_from(SCALES),
        left=sides,
        right=sides,
        softcap=st.sampled_from(SOFTCAPS) if kernel.softcap else st.just(0.0),
        bias=st.sampled_from(biases),
        seed=st.integers(0, 999),
    )


def _impossible(kernel: KernelSpec) -> tuple[str, ...]:
    """Values that say nothing: beside huge scores a bias is lost too."""
    return HUGE if kernel.pass_ == "bwd" or kernel.bias != "none" else ()


def _sized(*, batch: int, kv_heads: int, group: int, seq: int, seq_kv: int, **rest: Any) -> Case:
    """A case that gives up batch and heads, then group, before it gets slow."""
    pairs = seq * seq_kv
    if batch * kv_heads * group * pairs > MAX_WORK:
        batch = kv_heads = 1
    if group * pairs > MAX_WORK:
        group = 1
    heads = kv_heads * group
    return Case(batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, seq_kv=seq_kv, **rest)


def _lengths(*tiles: int) -> st.SearchStrategy[int]:
    edges = {0, 1} | {n * tile + d for tile in tiles for n in (1, 2) for d in (-1, 0, 1)}
    longest = 2 * max(tiles) + 17
    return st.integers(1, longest) | st.sampled_from(sorted(edges))


def _sides(tile: Tile) -> st.SearchStrategy[int]:
    """One side of a window: open, nothing, up to an edge of the tiles, beyond any length."""
    edges = {n * tile.block_kv + d for n in (0, 1) for d in (-1, 0, 1)}
    return st.sampled_from((*sorted(edges), 5, tile.block_q, 10_000)) | st.integers(0, 100)


# ---- What is right ------------------------------------------------------------------------------


Wanted = dict[str, tuple[Array, Array]]  # each output's float64 value and tolerance


@dataclass(frozen=True)
class Expected:
    """The float64 result and how far each element may be from it (docs/numerics.md).

    ``magnitude`` is P|V|, the sum of the absolute values that o adds up.
    """

    o: Array
    lse: Array
    o_tolerance: Array
    lse_tolerance: Array
    magnitude: Array

    @property
    def wanted(self) -> Wanted:
        return {"o": (self.o, self.o_tolerance), "lse": (self.lse, self.lse_tolerance)}


def expected(
    arrays: Mapping[str, Array],
    problem: Problem,
    *,
    values: str = "normal",
    narrow: bool = False,
) -> Expected:
    """Reference and tolerances of a forward problem for its arrays; ``values`` names how they came,
    ``narrow`` says that e4m3 is multiplied by wgmma, which has fewer bits of a sum.

    On top of the contract stands one term for scores rounded to fp32, which grows with their size
    (Higham and Mary 2019: the rounding of a sum of d products grows as sqrt(d)). It is far below
    the rest where scores are a few units, and absent where all scores are exact.
    """
    arrays = real(arrays, problem)
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    options = options_of(arrays, problem)
    plain = problem.softcap == 0 and "bias" not in options
    wide = np.concatenate([v.astype(np.float64), np.abs(v.astype(np.float64))], axis=3)
    both = reference.attention(q, k, wide, **options)
    o, magnitude = np.split(both.o, 2, axis=3)
    exact = values in EXACT_SCORES and plain and not problem.incoherent  # nor what is rotated
    unit = E4M3_SUM_UNIT if narrow else UNIT_ROUNDOFF["fp32"]
    scores = np.zeros((1, 1, 1)) if exact else score_rounding(q, k, problem, unit)
    if "bias" in options:
        scores = scores + bias_rounding(options["bias"])
    lost = reference.E4M3_LOST_LAZILY if narrow else reference.E4M3_LOST
    contract = _contract(arrays, o, magnitude, problem, lost)
    tolerance = contract + scores[..., None] * (magnitude + abs(o))
    if values == "normal" and plain:
        tolerance[:, :, strict_rows(problem)] = STRICT_FP32
    return Expected(o, both.lse, tolerance, lse_tolerance(both.lse, scores), magnitude)


def expected_gradients(arrays: Mapping[str, Array], problem: Problem) -> Wanted:
    """Reference and tolerances of dq, dk and dv, for the inputs of a backward problem.

    The contract's, with the absolute sums of each gradient, and a term for P, which comes from
    scores and lse in fp32: a relative error of their rounding, in a row or in all that a key sees.
    """
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    options = options_of(arrays, problem)
    want = reference.gradients(q, k, v, do, **options)
    sums = reference.gradient_sums(q, k, v, do, **options)
    standard = reference.standard_gradients(q, k, v, arrays["o"], do, problem.dtype, **options)
    rows = _weight_rounding(arrays, problem)
    keys = rows.reshape(problem.batch, problem.kv_heads, -1).max(axis=2, initial=0.0)[..., None]
    found: Wanted = {}
    for name, ref, size, other, rounding in zip(
        ("dq", "dk", "dv"), want, sums, standard, (rows, keys, keys), strict=True
    ):
        limit = _gradient_contract(ref, size, other, problem.dtype)
        found[name] = ref, limit + rounding[..., None] * (size + abs(ref))
    return found


def _weight_rounding(arrays: Mapping[str, Array], problem: Problem) -> Array:
    """Relative error of P and of the softcap's derivative from fp32 scores and lse, per row.

    d log(1 - tanh^2 x) is -2 tanh x dx: twice the absolute rounding of x, uncapped.
    """
    q, k, lse = (arrays[name] for name in ("q", "k", "lse"))
    size = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    rounding = score_rounding(q, k, problem) + 4 * UNIT_ROUNDOFF["fp32"] * size
    if problem.softcap:
        uncapped = score_rounding(q, k, problem.with_(softcap=0.0, scale=problem.scale))
        rounding = rounding + 2 * uncapped / problem.softcap
    return rounding + bias_rounding(arrays["bias"]) if "bias" in arrays else rounding


def _gradient_contract(ref: Array, size: Array, standard: Array, dtype: str) -> Array | float:
    """The tolerance of the numerics contract for one gradient, whose sum has absolute value
    ``size`` and whose same-precision result is ``standard``."""
    if dtype != "fp32" and ref.size < MANY_OUTPUTS:
        each: Array = 1.25 * UNIT_ROUNDOFF[dtype] * (size + abs(ref)) + 1e-6
        return each
    error = np.abs(standard.astype(np.float64) - ref).max(initial=0.0)
    return yardstick(dtype, float(error), abs(ref).max(initial=0.0))


def options_of(arrays: Mapping[str, Array], problem: Problem) -> Options:
    """The reference's options: those of the problem, with the bias or the slopes of the arrays."""
    options = reference.options_of(problem)
    if "slopes" in arrays:
        last = np.arange(problem.seq)[:, None] + problem.seq_kv - problem.seq
        distance = np.abs(np.arange(problem.seq_kv) - last)
        slopes = arrays["slopes"].astype(np.float64)
        options |= {"alibi": False, "bias": -slopes[None, :, None, None] * distance}
    elif "bias" in arrays:
        options["bias"] = arrays["bias"]
    return options


def _contract(
    arrays: Mapping[str, Array], o: Array, magnitude: Array, problem: Problem, lost: float
) -> Array | float:
    """The tolerance of the numerics contract. Few outputs get a bound of their own each."""
    if problem.dtype != "fp32" and o.size < MANY_OUTPUTS:
        dtypes = (problem.dtype, problem.out_dtype)
        return reference.allowed(o, magnitude, arrays["v"], *dtypes, lost)
    return yardstick(problem.dtype, _standard_error(arrays, o, problem), abs(o).max(initial=0.0))


def strict_rows(problem: Problem) -> Array:
    """Which query rows must be within STRICT_FP32 on unit normal inputs: fp32, many keys."""
    usual_scale = math.isclose(problem.scale, 1 / math.sqrt(problem.head_dim))
    return (visible_keys(problem) >= MANY_KEYS) & (problem.dtype == "fp32") & usual_scale


def _standard_error(arrays: Mapping[str, Array], o: Array, problem: Problem) -> float:
    """Largest error of standard attention in the problem's own precision."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    out_dtype, options = problem.out_dtype, options_of(arrays, problem)
    standard = reference.standard(q, k, v, problem.dtype, out_dtype=out_dtype, **options)
    return float(np.abs(standard.o.astype(np.float64) - o).max(initial=0.0))


def yardstick(dtype: str, standard_error: float, largest: float) -> float:
    """Twice the largest error of standard attention in the same precision, and a little.

    ``largest`` is the largest magnitude of the float64 result.
    """
    return 2 * standard_error + (1e-6 * max(1.0, largest) if dtype == "fp32" else 1e-5)


def score_rounding(
    q: Array, k: Array, problem: Problem, unit: float = UNIT_ROUNDOFF["fp32"]
) -> Array:
    """Relative error of exp(score) from scores summed in fp32, or where ``unit`` is lost of a sum,
    per row (batch, heads, seq)."""
    size = score_size(q, k, problem)
    if problem.softcap:  # what leaves tanh is small; what entered may be the rest of large products
        entered = size * steepness(q, k, problem)
        size = np.maximum(np.minimum(size, problem.softcap), entered)
    rounding: Array = unit * (2 + math.sqrt(problem.head_dim)) * (1 + size)
    return rounding


def steepness(q: Array, k: Array, problem: Problem) -> Array:
    """The share of a score's error that its softcap lets through, the largest of each row."""
    repeated = np.repeat(k.astype(np.float64), problem.group, axis=1)
    scores = problem.scale * q.astype(np.float64) @ repeated.swapaxes(2, 3)
    steep = 1 - np.tanh(scores / problem.softcap) ** 2
    return np.asarray(steep.max(axis=3, initial=0.0))


def score_size(q: Array, k: Array, problem: Problem) -> Array:
    """A bound on the scaled scores of every row (batch, heads, seq)."""
    norm_q, norm_k = (np.linalg.norm(x.astype(np.float64), axis=3) for x in (q, k))
    longest = np.repeat(norm_k.max(axis=2, initial=0.0), problem.group, axis=1)
    size: Array = problem.scale * norm_q * longest[:, :, None]
    return size


def bias_rounding(bias: Array) -> Array:
    """Relative error of exp(score) from a bias added in fp32, per row (batch, heads, seq)."""
    size = np.where(np.isfinite(bias), np.abs(bias), 0).astype(np.float64)
    rounding: Array = 3 * UNIT_ROUNDOFF["fp32"] * size.max(axis=3, initial=0.0)
    return rounding


def lse_tolerance(lse: Array, scores: Array) -> Array:
    """lse is fp32: two units in its last place, and what the scores' rounding moves it by."""
    size = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    tolerance: Array = 2e-6 * np.maximum(1.0, size) + scores
    return tolerance


def visible_keys(problem: Problem) -> Array:
    """Keys that the mask leaves to each query row."""
    aligned = np.arange(problem.seq) + problem.seq_kv - problem.seq
    left, right = problem.reach
    first = aligned - left if left >= 0 else 0 * aligned
    last = aligned + right if right >= 0 else 0 * aligned + problem.seq_kv - 1
    ends = np.clip([first, last + 1], 0, problem.seq_kv)
    seen: Array = np.maximum(ends[1] - ends[0], 0)
    return seen


class Mismatch(CheckFailed):
    """One element that is not what it must be."""

    def __init__(
        self, what: str, where: str = "", got: float = 0, want: float = 0, tolerance: float = 0
    ) -> None:
        numbers = f"got {got:.9g}, expected {want:.9g}, tolerance {tolerance:.3g}" if where else ""
        super().__init__(what, why=numbers, where=where)
        self.got, self.want, self.tolerance = got, want, tolerance


class Unsuitable(Exception):
    """The property says nothing about this input."""


def worst_error(tensor: str, got: Array, want: Array, tolerance: Array | float) -> float:
    """Largest error as a share of its tolerance. Raises Mismatch above 1."""
    if got.shape != want.shape:
        raise Mismatch(f"{tensor} has shape {got.shape}, not {want.shape}")
    if not got.size:
        return 0.0
    got, tolerances = got.astype(np.float64), np.broadcast_to(tolerance, got.shape)
    with np.errstate(all="ignore"):
        share = np.where(got == want, 0.0, np.abs(got - want) / tolerances)
    share = np.where(np.isnan(share), np.inf, share)
    at = np.unravel_index(int(share.argmax()), share.shape)
    if share[at] > 1:
        raise Mismatch(
            f"{tensor} is off", _place(tensor, at), got[at], want[at], float(tolerances[at])
        )
    return float(share[at])


def _same_bits(tensor: str, got: Array, want: Array, what: str, where: Array | None = None) -> None:
    """Raises Mismatch at the first element (of those picked by ``where``) with other bits."""
    different = _bits(got) != _bits(want)
    if where is not None:
        different &= where
    if different.any():
        at = tuple(np.argwhere(different)[0])
        raise Mismatch(what, _place(tensor, at), float(got[at]), float(want[at]))


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def _place(tensor: str, index: tuple[Any, ...]) -> str:
    return f"{tensor}[{', '.join(str(int(i)) for i in index)}]"


# ---- Properties ---------------------------------------------------------------------------------


@dataclass
class Trial:
    """One case on one kernel and runner; what several steps need is computed once.

    ``beside`` is a second runner, with which the first must agree. The case draws the schedules.
    """

    kernel: Kernel
    runner: Runner
    case: Case
    beside: Runner | None = None

    def __post_init__(self) -> None:
        if isinstance(self.runner, Counting):
            self.runner.next_seed = self.case.seed

    @cached_property
    def problem(self) -> Problem:
        return self.case.problem(self.kernel.plan)

    @cached_property
    def arrays(self) -> dict[str, Array]:
        return self.case.arrays(self.kernel.plan)

    @cached_property
    def expected(self) -> Expected:
        return self.expected_of(self.arrays, self.problem)

    def expected_of(self, arrays: Mapping[str, Array], problem: Problem) -> Expected:
        """The same for other arrays, or a changed problem."""
        narrow = self.kernel.plan.kernel.transposes
        return expected(arrays, problem, values=self.case.values, narrow=narrow)

    @cached_property
    def wanted(self) -> Wanted:
        """Of every output the float64 value and how far each element may be from it."""
        if self.kernel.plan.kernel.pass_ == "bwd":
            return expected_gradients(self.arrays, self.problem)
        return self.expected.wanted

    @cached_property
    def first_run(self) -> tuple[Outputs, Execution | None]:
        """Outputs of the case as drawn, layout included, and what it took where that is counted."""
        outputs = self.run(self.arrays, self.case.layout)
        return outputs, self.runner.last if isinstance(self.runner, Counting) else None

    @property
    def outputs(self) -> Outputs:
        return self.first_run[0]

    @property
    def execution(self) -> Execution:
        executed = self.first_run[1]
        assert executed is not None, "properties that count skip the runners that do not"
        return executed

    def check_same(
        self,
        name: str,
        got: Array,
        want: Array,
        what: str,
        where: Array | None = None,
        part: slice = slice(None),
    ) -> None:
        """Raises Mismatch unless one output, of a ``part`` of the batch, is the same in two runs:
        bit for bit if the plan says that it repeats, else up to the order of its sum."""
        if self.kernel.plan.kernel.repeats(name):
            return _same_bits(name, got, want, what, where)
        picked = np.full(got.shape, True) if where is None else where
        limit = np.where(picked, 2 * self.wanted[name][1], np.inf)[part]
        got, want = (np.where(picked[part], x.astype(np.float64), 0.0) for x in (got, want))
        worst_error(name, got, want, limit)
        return None

    def prepared(
        self, arrays: Mapping[str, Array], layout: str, problem: Problem, splits: int = 0
    ) -> tuple[dict[str, Array], Launch]:
        """What a runner takes; a kernel of packed sequences gets as many of one length."""
        plan = self.kernel.plan
        if not plan.kernel.varlen:
            return placed(arrays, layout), plan.launch_for(problem, splits=splits)
        packed = {name: pack(x) for name, x in arrays.items()}
        lengths = {"cu_seqlens_q": problem.seq, "cu_seqlens_k": problem.seq_kv}
        ends = {n: inputs.cu_seqlens([length] * problem.batch) for n, length in lengths.items()}
        if _takes_blocks(plan.kernel):
            packed |= _packed_scales(arrays, ends)
        return {**placed(packed, layout), **ends}, plan.launch_for(problem)

    def changed(self, **changes: Any) -> Problem:
        """The case's problem with some options changed, its scale kept."""
        return self.problem.with_(scale=self.problem.scale, **changes)

    def run(
        self,
        arrays: Mapping[str, Array],
        layout: str = "contiguous",
        *,
        splits: int = 0,
        **changes: Any,
    ) -> Outputs:
        """Outputs for other arrays, of the case's problem with ``changes`` (seq, seq_kv, …), its
        keys in ``splits`` parts or, 0, in as many as serve the GPU best."""
        problem = self.changed(**changes)
        outputs = self.runner.run(self.kernel, *self.prepared(arrays, layout, problem, splits))
        return unpack(outputs, problem) if self.kernel.plan.kernel.varlen else outputs

    def given(self, arrays: Mapping[str, Array], **changes: Any) -> Mapping[str, Array]:
        """The arrays for the case's problem with ``changes``: backward with its own o and lse."""
        backward = self.kernel.plan.kernel.pass_ == "bwd"
        return after_forward(arrays, self.changed(**changes)) if backward else arrays

    def run_packed(
        self, arrays: Mapping[str, Array], layout: str = "contiguous", **changes: Any
    ) -> Outputs:
        """Outputs for packed arrays: q, k, v (tokens, heads, head_dim) and where they part."""
        tokens = (len(arrays["q"]), len(arrays["k"]))
        launch = self.kernel.plan.launch_for(self.changed(**changes), tokens=tokens)
        return self.runner.run(self.kernel, placed(arrays, layout), launch)


def unpack(outputs: Outputs, problem: Problem) -> Outputs:
    """Results of equally long packed sequences in the shapes of those that are not packed."""
    return {name: _unpacked(x, problem.batch) for name, x in outputs.items()}


def _unpacked(x: Array, batch: int) -> Array:
    if x.ndim == 2:
        return x.reshape(x.shape[0], batch, -1).transpose(1, 0, 2)
    return x.reshape(batch, -1, *x.shape[1:]).transpose(0, 2, 1, 3)


def pack(x: Array) -> Array:
    """(batch, heads, seq, dim) as packed sequences (tokens, heads, dim), one number a row of
    (batch, heads, seq) as (heads, tokens); a vector stays what it is."""
    if x.ndim == 3:
        return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(x.shape[1], -1)
    if x.ndim < 3:
        return x
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(-1, x.shape[1], x.shape[3])


def _takes_blocks(kernel: KernelSpec) -> bool:
    """Whether a kernel is given scale factors of blocks of rows."""
    return kernel.scales == "block" and not kernel.quantises


def pack_scales(
    parts: Sequence[Sequence[Array]], ends_q: Array, ends_k: Array, beyond: int = 0
) -> dict[str, Array]:
    """Scale factors of the blocks of packed sequences as a kernel takes them, (blocks, heads): of
    q, k and v the (heads, blocks) of every sequence, where those part, and how many tokens come
    after the last. NaN stands where no sequence has a block."""
    packed: dict[str, Array] = {}
    for name, own, ends in zip(SCALE_INPUTS, parts, (ends_q, ends_k, ends_k), strict=True):
        blocks = int(ends[-1] + beyond) // SCALE_BLOCK + len(own)
        packed[name] = np.full((blocks, len(own[0])), np.nan, np.float32)
        for i, scales in enumerate(own):
            count = math.ceil((ends[i + 1] - ends[i]) / SCALE_BLOCK)
            first = ends[i] // SCALE_BLOCK + i
            packed[name][first : first + count] = scales[:, :count].T
    return packed


def placed(arrays: Mapping[str, Array], layout: str) -> dict[str, Array]:
    """Arrays of a launch in memory as a case's layout says; a vector stays where it is."""
    return {name: _placed(x, layout) for name, x in arrays.items()}


def _placed(x: Array, layout: str) -> Array:
    if x.ndim == 3:  # packed: heads outside as in an array of one sequence, or tokens
        whole: Array = lay_out(x.transpose(1, 0, 2)[None], layout)
        return np.transpose(whole[0], (1, 0, 2))
    return lay_out(x, layout) if x.ndim == 4 else x


def outputs_are_fully_written(trial: Trial) -> float:
    """No element still holds the poison (all bits set) that outputs start with."""
    for name, x in trial.outputs.items():
        bits = _bits(x)
        unwritten = np.argwhere(bits == np.iinfo(bits.dtype).max)
        if len(unwritten):
            raise Mismatch(f"{name} was not written", _place(name, tuple(unwritten[0])), math.nan)
    return 0.0


def repeated_runs_are_identical(trial: Trial) -> float:
    """Three runs on the same input agree bit for bit in all that the plan says repeats."""
    for _ in range(2):
        for name, x in trial.run(trial.arrays, trial.case.layout).items():
            trial.check_same(name, x, trial.outputs[name], "a second run gave other bits")
    return 0.0


def matches_float64(trial: Trial) -> float:
    """Every output is within the contract's tolerance of the float64 reference."""
    wanted = trial.wanted.items()
    return max(worst_error(name, trial.outputs[name], *limits) for name, limits in wanted)


def poisoned_padding_never_leaks(trial: Trial) -> float:
    """Arrays amid NaN give the bits that compact copies give."""
    compact = trial.run(trial.arrays)
    for layout in LAYOUTS[1:]:
        got = trial.run(trial.arrays, layout)
        for name, x in got.items():
            what = f"NaN around the {layout} arrays changed a result"
            trial.check_same(name, x, compact[name], what)
    return 0.0


def nan_stays_in_its_row(trial: Trial) -> float:
    """A NaN reaches every result that sees it, and leaves the bits of all others alone."""
    names = [n for n in _spread(trial) if trial.arrays[n].size]
    if not names:
        raise Unsuitable
    rng, arrays = trial.case.rng(), {n: x.copy() for n, x in trial.arrays.items()}
    hit = arrays[names[rng.integers(len(names))]]
    hit[tuple(rng.integers(hit.shape))] = np.nan
    want = _with_nan(trial, arrays)
    clean, got = trial.run(trial.arrays), trial.run(arrays)
    for name, ref in want.items():
        lost = np.argwhere(np.isnan(ref) & ~np.isnan(got[name].astype(np.float64)))
        if len(lost):
            raise Mismatch(
                "a NaN in the input was lost", _place(name, tuple(lost[0])), 0.0, math.nan
            )
        if trial.kernel.plan.kernel.quantises:  # the scale factor knows what the NaN replaced
            continue
        what = "a NaN changed another row"
        trial.check_same(name, got[name], clean[name], what, ~np.isnan(ref))
    return _others_right(trial, got, arrays) if trial.kernel.plan.kernel.quantises else 0.0


def _others_right(trial: Trial, got: Outputs, arrays: Mapping[str, Array]) -> float:
    """The rows that see no NaN, against float64. Tolerances are those of the inputs without one."""
    worst, limits = 0.0, trial.expected.wanted
    for name, (want, _) in trial.expected_of(arrays, trial.problem).wanted.items():
        lost = np.isnan(want)
        kept, right = np.where(lost, 0, got[name]), np.where(lost, 0, want)
        worst = max(worst, worst_error(name, kept, right, 2 * limits[name][1]))
    return worst


def _spread(trial: Trial) -> tuple[str, ...]:
    """Inputs whose NaN goes where mathematics sends it. Where pairs are hidden, the weight of 0 of
    one still meets v forward, and backward all but v, which only makes dP."""
    backward = trial.kernel.plan.kernel.pass_ == "bwd"
    if trial.problem.mask != "full" or "bias" in trial.arrays:
        return ("v",) if backward else ("q", "k")
    return ("q", "k", "v", "do") if backward else ("q", "k", "v")


def _with_nan(trial: Trial, arrays: dict[str, Array]) -> dict[str, Array]:
    """The float64 outputs for inputs with a NaN, which also spreads to the o and lse given."""
    options = options_of(arrays, trial.problem)
    values = real(arrays, trial.problem)
    q, k, v = (values[name] for name in ("q", "k", "v"))
    if trial.kernel.plan.kernel.pass_ == "fwd":
        return reference.attention(q, k, v, **options)._asdict()
    arrays.update(after_forward(arrays, trial.problem))
    return reference.gradients(q, k, v, arrays["do"], **options)._asdict()


def other_queries_change_nothing(trial: Trial) -> float:
    """A query grown sixteenfold leaves the bits of all other rows alone, or where it may move the
    scale factor of its block of rows, those of the other blocks."""
    q = trial.arrays["q"]
    if trial.problem.seq < 2:
        raise Unsuitable
    hit = int(trial.case.rng().integers(trial.problem.seq))
    grown, most = q.astype(np.float64), LARGEST[trial.problem.in_dtype]
    sharing = SCALE_BLOCK if trial.kernel.plan.kernel.quantises else 1
    grown[:, :, hit] = np.clip(16 * grown[:, :, hit], -most, most)
    clean, got = trial.run(trial.arrays), trial.run({**trial.arrays, "q": grown.astype(q.dtype)})
    for name, x in got.items():
        others = np.arange(trial.problem.seq) // sharing != hit // sharing
        others = np.broadcast_to(others[:, None] if x.ndim == 4 else others, x.shape)
        _same_bits(name, x, clean[name], "another query changed this row", others)
    return 0.0


def permuting_keys_changes_nothing(trial: Trial) -> float:
    """Keys and values in another order give the same result, up to rounding."""
    if trial.problem.seq_kv < 2:
        raise Unsuitable
    order = _shuffled(trial)
    arrays = trial.arrays
    shuffled = {name: arrays[name][:, :, order] for name in ("k", "v")}
    got = trial.run({**arrays, **shuffled})
    return _agree(trial, got, trial.outputs)


def _shuffled(trial: Trial) -> Array:
    """An order of the keys; where blocks of them share a scale factor they stay in their blocks."""
    keys, rng = np.arange(trial.problem.seq_kv), trial.case.rng()
    if trial.kernel.plan.kernel.scales != "block":
        return rng.permutation(keys)
    starts = range(SCALE_BLOCK, len(keys), SCALE_BLOCK)
    return np.concatenate([rng.permutation(block) for block in np.split(keys, starts)])


def splitting_keys_and_merging_by_lse_gives_the_whole(trial: Trial) -> float:
    """Two parts of the keys, weighted by exp(lse), add up to attention over all of them."""
    if trial.problem.seq_kv < 2 or trial.case.values == "huge":  # fp32 cannot hold such an lse
        raise Unsuitable
    cut = int(trial.case.rng().integers(1, trial.problem.seq_kv))
    parts = [_part(trial, slice(0, cut)), _part(trial, slice(cut, trial.problem.seq_kv))]
    lses = [part["lse"].astype(np.float64) for part in parts]
    lse, whole, want = np.logaddexp(*lses), trial.outputs, trial.expected
    weights = np.exp(np.stack(lses) - lse)
    merged = weights[0, ..., None] * parts[0]["o"] + weights[1, ..., None] * parts[1]["o"]
    unit = 2.5 * UNIT_ROUNDOFF[trial.problem.dtype]
    slack = (unit + 4 * want.lse_tolerance[..., None]) * want.magnitude + 1e-6
    return max(
        worst_error("o", merged, whole["o"].astype(np.float64), want.o_tolerance + slack),
        worst_error("lse", lse, whole["lse"].astype(np.float64), 3 * want.lse_tolerance),
    )


def _part(trial: Trial, keys: slice) -> Outputs:
    arrays = {**trial.arrays, **{name: trial.arrays[name][:, :, keys] for name in ("k", "v")}}
    return trial.run(arrays, seq_kv=keys.stop - keys.start)


def later_keys_change_nothing(trial: Trial) -> float:
    """Under a causal mask the first queries need only the keys up to their own."""
    seq, seq_kv = trial.problem.seq, trial.problem.seq_kv
    if seq < 2:
        raise Unsuitable
    rows = int(trial.case.rng().integers(1, seq))
    keys = max(0, seq_kv - seq + rows)
    lengths = {"q": rows, "k": keys, "v": keys}
    fewer = {name: trial.arrays[name][:, :, :n] for name, n in lengths.items()}
    if trial.kernel.plan.kernel.scales == "block":
        blocks = {f"{name}_scale": -(-n // SCALE_BLOCK) for name, n in lengths.items()}
        fewer |= {name: trial.arrays[name][:, :, :n] for name, n in blocks.items()}
    got = trial.run({**trial.arrays, **fewer}, seq=rows, seq_kv=keys)
    return _agree(trial, got, {name: x[:, :, :rows] for name, x in trial.outputs.items()}, rows)


def the_number_of_splits_changes_nothing(trial: Trial) -> float:
    """Keys in any number of parts, some of them empty, give the same result, up to rounding."""
    tiles = -(-trial.problem.seq_kv // trial.kernel.plan.kernel.tile.block_kv)
    worst = 0.0
    for splits in (1, max(tiles, 1), tiles + 2, int(trial.case.rng().integers(33, 100))):
        worst = max(worst, _agree(trial, trial.run(trial.arrays, splits=splits), trial.outputs))
    return worst


def gradients_are_linear_in_that_of_o(trial: Trial) -> float:
    """Twice the gradient of o gives twice the gradients."""
    twice = {**trial.arrays, "do": 2 * trial.arrays["do"]}
    return max(
        worst_error(name, x, 2 * trial.outputs[name].astype(np.float64), 4 * trial.wanted[name][1])
        for name, x in trial.run(twice).items()
    )


def splitting_the_batch_changes_nothing(trial: Trial) -> float:
    """Every problem of a batch gives by itself what it gives among the others."""
    if trial.problem.batch < 2:
        raise Unsuitable
    for b in range(trial.problem.batch):
        part = slice(b, b + 1)
        alone = {name: x[part] if x.ndim > 1 else x for name, x in trial.arrays.items()}
        got = trial.run(alone, batch=1)
        for name, x in got.items():
            what = "a problem alone gives other bits than in its batch"
            trial.check_same(name, x, trial.outputs[name][part], what, part=part)
    return 0.0


def rows_without_keys_have_no_gradient(trial: Trial) -> float:
    """A query that sees no key has a gradient of exactly 0."""
    blind = np.isneginf(trial.arrays["lse"])
    if not blind.any():
        raise Unsuitable
    got = trial.outputs["dq"][blind]
    return worst_error("dq", got, np.zeros(got.shape), 0.0)


def an_endless_window_is_none(trial: Trial) -> float:
    """A window beyond both lengths gives what one that is open does, and that is right."""
    wide = trial.problem.seq + trial.problem.seq_kv
    arrays = trial.given(trial.arrays, window=(-1, -1))
    opened = trial.run(arrays, window=(-1, -1))
    for name, x in trial.run(arrays, window=(wide, wide)).items():
        if trial.kernel.plan.kernel.repeats(name):
            _same_bits(name, x, opened[name], "a window beyond every key is not an open one")
    return _right(trial, opened, arrays, window=(-1, -1))


def an_endless_softcap_is_none(trial: Trial) -> float:
    """Under a softcap far above every score nothing is capped."""
    values = real(trial.arrays, trial.problem)
    largest = score_size(values["q"], values["k"], trial.problem).max(initial=0.0)
    if largest > 100:
        raise Unsuitable
    arrays = trial.given(trial.arrays, softcap=0.0)
    return _right(trial, trial.run(arrays, softcap=BOUNDLESS), arrays, softcap=0.0)


def a_bias_of_zero_is_none(trial: Trial) -> float:
    """Slopes or a bias of 0 give attention without them."""
    name = "slopes" if "slopes" in trial.arrays else "bias"
    plain = {key: x for key, x in trial.arrays.items() if key != name}
    plain = dict(trial.given(plain, bias="none"))
    got = trial.run({**plain, name: np.zeros_like(trial.arrays[name])})
    return _right(trial, got, plain, bias="none")


def a_constant_on_a_row_moves_only_its_lse(trial: Trial) -> float:
    """A bias that is one number a row changes nothing in O and adds that number to LSE."""
    shape, seed = trial.arrays["bias"].shape, trial.case.rng()
    shift = seed.choice([-4.0, -0.5, 1.0, 8.0], size=(*shape[:3], 1))
    dtype = trial.arrays["bias"].dtype
    bias = np.broadcast_to(shift.astype(dtype), shape)
    zero = trial.run({**trial.arrays, "bias": np.zeros(shape, dtype)})
    got = trial.run({**trial.arrays, "bias": bias})
    want = {"o": zero["o"], "lse": zero["lse"] + shift[..., 0]}
    limits = trial.expected_of({**trial.arrays, "bias": bias}, trial.problem)
    return _agree(trial, got, want, limits=limits.wanted)


def packed_sequences_are_those_one_by_one(trial: Trial) -> float:
    """Sequences of different lengths, 0 among them, give what each gives alone; NaN before the
    first token and after the last, or in another sequence, changes nothing, and nothing is written
    there."""
    problem, rng = trial.problem, trial.case.rng()
    lengths = [rng.integers(0, n + 1, problem.batch) for n in (problem.seq, problem.seq_kv)]
    alone = [_cut(trial, i, *map(int, own)) for i, own in enumerate(zip(*lengths, strict=True))]
    ends = {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
    arrays = {name: _joined(name, [one[name] for one in alone]) for name in alone[0]}
    arrays |= {name: inputs.cu_seqlens(own) + np.int32(1) for name, own in ends.items()}
    if _takes_blocks(trial.kernel.plan.kernel):
        arrays |= _packed_scales(trial.arrays, arrays, beyond=1)
    whole = trial.run_packed(arrays, trial.case.layout)
    _same_traffic(trial, *lengths)
    _check_ends(trial, whole)
    places = {name: 1 + np.cumsum([0, *own]) for name, own in ends.items()}
    return max(
        _same_alone(trial, one, i, whole, *(places[name][i] for name in ends))
        for i, one in enumerate(alone)
    )


def nan_stays_in_its_sequence(trial: Trial) -> float:
    """Of packed sequences one that is all NaN leaves the bits of the others alone."""
    problem, rng = trial.problem, trial.case.rng()
    if problem.batch < 2:
        raise Unsuitable
    lengths = [rng.integers(0, n + 1, problem.batch) for n in (problem.seq, problem.seq_kv)]
    parts = [_cut(trial, i, *map(int, own)) for i, own in enumerate(zip(*lengths, strict=True))]
    ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(inputs.cu_seqlens, lengths), strict=True))
    if _takes_blocks(trial.kernel.plan.kernel):
        ends |= _packed_scales(trial.arrays, ends)
    lost = int(rng.integers(problem.batch))
    ruined = [_ruined(one) if i == lost else one for i, one in enumerate(parts)]
    clean, got = (
        trial.run_packed({name: _together([one[name] for one in some]) for name in some[0]} | ends)
        for some in (parts, ruined)
    )
    others = np.repeat(np.arange(problem.batch) != lost, lengths[0])
    for name, x in got.items():
        where = np.broadcast_to(others if x.ndim == 2 else others[:, None, None], x.shape)
        _same_bits(name, x, clean[name], "a sequence of NaN changed another", where)
    return 0.0


def _ruined(one: Mapping[str, Array]) -> dict[str, Array]:
    """A packed sequence whose tokens are NaN."""
    return {name: np.full_like(x, np.nan) if x.ndim == 3 else x for name, x in one.items()}


def _together(parts: Sequence[Array]) -> Array:
    """Packed arrays one after the other; what belongs to all of them once."""
    return parts[0] if parts[0].ndim == 1 else np.concatenate(parts)


def _cut(trial: Trial, i: int, seq: int, seq_kv: int) -> dict[str, Array]:
    """The first tokens of problem ``i``, packed; backward with the o and lse that are theirs."""
    lengths = {"q": seq, "k": seq_kv, "v": seq_kv, "do": seq}
    given = {name: x for name, x in trial.arrays.items() if name not in ("o", "lse")}
    own = {name: x[i : i + 1] if x.ndim > 1 else x for name, x in given.items()}
    arrays = {name: x[:, :, : lengths[name]] if name in lengths else x for name, x in own.items()}
    arrays = dict(trial.given(arrays, batch=1, seq=seq, seq_kv=seq_kv))
    packed = {name: pack(x) for name, x in arrays.items()}
    if _takes_blocks(trial.kernel.plan.kernel):
        ends = {
            "cu_seqlens_q": inputs.cu_seqlens([seq]),
            "cu_seqlens_k": inputs.cu_seqlens([seq_kv]),
        }
        packed |= _packed_scales(arrays, ends)
    return packed


def _packed_scales(
    arrays: Mapping[str, Array], ends: Mapping[str, Array], beyond: int = 0
) -> dict[str, Array]:
    """Those of the blocks of packed sequences, the first tokens of all in ``arrays``."""
    parts = [[*arrays[name]] for name in SCALE_INPUTS]
    return pack_scales(parts, ends["cu_seqlens_q"], ends["cu_seqlens_k"], beyond)


def _joined(name: str, parts: Sequence[Array]) -> Array:
    """Packed arrays one after the other, between a token of NaN and another; a vector is shared,
    scale factors come a row each."""
    if parts[0].ndim == 1:
        return parts[0]
    if name.endswith("_scale"):
        return np.concatenate(parts)
    axis = 0 if parts[0].ndim == 3 else 1  # of tokens
    edge = np.full_like(np.take(parts[0], [], axis), np.nan, shape=_with_one(parts[0], axis))
    return np.concatenate([edge, *parts, edge], axis)


def _with_one(x: Array, axis: int) -> tuple[int, ...]:
    return tuple(1 if i == axis else n for i, n in enumerate(x.shape))


def _check_ends(trial: Trial, whole: Outputs) -> None:
    """The tokens before the first sequence and after the last are still poison."""
    if trial.runner.name == "numpy":
        return
    for name, x in whole.items():
        ends = np.take(_bits(x), [0, -1], axis=0 if x.ndim == 3 else 1)
        if (ends != np.iinfo(ends.dtype).max).any():
            raise Mismatch(f"{name} was written outside of every sequence")


def _same_traffic(trial: Trial, queries: Array, keys: Array) -> None:
    """The latest launch, if it was counted, moved of each tensor what its sequences would alone.
    Where they part is read by the blocks past their ends too, which also have turns, and largest
    numbers of nothing."""
    if not isinstance(trial.runner, Counting):
        return
    spec, executed = trial.kernel.plan.kernel, trial.runner.last
    mapped, again = spec.mapped.values() or ("q", "k", "v", "o"), _again(spec, executed)
    for name in dict.fromkeys((*mapped, *spec.pointers)):
        if name in ("turns", "most"):
            continue
        want = 0
        for seq, seq_kv in zip(queries.tolist(), keys.tolist(), strict=True):
            alone = trial.changed(batch=1, seq=seq, seq_kv=seq_kv)
            moved = traffic.issued(alone, spec.variant, spec.pass_, Tiles.of([spec.tile])).at(0)
            want += moved.reads.get(name, 0) + moved.writes.get(name, 0)
        got = executed.reads.get(name, 0) + executed.writes.get(name, 0)
        what = f"the bytes moved of {name} are not those of its sequences"
        _same_count(what, name, got, want, again.get(name, 0))


def _same_alone(
    trial: Trial, one: Mapping[str, Array], i: int, whole: Outputs, q: int, k: int
) -> float:
    """Sequence ``i``, of tokens from ``q`` and ``k`` on, gives by itself what it gave among the
    others: the same bits, or where those do not repeat what is right."""
    seq, seq_kv = len(one["q"]), len(one["k"])
    ends = {"cu_seqlens_q": inputs.cu_seqlens([seq]), "cu_seqlens_k": inputs.cu_seqlens([seq_kv])}
    alone = trial.run_packed({**one, **ends}, batch=1, seq=seq, seq_kv=seq_kv)
    rows, keys, worst = slice(q, q + seq), slice(k, k + seq_kv), 0.0
    for name, want in alone.items():
        tokens = keys if name in _OF_KEYS else rows
        got = whole[name][:, tokens] if want.ndim == 2 else whole[name][tokens]
        if trial.kernel.plan.kernel.repeats(name):
            _same_bits(name, got, want, f"sequence {i} is not what it is alone")
        else:
            worst = max(worst, _near(trial, one, name, got))
    return worst


_OF_KEYS = ("dk", "dv")


def _near(trial: Trial, one: Mapping[str, Array], name: str, got: Array) -> float:
    """A gradient of one packed sequence against float64."""
    arrays = {n: _unpacked(x, 1) if x.ndim > 1 else x for n, x in one.items()}
    lengths = {"seq": arrays["q"].shape[2], "seq_kv": arrays["k"].shape[2]}
    limits = expected_gradients(arrays, trial.changed(batch=1, **lengths))[name]
    return worst_error(name, _unpacked(got, 1), *limits)


def _right(trial: Trial, got: Outputs, arrays: Mapping[str, Array], **changes: Any) -> float:
    """Outputs against float64 on the case's problem with ``changes``."""
    problem = trial.changed(**changes)
    if trial.kernel.plan.kernel.pass_ == "bwd":
        wanted = expected_gradients(arrays, problem)
    else:
        wanted = trial.expected_of(arrays, problem).wanted
    return max(
        worst_error(name, got[name], want, 2 * limit) for name, (want, limit) in wanted.items()
    )


def bytes_moved_are_bytes_predicted(trial: Trial) -> float:
    """Loads and stores name as many bytes of each tensor as the model says, to the byte, but for
    what is read again where scores were gone."""
    spec, executed = trial.kernel.plan.kernel, trial.execution
    predicted = traffic.issued(trial.problem, spec.variant, spec.pass_, _tiles(trial)).at(0)
    for verb, got, want, again in (
        ("read", executed.reads, predicted.reads, _again(spec, executed)),
        ("written", executed.writes, predicted.writes, {}),
    ):
        for name in sorted({*got, *want}):
            what = f"the bytes {verb} of {name} are not those predicted"
            _same_count(what, name, got.get(name, 0), want.get(name, 0), again.get(name, 0))
    return 0.0


def _again(spec: KernelSpec, executed: Execution) -> dict[str, int]:
    """Bytes that V3's warps may have read of Q and K beside what TMA moves, for scores that were
    gone: 8 columns of 16 rows and 8 keys for each product that a warp computes alone."""
    bytes_ = 8 * 2 * _operations(executed, "mma", "count")
    return {name: rows * bytes_ for name, rows in zip(spec.rescored, (16, 8), strict=False)}


def matrix_instructions_do_the_flops_predicted(trial: Trial) -> float:
    """The tensor cores execute the FLOPs that the model charges: whole tiles, no more."""
    spec, executed = trial.kernel.plan.kernel, trial.execution
    predicted = int(flops.executed(trial.problem, spec.variant, spec.pass_, _tiles(trial))[0])
    kind, rows = ("wgmma", 64) if spec.algo == "v3" else ("mma", 16)
    got = _operations(executed, kind, "count") * 2 * rows * 8 * spec.mma_depth  # 8 columns each
    _same_count("the FLOPs executed are not those predicted", kind, got, predicted)
    return 0.0


def _tiles(trial: Trial) -> Tiles:
    """The kernel's tile, with the number of parts in which the case's launch has the keys."""
    plan = trial.kernel.plan
    splits = plan.launch_for(trial.problem).scalars.get("splits", 1)
    return Tiles.of([plan.kernel.tile]).split(np.array([splits]))


def main_loop_has_no_bank_conflicts(trial: Trial) -> float:
    """Copies into shared memory and matrix loads from it take one pass where one is enough."""
    for kind in ("cp.async", "ldmatrix"):
        conflicts = _operations(trial.execution, kind, "conflicts")
        _same_count("lanes meet in one bank of shared memory", kind, conflicts, 0)
    return 0.0


def _operations(executed: Execution, kind: str, what: str) -> int:
    """``what`` of the operations of one kind, 0 if there was none."""
    return int(getattr(executed.operations.get(kind), what, 0))


def _same_count(what: str, where: str, got: int, want: int, more: int = 0) -> None:
    """``more`` is what may have come on top."""
    if not want <= got <= want + more:
        raise Mismatch(what, where, got, want)


def both_runners_agree(trial: Trial) -> float:
    """The results of two runners, each of which may be off by its tolerance."""
    if trial.beside is None:
        raise Unsuitable
    return _agree(trial, trial.outputs, Trial(trial.kernel, trial.beside, trial.case).outputs)


def _agree(
    trial: Trial,
    got: Outputs,
    want: Outputs,
    rows: int | None = None,
    limits: Wanted | None = None,
) -> float:
    """Two results of which each may be off by its tolerance."""
    limits = limits or trial.wanted
    return max(
        worst_error(name, got[name], want[name].astype(np.float64), 2 * limit[:, :, :rows])
        for name, (_, limit) in limits.items()
    )


Check = Callable[[Trial], float]
Skip = Callable[[Plan, Runner], str]


@dataclass(frozen=True)
class Property:
    """A sentence, how to check it on one trial (the worst error as a share of its tolerance), why
    some kernels or runners skip it, and the passes it speaks of."""

    check: Check
    skip: Skip | None = None
    passes: tuple[str, ...] = ("fwd", "bwd")

    @property
    def name(self) -> str:
        return self.check.__name__

    def skipped(self, plan: Plan, runner: Runner) -> str:
        if plan.kernel.pass_ not in self.passes:
            return f"it speaks of {' and '.join(self.passes)} kernels"
        return self.skip(plan, runner) if self.skip else ""


def _no_memory(plan: Plan, runner: Runner) -> str:
    return "the numpy runner has no memory between rows to read" if runner.name == "numpy" else ""


def _if_ordered(plan: Plan, runner: Runner) -> str:
    if plan.kernel.mask != "full":
        return f"a {plan.kernel.mask} mask orders the keys"
    return "" if plan.kernel.bias == "none" else "a bias orders the keys"


def _if_quantised(plan: Plan, runner: Runner) -> str:
    shared = plan.kernel.quantises and plan.kernel.scales != "block"
    return "all rows of a head share a scale factor" if shared else ""


def _if_parts_differ(plan: Plan, runner: Runner) -> str:
    if plan.kernel.quantises:
        return "a part of the keys has other scale factors"
    if plan.kernel.scales == "block":
        return "a part of the keys would begin inside a block"
    return _if_ordered(plan, runner)


def _unless_causal(plan: Plan, runner: Runner) -> str:
    if plan.kernel.quantises:
        return "fewer rows have other scale factors"
    if plan.kernel.bias_dtype:
        return "a dense bias has a shape of its own"
    return "" if plan.kernel.mask == "causal" else "other queries see other keys than the first"


def _if_all_see(plan: Plan, runner: Runner) -> str:
    hiding = plan.kernel.mask != "full" or plan.kernel.bias_dtype
    return "" if hiding else "no mask hides all keys from a query"


def _unless_window(plan: Plan, runner: Runner) -> str:
    return "" if plan.kernel.mask == "window" else "the kernel has no window"


def _unless_softcap(plan: Plan, runner: Runner) -> str:
    return "" if plan.kernel.softcap else "the kernel has no softcap"


def _unless_bias(plan: Plan, runner: Runner) -> str:
    return "the kernel has no bias" if plan.kernel.bias == "none" else ""


def _unless_dense(plan: Plan, runner: Runner) -> str:
    return "" if plan.kernel.bias_dtype else "the kernel has no dense bias"


def _unless_varlen(plan: Plan, runner: Runner) -> str:
    return "" if plan.kernel.varlen else "the kernel takes no packed sequences"


def _unless_packed_apart(plan: Plan, runner: Runner) -> str:
    if plan.kernel.quantises and plan.kernel.scales == "tensor":
        return "all sequences share a scale factor"
    return _unless_varlen(plan, runner)


def _unless_split(plan: Plan, runner: Runner) -> str:
    if runner.name == "numpy":
        return "the numpy runner does not split keys"
    return "" if plan.kernel.splits else "this kernel does not split keys"


def _unless_counted(plan: Plan, runner: Runner) -> str:
    return "" if isinstance(runner, Counting) else "only the emulator counts what a kernel executes"


def _unless_matrices(plan: Plan, runner: Runner) -> str:
    if plan.kernel.dtype == "fp32":
        return "fp32 multiplies without matrix instructions"
    return _unless_counted(plan, runner)


# The most telling first: the first that fails is the one reported.
PROPERTIES = (
    Property(outputs_are_fully_written),
    Property(repeated_runs_are_identical),
    Property(matches_float64),
    Property(poisoned_padding_never_leaks, _no_memory),
    Property(nan_stays_in_its_row),
    Property(other_queries_change_nothing, _if_quantised, passes=("fwd",)),
    Property(permuting_keys_changes_nothing, _if_ordered, ("fwd",)),
    Property(splitting_keys_and_merging_by_lse_gives_the_whole, _if_parts_differ, ("fwd",)),
    Property(later_keys_change_nothing, _unless_causal, ("fwd",)),
    Property(the_number_of_splits_changes_nothing, _unless_split, ("fwd",)),
    Property(an_endless_window_is_none, _unless_window),
    Property(an_endless_softcap_is_none, _unless_softcap),
    Property(a_bias_of_zero_is_none, _unless_bias),
    Property(a_constant_on_a_row_moves_only_its_lse, _unless_dense, ("fwd",)),
    Property(packed_sequences_are_those_one_by_one, _unless_packed_apart),
    Property(nan_stays_in_its_sequence, _unless_packed_apart, ("fwd",)),
    Property(gradients_are_linear_in_that_of_o, passes=("bwd",)),
    Property(splitting_the_batch_changes_nothing, passes=("bwd",)),
    Property(rows_without_keys_have_no_gradient, _if_all_see, ("bwd",)),
    Property(bytes_moved_are_bytes_predicted, _unless_counted),
    Property(matrix_instructions_do_the_flops_predicted, _unless_matrices),
    Property(main_loop_has_no_bank_conflicts, _unless_counted),
)
AGREEMENT = Property(both_runners_agree)  # where there are two


# ---- Verifying ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A property broken by an input; ``replay`` is what verify's ``replay`` takes."""

    name: str
    case: Case
    error: CheckFailed
    flaky: bool = False  # the same input also passed

    @property
    def replay(self) -> str:
        return f"{self.case} property={self.name}"

    def to_json(self) -> dict[str, Any]:
        error = self.error
        said = {name: getattr(error, name) for name in ("what", "where", "why", "hint")}
        return {"property": self.name, "replay": self.replay, "flaky": self.flaky, **said}


@dataclass(frozen=True)
class Outcome:
    """One property on one kernel: cases tried, largest error as a share of its tolerance.

    ``errors`` counts the cases by the largest error in each, in tenths of the tolerance: "0.3" is
    from 0.3 to less than 0.4, "0.9" up to the whole of it.
    """

    name: str
    cases: int = 0
    worst: float = 0.0
    skipped: str = ""
    failure: Failure | None = None
    errors: Mapping[str, int] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        counts = {"cases": self.cases, "worst": self.worst, "errors": dict(self.errors)}
        failure = self.failure and self.failure.to_json()
        return {"property": self.name, **counts, "skipped": self.skipped, "failure": failure}


def tenths(share: float) -> str:
    """The tenth of a tolerance that an error within it falls into."""
    return f"{min(9, int(10 * share)) / 10:.1f}"


RUNNER_NOTES = {
    "numpy": "the numpy runner checked the tiles of fasim/tiled.py; the file was never run",
    "emulator": "the file ran on the CPU, in the emulator, which models no timing",
}


@dataclass(frozen=True)
class Report:
    """What verify found. ``histogram`` counts the options and edges of the inputs drawn,
    ``executed`` all that ran, None if nobody counted."""

    stem: str
    runner: str
    edited: bool
    seed: int
    outcomes: tuple[Outcome, ...]
    histogram: Counter[str] = field(default_factory=Counter)
    executed: Execution | None = None
    schedules: int = 1  # that every run was tried under

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def failure(self) -> Failure | None:
        """The first failure, in the order of PROPERTIES."""
        return next((o.failure for o in self.outcomes if o.failure), None)

    @property
    def cases(self) -> int:
        return sum(outcome.cases for outcome in self.outcomes)

    @property
    def ran_file(self) -> bool:
        return self.runner != "numpy"

    @property
    def note(self) -> str:
        """What a reader must know about the result, "" if nothing."""
        return RUNNER_NOTES.get(self.runner, "")

    def check(self) -> None:
        """Raises CheckFailed with the first failure."""
        if self.failure is None:
            return
        failure, error = self.failure, self.failure.error
        flaky = " (only in some runs)" if failure.flaky else ""
        schedules = f"--schedules {self.schedules} " if self.schedules > 1 else ""
        repeat = f'repeat it with {schedules}--replay "{failure.replay}"'
        raise CheckFailed(
            f"{self.stem} on {self.runner}: {failure.name} failed{flaky}: {error.what}",
            where=f"{error.where} with {failure.case}" if error.where else str(failure.case),
            why=error.why,
            hint=f"{error.hint}\n{repeat}" if error.hint else repeat,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kernel": self.stem,
            "runner": self.runner,
            "ran_file": self.ran_file,
            "edited": self.edited,
            "seed": self.seed,
            "schedules": self.schedules,
            "ok": self.ok,
            "note": self.note,
            "executed": self.executed and self.executed.to_json(),
            "failure": self.failure and self.failure.to_json(),
            "properties": [outcome.to_json() for outcome in self.outcomes],
            "histogram": dict(sorted(self.histogram.items())),
        }


def verify(
    kernel: Kernel,
    runner: Runner,
    examples: int = 25,
    seed: int = 0,
    replay: str | None = None,
    beside: Runner | None = None,
    hurry: bool = False,
) -> Report:
    """Try every property on ``examples`` inputs each, or the one of ``replay`` on its input.

    With ``beside``, a second runner, that the two agree is one more property. The same kernel,
    runner, examples and seed draw the same inputs. A failing input is shrunk to the smallest that
    still fails; in a ``hurry`` the first one ends all, as it is. Errors that say nothing about the
    kernel (no device, a compiler that refuses) are raised as they are; UsageError for a replay line
    that cannot be read.
    """
    histogram: Counter[str] = Counter()
    if replay is not None:
        property_, case = parse_replay(replay)
        outcomes = [_Search(property_, kernel, runner, histogram, beside).replay(case)]
    else:
        known = (*PROPERTIES, AGREEMENT) if beside else PROPERTIES
        tried = [p for p in known if kernel.plan.kernel.pass_ in p.passes]
        searches = (_Search(p, kernel, runner, histogram, beside, hurry) for p in tried)
        outcomes = list(_outcomes(searches, examples, seed))
    return Report(
        stem=kernel.stem,
        runner=runner.name,
        edited=kernel.edited,
        seed=seed,
        outcomes=tuple(outcomes),
        histogram=histogram,
        executed=runner.executed if isinstance(runner, Counting) else None,
        schedules=runner.schedules if isinstance(runner, Counting) else 1,
    )


def verify_all(
    kernel: Kernel,
    runners: Sequence[Runner],
    examples: int = 25,
    seed: int = 0,
    replay: str | None = None,
) -> list[Report]:
    """A report of each runner on the same inputs; each must also agree with the first."""
    first, *others = runners
    reports = [verify(kernel, first, examples, seed, replay)]
    return reports + [verify(kernel, r, examples, seed, replay, beside=first) for r in others]


def _outcomes(searches: Iterator[_Search], examples: int, seed: int) -> Iterator[Outcome]:
    """Outcome by outcome; after a fault the device answers nothing more, and who is in a hurry asks
    for nothing after a failure."""
    dead = False
    for search in searches:
        if dead:
            yield Outcome(search.property.name, skipped="the device failed before")
        else:
            outcome = search.run(examples, seed)
            dead = outcome.failure is not None and isinstance(outcome.failure.error, DeviceFault)
            yield outcome
            if outcome.failure and search.hurry:
                return


class _Search:
    """The search for an input that breaks one property."""

    def __init__(
        self,
        property_: Property,
        kernel: Kernel,
        runner: Runner,
        histogram: Counter[str],
        beside: Runner | None,
        hurry: bool = False,
    ) -> None:
        self.property, self.kernel, self.runner, self.beside = property_, kernel, runner, beside
        self.hurry = hurry
        self.histogram = histogram
        self.cases, self.worst, self.errors = 0, 0.0, Counter[str]()
        self.failure: Failure | None = None
        self.stopped: Exception | None = None

    def run(self, examples: int, seed: int) -> Outcome:
        skipped = self.property.skipped(self.kernel.plan, self.runner)
        if skipped:
            return Outcome(self.property.name, skipped=skipped)

        @hypothesis.seed(seed)
        @_settings(examples, shrink=not self.hurry)
        @hypothesis.given(cases(self.kernel.plan))
        def search(case: Case) -> None:
            try:
                self.attempt(case)
            except Unsuitable:
                hypothesis.reject()

        try:
            search()
        except CheckFailed:
            pass
        except hypothesis.errors.Flaky:
            self.failure = self.failure and replace(self.failure, flaky=True)
        except Exception:
            if self.stopped is None:
                raise
        return self.outcome()

    def replay(self, case: Case) -> Outcome:
        skipped = self.property.skipped(self.kernel.plan, self.runner)
        if skipped:
            return Outcome(self.property.name, skipped=skipped)
        try:
            self.attempt(case)
        except CheckFailed:
            pass
        except Unsuitable:
            return Outcome(self.property.name, skipped="it says nothing about this input")
        return self.outcome()

    def outcome(self) -> Outcome:
        if self.stopped is not None and not isinstance(self.stopped, DeviceFault):
            raise self.stopped
        name, errors = self.property.name, self.errors
        return Outcome(name, self.cases, self.worst, failure=self.failure, errors=errors)

    def attempt(self, case: Case) -> None:
        """One input. Once something other than a mismatch went wrong, every input gets that."""
        if self.stopped is not None:
            raise self.stopped
        try:
            worst = self.property.check(Trial(self.kernel, self.runner, case, self.beside))
        except Unsuitable:
            raise
        except CheckFailed as error:
            self.failure = Failure(self.property.name, case, error)
            self.stopped = error if isinstance(error, DeviceFault) else None
            raise
        except Exception as error:
            self.stopped = error
            raise
        self._count(case, worst)

    def _count(self, case: Case, worst: float) -> None:
        self.cases += 1
        self.worst = max(self.worst, worst)
        self.errors[tenths(worst)] += 1
        self.histogram.update(bins(case, self.kernel.plan))


def _settings(examples: int, shrink: bool) -> hypothesis.settings:
    shrinking = (hypothesis.Phase.shrink,) * shrink
    return hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, *shrinking),
        verbosity=hypothesis.Verbosity.quiet,
    )


def traced(kernel: Kernel, runner: Tracing, replay: str | None = None) -> dict[str, Any]:
    """The trace (fasim.emulator.trace) of one launch: of a replay line's input, else of one head
    with two tiles of queries and two of keys. Raises UsageError for a line it cannot read."""
    tile = kernel.plan.kernel.tile
    small = Case(seq=2 * tile.block_q, seq_kv=2 * tile.block_kv)
    case = parse_replay(replay)[1] if replay else small
    trial = Trial(kernel, runner, case)
    ready = trial.prepared(trial.arrays, case.layout, trial.problem)
    return trace.document(kernel, runner.trace(kernel, *ready))


def parse_replay(line: str) -> tuple[Property, Case]:
    """Inverse of Failure.replay; what the line leaves out is the default. Raises UsageError."""
    words = dict(word.partition("=")[::2] for word in line.split())
    known = {property_.name: property_ for property_ in (*PROPERTIES, AGREEMENT)}
    name = words.pop("property", "matches_float64")
    if name not in known:
        raise _no_replay(f"there is no property {name!r}", f"known: {', '.join(known)}")
    kinds: dict[str, type] = {f.name: type(f.default) for f in fields(Case)}
    try:
        case = Case(**{key: kinds[key](text) for key, text in words.items()})
    except (KeyError, ValueError) as error:
        raise _no_replay(f"cannot read {error}", f"known: {', '.join(kinds)}") from error
    known_words = case.values in VALUES and case.layout in LAYOUTS and case.bias in SLOPES + BIASES
    if not known_words or case.seed < 0:
        said = f"values={case.values} layout={case.layout} bias={case.bias} seed={case.seed}"
        raise _no_replay(said, _CHOICES)
    return known[name], case


_CHOICES = f"values: {', '.join(VALUES)}; layouts: {', '.join(LAYOUTS)}; seed from 0"


def _no_replay(why: str, hint: str) -> FasimError:
    return UsageError("this replay line cannot be read", why=why, hint=hint)


# ---- Coverage -----------------------------------------------------------------------------------


def bins(case: Case, plan: Plan) -> tuple[str, ...]:
    """The options and edges that a case touches."""
    spec, problem = plan.kernel, case.problem(plan)
    found = [
        f"algo {spec.algo}",
        f"dtype {spec.dtype}",
        f"mask {spec.mask}",
        f"rows {'aligned' if spec.head_dim * DTYPE_BYTES[spec.dtype] % 16 == 0 else 'unaligned'}",
        f"group {problem.group}",
        f"values {case.values}",
        f"layout {case.layout}",
        f"scale {'other' if case.scale else 'default'}",
        f"queries {_edge(case.seq, spec.tile.block_q)}",
        f"keys {_edge(case.seq_kv, spec.tile.block_kv)}",
        f"queries {'=<>'[(case.seq > case.seq_kv) - (case.seq < case.seq_kv)]} keys",
    ]
    if case.seq and visible_keys(problem)[0] == 0:
        found.append("empty rows")
    return (*found, *_option_bins(case, plan))


def _option_bins(case: Case, plan: Plan) -> Iterator[str]:
    """Those of the options that the kernel has."""
    spec, tile = plan.kernel, plan.kernel.tile
    if spec.mask == "window":
        yield f"left {_side(case.left, case.seq_kv, tile)}"
        yield f"right {_side(case.right, case.seq, tile)}"
    if spec.softcap:
        yield f"softcap {case.problem(plan).softcap:g}"
    if spec.bias == "alibi":
        yield f"slopes {case.bias}"
    if spec.bias_dtype:
        yield f"bias {case.bias}"
        yield f"bias in {'fp32' if spec.bias_dtype == 'fp32' else 'the inputs'}"
    if spec.varlen:
        yield "sequences packed"
    if spec.quantises:
        yield "inputs quantised"
    if spec.incoherent:
        yield "rows rotated"


def _side(keys: int, length: int, tile: Tile) -> str:
    """One side of a window."""
    if keys <= 0:
        return "0" if keys == 0 else "open"
    near = {n * tile.block_kv + d for n in (0, 1) for d in (-1, 0, 1)}
    return "endless" if keys >= length else "edge" if keys in near else "other"


def _edge(length: int, tile: int) -> str:
    names = {0: "0", 1: "1", tile - 1: "tile-1", tile: "tile", tile + 1: "tile+1"}
    return names.get(length, "other" if length % tile else "tiles")


_SIDES = ("open", "0", "edge", "other", "endless")
_LENGTHS = ("0", "1", "tile-1", "tile", "tile+1", "tiles", "other")
BINS = (
    *("algo v1", "algo v2", "algo v3", "dtype fp32", "dtype fp16", "dtype bf16", "dtype e4m3"),
    *("mask full", "mask causal", "mask window", "sequences packed"),
    *("rows aligned", "rows unaligned", "scale default", "scale other", "empty rows"),
    *(f"group {group}" for group in GROUPS),
    *(f"values {values}" for values in VALUES),
    *(f"layout {layout}" for layout in LAYOUTS),
    *(f"{what} {length}" for what in ("queries", "keys") for length in _LENGTHS),
    *(f"queries {sign} keys" for sign in "<=>"),
    *(f"{side} {keys}" for side in ("left", "right") for keys in _SIDES),
    *(f"softcap {cap:g}" for cap in SOFTCAPS),
    *(f"slopes {slopes}" for slopes in SLOPES),
    *(f"bias {bias}" for bias in BIASES),
    *("bias in the inputs", "bias in fp32"),
    *("inputs quantised", "rows rotated"),
)


def empty_bins(histogram: Mapping[str, int]) -> tuple[str, ...]:
    """The bins that a run over a catalogue should have filled and did not."""
    return tuple(name for name in BINS if not histogram.get(name))

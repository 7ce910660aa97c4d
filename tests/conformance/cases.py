"""The conformance cases: tiny kernels that show what an instruction does to every input.

Each case is one kernel, deterministic inputs, and what NumPy expects of it, from the PTX ISA alone.
``record.py`` runs the cases on a device and keeps the results; the tests hold the emulator against
both. A kernel takes pointers only: its inputs, then its outputs, in the order of the case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fasim.render import render_text

Array = NDArray[Any]
Arrays = Mapping[str, Array]

KERNELS = Path(__file__).parent / "kernels"
POISON = 0xFF  # every byte of an output before the launch
SEED = 20240607

LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4  # the PTX ISA's groupID and threadID_in_group
TYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True)
class Bound:
    """How far results may be apart: ``absolute + relative * |wanted|``, and why they may at all."""

    why: str
    absolute: Array | float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class Case:
    """One kernel, its launch, its inputs and what each output should be.

    ``values`` fill in the template. ``initial`` gives outputs that the kernel adds to. An output
    without a bound agrees bit for bit; with ``silicon`` emulator and device do so in any case.
    """

    name: str
    kernel: str  # the file, and the symbol in it
    grid: int
    block: int
    inputs: Arrays
    expected: Arrays
    values: Mapping[str, object] = field(default_factory=dict)
    initial: Arrays = field(default_factory=dict)
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    arch: str = "sm_80"  # the oldest that has it
    silicon: bool = True
    smem_bytes: int = 0

    @property
    def source(self) -> str:
        """The kernel as CUDA."""
        return render_text((KERNELS / f"{self.kernel}.cu").read_text(), **self.values)

    @property
    def digest(self) -> str:
        """sha256 over source and inputs: what a recorded result belongs to."""
        parts = [self.source.encode(), *(array.tobytes() for array in self.inputs.values())]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def arrays(self) -> dict[str, Array]:
        """Every array of a launch as unsigned integers, in the kernel's order, outputs fresh."""
        outputs = {name: self.initial.get(name, _poison(x)) for name, x in self.expected.items()}
        return {name: bits(x).copy() for name, x in {**self.inputs, **outputs}.items()}

    def disagreements(
        self, found: Arrays, wanted: Arrays, *, any_nan: bool = False, exact: bool = False
    ) -> list[str]:
        """A line for each output that does not agree. ``any_nan``: all NaNs are the same;
        ``exact``: no bound holds."""
        lines = []
        for name, like in self.expected.items():
            one, two = found[name].view(like.dtype), wanted[name].view(like.dtype)
            good = _agree(one, two, None if exact else self.bounds.get(name), any_nan)
            if not good.all():
                at = tuple(int(i) for i in np.argwhere(~good)[0])
                count = np.count_nonzero(~good)
                lines.append(f"{name}{list(at)} is {one[at]!r}, not {two[at]!r}; {count} differ")
        return lines


def bits(x: Array) -> Array:
    """The same memory as unsigned integers."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _poison(like: Array) -> Array:
    return np.full(like.nbytes, POISON, np.uint8).view(like.dtype).reshape(like.shape)


def _agree(found: Array, wanted: Array, bound: Bound | None, any_nan: bool) -> NDArray[np.bool_]:
    good: NDArray[np.bool_] = bits(found) == bits(wanted)
    if found.dtype.kind in "iu" or not (bound or any_nan):
        return good
    with np.errstate(all="ignore"):
        one, two = found.astype(np.float64), wanted.astype(np.float64)
        good |= np.isnan(one) & np.isnan(two)
        if bound:
            good |= np.abs(one - two) <= bound.absolute + bound.relative * np.abs(two)
    return good


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng([SEED, *name.encode()])


# ---- matrix products ----------------------------------------------------------------------------

# Instruction, type, k, least arch. All have m = 16 and n = 8.
MMA = (
    ("mma_m16n8k16_f16", "f16", 16, "sm_80"),
    ("mma_m16n8k16_bf16", "bf16", 16, "sm_80"),
    ("mma_m16n8k8_f16", "f16", 8, "sm_80"),
    ("mma_m16n8k8_bf16", "bf16", 8, "sm_80"),
    ("mma_m16n8k32_e4m3", "e4m3", 32, "sm_89"),
)
PRODUCTS = 64  # instances of each
SMALLEST = 2.0**-149  # of fp32
WHY_INEXACT = (
    "the order of the k + 1 terms is free, and tensor cores align them to the largest and cut off"
    " what lies below the last bit kept"
)


def _mma() -> Iterator[Case]:
    for instruction, kind, k, arch in MMA:
        for numbers in ("integers", "normal", "special", "wide"):
            name = f"{instruction}_{numbers}"
            a, b, c = _operands(name, kind, k)
            left, right = _left(a), _right(b)
            yield Case(
                name,
                "mma",
                grid=PRODUCTS,
                block=32,
                arch=arch,
                values={
                    "instruction": instruction,
                    "a_registers": left.shape[-1],
                    "b_registers": right.shape[-1],
                },
                inputs={"a": left, "b": right, "c": _accumulators(c)},
                expected={"d": _accumulators(_product(a, b, c))},
                bounds={} if numbers == "integers" else {"d": _sum_bound(a, b, c)},
            )


def _operands(name: str, kind: str, k: int) -> tuple[Array, Array, Array]:
    """a (16 x k), b (k x 8), c (16 x 8): small integers; normal numbers; the same with special ones
    strewn in; or numbers of all sizes that the type has."""
    rng, shapes = _rng(name), ((PRODUCTS, 16, k), (PRODUCTS, k, 8), (PRODUCTS, 16, 8))
    if name.endswith("integers"):
        a, b, c = (rng.integers(-3, 4, shape).astype(np.float64) for shape in shapes)
    else:
        a, b, c = (rng.standard_normal(shape) for shape in shapes)
    if name.endswith("wide"):
        a, b, c = _scaled(a, b, c, kind, rng)
    with np.errstate(over="ignore"):
        a, b, c = a.astype(TYPES[kind]), b.astype(TYPES[kind]), c.astype(np.float32)
    if name.endswith("special"):
        a, b, c = (_strewn(x, rng) for x in (a, b, c))
    return a, b, c


def _scaled(
    a: Array, b: Array, c: Array, kind: str, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Every instance in another part of the type's range: from subnormal numbers to overflow."""
    low, high = {"f16": (-24, 8), "bf16": (-132, 66), "e4m3": (-10, 2)}[kind]
    center = np.linspace(low, high, PRODUCTS).round()[:, None, None]
    third = np.arange(PRODUCTS)[:, None, None] % 3 == 0
    other = np.where(third, center, rng.permutation(center))
    a = a * 2.0 ** (center + rng.integers(-4, 5, a.shape))
    b = b * 2.0 ** (other + rng.integers(-4, 5, b.shape))
    return a, b, c * 2.0 ** (center + other + rng.integers(-16, 17, c.shape))


def _strewn(x: Array, rng: np.random.Generator) -> Array:
    """Some elements are infinite (not in e4m3), NaN, subnormal or a zero of either sign instead."""
    least = np.array(1, f"u{x.itemsize}").view(x.dtype).astype(np.float64)
    some = np.array([np.inf, -np.inf, np.nan, least, -3 * least, 0.0, -0.0])
    if x.dtype == TYPES["e4m3"]:
        some = some[2:]
    chosen = rng.choice(some, x.shape).astype(x.dtype)
    return np.where(rng.random(x.shape) < 0.02, chosen, x)


def _product(a: Array, b: Array, c: Array | float = 0.0) -> Array:
    with np.errstate(all="ignore"):
        return (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)


def _sum_bound(a: Array, b: Array, c: Array) -> Bound:
    """A few units in the last place of fp32, of the sum of all magnitudes; no magnitude counts as
    less than the smallest normal number."""
    with np.errstate(all="ignore"):
        left, right, base = (np.where(x == 0, 0, np.maximum(np.abs(x.astype(np.float64)), _tiny(x)))
                             for x in (a, b, c))  # fmt: skip
        sizes = left @ right + base
    finite = np.where(np.isfinite(sizes), sizes, 0.0)
    return Bound(WHY_INEXACT, absolute=_accumulators(finite) * 2.0**-21 + SMALLEST)


def _tiny(x: Array) -> float:
    """The smallest normal number of a type."""
    return float(ml_dtypes.finfo(x.dtype).smallest_normal)


def _left(a: Array) -> Array:
    """Registers (..., lane, register) of a row-major left operand. PTX ISA: mma, fragments of A."""
    each = 4 // a.dtype.itemsize  # elements of a register
    register, element = np.arange(a.shape[-1] // (2 * each)), np.arange(each)
    rows = GROUP[:, None, None] + 8 * (register % 2)[:, None]
    columns = each * THREAD[:, None, None] + 4 * each * (register // 2)[:, None] + element
    return _words(a[..., rows, columns])


def _right(b: Array) -> Array:
    """The same of a right operand, (..., k, n). PTX ISA: mma, fragments of B."""
    each = 4 // b.dtype.itemsize
    register, element = np.arange(b.shape[-2] // (4 * each)), np.arange(each)
    rows = each * THREAD[:, None, None] + 4 * each * register[:, None] + element
    return _words(b[..., rows, GROUP[:, None, None]])


def _accumulators(c: Array) -> Array:
    """(..., lane, register) of a 16 x 8 result. PTX ISA: mma, fragments of C and D."""
    register = np.arange(4)
    rows = GROUP[:, None] + 8 * (register // 2)
    return np.ascontiguousarray(c[..., rows, 2 * THREAD[:, None] + register % 2])


def _words(elements: Array) -> Array:
    """Elements (..., register, element) as registers of 32 bits, the first in the low bits."""
    return np.ascontiguousarray(elements).view(np.uint32)[..., 0]


def _tile_product() -> Iterator[Case]:
    for kind in ("f16", "bf16"):
        name = f"tile_product_{kind}"
        shapes = {"a": (16, 64), "b": (16, 64), "v": (64, 16)}
        rng = _rng(name)
        x = {key: rng.integers(-3, 4, shape).astype(TYPES[kind]) for key, shape in shapes.items()}
        yield Case(
            name,
            "tile_product",
            grid=1,
            block=32,
            smem_bytes=3 * 16 * 64 * 2,
            values={"type": kind},
            inputs=x,
            expected={"ab": _product(x["a"], x["b"].T), "av": _product(x["a"], x["v"])},
        )


def _ldmatrix() -> Iterator[Case]:
    codes = (np.arange(64 * 8) * 127).astype(np.uint16).reshape(64, 8)
    for matrices in (1, 2, 4):
        for suffix in ("", "_trans"):
            name = f"ldmatrix_x{matrices}{suffix}"
            rows = _rng(name).integers(0, 64, (16, 32), dtype=np.int32)
            tiles = codes[rows[:, : 8 * matrices]].reshape(16, matrices, 8, 8)
            tiles = np.swapaxes(tiles, -1, -2) if suffix else tiles
            pairs = tiles[..., GROUP[:, None], 2 * THREAD[:, None] + np.arange(2)]
            yield Case(
                name,
                "ldmatrix",
                grid=16,
                block=32,
                smem_bytes=codes.nbytes,
                values={"instruction": name, "matrices": matrices},
                inputs={"codes": codes, "rows": rows},
                expected={"registers": _words(np.swapaxes(pairs, 1, 2))},
            )


# ---- conversions and functions ------------------------------------------------------------------


def _elementwise(name: str, kernel: str, x: Array, y: Array, **more: Any) -> Case:
    """A case of one thread an output; ``x`` and ``y`` by the names the kernel gives them."""
    names = {"unary": ("x", "y"), "pack": ("pairs", "packed")}[kernel]
    target = "float" if y.dtype == np.float32 else {2: "u16", 4: "u32"}[y[0].nbytes]
    values = {"instruction": name, "target": target, **more.pop("values", {})}
    inputs, expected = {names[0]: x}, {names[1]: y}
    return Case(name, kernel, len(y) // 256, 256, inputs, expected, values, **more)


def _conversions() -> Iterator[Case]:
    for kind, arch in (("f16", "sm_80"), ("bf16", "sm_80"), ("e4m3", "sm_89")):
        x = _floats_around_every_upper_half()
        packed = _rounded(x, kind).reshape(-1, 2)
        yield _elementwise(f"cvt_{kind}x2", "pack", x.reshape(-1, 2), packed, arch=arch)
    x = _floats_around_every_upper_half()
    single = {"values": {"source": "float"}}
    yield _elementwise("cvt_f16", "unary", x, _rounded(x, "f16"), **single)
    codes = np.arange(1 << 16, dtype=np.uint16)
    exact = {"values": {"source": "u16"}}
    yield _elementwise("cvt_f32_f16", "unary", codes, _floats(codes.view(np.float16)), **exact)
    pairs = codes.view(TYPES["e4m3"]).reshape(-1, 2)
    halves = pairs.astype(np.float32).astype(np.float16)
    yield _elementwise("cvt_f16x2_e4m3x2", "unary", codes, halves, arch="sm_89", **exact)


def _floats_around_every_upper_half() -> Array:
    """Floats with each of the 65,536 upper halves, four lower halves each: 0, a tie of bf16, a tie
    of f16 (of e4m3 and of subnormals 0 is one), and anything."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    lower = np.zeros((1 << 16, 4), np.uint32)
    lower[:, 1] = 0x8000
    lower[:, 2] = (upper * 5 % 8) << 13 | 0x1000
    lower[:, 3] = upper * np.uint32(2654435761) >> 16
    return (upper[:, None] << 16 | lower).view(np.float32).ravel()


def _rounded(x: Array, kind: str) -> Array:
    """Nearest, ties to even; e4m3 saturates at its largest number, 448."""
    with np.errstate(all="ignore"):
        return (np.clip(x, -448, 448) if kind == "e4m3" else x).astype(TYPES[kind])


def _floats(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return x.astype(np.float32)


def _functions() -> Iterator[Case]:
    x = _floats_around_every_upper_half()[3::4]
    small = float(np.finfo(np.float32).tiny)
    source = {"values": {"source": "float"}}
    with np.errstate(all="ignore"):
        powers = _floats(np.exp2(np.where(np.abs(x) < small, 0, x).astype(np.float64)))
        powers[powers < small] = 0
        logarithms = _floats(np.log2(x.astype(np.float64)))
        inverses = _floats(1 / np.where(np.abs(x) < small, 0 * x, x).astype(np.float64))
        inverses[np.abs(inverses) < small] *= 0
    bound = Bound("2^-22 relative as specified; subnormal results are 0", small, 2.0**-21)
    yield _elementwise("ex2", "unary", x, powers, bounds={"y": bound}, silicon=False, **source)
    bound = Bound("2^-22 as specified, absolute between 0.5 and 2, else relative", 2**-22, 2**-22)
    yield _elementwise("lg2", "unary", x, logarithms, bounds={"y": bound}, silicon=False, **source)
    bound = Bound("1 ulp as specified; subnormal results are 0", small, 2.0**-23)
    yield _elementwise("rcp", "unary", x, inverses, bounds={"y": bound}, silicon=False, **source)


# ---- copies, lanes, barriers, atomics -----------------------------------------------------------


def _cp_async() -> Case:
    rng = _rng("cp_async")
    source = rng.integers(0, 1 << 32, 4 * 128, dtype=np.uint32)
    valid = rng.integers(0, 2, (3, 128), dtype=np.int32)
    tiles = [
        np.where(flags[:, None], source[: words * 128].reshape(128, words), 0).ravel()
        for words, flags in zip((1, 2, 4), valid, strict=True)
    ]
    return Case(
        "cp_async",
        "cp_async",
        grid=1,
        block=128,
        smem_bytes=7 * 128 * 4,
        inputs={"source": source, "valid": valid},
        expected={"copied": np.concatenate(tiles)},
    )


def _shuffle() -> Case:
    rng = _rng("shuffle")
    deltas = np.array([0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 30, 31], np.int32)
    lanes = rng.integers(-40, 72, (len(deltas), 32), dtype=np.int32)
    x = rng.integers(0, 1 << 32, 32, dtype=np.uint32)
    widths = (32, 16, 8, 4, 2)
    return Case(
        "shuffle",
        "shuffle",
        grid=1,
        block=32,
        values={"steps": len(deltas)},
        inputs={"x": x, "lanes": lanes, "deltas": deltas},
        expected={"shuffled": np.stack([_shuffled(x, lanes, deltas, w) for w in widths])},
    )


def _shuffled(x: Array, lanes: Array, deltas: Array, width: int) -> Array:
    """(form, step, lane); a lane whose source is out of reach keeps its own. PTX ISA: shfl."""
    first, last = LANE // width * width, LANE // width * width + width - 1
    delta = deltas[:, None]
    sources = np.stack([first + lanes % width, LANE - delta, LANE + delta, LANE ^ delta])
    lowest = np.array([0, 1, 0, 0])[:, None, None] * first  # xor may reach a segment further down
    reached = (sources >= lowest) & (sources <= last)
    return x[np.where(reached, sources, LANE)]


def _vote() -> Case:
    rng = _rng("vote")
    votes = (rng.random((16, 32)) < np.linspace(0, 1, 16)[:, None]) * rng.choice([1, -2, 256], 32)
    yes = votes != 0
    words = (yes << LANE.astype(np.uint32)).sum(axis=1)
    by_warp = {"ballot": words, "all": yes.all(axis=1), "any": yes.any(axis=1)}
    by_lane = {name: np.repeat(x.astype(np.uint32), 32) for name, x in by_warp.items()}
    return Case(
        "vote",
        "vote",
        grid=16,
        block=32,
        inputs={"votes": votes.astype(np.int32)},
        expected=by_lane,
    )


def _barriers() -> Iterator[Case]:
    x = _rng("barriers").integers(0, 1 << 32, (8, 160), dtype=np.uint32)
    half = x[:, :64]
    turned = {"y": half[:, ::-1]}
    yield Case("named_barrier", "named_barrier", 1, 128, {"x": half}, turned, smem_bytes=64 * 4)
    turned = {"y": x[::-1, ::-1]}
    yield Case("syncthreads", "syncthreads", 1, 160, {"x": x}, turned, smem_bytes=160 * 4)


def _atomic() -> Case:
    rng, bins, threads = _rng("atomic"), 8, 4 * 64
    bin_of = rng.integers(0, bins, threads, dtype=np.int32)
    x = rng.integers(-8, 9, threads).astype(np.float32)
    count = np.bincount(bin_of, minlength=bins)
    seen = (np.arange(threads) < count[:, None]).astype(np.uint32)
    expected = {
        "sums": np.bincount(bin_of, weights=x, minlength=bins).astype(np.float32),
        "count_f32": count.astype(np.float32),
        "count_u32": count.astype(np.uint32),
        "seen_f32": seen,
        "seen_u32": seen,
    }
    return Case(
        "atomic",
        "atomic",
        grid=4,
        block=64,
        inputs={"bins": bin_of, "x": x},
        expected=expected,
        initial={name: np.zeros_like(array) for name, array in expected.items()},
    )


def _atomic_x4() -> Case:
    rng, bins, threads = _rng("atomic_x4"), 8, 4 * 64
    bin_of = rng.integers(0, bins, threads, dtype=np.int32)
    x = rng.integers(-8, 9, (threads, 4)).astype(np.float32)
    sums = np.zeros((bins, 4), np.float32)
    np.add.at(sums, bin_of, x)
    return Case(
        "atomic_x4",
        "atomic_x4",
        grid=4,
        block=64,
        inputs={"bins": bin_of, "x": x.ravel()},
        expected={"sums": sums.ravel()},
        initial={"sums": np.zeros(4 * bins, np.float32)},
    )


def _turns() -> Case:
    """Numbers of many sizes, whose sum depends on its order."""
    rng, blocks = _rng("turns"), 300
    x = (rng.standard_normal(blocks) * 2.0 ** rng.integers(-12, 12, blocks)).astype(np.float32)
    total = np.float32(0)
    for term in x:
        total += term
    count = np.array([blocks], np.uint32)
    return Case(
        "turns",
        "turns",
        grid=blocks,
        block=64,
        inputs={"x": x},
        expected={"sum": np.array([total]), "started": count, "turn": count},
        initial={
            "sum": np.zeros(1, np.float32),
            "started": np.zeros(1, np.uint32),
            "turn": np.zeros(1, np.uint32),
        },
    )


CASES = (
    *_mma(),
    *_tile_product(),
    *_ldmatrix(),
    *_conversions(),
    *_functions(),
    _cp_async(),
    _shuffle(),
    _vote(),
    *_barriers(),
    _atomic(),
    _atomic_x4(),
    _turns(),
)

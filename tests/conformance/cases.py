"""The conformance cases: tiny kernels that show what an instruction does to every input.

Each case is one kernel, deterministic inputs, and what NumPy expects of it, from the PTX ISA alone.
``record.py`` runs the cases on a device and keeps the results; the tests hold the emulator against
both. A kernel takes its inputs, then its outputs, in the order of the case: as pointers, or those
that have one as a tensor map.
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
from fasim.tensor_map import TensorMap

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Rng = np.random.Generator

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
class Boxes:
    """How TMA sees an array: the box of one instruction, innermost first, and its swizzle."""

    box: tuple[int, ...]
    swizzle: int = 0

    def map(self, array: Array, address: int) -> TensorMap:
        """For the array's values at an address."""
        kind, sizes, strides = _KINDS[array.itemsize], array.shape[::-1], array.strides[-2::-1]
        return TensorMap(address, kind, sizes, strides, self.box, self.swizzle)


_KINDS = {1: "e4m3", 2: "bf16", 4: "fp32"}


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
    maps: Mapping[str, Boxes] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The kernel as CUDA."""
        return render_text((KERNELS / f"{self.kernel}.cu").read_text(), **self.values)

    @property
    def digest(self) -> str:
        """sha256 over source and inputs: what a recorded result belongs to."""
        parts = [self.source.encode(), *(array.tobytes() for array in self.inputs.values())]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    @property
    def capability(self) -> int:
        return int(self.arch[3:].rstrip("a"))

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


# ---- Hopper: TMA, mbarriers, products of a warpgroup --------------------------------------------

# Sizes of a tensor, box of it (both innermost first), swizzle. Boxes begin before, across and past
# the edges.
BOXES = {
    "2d_128": ((96, 40), (64, 24), 128),
    "2d_64": ((80, 40), (32, 24), 64),
    "2d_32": ((80, 40), (16, 40), 32),
    "2d_none": ((104, 40), (40, 24), 0),
    "3d_128": ((64, 20, 3), (64, 12, 2), 128),
    "4d_64": ((40, 9, 3, 2), (32, 8, 2, 1), 64),
    "5d_128": ((64, 20, 2, 3, 2), (64, 16, 2, 1, 1), 128),
}
EACH = 12  # boxes of a case


def _tma() -> Iterator[Case]:
    for name, (sizes, box, swizzle) in BOXES.items():
        rng = _rng(name)
        x = rng.integers(1, 1 << 16, sizes[::-1], dtype=np.uint16)
        at = _corners(sizes, box, 8, rng)
        boxes = [swizzled(box_of(x, c, box), swizzle) for c in at]
        common = {
            "grid": 1,
            "block": 128,
            "arch": "sm_90a",
            "smem_bytes": boxes[0].nbytes,
        }
        values = {"rank": len(box), "box_bytes": boxes[0].nbytes, "boxes": len(at)}
        yield Case(
            f"tma_load_{name}",
            "tma_load",
            inputs={"x": x, "at": at},
            expected={"out": np.stack(boxes)},
            values=values,
            maps={"x": Boxes(box, swizzle)},
            **common,
        )
        if len(box) in (2, 4):
            yield from _tma_store(name, x, at, boxes, values, Boxes(box, swizzle), common)
    yield _tma_reduce()


def _tma_store(
    name: str,
    x: Array,
    at: Array,
    boxes: list[Array],
    values: dict[str, object],
    how: Boxes,
    common: dict[str, Any],
) -> Iterator[Case]:
    """The boxes that were loaded, each element one more, on their way back; none begins before the
    tensor, which is an illegal instruction."""
    at = np.maximum(at, 0)
    instruction = f"cp_async_bulk_tensor_{len(how.box)}d"
    wanted, plain = x.copy(), [box_of(x, c, how.box) + np.uint16(1) for c in at]
    for c, box in zip(at, plain, strict=True):
        put_box(wanted, c, box)
    yield Case(
        f"tma_store_{name}",
        "tma_store",
        inputs={"at": at, "x": np.stack([swizzled(box, how.swizzle) for box in plain])},
        expected={"y": wanted},
        initial={"y": x},
        values={**values, "file": instruction, "instruction": f"{instruction}_store", "wait": ""},
        maps={"y": how},
        **common,
    )


def _tma_reduce() -> Case:
    sizes, box, rng = (40, 24), (32, 16), _rng("tma_reduce")
    start = rng.integers(-9, 9, sizes[::-1]).astype(np.float32)
    at = np.maximum(_corners(sizes, box, 4, rng), 0)
    boxes = rng.integers(-9, 9, (len(at), *box[::-1])).astype(np.float32)
    wanted = start.copy()
    for c, one in zip(at, boxes, strict=True):
        put_box(wanted, c, one, add=True)
    instruction = "cp_reduce_async_bulk_tensor_2d"
    nbytes = boxes[0].nbytes
    return Case(
        "tma_reduce",
        "tma_store",
        grid=1,
        block=128,
        inputs={"at": at, "x": np.stack([swizzled(one, 128) for one in boxes])},
        expected={"y": wanted},
        initial={"y": start},
        values={
            **{"rank": 2, "box_bytes": nbytes, "boxes": len(at)},
            **{"file": instruction, "instruction": instruction, "wait": "_read"},
        },
        maps={"y": Boxes(box, 128)},
        arch="sm_90a",
        smem_bytes=nbytes,
    )


def _corners(sizes: tuple[int, ...], box: tuple[int, ...], each: int, rng: Rng) -> Array:
    """Where boxes begin: the origin, and around every edge; of a row at multiples of ``each``
    elements, which are 16 bytes."""
    ends = np.array([[-b - 1, n + 2] for n, b in zip(sizes, box, strict=True)])
    at = rng.integers(ends[:, 0], ends[:, 1], (EACH, len(sizes)), dtype=np.int32)
    at[0] = 0
    at[1:4, 1:] = rng.integers(0, np.array(sizes[1:]), (3, len(sizes) - 1))
    at[:, 0] = at[:, 0] // each * each
    return at


def box_of(x: Array, at: Array, box: tuple[int, ...]) -> Array:
    """A box of x; zero outside."""
    result = np.zeros(box[::-1], x.dtype)
    put_or_take(x, at, result, lambda whole, part: (part, whole))
    return result


def put_box(x: Array, at: Array, box: Array, add: bool = False) -> None:
    put_or_take(x, at, box, lambda whole, part: (whole, part + whole * x.dtype.type(add)))


def put_or_take(x: Array, at: Array, box: Array, how: Any) -> None:
    """Assigns between the part of x under the box, and that part of the box."""
    starts = np.asarray(at)[::-1]
    inside = [
        (max(0, -c), min(b, n - c)) for c, b, n in zip(starts, box.shape, x.shape, strict=True)
    ]
    if any(low >= high for low, high in inside):
        return
    of_box = tuple(slice(low, high) for low, high in inside)
    of_x = tuple(slice(c + low, c + high) for c, (low, high) in zip(starts, inside, strict=True))
    target, value = how(x[of_x], box[of_box])
    target[...] = value


def swizzled(box: Array, span: int) -> Array:
    """A box as it lies in shared memory from a multiple of 1024 bytes on, by its 16-byte chunks."""
    chunks = box.reshape(-1).view(np.uint8).reshape(-1, 16)
    address = np.arange(len(chunks)) * 16
    mask = max(span // 16 - 1, 0)
    where = (address ^ (address >> 7 & mask) << 4) // 16
    result = np.empty_like(chunks)
    result[where] = chunks
    return result.reshape(-1).view(box.dtype).reshape(box.shape)


def _bulk() -> Case:
    blocks, words = 4, 1024
    x = _rng("bulk").integers(-99, 99, (blocks, words)).astype(np.float32)
    start = np.arange(words // 2, dtype=np.float32)
    return Case(
        "bulk",
        "bulk",
        grid=blocks,
        block=32,
        inputs={"x": x},
        expected={"copied": x, "sums": start + x[:, 4 : 4 + words // 2].sum(axis=0)},
        initial={"sums": start},
        arch="sm_90a",
        smem_bytes=4096,
    )


def _mbarrier_ring() -> Case:
    x = _rng("mbarrier_ring").integers(0, 1 << 32, (9, 256), dtype=np.uint32)
    return Case(
        "mbarrier_ring",
        "mbarrier_ring",
        grid=1,
        block=384,
        inputs={"x": x},
        expected={"y": x[:, ::-1].copy(), "elected": (LANE == 0).astype(np.uint32)},
        arch="sm_90a",
        smem_bytes=2 * 1024,
    )


def _stmatrix() -> Case:
    rng = _rng("stmatrix")
    pairs = rng.integers(0, 1 << 16, (32, 4, 2), dtype=np.uint16)
    rows = rng.permutation(32).astype(np.int32)
    tiles = np.zeros((2, 3, 32, 8), np.uint16)
    for (trans, form), tile in np.ndenumerate(np.empty((2, 3))):
        del tile
        for m in range((1, 2, 4)[form]):
            matrix = np.empty((8, 8), np.uint16)
            matrix[GROUP[:, None], 2 * THREAD[:, None] + np.arange(2)] = pairs[:, m]
            tiles[trans, form, rows[8 * m : 8 * m + 8]] = matrix.T if trans else matrix
    return Case(
        "stmatrix",
        "stmatrix",
        grid=1,
        block=32,
        inputs={"registers": _words(pairs), "rows": rows},
        expected={"tiles": tiles},
        arch="sm_90a",
        smem_bytes=32 * 16,
    )


# Of the columns that a product has; and what forms there are: a from shared memory or registers,
# times b with the depth contiguous or (not e4m3) the columns.
COLUMNS = (8, 64, 128, 176, 256)
KEPT = {"f16": 2.0**-19, "bf16": 2.0**-19, "e4m3": 2.0**-6}  # of the sum of all magnitudes
WHY_KEPT = (
    "tensor cores keep 25 bits below the largest addend of an instruction, and of e4m3 only 13;"
    " each of the 33 addends of 4 instructions may lose what lies below"
)


def _wgmma() -> Iterator[Case]:
    for kind in ("f16", "bf16", "e4m3"):
        for numbers in ("integers", "normal", "special", "wide"):
            name = f"wgmma_{kind}_{numbers}"
            depth = 128 // TYPES[kind].itemsize
            columns = COLUMNS if numbers == "integers" else (64,)  # or the results would be large
            forms = 4 if numbers == "integers" and kind != "e4m3" else 2
            a, b = _factors(name, kind, depth)
            values = {"type": kind, "size": TYPES[kind].itemsize, "depth": depth // 4}
            maps = {"a_map": Boxes((depth, 64), 128), "b_map": Boxes((depth, 256), 128)}
            bt = np.ascontiguousarray(b.T)
            yield Case(
                name,
                "wgmma",
                grid=len(columns) * forms,
                block=128,
                inputs={"a_map": a, "b_map": b, "bt_map": bt, "a": _warpgroup_left(a)},
                expected={"d": _all_forms(_product(a, b.T), columns, forms)},
                values={**values, "forms": forms, "columns": columns},
                bounds={} if numbers == "integers" else {"d": _kept(a, b, kind, columns, forms)},
                maps={**maps, "bt_map": Boxes((128 // TYPES[kind].itemsize, depth), 128)},
                arch="sm_90a",
                smem_bytes=(64 + 256 + 256) * 128,
            )


def _factors(name: str, kind: str, depth: int) -> tuple[Array, Array]:
    """a (64 x depth) and b (256 x depth)."""
    rng, shapes = _rng(name), ((64, depth), (256, depth))
    if name.endswith("integers"):
        a, b = (rng.integers(-3, 4, shape).astype(np.float64) for shape in shapes)
    else:
        a, b = (rng.standard_normal(shape) for shape in shapes)
    if name.endswith("wide"):  # rows of all sizes
        low, high = {"f16": (-22, 8), "bf16": (-60, 60), "e4m3": (-8, 4)}[kind]
        a = a * 2.0 ** (np.linspace(low, high, 64).round()[:, None] + rng.integers(-4, 5, a.shape))
        b = b * 2.0 ** (rng.integers(low, high, (256, 1)) + rng.integers(-4, 5, b.shape))
    with np.errstate(over="ignore"):
        a, b = a.astype(TYPES[kind]), b.astype(TYPES[kind])
    return (_strewn(a, rng), _strewn(b, rng)) if name.endswith("special") else (a, b)


def _kept(a: Array, b: Array, kind: str, columns: tuple[int, ...], forms: int) -> Bound:
    with np.errstate(all="ignore"):
        left, right = (np.where(x == 0, 0, np.maximum(np.abs(x.astype(np.float64)), _tiny(x)))
                       for x in (a, b))  # fmt: skip
        sizes = left @ right.T
    finite = np.where(np.isfinite(sizes), sizes, 0.0)
    return Bound(WHY_KEPT, absolute=_all_forms(finite, columns, forms) * KEPT[kind] + SMALLEST)


def _all_forms(product: Array, columns: tuple[int, ...], forms: int) -> Array:
    """Of every number of columns and every form the sums of a warpgroup, one after the other."""
    parts = [np.tile(_warpgroup_sums(product[:, :n]).ravel(), forms) for n in columns]
    return np.concatenate(parts)


def _warpgroup_sums(d: Array) -> Array:
    """(thread, register) of a 64 x n result. PTX ISA: wgmma, fragments of D."""
    thread, register = np.arange(128)[:, None], np.arange(d.shape[1] // 2)
    rows = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2 % 2)
    return np.ascontiguousarray(d[rows, register // 4 * 8 + 2 * (thread % 4) + register % 2])


def _warpgroup_left(a: Array) -> Array:
    """(thread, step, register) of a row-major left operand of 64 rows, warp by warp as for mma."""
    steps = np.split(a.reshape(4, 16, -1), 4, axis=-1)
    return np.ascontiguousarray(np.stack([_left(step) for step in steps], axis=2)).reshape(
        128, 4, 4
    )


def _wgmma_layouts() -> Iterator[Case]:
    for span, swizzle, row in ((128, "k128", 5), (64, "k64", 8), (32, "k32", 8), (16, "kNone", 0)):
        rng, depth = _rng(f"wgmma_layout_{span}"), max(span // 2, 32)
        a, b = (rng.integers(-3, 4, (104, depth)).astype(TYPES["bf16"]) for _ in range(2))
        at, bt = (
            np.ascontiguousarray(rng.integers(-3, 4, (n, depth)).astype(TYPES["bf16"]).T)
            for n in (64, 96)
        )
        products = _product(a[row : row + 64], b[row : row + 96].T), _product(at.T, bt)
        rows = {"a": 104, "b": 104, "at": depth, "bt": depth}
        yield Case(
            f"wgmma_layout_{span}",
            "wgmma_layout",
            grid=1,
            block=128,
            inputs={"a": a, "b": b, "at": at, "bt": bt},
            expected={"d": np.stack([_warpgroup_sums(product) for product in products])},
            values={"span": span, "swizzle": swizzle, "row": row, "type": "bf16"},
            maps={
                name: Boxes((span // 2, n), 0 if swizzle == "kNone" else span)
                for name, n in rows.items()
            },
            arch="sm_90a",
            smem_bytes=4 * 16384,
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
    *_tma(),
    _bulk(),
    _mbarrier_ring(),
    _stmatrix(),
    *_wgmma(),
    *_wgmma_layouts(),
)

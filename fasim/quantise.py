"""What kernels that quantise their inputs make of them, bit for bit, as short NumPy loops.

Everything is fp32, in the order of the kernel (templates/device/quantise_e4m3.cuh): a number is
multiplied by the reciprocal of its scale factor and rounded once to e4m3. The oracle's own
quantiser, ``reference.quantise``, divides in float64; the two differ where a number lies within
rounding of the middle between two of e4m3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasim.plan import SCALE_BLOCK, SIGNS, KernelSpec
from fasim.problem import Problem
from fasim.reference import DTYPES, E4M3_MAX

Array = NDArray[Any]

SMALLEST_SCALE = np.finfo(np.float32).tiny


def stored(arrays: Mapping[str, Array], work: Problem | KernelSpec) -> dict[str, Array]:
    """The inputs of what quantises with q, k and v in e4m3 and their scale factors, as arrays of a
    kernel that takes those; of anything else as they are."""
    if not work.quantises:
        return dict(arrays)
    made = dict(arrays)
    for name in ("q", "k", "v"):
        x, unit = arrays[name].astype(np.float32), 1.0
        if work.incoherent and name != "v":
            x, unit = transform(x), unit_of(x.shape[3])
        made[name], made[f"{name}_scale"] = quantise(x, work.scales, unit)
    return made


def quantise(x: Array, scales: str = "tensor", unit: float = 1.0) -> tuple[Array, Array]:
    """unit * x (batch, heads, seq, dim) fp32 as e4m3, and the scale factors: (1,) for a tensor,
    (batch, heads) for heads, (batch, heads, blocks) for blocks of SCALE_BLOCK rows.

    The largest finite magnitude of each becomes 448; infinities saturate there, NaN stays.
    """
    most = _LARGEST[scales](np.where(np.isfinite(x), np.abs(x), np.float32(0))) * np.float32(unit)
    scale = np.maximum(most / np.float32(E4M3_MAX), SMALLEST_SCALE)
    with np.errstate(over="ignore", invalid="ignore"):
        grown = np.clip(x * per_row(1 / scale * np.float32(unit), x.shape[2]), -E4M3_MAX, E4M3_MAX)
    return grown.astype(DTYPES["e4m3"]), scale


def rotate(x: Array) -> Array:
    """Rows of x times an orthogonal matrix, the same for q and k, so that products of rows stay
    what they are."""
    return transform(x) * np.float32(unit_of(x.shape[-1]))


def unit_of(d: int) -> float:
    """What a transform of ``d`` numbers must be multiplied by to change no length."""
    return float(np.float32(1 / math.sqrt(d)))


def transform(x: Array) -> Array:
    """Rows of x times random signs, then their Hadamard transforms: sqrt(d) times a rotation. The
    last dimension, d, is a power of two.

    Stage by stage numbers whose columns differ in one bit become their sum and their difference.
    """
    d = x.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype(np.float32) * signs(d)
        for apart in (1 << bit for bit in range(d.bit_length() - 1)):
            pairs = x.reshape(*x.shape[:-1], d // (2 * apart), 2, apart)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            x = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
    return x


def signs(d: int) -> Array:
    """1 or -1 for each of ``d`` columns, fp32."""
    bits = np.unpackbits(np.frombuffer(SIGNS, np.uint8), bitorder="little")[:d]
    return 1 - 2 * bits.astype(np.float32)


def per_row(scale: Array, rows: int) -> Array:
    """Scale factors of a tensor, of heads or of blocks, in a shape that q, k or v multiply with."""
    if scale.ndim < 3:
        return scale.reshape(*scale.shape, 1, 1)
    return np.repeat(scale, SCALE_BLOCK, axis=2)[:, :, :rows, None]


def _largest_of_blocks(x: Array) -> Array:
    rows = x.max(axis=3, initial=0)
    starts = range(0, x.shape[2], SCALE_BLOCK)
    blocks = [rows[:, :, i : i + SCALE_BLOCK].max(axis=2) for i in starts]
    return np.stack(blocks, axis=2) if blocks else rows


_LARGEST: dict[str, Callable[[Array], Array]] = {
    "tensor": lambda x: x.max(initial=0).reshape(1),
    "head": lambda x: x.max(axis=(2, 3), initial=0),
    "block": _largest_of_blocks,
}

"""Runs a plan's tiles in NumPy: the loops of fasim/tiled.py, at the plan's tile sizes.

This checks the algorithm, never a file: the text of the kernel is not looked at, so a mistake in it
goes unseen here. Only the GPU and the emulator execute what was generated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fasim import quantise, tiled
from fasim.errors import UsageError
from fasim.plan import KernelSpec, Launch
from fasim.reference import DTYPES

if TYPE_CHECKING:
    from fasim.render import Kernel

Array = NDArray[Any]
FORWARD: dict[str, Callable[..., tuple[Array, Array]]] = {
    "v1": tiled.v1,
    "v2": tiled.v2,
    "v3": tiled.v3,
}


class NumpyRunner:
    """The runner that needs nothing but NumPy."""

    name = "numpy"

    @np.errstate(all="ignore")
    def run(self, kernel: Kernel, arrays: Mapping[str, Array], launch: Launch) -> dict[str, Array]:
        """Outputs o (out_dtype) and lse (fp32) of ``arrays`` q, k, v (batch, heads, seq, dim).

        Tiles are worked on in fp32, as the kernels accumulate; those of V3 also in e4m3 with scale
        factors, made here if the kernel quantises. Raises UsageError for a kernel whose tiles are
        not written down in tiled.py.
        """
        spec = kernel.plan.kernel
        forward = _forward_of(spec, launch)
        given = quantise.stored({name: np.asarray(x) for name, x in arrays.items()}, spec)
        kind = np.float32 if spec.dtype != "e4m3" else DTYPES["e4m3"]
        q, k, v = (given[name].astype(kind) for name in ("q", "k", "v"))
        o, lse = (np.empty(*_kind(launch, name)) for name in ("o", "lse"))
        group = q.shape[1] // k.shape[1]
        for b, h in np.ndindex(*q.shape[:2]):
            heads = {"q": (b, h), "k": (b, h // group), "v": (b, h // group)}
            scales = _scales(given, spec, heads) if spec.scaled else {}
            o[b, h], lse[b, h] = forward(q[b, h], k[b, h // group], v[b, h // group], **scales)
        return {"o": o, "lse": lse}


def _scales(
    arrays: Mapping[str, Array], spec: KernelSpec, heads: Mapping[str, tuple[int, int]]
) -> dict[str, tiled.Scales]:
    """The scale factor of every tile of some heads of q, k and v."""
    sizes = {"q": spec.tile.block_q, "k": spec.tile.block_kv, "v": spec.tile.block_kv}
    found = []
    for name, head in heads.items():
        factor = arrays[f"{name}_scale"]
        tiles = math.ceil(arrays[name].shape[2] / sizes[name])
        of_head = factor if spec.scales == "tensor" else factor[head]
        found.append(of_head if spec.scales == "block" else np.full(tiles, of_head))
    return {"scales": tiled.Scales(*found)}


def _forward_of(spec: KernelSpec, launch: Launch) -> Callable[..., tuple[Array, Array]]:
    """The loops of ``spec`` with its tiles, mask and scale filled in."""
    _check(spec)
    scale_log2 = cast(float, launch.scalars["scale_log2"])
    options = {
        "block_q": spec.tile.block_q,
        "block_kv": spec.tile.block_kv,
        "causal": spec.mask == "causal",
        "scale": scale_log2 * math.log(2),
    }
    return lambda q, k, v, **scales: FORWARD[spec.algo](q, k, v, **options, **scales)


def _check(spec: KernelSpec) -> None:
    asked = {
        "algorithm": (spec.algo, tuple(FORWARD)),
        "pass": (spec.pass_, ("fwd",)),
        "dtype": (spec.dtype, ("fp32", "fp16", "bf16", *["e4m3"] * (spec.algo == "v3"))),
        "mask": (spec.mask, ("full", "causal")),
        "bias": (spec.bias, ("none",)),
        "softcap": (spec.softcap, (False,)),
        "varlen": (spec.varlen, (False,)),
    }
    for what, (value, known) in asked.items():
        if value not in known:
            raise UsageError(
                f"the numpy runner has no tiles for {what} {value}",
                why=f"it knows {', '.join(map(str, known))}",
                hint="use another runner",
            )


def _kind(launch: Launch, name: str) -> tuple[tuple[int, ...], Any]:
    shape, dtype = launch.outputs[name]
    return shape, DTYPES[dtype]

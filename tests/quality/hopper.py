"""The small Hopper attention kernel of these tests, launched on the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fasim.emulator.program import Execution, Fault, Mapped, Program, Span
from fasim.render import render_text
from fasim.tensor_map import TensorMap

Array = NDArray[Any]

NOTHING, NUMBERS = "nothing", "numbers"
HEAD_DIM, THREADS, SMEM_BYTES = 128, 384, 5 * 128 * 128 * 2
ROWS = {"q": 128, "k": 128, "v": 128, "o": 64}  # of a box
WRAPPERS = (
    *("smem_address", "bar_sync", "ex2", "lg2", "rcp", "cvt_bf16x2", "stmatrix_x4"),
    *("mbarrier_init", "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_try_wait"),
    *("fence_mbarrier_init", "fence_proxy_async", "setmaxnreg_inc", "setmaxnreg_dec"),
    *("cp_async_bulk_tensor_3d", "cp_async_bulk_commit_group", "cp_async_bulk_wait_group"),
    *("wgmma_fence", "wgmma_commit_group", "wgmma_wait_group"),
)


@dataclass(frozen=True)
class Shape:
    heads: int = 1
    rows: int = 200
    keys: int = 300
    grid: int = 1


@cache
def source() -> str:
    path = Path(__file__).parent / "kernels" / "hopper_attention.cu"
    return render_text(path.read_text(), wrappers=WRAPPERS)


def aligned(shape: tuple[int, ...], dtype: Any, fill: int = 0xFF) -> Array:
    """An array at a multiple of 128 bytes, as TMA wants it, with room around."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(nbytes + 4096, fill, np.uint8)
    start = 2048 - (raw.ctypes.data + 2048) % 128
    return raw[start : start + nbytes].view(dtype).reshape(shape)


@cache
def inputs(shape: Shape, seed: int) -> dict[str, Array]:
    """Scores far below 0, so that keys past the end, which TMA fills with 0, would show."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, length in (("q", shape.rows), ("k", shape.keys), ("v", shape.keys)):
        x = rng.standard_normal((shape.heads, length, HEAD_DIM))
        x = np.abs(x) if name == "q" else -np.abs(x) if name == "k" else x
        made[name] = aligned(x.shape, ml_dtypes.bfloat16)
        made[name][...] = x
    return made


def mapped(name: str, x: Array) -> Mapped:
    box = (64, ROWS[name], 1)
    return Mapped(x, TensorMap(x.ctypes.data, "bf16", x.shape[::-1], x.strides[-2::-1], box, 128))


def launch(
    text: str, shape: Shape, seed: int, spans: list[Span] | None = None, workers: int = 1
) -> tuple[dict[str, Array], Execution]:
    """O and LSE (to base 2), and what was executed."""
    given = inputs(shape, 0)
    outputs = {
        "o": aligned((shape.heads, shape.rows, HEAD_DIM), ml_dtypes.bfloat16),
        "lse": aligned((shape.heads, shape.rows), np.float32),
    }
    scale = np.float32(np.log2(np.e) / np.sqrt(HEAD_DIM))
    numbers = (np.int32(shape.heads), np.int32(shape.rows), np.int32(shape.keys), scale)
    arguments: dict[str, Any] = {name: mapped(name, x) for name, x in given.items()}
    arguments |= {"o": mapped("o", outputs["o"]), "lse": outputs["lse"]}
    arguments |= {f"scalar{i}": x.tobytes() for i, x in enumerate(numbers)}
    executed = Program.load(text, "hopper_attention").launch(
        arguments,
        outputs,
        grid=shape.grid,
        block=THREADS,
        smem_bytes=SMEM_BYTES,
        seed=seed,
        spans=spans,
        workers=workers,
    )
    return outputs, executed


@cache
def expected(shape: Shape) -> dict[str, Array]:
    given = {name: x.astype(np.float64) for name, x in inputs(shape, 0).items()}
    s = given["q"] @ np.swapaxes(given["k"], 1, 2) / np.sqrt(HEAD_DIM)
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    return {"o": p / total @ given["v"], "lse": ((top + np.log(total)) * np.log2(np.e))[..., 0]}


def wrong(outputs: Mapping[str, Array], shape: Shape) -> bool:
    """Whether numbers are off by more than bf16 explains."""
    bounds = {"o": 2e-2, "lse": 1e-3}
    return any(
        not (np.abs(outputs[name].astype(np.float64) - x) <= bounds[name]).all()
        for name, x in expected(shape).items()
    )


def finder(text: str, shape: Shape, seed: int) -> str:
    """What finds something in a kernel: a rule, the numbers, or nothing."""
    try:
        outputs, _ = launch(text, shape, seed)
    except Fault as fault:
        return fault.rule
    return NUMBERS if wrong(outputs, shape) else NOTHING

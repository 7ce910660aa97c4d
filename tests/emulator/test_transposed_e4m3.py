"""The kernel that lays out V anew for V3 in e4m3, in the emulator: every byte that it leaves,
whatever the width of V's rows and wherever they lie."""

from __future__ import annotations

import mmap
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fasim import gpu, inputs, planner
from fasim.emulator.program import Fault
from fasim.plan import SLAB_BYTES, kernel_strides, packed_blocks, tensor_shapes
from fasim.problem import Problem
from fasim.properties import lay_out
from fasim.render import Kernel, parse, render
from fasim.runners.arrays import DTYPES
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]

pytestmark = pytest.mark.emulator

E4M3, ONE = DTYPES["e4m3"], 0x38
SHAPE: dict[str, Any] = {"batch": 2, "heads": 3, "kv_heads": 3, "seq": 1, "head_dim": 32}
WIDTHS = (1, 2, 16, 31, 32, 36, 40, 50, 64, 80, 96, 100, 128, 144, 192, 255, 256)
ORDER = np.ravel([[2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9] for t in range(4)])
KEYS = (16 * np.arange(SLAB_BYTES // 16)[:, None] + ORDER).ravel()
SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: only what is used is there


@cache
def kernel(head_dim_v: int, varlen: bool = False) -> Kernel:
    problem = Problem(dtype="e4m3", head_dim_v=head_dim_v, seq_kv=130, varlen=varlen, **SHAPE)
    plan = planner.plan(problem, gpu.load("h200"), "v3").plan
    assert plan
    return render(plan)


def drawn(shape: tuple[int, ...]) -> Array:
    """All bytes but those of NaN."""
    draw: Array = np.random.default_rng(0).integers(0, 0x7F, shape, np.uint8)
    return (draw | np.random.default_rng(1).choice(np.array([0, 0x80], np.uint8), shape)).view(E4M3)


def wanted(v: Array, rows: int) -> Array:
    """V (keys, columns) of a head in slabs: (slabs, rows, keys of a slab)."""
    count = max(1, -(-v.shape[0] // SLAB_BYTES))
    whole = np.zeros((count * SLAB_BYTES, rows), np.uint8)
    whole[: v.shape[0], : v.shape[1]] = v.view(np.uint8)
    whole[:, -1] = ONE
    return whole.reshape(count, SLAB_BYTES, rows)[:, KEYS].swapaxes(1, 2)


def laid_out(kernel: Kernel, problem: Problem, v: Array, **sequences: Any) -> Array:
    """What the kernel leaves, in several orders of its warps, as bytes."""
    tokens = (problem.batch, len(v)) if problem.varlen else None
    steps = tuple(n // v.itemsize for n in v.strides)
    launch = kernel.plan.launch_for(problem, {"v": kernel_strides(steps)}, tokens)
    shown = replace(launch, outputs={**launch.outputs, **launch.workspaces}, workspaces={})
    arrays = {
        name: np.zeros(shape, DTYPES[dtype]) if "scale" not in name else np.ones(shape, np.float32)
        for name, (shape, dtype) in launch.inputs.items()
    }
    arrays |= {"v": v, **sequences}
    return EmulatorRunner(schedules=3).run(kernel, arrays, shown)["vt"].view(np.uint8)


def check(kernel: Kernel, problem: Problem, v: Array) -> None:
    vt = laid_out(kernel, problem, v)
    heads = np.concatenate(v)
    for got, head in zip(vt, heads, strict=True):
        np.testing.assert_array_equal(got, wanted(np.ascontiguousarray(head), vt.shape[2]))


@pytest.mark.parametrize("head_dim_v", WIDTHS)
def test_every_byte_is_in_its_place(head_dim_v: int) -> None:
    of = kernel(head_dim_v)
    for seq_kv in (0, 1, 137, 300):
        problem = of.plan.problem.with_(seq_kv=seq_kv)
        check(of, problem, drawn(tensor_shapes(problem)["v"]))


@pytest.mark.parametrize("layout", ["padded", "tokens"])
@pytest.mark.parametrize("head_dim_v", [33, 36, 80, 128])
def test_rows_may_lie_anywhere(head_dim_v: int, layout: str) -> None:
    """What lies between them is NaN."""
    of = kernel(head_dim_v)
    v = drawn(tensor_shapes(of.plan.problem)["v"])
    check(of, of.plan.problem, lay_out(v, layout))


@pytest.mark.parametrize("head_dim_v", [33, 80, 128])
def test_packed_sequences_begin_in_slabs_of_their_own(head_dim_v: int) -> None:
    """Slabs that no sequence reaches stay as they were."""
    of, lengths = kernel(head_dim_v, varlen=True), [0, 129, 300, 1, 128]
    problem = of.plan.problem.with_(batch=len(lengths), seq_kv=max(lengths))
    v, ends = drawn((sum(lengths), 3, head_dim_v)), inputs.cu_seqlens(lengths)
    queries = inputs.cu_seqlens([1] * len(lengths))
    vt = laid_out(of, problem, v, cu_seqlens_k=ends, cu_seqlens_q=queries)
    assert len(vt) == packed_blocks(problem, sum(lengths))
    for i, (start, stop) in enumerate(pairwise(ends)):
        first, count = start // SLAB_BYTES + i, -(-(stop - start) // SLAB_BYTES)
        for head in range(3):
            want = wanted(np.ascontiguousarray(v[start:stop, head]), vt.shape[2])
            np.testing.assert_array_equal(vt[first : first + count, head], want[:count])


# ---- offsets beyond 2^31 ------------------------------------------------------------------------


def far_apart(x: Array, stride: int) -> Array:
    """The same values with ``stride`` bytes between the keys."""
    strides = (*x.strides[:2], stride, 1)
    memory = mmap.mmap(-1, x.shape[2] * stride + x.nbytes, flags=SPARSE)
    view: Array = np.ndarray(x.shape, x.dtype, memory, 0, strides)
    view[...] = x
    return view


def far_values() -> tuple[Kernel, Problem, Array]:
    of = kernel(64)
    problem = of.plan.problem.with_(batch=1, heads=1, kv_heads=1)
    return of, problem, far_apart(drawn(tensor_shapes(problem)["v"]), 2**25)


def test_offsets_beyond_2_to_the_31_are_followed() -> None:
    check(*far_values())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("v += (first_key + key) * v_strides.seq", "v += (first_key + key) * int(v_strides.seq)"),
        ("v += (first_key + key) * v_strides.seq", "v += int((first_key + key) * v_strides.seq)"),
    ],
)
def test_an_offset_of_32_bits_is_found(right: str, wrong: str) -> None:
    of, problem, v = far_values()
    assert of.source.count(right) == 1
    with pytest.raises(Fault) as fault:
        laid_out(parse(of.source.replace(right, wrong)), problem, v)
    assert fault.value.rule in ("out of bounds", "undefined arithmetic")

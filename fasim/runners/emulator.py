"""The emulator runner: the generated file on the CPU, held to rules that hardware lets pass.

The file is compiled as C++ with headers that give every CUDA word its meaning (fasim/emulator/). It
needs a C++ compiler and no GPU. Races, copies not waited for, accesses out of bounds, reads of
what nobody wrote and deadlocks are errors, with the line. Values are those of the hardware up to
the order of sums; time is not modelled.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasim.emulator.build import build_kernel
from fasim.emulator.program import Argument, Execution, Mapped, Program, Span
from fasim.errors import CheckFailed, MissingToolError
from fasim.plan import Launch, alignment
from fasim.render import Kernel, memory_map
from fasim.runners.arrays import (
    DTYPES,
    POISON,
    View,
    actual_scalars,
    bytes_of,
    check_array,
    check_present,
    followable,
    host_array,
    pack_arguments,
    tensor_maps,
    why_copy,
)
from fasim.toolchain import find_cxx

Array = NDArray[Any]

ALIGNMENT = 256  # of arrays, as of memory that CUDA allocates
GUARD = 1 << 16  # bytes around an array that belong to none, so that one overrun hits no other
COPIED = 1 << 26  # a larger input stays where it lies
LOADED = 32  # programs that stay loaded


class EmulatorRunner:
    """Runs generated kernels on the CPU. Raises MissingToolError if there is no C++ compiler.

    A run draws ``schedules`` orders of its warps and demands the same bits from all of them, in
    every output that the plan says repeats; the next run draws others, from ``seed`` on.
    ``workers`` system threads share the blocks of a launch (0: all cores). ``last`` is what the
    latest launch executed, ``executed`` all of them.
    """

    name = "emulator"

    def __init__(self, schedules: int = 1, seed: int = 0, workers: int = 0) -> None:
        find_cxx()
        self.schedules, self.workers = schedules, workers or len(os.sched_getaffinity(0))
        self.next_seed = seed
        self.last = self.executed = Execution()

    def run(self, kernel: Kernel, arrays: Mapping[str, Any], launch: Launch) -> dict[str, Array]:
        """Outputs as arrays. Outputs and workspaces start uninitialised, as poison (NaN bytes).

        Raises UsageError for arrays that the kernel does not take, Fault when it breaks a rule, and
        CheckFailed when two schedules give different bits.
        """
        first = self._launch(kernel, arrays, launch)
        for _ in range(1, self.schedules):
            _check_same(kernel, first, self._launch(kernel, arrays, launch), self.next_seed - 1)
        return first

    def trace(self, kernel: Kernel, arrays: Mapping[str, Any], launch: Launch) -> list[Span]:
        """What the warps of one launch did, in the order of their blocks. Errors as of ``run``."""
        spans: list[Span] = []
        self._launch(kernel, arrays, launch, spans)
        return sorted(spans, key=lambda span: (span.block, span.first))

    def read_after(
        self, kernel: Kernel, arrays: Mapping[str, Any], launch: Launch, symbol: str, size: int
    ) -> NDArray[np.uint8]:
        """The ``size`` bytes of a variable of the file after a launch that found it zeroed. Errors
        as of ``run``."""
        variable = _program(kernel).variable(symbol, size)
        variable[...] = 0
        self._launch(kernel, arrays, launch)
        return variable.copy()

    def _launch(
        self,
        kernel: Kernel,
        arrays: Mapping[str, Any],
        launch: Launch,
        spans: list[Span] | None = None,
    ) -> dict[str, Array]:
        inputs = _inputs(kernel, arrays, launch)
        sizes = {**launch.outputs, **launch.workspaces}
        buffers = {name: _poison(shape, DTYPES[dtype]) for name, (shape, dtype) in sizes.items()}
        seed, self.next_seed = self.next_seed, self.next_seed + 1
        arguments = _arguments(kernel, {**inputs, **buffers}, launch)
        known = {name: np.zeros(x.nbytes, np.bool_) for name, x in buffers.items()}
        done = Execution()
        for stage in launch.stages:
            if stage.grid:
                done += _program(kernel).launch(
                    arguments,
                    buffers,
                    entry=stage.entry,
                    grid=stage.grid,
                    block=stage.block,
                    smem_bytes=stage.smem_bytes,
                    seed=seed,
                    workers=min(self.workers, stage.grid),
                    ordered=kernel.plan.kernel.deterministic,
                    known=known,
                    describe=_shared_bytes(kernel).__getitem__,
                    spans=spans,
                )
        self.last = replace(done, launches=1)  # of the whole file
        self.executed += self.last
        return {name: buffers[name] for name in launch.outputs}


def available() -> str | None:
    """None when the emulator can run here, else the reason why not. Never raises."""
    try:
        find_cxx()
    except MissingToolError as error:
        return error.what
    return None


@lru_cache(LOADED)
def _program(kernel: Kernel) -> Program:
    return Program(kernel.stem, build_kernel(kernel))


class _shared_bytes(dict[int, str]):
    """Names of the bytes of a kernel's shared memory, by their offset."""

    def __init__(self, kernel: Kernel) -> None:
        self.tiles = memory_map(kernel.plan)

    def __missing__(self, offset: int) -> str:
        for name, start, size in self.tiles:
            if start <= offset < start + size:
                return f"byte {offset} of shared memory ({name})"
        return f"byte {offset} of shared memory"


def _check_same(
    kernel: Kernel, first: Mapping[str, Array], other: Mapping[str, Array], seed: int
) -> None:
    for name, x in first.items():
        if kernel.plan.kernel.repeats(name) and x.tobytes() != other[name].tobytes():
            raise CheckFailed(
                f"{kernel.stem} gives other bits when its warps run in another order",
                where=name,
                why=f"schedule {seed} differs from the first",
            )


# ---- Arguments ----------------------------------------------------------------------------------


def _arguments(kernel: Kernel, arrays: Mapping[str, Array], launch: Launch) -> dict[str, Argument]:
    """Arrays, and the bytes of all that is passed by value, in the order of the parameters."""
    steps = {name: View.of(x.__array_interface__).steps() for name, x in arrays.items()}
    scalars = actual_scalars(launch, {name: steps[name] for name in launch.inputs})
    maps = _maps(launch, arrays, steps)
    packed: dict[str, Argument] = {}
    for name, kind in kernel.plan.kernel.arguments:
        if kind == "map":
            tensor = name.removesuffix("_map")
            packed[tensor] = maps[tensor]
        elif kind == "ptr":  # of what is a map too, the map bears the name
            packed[name if name not in packed else f"{name}, by address"] = arrays[name]
        else:
            (form,), values = pack_arguments(((name, kind),), {}, scalars)
            packed[name] = struct.pack(f"={form}", *values)
    return packed


def _maps(
    launch: Launch, arrays: Mapping[str, Array], steps: Mapping[str, tuple[int, ...]]
) -> dict[str, Mapped]:
    addresses = {name: arrays[name].ctypes.data for name in launch.boxes}
    maps = tensor_maps(launch, addresses, steps)
    return {name: Mapped(arrays[name], one) for name, one in maps.items()}


def _inputs(kernel: Kernel, arrays: Mapping[str, Any], launch: Launch) -> dict[str, Array]:
    check_present(kernel, launch, arrays)
    return {name: _input(name, arrays[name], launch) for name in launch.inputs}


def _input(name: str, array: Any, launch: Launch) -> Array:
    """A copy amid a guard, with the array's strides where the kernel can follow them; a large array
    where it lies."""
    host = host_array(name, array)
    view = View.of(host.__array_interface__)
    check_array(name, view, *launch.inputs[name])
    align = alignment(name, launch)
    if not why_copy(view, align) and view.span_bytes() > COPIED:
        return host
    host = followable(host, align)
    span = bytes_of(host)
    memory = _aligned(span.size)
    memory[...] = span
    return np.ndarray(host.shape, host.dtype, memory.data, 0, host.strides)


def _poison(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = _aligned(size)
    memory[...] = POISON
    return memory.view(dtype).reshape(shape)


def _aligned(size: int) -> Array:
    raw = np.empty(size + ALIGNMENT + 2 * GUARD, np.uint8)
    start = GUARD + -(raw.ctypes.data + GUARD) % ALIGNMENT
    return raw[start : start + size]

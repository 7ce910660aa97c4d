"""The GPU runner: a generated kernel, loaded and launched with PyCUDA.

This is the only module that imports pycuda. It works in the device's primary context, the one that
torch uses too, and makes it current only while it needs it, so that either may be imported first
and an exception leaves nothing behind.

Arrays may be host arrays (anything ``numpy.asarray`` takes) or device arrays (anything with
``__cuda_array_interface__``). Strides are kept where the kernel can follow them: the last dimension
contiguous, every row aligned to the copies the kernel was built with.
"""

from __future__ import annotations

import atexit
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasim.compile import compile_kernel
from fasim.errors import CheckFailed, MissingToolError, NoPlanError, UsageError
from fasim.plan import Launch, Stage, alignment, contiguous_strides
from fasim.render import Kernel
from fasim.runners import DeviceFault
from fasim.runners.arrays import (
    DTYPES,
    MAP_FORMAT,
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
from fasim.tensor_map import parameter_offsets, placed

Array = NDArray[Any]

GUARD_BYTES = 128 * 1024  # beyond the widest tile that could be read past an end
DUMMY_BYTES = 1024  # what stands behind the pointer of an array without elements
MAX_GRID = 2**31 - 1
OPT_IN_SMEM_BYTES = 48 * 1024  # above this a kernel must ask for its shared memory


class GpuRunner:
    """Runs generated kernels on the first CUDA device. Raises MissingToolError if there is none.

    With ``guard`` every array stands between zones of poison, so that a read past its end shows in
    the result and a write past its end is found. Without it arrays are exactly as large as their
    data, which is what a memory checker wants.
    """

    name = "gpu"

    def __init__(self, guard: bool = True) -> None:
        _primary_context()
        self.guard = guard

    def run(
        self, kernel: Kernel, arrays: Mapping[str, Any], launch: Launch
    ) -> dict[str, NDArray[Any]]:
        """Outputs as host arrays, after checking that nothing was written beside them.

        Every output and workspace starts as poison (NaN bytes).
        Raises UsageError for arrays the kernel does not take, CheckFailed when a guard zone was
        written, DeviceFault when the kernel made the device fail, MissingToolError if none is here.
        """
        with _device(kernel.stem):
            call = launch_on_device(kernel, arrays, launch, guard=self.guard)
            _driver().Context.synchronize()
            for buffer in call.buffers.values():
                buffer.check_guards(kernel.stem)
            return {name: call.outputs[name].numpy() for name in launch.outputs}

    def read_after(
        self, kernel: Kernel, arrays: Mapping[str, Any], launch: Launch, symbol: str, size: int
    ) -> NDArray[np.uint8]:
        """The ``size`` bytes of a variable of the file after a launch that found it zeroed; one
        before warms up. Errors as of ``run``."""
        with _device(kernel.stem):
            call = launch_on_device(kernel, arrays, launch)
            address, _ = _module(kernel).get_global(symbol)
            _driver().Context.synchronize()
            _driver().memset_d8(int(address), 0, size)
            call()
            _driver().Context.synchronize()
            return _download(int(address), size)


@dataclass(frozen=True)
class DeviceArray:
    """A C-contiguous array on the device, between two guard zones of poison (or of 0 bytes).

    Other libraries read it through ``__cuda_array_interface__``; it owns its memory.
    """

    name: str
    memory: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    guard_bytes: int

    @property
    def address(self) -> int:
        return int(self.memory) + self.guard_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "version": 3}

    def numpy(self) -> Array:
        """A copy on the host."""
        with _device():
            raw = _download(self.address, math.prod(self.shape) * self.dtype.itemsize)
        return raw.view(self.dtype).reshape(self.shape)

    def check_guards(self, stem: str) -> None:
        """Raises CheckFailed if a byte right before or after the array is no longer poison."""
        for where, start in (("before", int(self.memory)), ("after", self.address + self.nbytes)):
            changed = np.flatnonzero(_download(start, self.guard_bytes) != POISON)
            if len(changed):
                nearest = self.guard_bytes - changed[-1] if where == "before" else changed[0] + 1
                raise CheckFailed(
                    f"{stem} wrote outside {self.name}",
                    why=f"{len(changed)} bytes {where} it changed, the nearest {nearest} away",
                    hint="run the kernel under compute-sanitizer for the line",
                )


@dataclass(frozen=True)
class DeviceLaunch:
    """A launch with everything in place: calling it launches once more, without waiting."""

    stem: str
    outputs: Mapping[str, DeviceArray]
    buffers: Mapping[str, DeviceArray]  # outputs and workspaces
    inputs: Mapping[str, Any]  # kept alive
    launch: Callable[[], None]

    def __call__(self) -> None:
        with _device(self.stem):
            self.launch()


def launch_on_device(
    kernel: Kernel, arrays: Mapping[str, Any], launch: Launch, *, guard: bool = False
) -> DeviceLaunch:
    """Launch without waiting and leave the outputs on the device.

    Device arrays are used where they are; host arrays are uploaded. Errors and ``guard`` as of
    GpuRunner.
    """
    if (blocks := max(stage.grid for stage in launch.stages)) > MAX_GRID:
        raise UsageError(
            f"{kernel.stem} would need {blocks:,} thread blocks",
            why=f"a CUDA grid has at most {MAX_GRID:,}",
            hint="split the batch into several calls",
        )
    with _device(kernel.stem):
        heap = _Heap(GUARD_BYTES if guard else 0)
        inputs = _inputs(kernel, arrays, launch, heap)
        sizes = {**launch.outputs, **launch.workspaces}
        buffers = {name: heap.empty(name, shape, DTYPES[d]) for name, (shape, d) in sizes.items()}
        bound = _bind(kernel, inputs, buffers, launch)
        outputs = {name: buffers[name] for name in launch.outputs}
        call = DeviceLaunch(kernel.stem, outputs, buffers, inputs, bound)
        call()
    return call


def available() -> str | None:
    """None when kernels can run here, else the reason why not. Never raises."""
    try:
        _primary_context()
    except MissingToolError as error:
        return error.what
    return None


def device() -> dict[str, Any]:
    """Name, compute capability, SM count and driver of the device, as JSON-able values."""
    with _device():
        gpu = _driver().Context.get_device()
        return {
            "name": gpu.name(),
            "compute_capability": list(gpu.compute_capability()),
            "sm_count": gpu.multiprocessor_count,
            "memory_bytes": gpu.total_memory(),
            "cuda_driver": _driver().get_driver_version(),
        }


def time_launches(
    launch: Callable[[], object], count: int, meanwhile: Callable[[], object] = lambda: None
) -> float:
    """Seconds a launch takes: CUDA events around ``count`` of them on the default stream.

    ``meanwhile`` is called once they are queued, while the device works.
    """
    with _device():
        start, end = _driver().Event(), _driver().Event()
        start.record()
        for _ in range(count):
            launch()
        end.record()
        meanwhile()
        end.synchronize()
        return float(start.time_till(end)) * 1e-3 / count


# ---- Context ------------------------------------------------------------------------------------

_HINT = "install fasim[gpu] on a machine with an NVIDIA driver"


def _driver() -> Any:
    import pycuda.driver

    return pycuda.driver


@cache
def _primary_context() -> Any:
    """The device's primary context, retained once. Raises MissingToolError (not cached) if none."""
    if find_spec("pycuda") is None:
        raise MissingToolError("pycuda is not installed", hint=_HINT)
    try:
        driver = _driver()
        driver.init()
        return driver.Device(0).retain_primary_context()
    except Exception as error:  # pycuda raises its own types, and ImportError without a driver
        raise MissingToolError("pycuda finds no CUDA device", why=str(error), hint=_HINT) from error


@contextmanager
def _device(what: str = "the device") -> Iterator[None]:
    """The primary context made current, and popped on every way out.

    Whatever the driver reports inside becomes a DeviceFault of ``what``.
    """
    context, driver = _primary_context(), _driver()
    try:
        context.push()
        try:
            yield
        finally:
            with suppress(driver.Error):  # after a fault this reports the same fault again
                driver.Context.pop()
    except driver.Error as error:
        raise DeviceFault(
            f"{what} failed on the device",
            why=str(error),
            hint="run it under compute-sanitizer for the place",
        ) from error


@atexit.register
def _forget() -> None:
    """Free modules and context while the driver still stands."""
    _module.cache_clear()
    _primary_context.cache_clear()


# ---- Launching ----------------------------------------------------------------------------------


def _bind(
    kernel: Kernel, inputs: Mapping[str, _Input], buffers: Mapping[str, DeviceArray], launch: Launch
) -> Callable[[], None]:
    """The launch as a call without arguments. An empty grid launches nothing."""
    stages = [stage for stage in launch.stages if stage.grid]
    if not stages:
        return lambda: None
    pointers = {name: array.address for name, array in inputs.items()}
    pointers |= {name: array.address for name, array in buffers.items()}
    arguments = kernel.plan.kernel.arguments
    steps = {name: array.strides for name, array in inputs.items()}
    scalars = actual_scalars(launch, steps)
    made = {**launch.outputs, **launch.workspaces}
    steps |= {name: contiguous_strides(shape) for name, (shape, _) in made.items()}
    maps = {n: m.encoded() for n, m in tensor_maps(launch, pointers, steps).items()}
    formats, values = pack_arguments(arguments, pointers, scalars, maps)
    calls = [_prepared(kernel, stage, formats, values) for stage in stages]

    def launch_all() -> None:
        for call in calls:
            call()

    return launch_all


def _prepared(
    kernel: Kernel, stage: Stage, formats: list[str], values: list[int | float | bytes]
) -> Callable[[], None]:
    """One kernel of the file as a call without arguments."""
    function = _module(kernel).get_function(stage.entry)
    if MAP_FORMAT in formats:
        formats, gaps = placed(formats, parameter_offsets(_cubin(kernel), stage.entry))
        values = list(values)
        for gap in gaps:
            values.insert(gap, b"")
    if stage.smem_bytes > OPT_IN_SMEM_BYTES:
        attribute = _driver().function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        function.set_attribute(attribute, stage.smem_bytes)
    function.prepare(formats)
    grid, block = (stage.grid, 1), (stage.block, 1, 1)
    return lambda: function.prepared_call(grid, block, *values, shared_size=stage.smem_bytes)


@cache
def _module(kernel: Kernel) -> Any:
    """The loaded file, compiled for this device: one module a process for each source."""
    return _driver().module_from_buffer(_cubin(kernel))


def _cubin(kernel: Kernel) -> bytes:
    capability = _driver().Context.get_device().compute_capability()
    binary = compile_kernel(kernel, arch=target_arch(kernel.plan.kernel.arch, capability))
    return binary.cubin.read_bytes()


def target_arch(built_for: str, capability: tuple[int, int]) -> str | None:
    """The arch to compile for, None if the plan's own runs on a device of this capability.

    Machine code runs on later devices of its major version; ``sm_90a`` on 9.0 alone. Raises
    UsageError when the kernel needs a device this one is not.
    """
    number, specific = built_for.removeprefix("sm_").rstrip("a"), built_for.endswith("a")
    wanted, here = divmod(int(number), 10), tuple(capability)
    if wanted == here or (not specific and wanted[0] == here[0] and wanted < here):
        return None
    if specific or wanted > here:
        raise UsageError(
            f"a kernel for {built_for} does not run on this device",
            why=f"its compute capability is {here[0]}.{here[1]}",
            hint="plan again with --gpu auto",
        )
    return f"sm_{here[0]}{here[1]}"


# ---- Memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Input:
    """An array the kernel reads: where it is, its strides in elements, and what keeps it alive."""

    address: int
    strides: tuple[int, ...]
    owner: Any


def _inputs(
    kernel: Kernel, arrays: Mapping[str, Any], launch: Launch, heap: _Heap
) -> dict[str, _Input]:
    check_present(kernel, launch, arrays)
    _driver().Context.synchronize()  # whatever stream the caller filled them on is done
    return {name: _input(name, arrays[name], launch, heap) for name in launch.inputs}


def _input(name: str, array: Any, launch: Launch, heap: _Heap) -> _Input:
    interface = _device_interface(name, array)
    host = np.empty(0) if interface else host_array(name, array)
    view = View.of(interface or host.__array_interface__)
    check_array(name, view, *launch.inputs[name])
    align = alignment(name, launch)
    if not interface:
        return heap.upload(name, host, align)
    reason = why_copy(view, align)
    if not reason and view.address:
        return _Input(view.address, view.steps(), array)
    if reason:
        warnings.warn(f"{name} is copied: {reason}", stacklevel=5)
    return heap.upload(name, _to_host(view), align)


def _device_interface(name: str, array: Any) -> dict[str, Any] | None:
    """The array's __cuda_array_interface__, None for a host array."""
    try:
        interface: dict[str, Any] | None = getattr(array, "__cuda_array_interface__", None)
    except RuntimeError as error:  # torch's way of refusing a tensor that requires grad
        raise UsageError(f"{name} cannot be read", why=str(error), hint="detach it") from error
    return interface


def _to_host(view: View) -> Array:
    """A host copy of a device array of any layout."""
    dtype, steps = np.dtype(view.typestr), view.strides
    below = sum((n - 1) * min(step, 0) for n, step in zip(view.shape, steps, strict=True))
    forward = replace(view, strides=tuple(map(abs, steps)))
    raw = _download(view.address + below, forward.span_bytes())
    return np.ndarray(view.shape, dtype, raw, offset=-below, strides=steps)


class _Heap:
    """New device arrays, each between guard zones of ``guard_bytes``."""

    def __init__(self, guard_bytes: int) -> None:
        self.guard_bytes = guard_bytes

    def empty(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """An array of poison. Raises NoPlanError if it does not fit."""
        driver, nbytes = _driver(), max(math.prod(shape) * dtype.itemsize, DUMMY_BYTES)
        total = nbytes + 2 * self.guard_bytes
        try:
            memory = driver.mem_alloc(total)
        except driver.MemoryError as error:
            raise NoPlanError(
                f"{name} does not fit on the device",
                why=f"it needs {total:,} bytes, {driver.mem_get_info()[0]:,} are free",
                hint="shorten seq or the batch",
            ) from error
        driver.memset_d8(int(memory), POISON, total)
        return DeviceArray(name, memory, shape, dtype, nbytes, self.guard_bytes)

    def upload(self, name: str, array: Array, align: int) -> _Input:
        """A host array with the gaps between its rows, so that its strides stay what they are."""
        array = followable(array, align)
        view = View.of(array.__array_interface__)
        buffer = self.empty(name, (view.span_bytes(),), np.dtype(np.uint8))
        if view.span_bytes():
            _driver().memcpy_htod(buffer.address, bytes_of(array))
        return _Input(buffer.address, view.steps(), buffer)


def _download(address: int, nbytes: int) -> Array:
    raw = np.empty(nbytes, np.uint8)
    if nbytes:
        _driver().memcpy_dtoh(raw, address)
    return raw

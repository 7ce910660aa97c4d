"""What a runner must know of arrays to pass them to a kernel: layouts, checks, and arguments.

Strides are kept where the kernel can follow them: none negative, the last dimension contiguous,
every row aligned to the copies that the kernel was built with.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasim import reference, tensor_map
from fasim.errors import UsageError
from fasim.plan import SLAB_BYTES, Launch, Scalar, contiguous_strides, kernel_strides
from fasim.problem import DTYPE_BYTES
from fasim.render import Kernel
from fasim.tensor_map import TensorMap

Array = NDArray[Any]
Strides = tuple[int, ...]
Sizes = tuple[int, ...]

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(dtype) for name, dtype in reference.DTYPES.items()},
    "int32": np.dtype(np.int32),
}
POISON = 0xFF  # as fp32, fp16 or bf16 these bytes are a NaN that no arithmetic produces
PACKED_END = 1 << 30  # rows of a packed sequence as TMA sees it; kEnd in V3's kernel
MAP_FORMAT = f"{tensor_map.BYTES}s"
FORMATS = {"map": MAP_FORMAT, "ptr": "P", "i32": "i", "i64": "q", "f32": "f", "i64x3": "qqq"}


@dataclass(frozen=True)
class View:
    """Shape, strides (bytes), first address and type of an array, on host or device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    typestr: str

    @classmethod
    def of(cls, interface: Mapping[str, Any]) -> View:
        """From an ``__array_interface__`` or a ``__cuda_array_interface__``."""
        shape, typestr = tuple(interface["shape"]), str(interface["typestr"])
        item = np.dtype(typestr).itemsize
        steps = interface.get("strides") or tuple(n * item for n in contiguous_strides(shape))
        return cls(shape, tuple(steps), interface["data"][0], typestr)

    @property
    def itemsize(self) -> int:
        return np.dtype(self.typestr).itemsize

    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last, for strides that do not go back."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return last + self.itemsize

    def steps(self) -> tuple[int, ...]:
        """Strides in elements; those of dimensions with one element do not matter and become 0."""
        extents = zip(self.shape, self.strides, strict=True)
        return tuple(step // self.itemsize if n > 1 else 0 for n, step in extents)


# ---- Layouts ------------------------------------------------------------------------------------


def why_copy(view: View, align: int) -> str:
    """Why a kernel that copies ``align`` bytes at a time cannot follow a layout; "" if it can.
    ``align`` is that of ``plan.alignment``."""
    if 0 in view.shape:
        return ""
    if not align:
        return _why_pack(view)
    used = [step for n, step in zip(view.shape, view.strides, strict=True) if n > 1]
    if any(step < 0 for step in used):
        return "it has negative strides"
    if view.shape[-1] > 1 and view.strides[-1] != view.itemsize:
        return "its last dimension is not contiguous"
    outer = [step for n, step in zip(view.shape[:-1], view.strides, strict=False) if n > 1]
    if view.address % align or any(step % align for step in outer):
        return f"its rows are not aligned to {align} bytes"
    return ""


def _why_pack(view: View) -> str:
    packed = tuple(n * view.itemsize for n in contiguous_strides(view.shape))
    if view.steps() != replace(view, strides=packed).steps():
        return "it is not contiguous"
    return "it is not aligned to its elements" if view.address % view.itemsize else ""


def followable(array: Array, align: int) -> Array:
    """The array itself if a kernel can follow its strides at an aligned address, else a contiguous
    copy."""
    placed = replace(View.of(array.__array_interface__), address=0)
    return np.ascontiguousarray(array) if why_copy(placed, align) else array


def bytes_of(array: Array) -> Array:
    """The host memory a followable array spans, its gaps included, as uint8 without a copy."""
    plain = array.view(np.dtype(f"V{array.itemsize}"))
    count = View.of(array.__array_interface__).span_bytes() // array.itemsize
    flat = np.lib.stride_tricks.as_strided(plain, (count,), (array.itemsize,))
    return flat.view(np.uint8)


# ---- Checks -------------------------------------------------------------------------------------


def check_present(kernel: Kernel, launch: Launch, arrays: Mapping[str, Any]) -> None:
    """Raises UsageError if an input of the launch is not there."""
    missing = [name for name in launch.inputs if name not in arrays]
    if missing:
        raise UsageError(f"{kernel.stem} needs an array {missing[0]}")


def check_array(name: str, view: View, shape: tuple[int, ...], dtype: str) -> None:
    """Raises UsageError for an array of another type or shape than a launch reads."""
    if view.typestr != DTYPES[dtype].str:
        raise UsageError(
            f"{name} has type {_type_name(view.typestr)}, this kernel takes {dtype}",
            hint=f"convert it to {dtype} first; nothing is converted silently",
        )
    if view.shape != shape:
        raise UsageError(
            f"{name} has shape {view.shape}, this launch needs {shape}",
            hint="shapes are (batch, heads, seq, head_dim), packed (tokens, heads, head_dim)",
        )


def _type_name(typestr: str) -> str:
    names = {dtype.str: name for name, dtype in DTYPES.items()}
    return names.get(typestr) or np.dtype(typestr).name


def host_array(name: str, array: Any) -> Array:
    """Anything that ``numpy.asarray`` takes, as an array. Raises UsageError for the rest."""
    try:
        return np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "pass a NumPy array (bf16 as ml_dtypes.bfloat16) or a device array"
        raise UsageError(f"{name} is not an array", why=str(error), hint=hint) from error


# ---- Tensor maps --------------------------------------------------------------------------------


def tensor_maps(
    launch: Launch, addresses: Mapping[str, int], steps: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorMap]:
    """How TMA sees the tensors that a kernel takes as maps, by tensor: slabs of 128-byte rows of a
    (batch, heads, seq, head_dim) array, or a packed one, at an address, with strides in elements.
    An array without elements looks like one of zeros in all dimensions but the last."""
    arrays = {**launch.inputs, **launch.outputs, **launch.workspaces}
    maps = {}
    for name, rows in launch.boxes.items():
        shape, dtype = arrays[name]
        size = DTYPE_BYTES[dtype]
        bytes_ = [size * step for step in steps[name]]
        sizes, strides = _seen(shape, bytes_)
        box = (SLAB_BYTES // size, rows, *[1] * (len(sizes) - 2))
        if group := launch.groups.get(name, 0):
            sizes, strides = _grouped(shape, bytes_, group)
            box = (SLAB_BYTES // size, group, rows // group, 1, 1)
        maps[name] = TensorMap(
            address=addresses[name],
            dtype=dtype,
            sizes=sizes,
            strides=strides,
            box=box,
            swizzle=SLAB_BYTES,
        )
    return maps


def _seen(shape: tuple[int, ...], steps: list[int]) -> tuple[Sizes, Strides]:
    """Sizes, from the innermost on, and strides (bytes) of the others as TMA sees an array.

    In a packed one it sees, for every token e, a sequence of PACKED_END rows that ends before e:
    its row i is token e - PACKED_END + i. A kernel that loads or stores row i of a sequence of n
    tokens asks for row PACKED_END - n + i of that which ends where the sequence does; what lies
    beyond is outside the tensor, and not in the next sequence. The last dimension, always asked for
    at PACKED_END, subtracts those rows modulo 2^64: PACKED_END steps of 16 GiB are 2^64 bytes. So
    the map begins where the array does; a device faults where a map begins in memory that is not
    there (seen on an H200), whatever is loaded.
    """
    if len(shape) == 3:
        tokens, heads, width = shape
        sizes = (width, PACKED_END, max(heads, 1), tokens + 1, PACKED_END + 1)
        return sizes, (steps[0], steps[1], steps[0], (1 << 34) - steps[0])
    batch, heads, seq, width = shape
    return (width, max(seq, 1), max(heads, 1), max(batch, 1)), (steps[2], steps[1], steps[0])


def _grouped(shape: tuple[int, ...], steps: list[int], group: int) -> tuple[Sizes, Strides]:
    """The same where all heads of a group stand side by side: a box has whole queries of them."""
    batch, heads, seq, width = shape
    sizes = (width, group, max(seq, 1), max(heads // group, 1), max(batch, 1))
    return sizes, (steps[1], steps[2], group * steps[1], steps[0])


# ---- Arguments ----------------------------------------------------------------------------------


def actual_scalars(launch: Launch, steps: Mapping[str, tuple[int, ...]]) -> dict[str, Scalar]:
    """The launch's scalars with the strides (in elements) of the inputs that are really passed;
    outputs are contiguous."""
    outputs = {name: contiguous_strides(shape) for name, (shape, _) in launch.outputs.items()}
    both = {**steps, **outputs}
    actual = {f"{name}_strides": kernel_strides(strides) for name, strides in both.items()}
    return {**launch.scalars, **{k: v for k, v in actual.items() if k in launch.scalars}}


def pack_arguments(
    arguments: tuple[tuple[str, str], ...],
    pointers: Mapping[str, int],
    scalars: Mapping[str, Scalar],
    maps: Mapping[str, bytes] | None = None,
) -> tuple[list[str], list[int | float | bytes]]:
    """struct formats and values of a kernel's arguments, in the order of ``arguments``.

    Natural alignment is the ABI's for these types. Raises UsageError for a null pointer, a missing
    value and a value outside its type.
    """
    formats = [FORMATS[kind] for _, kind in arguments]
    values: list[int | float | bytes] = []
    for (name, _), form in zip(arguments, formats, strict=True):
        if form == MAP_FORMAT:
            values.append((maps or {})[name.removesuffix("_map")])
            continue
        value = pointers.get(name) if form == "P" else scalars.get(name)
        parts = value if isinstance(value, tuple) else (value,)
        values += [_checked(name, form, part) for part in parts]
    return formats, values


def _checked(name: str, form: str, value: int | float | None) -> int | float:
    if value is None or (form == "P" and value == 0):
        raise UsageError(f"kernel argument {name} has no value")
    value = float(value) if form == "f" else int(value)
    try:
        struct.pack("<Q" if form == "P" else f"<{form[0]}", value)
    except (struct.error, OverflowError) as error:
        raise UsageError(f"kernel argument {name} cannot be {value}", why=str(error)) from error
    return value

"""How TMA is told of a tensor: 128 bytes that a kernel takes as a parameter.

One description serves both runners. For a device the driver encodes it (CUDA driver API,
cuTensorMapEncodeTiled); the emulator has an encoding of its own, with the same fields (tma.h). What
the driver would refuse is refused here, with a reason.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fasim.errors import MissingToolError, UsageError

BYTES = 128
SWIZZLES = (0, 32, 64, 128)  # spans in bytes
ELEMENTS = {  # bytes, CUtensorMapDataType, whether TMA can add them in the emulator
    "e4m3": (1, 0, False),
    "fp16": (2, 6, False),
    "bf16": (2, 9, False),
    "fp32": (4, 7, True),
}
MOST_DIMENSIONS, MOST_BOX, MOST_STRIDE = 5, 256, 1 << 40
_MAGIC = 0x50414D46


@dataclass(frozen=True)
class TensorMap:
    """A tensor at an address, and the box of it that one instruction moves.

    The innermost dimension comes first. ``strides`` are in bytes, of the dimensions after it;
    ``swizzle`` is the span in bytes within which 16-byte chunks are exchanged, 0 for none.
    """

    address: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        for good, why in _rules(self):
            if not good:
                raise UsageError("TMA cannot be told of this tensor", why=why)

    @property
    def box_bytes(self) -> int:
        return math.prod(self.box) * ELEMENTS[self.dtype][0]

    def emulated(self) -> bytes:
        """For the emulator: struct TensorMap of tma.h."""
        size, _, adds = ELEMENTS[self.dtype]
        code = (0, 3, 2, 1)[SWIZZLES.index(self.swizzle)]  # as in wgmma's descriptors
        numbers = (_padded(self.sizes, 5), _padded(self.strides, 4), _padded(self.box, 5))
        values = (value for part in numbers for value in part)
        head = (_MAGIC, len(self.sizes), size, adds, code, self.address)
        return struct.pack("<I4BQ5Q4Q5I", *head, *values).ljust(BYTES, b"\0")

    def encoded(self) -> bytes:
        """For a device. Raises MissingToolError without a driver."""
        rank = len(self.sizes)
        aligned = _Aligned()
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned.address),
            ctypes.c_int(ELEMENTS[self.dtype][1]),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(self.address),
            (ctypes.c_uint64 * rank)(*self.sizes),
            (ctypes.c_uint64 * (rank - 1))(*self.strides),
            (ctypes.c_uint32 * rank)(*self.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),  # no interleaving
            ctypes.c_int(SWIZZLES.index(self.swizzle)),
            ctypes.c_int(3),  # L2 fetches 256 bytes
            ctypes.c_int(0),  # zeros outside
        )
        if status:
            raise UsageError("the driver refuses this tensor map", why=f"{self}: error {status}")
        return aligned.content


def _rules(tensor: TensorMap) -> list[tuple[bool, str]]:
    """What the driver demands, and of swizzled boxes that their rows fill the span."""
    rank, size = len(tensor.sizes), ELEMENTS[tensor.dtype][0]
    row = tensor.box[0] * size
    return [
        (1 <= rank <= MOST_DIMENSIONS, f"it has {rank} dimensions, not 1 to {MOST_DIMENSIONS}"),
        (len(tensor.box) == rank == len(tensor.strides) + 1, "sizes, strides and box do not match"),
        (tensor.address % 16 == 0, f"it begins at {tensor.address:#x}, no multiple of 16"),
        (all(n > 0 for n in tensor.sizes), f"a dimension of {tensor.sizes} is empty"),
        (all(s % 16 == 0 for s in tensor.strides), f"strides {tensor.strides} are not all 16 n"),
        (all(0 <= s < MOST_STRIDE for s in tensor.strides), f"a stride of {tensor.strides}"),
        (all(1 <= n <= MOST_BOX for n in tensor.box), f"a box of {tensor.box}; at most {MOST_BOX}"),
        (row % 16 == 0, f"a row of the box has {row} bytes, no multiple of 16"),
        (tensor.swizzle in SWIZZLES, f"a swizzle of {tensor.swizzle} bytes"),
        (tensor.swizzle in (0, row), f"its rows of {row} bytes do not fill {tensor.swizzle}"),
    ]


def _padded(values: Sequence[int], count: int) -> tuple[int, ...]:
    return (*values, *[0] * (count - len(values)))


class _Aligned:
    """128 bytes at a multiple of 64, which is where the driver writes."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_uint8 * (BYTES + 64))()
        start = ctypes.addressof(self.memory)
        self.offset = -start % 64
        self.address = start + self.offset

    @property
    def content(self) -> bytes:
        return bytes(self.memory[self.offset : self.offset + BYTES])


# ---- Where parameters lie -----------------------------------------------------------------------


def parameter_offsets(cubin: bytes, entry: str) -> list[int]:
    """Where the driver wants each parameter of a kernel. The device's context must be current.

    Parameters do not begin at a multiple of 64 in the constant bank, so a struct aligned to 64 does
    not come first at offset 0 (CUDA driver API, cuFuncGetParamInfo). The module stays loaded: the
    kernel is launched from another load of the same file, and asked about once.
    """
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), entry)
    return _offsets(driver, function)


def _offsets(driver: Any, function: ctypes.c_void_p) -> list[int]:
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), list[int]()
    where = (ctypes.byref(offset), ctypes.byref(size))
    while not driver.cuFuncGetParamInfo(function, ctypes.c_size_t(len(found)), *where):
        found.append(offset.value)
    return found


def placed(formats: Sequence[str], offsets: Sequence[int]) -> tuple[list[str], list[int]]:
    """struct formats with gaps ("48s") put in, so that each parameter lies at its offset; and the
    places in the new list where those gaps stand."""
    check_parameters("the kernel", len(offsets), len(formats))
    result, gaps = list[str](), list[int]()
    for form, offset in zip(formats, offsets, strict=True):
        end, align = struct.calcsize("".join(result)), _alignment(form)
        here = end + -end % align
        if offset < here or offset % align:
            raise UsageError(f"a parameter {form} cannot be placed at offset {offset}")
        if offset > here:
            gaps.append(len(result))
            result.append(f"{offset - end}s")
        result.append(form)
    return result, gaps


def check_parameters(kernel: str, taken: int, passed: int) -> None:
    """Raises UsageError if a kernel takes another number of them than it would be passed."""
    if taken != passed:
        raise UsageError(
            f"{kernel} takes {taken} parameters, and its plan has {passed}",
            hint="the file is of another version: generate it again from its plan",
        )


def _alignment(form: str) -> int:
    return 1 if form.endswith("s") else struct.calcsize(form[-1])


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingToolError("there is no CUDA driver", why=str(error)) from error


def _check(status: int, what: str) -> None:
    if status:
        raise UsageError(f"{what} failed in the driver", why=f"error {status}")

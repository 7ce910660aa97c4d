"""A compiled kernel that can be launched, what a launch executed, and what it did wrong.

The structures mirror abi.h. Nothing here knows of plans: any CUDA text whose words the emulator has
can be launched, which is how its conformance to the hardware is tested.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import c_char, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasim.emulator.build import MOST_SHARED, build, lines
from fasim.errors import CheckFailed, UsageError
from fasim.tensor_map import TensorMap, check_parameters

Array = NDArray[Any]

KINDS = (
    *("mma", "ldmatrix", "cp.async", "shuffle", "vote", "barrier", "syncwarp"),
    *("ex2", "lg2", "rcp", "cvt"),
    *("shared load", "shared store", "global load", "global store", "atomic"),
    *("wgmma", "stmatrix", "tma load", "tma store", "mbarrier", "wait"),
)
BY_THREAD = ("ex2", "lg2", "rcp", "cvt", "atomic", "mbarrier")  # the rest by warps
WARP = 32
MOST_THREADS = 1024  # of a block, on any GPU so far
MOST_ARRAYS, OUTER = 32, 3
BUDGET = 1 << 31  # accesses of one block before its loop counts as endless
LINE = 1 << 31  # a place with this bit is a line, without it an offset in the library


class _ArrayView(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("base", c_void_p),
        ("bytes", c_int64),
        ("row_bytes", c_int64),
        ("count", c_int64 * OUTER),
        ("step", c_int64 * OUTER),
        ("known", c_void_p),
        ("writable", c_int32),
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("kernel", c_void_p),
        ("arguments", ctypes.POINTER(c_void_p)),
        ("arrays", ctypes.POINTER(_ArrayView)),
        ("array_count", c_int32),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("smem_bytes", c_uint32),
        ("blocks_per_sm", c_uint32),
        ("seed", c_uint64),
        ("budget", c_uint64),
        ("workers", c_int32),
        ("trace", c_int32),
        ("ordered", c_int32),
        ("stop", ctypes.POINTER(c_int32)),
    ]


class _Operation(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in ("count", "bytes", "wavefronts", "conflicts")]


class _Counts(ctypes.Structure):
    _fields_ = [
        ("blocks", c_uint64),
        ("threads", c_uint64),
        ("reads", c_uint64 * MOST_ARRAYS),
        ("writes", c_uint64 * MOST_ARRAYS),
        ("operations", _Operation * len(KINDS)),
    ]


class _Span(ctypes.Structure):
    _fields_ = [
        *((name, c_uint32) for name in ("block", "warp", "kind", "place")),
        *((name, c_uint64) for name in ("first", "last", "count")),
        *((name, c_int64) for name in ("array", "from_", "to")),
        *((name, c_uint32) for name in ("smem_from", "smem_to")),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("rule", c_char * 48),
        ("text", c_char * 4000),
        ("place", c_uint32),
        ("block", c_int32),
        ("thread", c_int32),
    ]


class _Response(ctypes.Structure):
    _fields_ = [
        ("counts", _Counts),
        ("fault", _Fault),
        ("spans", ctypes.POINTER(_Span)),
        ("span_count", c_uint64),
    ]


# ---- What a launch executed ---------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """How often one kind of instruction ran, the bytes it named, and in shared memory the
    wavefronts it took and how many of them bank conflicts added."""

    count: int = 0
    bytes: int = 0
    wavefronts: int = 0
    conflicts: int = 0

    def __add__(self, other: Operation) -> Operation:
        return Operation(
            self.count + other.count,
            self.bytes + other.bytes,
            self.wavefronts + other.wavefronts,
            self.conflicts + other.conflicts,
        )

    def to_json(self) -> dict[str, int]:
        return dict(vars(self))


@dataclass(frozen=True)
class Execution:
    """What launches executed: ``reads`` and ``writes`` are bytes that loads and stores named, by
    array; ``operations`` has an entry for each kind of instruction that ran (KINDS)."""

    launches: int = 0
    blocks: int = 0
    threads: int = 0
    reads: Mapping[str, int] = field(default_factory=dict)
    writes: Mapping[str, int] = field(default_factory=dict)
    operations: Mapping[str, Operation] = field(default_factory=dict)

    def __add__(self, other: Execution) -> Execution:
        return Execution(
            self.launches + other.launches,
            self.blocks + other.blocks,
            self.threads + other.threads,
            _sum(self.reads, other.reads, 0),
            _sum(self.writes, other.writes, 0),
            _sum(self.operations, other.operations, Operation()),
        )

    @property
    def bytes(self) -> int:
        """Of global memory, read and written."""
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def instructions(self) -> int:
        """Of warps; what is counted by threads is taken to be whole warps."""
        counts = ((kind, operation.count) for kind, operation in self.operations.items())
        return sum(-(-n // WARP) if kind in BY_THREAD else n for kind, n in counts)

    def to_json(self) -> dict[str, Any]:
        return {
            "launches": self.launches,
            "blocks": self.blocks,
            "threads": self.threads,
            "instructions": self.instructions,
            "bytes": self.bytes,
            "reads": dict(self.reads),
            "writes": dict(self.writes),
            "operations": {kind: one.to_json() for kind, one in self.operations.items()},
        }


def _sum(a: Mapping[str, Any], b: Mapping[str, Any], zero: Any) -> dict[str, Any]:
    return {name: a.get(name, zero) + b.get(name, zero) for name in {**a, **b}}


@dataclass(frozen=True)
class Span:
    """A stretch of one warp's work of one kind: ``count`` operations between two steps of its
    block. Of a copy also which bytes of which array came to which bytes of shared memory."""

    block: int
    warp: int
    kind: str
    line: int | None
    first: int
    last: int
    count: int
    array: str | None = None
    source: tuple[int, int] | None = None
    shared: tuple[int, int] | None = None


class Fault(CheckFailed):
    """A rule of CUDA that a kernel broke; ``line`` is that of the kernel's text, if known."""

    def __init__(
        self, symbol: str, rule: str, text: str, line: int | None, block: int, thread: int
    ) -> None:
        by = "" if thread < 0 else f", thread {thread} (warp {thread // WARP})"
        where = f"{symbol}.cu:{line}" if line else ""
        super().__init__(f"{rule} in block {block}{by}", why=text, where=where)
        self.rule, self.line, self.block, self.thread = rule, line, block, thread


# ---- Launching ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mapped:
    """An array that the kernel takes as the map of a tensor, and the map."""

    array: Array
    map: TensorMap


Argument = Array | bytes | Mapped
Known = NDArray[np.bool_]  # for each byte of an array whether it is initialised
Describe = Callable[[int], str]


def _byte(offset: int) -> str:
    return f"byte {offset} of shared memory"


@dataclass(frozen=True)
class Program:
    """A kernel, compiled for this machine and loaded."""

    symbol: str
    library: Path

    @classmethod
    def load(cls, source: str, symbol: str) -> Program:
        """The kernel ``symbol`` of a CUDA text. Errors as of fasim.emulator.build.build."""
        return cls(symbol, build(source, symbol))

    @cached_property
    def _loaded(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self.library))

    @cached_property
    def _entry(self) -> Any:
        entry = self._loaded.fasim_launch
        entry.argtypes = [ctypes.POINTER(_Request), ctypes.POINTER(_Response)]
        entry.restype = None
        return entry

    @cached_property
    def text(self) -> list[str]:
        """The kernel's lines."""
        return self.library.with_name("kernel.cu").read_text().splitlines()

    def variable(self, symbol: str, size: int) -> NDArray[np.uint8]:
        """The ``size`` bytes of a variable of the file, where they lie. Raises UsageError if it has
        none of that name."""
        try:
            memory = (c_uint8 * size).in_dll(self._loaded, symbol)
        except ValueError as error:
            raise UsageError(f"{self.symbol} has no variable {symbol}", why=str(error)) from error
        return np.frombuffer(memoryview(memory), np.uint8)

    def launch(
        self,
        arguments: Mapping[str, Argument],
        outputs: Collection[str],
        *,
        entry: str = "",
        grid: int,
        block: int,
        smem_bytes: int = 0,
        seed: int = 0,
        workers: int = 1,
        ordered: bool = False,
        initialised: Collection[str] = (),
        known: Mapping[str, Known] | None = None,
        describe: Describe = _byte,
        spans: list[Span] | None = None,
    ) -> Execution:
        """Run the kernel ``entry`` (default: the symbol). ``outputs`` are the arrays that it may
        write, in place; it only reads the others.

        ``arguments`` stand in the order of the parameters: an array is passed by its address, bytes
        by value, a mapped array by its map. Outputs count as uninitialised unless named in
        ``initialised``, or as ``known`` says byte by byte; it is brought up to date, so that a
        file's next kernel knows what this one wrote. ``seed`` draws the order in which warps run
        and blocks start, ``workers`` threads share the blocks, ``ordered`` demands that floats are
        added up in an order that is always the same, ``describe`` names a byte of shared memory in
        errors, ``spans`` receives the trace. Raises Fault.
        """
        if block > MOST_THREADS or smem_bytes > MOST_SHARED:
            raise UsageError(
                f"{self.symbol} cannot be launched with {block} threads and {smem_bytes} bytes",
                why=f"a block has at most {MOST_THREADS} threads and {MOST_SHARED} shared bytes",
            )
        arrays = _arrays(arguments)
        if len(arrays) > MOST_ARRAYS:
            raise UsageError(f"the emulator takes at most {MOST_ARRAYS} arrays")
        known = known or {
            name: np.full(arrays[name].nbytes, name in initialised) for name in outputs
        }
        views = (_ArrayView * len(arrays))(
            *(_view(name, x, known.get(name)) for name, x in arrays.items())
        )
        values, stop = [_value(x) for x in arguments.values()], c_int32(0)
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        kernel = getattr(self._loaded, f"fasim_kernel_{entry or self.symbol}")
        taken = c_uint32.in_dll(self._loaded, f"fasim_parameters_{entry or self.symbol}").value
        check_parameters(self.symbol, taken, len(arguments))
        blocks_per_sm = c_uint32.in_dll(self._loaded, f"fasim_blocks_{entry or self.symbol}")
        request = _Request(
            ctypes.cast(kernel, c_void_p),
            ctypes.cast(pointers, ctypes.POINTER(c_void_p)),
            views,
            len(arrays),
            (grid, 1, 1),
            (block, 1, 1),
            smem_bytes,
            blocks_per_sm,
            seed,
            BUDGET,
            workers,
            spans is not None,
            ordered,
            ctypes.pointer(stop),
        )
        response = self._run(request, stop)
        if response.fault.rule:
            raise self._fault(response.fault, arrays, describe)
        if spans is not None:
            spans += self._spans(response, list(arrays))
        return _execution(response.counts, list(arrays))

    def _run(self, request: _Request, stop: c_int32) -> _Response:
        """In a thread of its own, so that an interrupt is heard meanwhile."""
        response = _Response()
        call = threading.Thread(target=self._entry, args=(request, response))
        call.start()
        try:
            call.join()
        except BaseException:
            stop.value = 1
            call.join()
            raise
        return response

    def _fault(self, fault: _Fault, arrays: Mapping[str, Array], describe: Describe) -> Fault:
        text = fault.text.decode(errors="replace")
        known = self._lines([int(place, 16) for place in _PLACE.findall(text)] + [fault.place])

        def address(found: re.Match[str]) -> str:
            name, offset = found[1], int(found[2])
            if name != "shared":
                return _element(name, arrays[name], offset)
            return describe(offset) if offset >= 0 else f"static byte {offset} of shared memory"

        def place(found: re.Match[str]) -> str:
            line = known.get(int(found[1], 16))
            return f"in line {line} (`{self.text[line - 1].strip()}`)" if line else "elsewhere"

        text = _PLACE.sub(place, _ADDRESS.sub(address, text))
        line = known.get(fault.place)
        shown = f"`{self.text[line - 1].strip()}`: {text}" if line else text
        rule = fault.rule.decode()
        return Fault(self.symbol, rule, shown, line, fault.block, fault.thread)

    def _lines(self, places: Sequence[int]) -> dict[int, int]:
        offsets = {place for place in places if 0 < place < LINE}
        given = {place: place - LINE for place in places if place >= LINE}
        return {**lines(self.library, offsets), **given}

    def _spans(self, response: _Response, names: list[str]) -> list[Span]:
        raw = [response.spans[i] for i in range(response.span_count)]
        known = self._lines([span.place for span in raw])
        return [_span(span, known.get(span.place), names) for span in raw]


_PLACE = re.compile(r"@([0-9a-f]{8})")
_ADDRESS = re.compile(r"\[\[(\w+)\+(-?\d+)\]\]")


def _arrays(arguments: Mapping[str, Argument]) -> dict[str, Array]:
    """Each array once, under the first name that it has."""
    given = {name: x.array if isinstance(x, Mapped) else x for name, x in arguments.items()}
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    first = {x.ctypes.data: name for name, x in reversed(arrays.items()) if x.size}
    return {name: x for name, x in arrays.items() if first.get(x.ctypes.data, name) == name}


def _value(argument: Argument) -> Any:
    """Storage that holds a parameter: the array's address, or the bytes."""
    if isinstance(argument, np.ndarray):
        return c_void_p(argument.ctypes.data)
    if isinstance(argument, Mapped):
        argument = argument.map.emulated()
    return (c_uint8 * len(argument)).from_buffer_copy(argument)


def _view(name: str, x: Array, known: Known | None) -> _ArrayView:
    row, outer = rows_of(x)
    counts, steps = [n for n, _ in outer], [step for _, step in outer]
    blank = OUTER - len(outer)
    span = row + sum((n - 1) * step for n, step in outer) if x.size else 0
    return _ArrayView(
        name.encode(),
        x.ctypes.data,
        span,
        row,
        (*counts, *[1] * blank),
        (*steps, *[1] * blank),
        None if known is None else known.ctypes.data,
        known is not None,
    )


def rows_of(x: Array) -> tuple[int, list[tuple[int, int]]]:
    """Contiguous bytes of a row, and (count, step in bytes) of the dimensions outside it, from the
    largest step to the smallest; broadcast dimensions are left out."""
    dimensions = [(n, step) for n, step in zip(x.shape, x.strides, strict=True) if n > 1 and step]
    outer, row = sorted(dimensions, key=lambda d: -d[1]), x.itemsize
    while outer and outer[-1][1] == row:
        row *= outer.pop()[0]
    if len(outer) > OUTER:
        raise UsageError(f"an array with {len(outer)} strided dimensions", why=f"at most {OUTER}")
    return row, outer


def _element(name: str, x: Array, offset: int) -> str:
    """The element at a byte offset from an array's first one, as name[i, j, …]."""
    index, rest = [0] * x.ndim, offset
    for axis in sorted(range(x.ndim), key=lambda axis: -x.strides[axis]):
        if x.strides[axis] and x.shape[axis] > 1:
            index[axis], rest = divmod(rest, x.strides[axis])
    beyond = f" and {rest} bytes" if rest else ""
    return f"{name}[{', '.join(map(str, index))}]{beyond}"


def _execution(counts: _Counts, names: list[str]) -> Execution:
    operations = {
        kind: Operation(one.count, one.bytes, one.wavefronts, one.conflicts)
        for kind, one in zip(KINDS, counts.operations, strict=True)
        if one.count
    }
    reads, writes = (_moved(names, part) for part in (counts.reads, counts.writes))
    return Execution(1, counts.blocks, counts.threads, reads, writes, operations)


def _moved(names: list[str], bytes_: Sequence[int]) -> dict[str, int]:
    return {name: n for name, n in zip(names, bytes_, strict=False) if n}


def _span(span: _Span, line: int | None, names: list[str]) -> Span:
    kind = KINDS[span.kind]
    common = (span.block, span.warp, kind, line, span.first, span.last, span.count)
    if span.array < 0:
        return Span(*common)
    copies = ("cp.async", "tma load", "tma store")
    shared = (span.smem_from, span.smem_to) if kind in copies else None
    return Span(*common, names[span.array], (span.from_, span.to), shared)

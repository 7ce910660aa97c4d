"""The trace of a launch as a document: what each warp did, named by the kernel's own functions.

A span is a stretch of one warp's work of one sort, between two steps of its block. Steps count what
the block did in the order in which the emulator ran it: they order, and are no time.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from fasim.emulator.program import Span
from fasim.render import Kernel

SCHEMA = "fasim.trace/1"
SORTS = {
    "mma": "product",
    "ldmatrix": "product",
    "shuffle": "softmax",
    "vote": "softmax",
    "ex2": "softmax",
    "lg2": "softmax",
    "rcp": "softmax",
    "cvt": "softmax",
    "cp.async": "copy",
    "global load": "load",
    "global store": "store",
    "atomic": "store",
    "barrier": "barrier",
    "syncwarp": "barrier",
    "wgmma": "product",
    "stmatrix": "store",
    "tma load": "copy",
    "tma store": "store",
    "mbarrier": "wait",
    "wait": "wait",
}


def document(kernel: Kernel, spans: Iterable[Span]) -> dict[str, Any]:
    """JSON of one launch's spans, in their order.

    ``sort`` is product, softmax, copy, load, store, wait or barrier; ``function`` is where in the
    kernel the span began; ``source`` and ``shared`` are byte ranges of the array and of the
    block's shared memory. Where warps have parts of their own, ``roles`` tells them.
    """
    functions, listed = Functions(kernel.source), list(spans)
    return {
        "schema": SCHEMA,
        "kernel": kernel.stem,
        "spans": [_entry(span, functions) for span in listed],
        "roles": {str(warp): role for warp, role in sorted(roles(listed).items())},
    }


def roles(spans: Iterable[Span]) -> dict[int, str]:
    """Of a kernel whose warps divide the work: which one brings tiles by TMA (a producer), which
    multiply them (consumers), by warp. Empty where those are the same warps."""
    kinds: dict[int, set[str]] = {}
    for span in spans:
        kinds.setdefault(span.warp, set()).add(span.kind)
    producers = {warp for warp, did in kinds.items() if "tma load" in did}
    consumers = {warp for warp, did in kinds.items() if did & {"wgmma", "mma"}}
    if not producers or producers & consumers:
        return {}
    return {**dict.fromkeys(producers, "producer"), **dict.fromkeys(consumers, "consumer")}


def _entry(span: Span, functions: Functions) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "block": span.block,
        "warp": span.warp,
        "sort": SORTS[span.kind],
        "function": functions.at(span.line),
        "line": span.line,
        "steps": [span.first, span.last],
        "count": span.count,
    }
    places = {"array": span.array, "source": span.source, "shared": span.shared}
    return entry | {name: place for name, place in places.items() if place is not None}


class Functions:
    """The functions of a generated file, by line."""

    def __init__(self, source: str) -> None:
        found = list(_FUNCTION.finditer(source))
        self.starts = [source.count("\n", 0, one.start()) + 1 for one in found]
        self.names = [one["function"] or one["kernel"] for one in found]

    def at(self, line: int | None) -> str | None:
        """The function that a line belongs to."""
        place = bisect_right(self.starts, line or 0)
        return self.names[place - 1] if place else None


_FUNCTION = re.compile(
    r"^__device__[^;{]*?\b(?P<function>\w+)\((?=(?:[^()]|\([^()]*\))*\)[^;]*\{)"
    r"|^extern \"C\" __global__ [^{]*?\b(?P<kernel>\w+)\([^()]*\) \{",
    re.MULTILINE,
)

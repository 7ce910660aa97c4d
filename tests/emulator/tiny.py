"""Tiny kernels, launched: a body, in a kernel that reads ``x`` and writes ``y``."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fasim.emulator.program import Execution, Fault, Program

Array = NDArray[Any]

WORDS = 256  # of x and of y
SMEM_BYTES = 1024
KERNEL = """using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

extern "C" __global__ void tiny(const u32* x, u32* y) {{
  extern __shared__ __align__(128) unsigned char smem_raw[];
  u32* tile = reinterpret_cast<u32*>(smem_raw);
  const int i = threadIdx.x, warp = i / 32;
  (void)tile, (void)i, (void)warp;
{body}
}}
"""
MARK = "//!"  # the line that a fault must name


def source(body: str) -> str:
    return KERNEL.format(body=body)


def marked_line(text: str) -> int | None:
    """The line of the text that carries the mark."""
    return next((n for n, line in enumerate(text.split("\n"), 1) if MARK in line), None)


def arrays() -> dict[str, Array]:
    """x and y, with room around each: what lies outside one lies in no other."""
    memory = np.zeros((5, WORDS), np.uint32)
    memory[1] = np.arange(WORDS)
    return {"x": memory[1], "y": memory[3]}


def launch(
    body: str,
    *,
    given: dict[str, Array] | None = None,
    grid: int = 1,
    block: int = 64,
    initialised: Collection[str] = (),
    **options: Any,
) -> tuple[Array, Execution]:
    """y and what was executed."""
    given = given or arrays()
    executed = Program.load(source(body), "tiny").launch(
        given,
        ["y"],
        grid=grid,
        block=block,
        smem_bytes=SMEM_BYTES,
        initialised=initialised,
        **options,
    )
    return given["y"], executed


@contextmanager
def alarm(seconds: float, error: BaseException) -> Iterator[None]:
    """Raises an error in the main thread after so many seconds, as Ctrl-C would."""

    def ring(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fault(body: str, **options: Any) -> Fault:
    """The rule that a launch breaks. Where the body has a mark, the fault names that line."""
    with pytest.raises(Fault) as raised:
        launch(body, **options)
    line = marked_line(source(body))
    assert line is None or raised.value.line == line, raised.value
    return raised.value

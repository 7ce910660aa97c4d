"""Runners execute one kernel on one set of arrays; properties cannot tell them apart.

``gpu`` runs the generated file on a CUDA device; ``emulator`` runs the same file on the CPU, counts
what it executes and holds it to the rules that make it right on any schedule. ``numpy`` runs the
tile loops of fasim.tiled instead of the file: it proves the algorithm and says nothing about the
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fasim.errors import CheckFailed

if TYPE_CHECKING:
    from fasim.emulator.program import Execution, Span
    from fasim.plan import Launch
    from fasim.render import Kernel


class Runner(Protocol):
    """One call: arrays q, k, v of shape (batch, heads, seq, head_dim) in, o and lse out.

    Outputs are host arrays of the shapes and types of ``launch.outputs``. Failures are FasimErrors.
    """

    @property
    def name(self) -> str: ...

    def run(
        self, kernel: Kernel, arrays: Mapping[str, Any], launch: Launch
    ) -> Mapping[str, Any]: ...


@runtime_checkable
class Counting(Runner, Protocol):
    """A runner that counts what it executes: ``last`` in one launch, ``executed`` in all so far.

    A run tries ``schedules`` orders of the warps, drawn from ``next_seed`` on.
    """

    next_seed: int
    schedules: int

    @property
    def last(self) -> Execution: ...

    @property
    def executed(self) -> Execution: ...


class Tracing(Counting, Protocol):
    """A counting runner that also tells what the warps of a launch did."""

    def trace(self, kernel: Kernel, arrays: Mapping[str, Any], launch: Launch) -> list[Span]: ...


class DeviceFault(CheckFailed):
    """The kernel made the device fail (a bad address, an illegal instruction).

    CUDA gives the process no way back: every later launch in it fails too.
    """

"""Runners execute one kernel on one set of arrays; properties cannot tell them apart.

``gpu`` runs the generated file on a CUDA device. ``numpy`` runs the tile loops of fasim.tiled
instead of the file, so it proves the algorithm and says nothing about the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fasim.errors import CheckFailed

if TYPE_CHECKING:
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


class DeviceFault(CheckFailed):
    """The kernel made the device fail (a bad address, an illegal instruction).

    CUDA gives the process no way back: every later launch in it fails too.
    """

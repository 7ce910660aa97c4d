"""The two-minute tour: every step is one line saying what was done and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fasim
from fasim import gpu, planner, show
from fasim.errors import CheckFailed, MissingToolError
from fasim.problem import Problem
from fasim.render import Kernel
from fasim.screen import Screen

if TYPE_CHECKING:
    from fasim.runners import Runner

ROWS, HEAD_DIM, SEED = 128, 16, 42
TOLERANCE = 1e-6
EXAMPLES, EMULATED = 20, 2  # cases a property: in NumPy or on a GPU, in the emulator


def take(screen: Screen) -> None:
    """Check the algorithm, plan, generate, compile, verify; say what this machine cannot do."""
    _step(screen, "algorithm", check_algorithm())
    device = gpu.load("auto")
    entry = planner.plan(Problem(causal=True), device, "v2")
    _step(screen, "plan", show.headline(entry, device), show.choice(entry))
    _step(screen, "", show.predicted(entry.time))
    kernel = fasim.generate(entry)
    writes = f"`fasim gen --gpu {device.name} --algo v2 --causal` writes {kernel.stem}.cu"
    _step(screen, "generate", f"{kernel.source.count(chr(10))} lines of CUDA; {writes}")
    _step(screen, "compile", _compile(kernel))
    _step(screen, "verify", _verify(kernel))
    _step(screen, "emulate", *_emulate(kernel))
    screen.line()
    screen.line("next: `fasim explain`, `fasim compare`, `fasim COMMAND --help`")


def check_algorithm() -> str:
    """FlashAttention V1 in NumPy against softmax(Q K^T / sqrt(d)) V. Raises CheckFailed."""
    import numpy as np

    from fasim import reference, tiled

    draw = np.random.RandomState(SEED)
    q, k, v = (draw.standard_normal((ROWS, HEAD_DIM)) for _ in range(3))
    exact = reference.attention(q[None, None], k[None, None], v[None, None]).o[0, 0]
    error = float(abs(tiled.flash_attention_v1(q, k, v, block_size=32) - exact).max())
    if not error < TOLERANCE:
        raise CheckFailed(
            "FlashAttention V1 in NumPy disagrees with standard attention",
            why=f"max error {error:.2e}, not below {TOLERANCE:.0e}",
            hint="run `fasim doctor`: the NumPy of this machine may be broken",
        )
    return f"V1 in tiles of 32 on {ROWS} x {HEAD_DIM}, against the reference: max error {error:.2e}"


def _compile(kernel: Kernel) -> str:
    from fasim import compile as compiler

    try:
        binary = compiler.compile_kernel(kernel)
    except MissingToolError as error:
        return f"skipped: {error.what} ({error.hint})"
    compiler.check_promises(binary, kernel.plan)
    return show.resources(kernel, binary)


def _verify(kernel: Kernel) -> str:
    from fasim import properties
    from fasim.runners import gpu as device
    from fasim.runners.numpy import NumpyRunner

    reason = device.available()
    runner: Runner = NumpyRunner() if reason else device.GpuRunner()
    report = properties.verify(kernel, runner, EXAMPLES)
    report.check()
    what = (
        f"the plan's tiles in NumPy, not the file: {reason}" if reason else "the file, on the GPU"
    )
    return f"{show.verdict(report)} ({what})"


def _emulate(kernel: Kernel) -> tuple[str, ...]:
    """What the file does on the CPU, and what that took."""
    from fasim import properties
    from fasim.runners.emulator import EmulatorRunner

    try:
        report = properties.verify(kernel, EmulatorRunner(), EMULATED)
    except MissingToolError as error:
        return (f"skipped: {error.what} ({error.hint})",)
    report.check()
    return f"{show.verdict(report)} (the file, on the CPU)", show.executed(report)


def _step(screen: Screen, name: str, *lines: str) -> None:
    for place, line in enumerate(lines):
        screen.facts([("" if place else name, line)])


__all__ = ["check_algorithm", "take"]

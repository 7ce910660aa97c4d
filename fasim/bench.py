"""Time kernels on the GPU of this machine, beside each other and beside what the model predicted.

Candidates take turns, round after round in one run, so that clocks, power and temperature fall on
all of them alike. A ratio is the median over the rounds, published with its spread.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fasim.errors import FasimError, MissingToolError
from fasim.inputs import option_arrays
from fasim.plan import Launch
from fasim.problem import Problem
from fasim.reference import DTYPES
from fasim.render import Kernel, template_root
from fasim.runners import gpu

SCHEMA = "fasim.bench/1"
WARM_UP, LAUNCHES, ROUNDS = 3, 20, 7
ROUND_S = 0.4  # a slow candidate launches fewer times a round, so that a round ends

Clocks = Mapping[str, float]
Timer = Callable[[Callable[[], object], int, Callable[[], object]], float]


@dataclass(frozen=True)
class Candidate:
    """Something to time: a call that queues one launch on the default stream."""

    name: str
    launch: Callable[[], object]
    predicted_s: float | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds a launch: one mean for each round of ``launches``, with the clocks seen then."""

    name: str
    rounds: tuple[float, ...]
    launches: int
    predicted_s: float | None = None
    clocks: tuple[Clocks, ...] = ()

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Slowest minus fastest round, as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": self.seconds,
            "spread": self.spread,
            "rounds": list(self.rounds),
            "launches": self.launches,
            "predicted_s": self.predicted_s,
            "clocks": _medians(self.clocks),
        }


def _medians(samples: Sequence[Clocks]) -> dict[str, float]:
    names = samples[0].keys() if samples else ()
    return {name: statistics.median(sample[name] for sample in samples) for name in names}


def interleave(
    candidates: Sequence[Candidate],
    *,
    rounds: int = ROUNDS,
    launches: int = LAUNCHES,
    timer: Timer = gpu.time_launches,
) -> tuple[Timing, ...]:
    """Time the candidates in turns, each ``launches`` times a round after a warm-up.

    Where power limits the clocks, who comes behind a light candidate runs faster (2 to 4 % were
    seen on an H200): so each comes behind every other one as often.
    """
    counts = [_launches(candidate, launches, timer) for candidate in candidates]
    seconds: list[list[float]] = [[] for _ in candidates]
    clocks: list[list[Clocks]] = [[] for _ in candidates]
    sample = clock_reader()
    for round_ in range(rounds):
        for i in _turns(len(candidates), round_):
            note = partial(_note, clocks[i], sample)
            seconds[i].append(timer(candidates[i].launch, counts[i], note))
    return tuple(
        Timing(c.name, tuple(times), count, c.predicted_s, tuple(seen))
        for c, times, count, seen in zip(candidates, seconds, counts, clocks, strict=True)
    )


def _turns(count: int, round_: int) -> list[int]:
    """Who is timed when. Over twice as many rounds as there are candidates each comes behind each
    other one equally often (Williams, Experimental designs balanced for the estimation of residual
    effects of treatments, 1949)."""
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    turns = [(step + round_) % count for step in zigzag]
    return turns[::-1] if count % 2 and round_ % 2 else turns


def _note(seen: list[Clocks], sample: Callable[[], Clocks]) -> None:
    if read := sample():
        seen.append(read)


def _launches(candidate: Candidate, launches: int, timer: Timer) -> int:
    """Warm up, and fit a round of a slow candidate into its time."""
    once = timer(candidate.launch, WARM_UP, lambda: None)
    return min(launches, max(3, int(ROUND_S / once))) if once else launches


@dataclass(frozen=True)
class Ratio:
    """How many times faster one candidate is than another: median, lowest and highest round."""

    median: float
    low: float
    high: float


def ratio(fast: Timing, slow: Timing) -> Ratio:
    """Speed of ``fast`` over ``slow``, round by round."""
    factors = [s / f for f, s in zip(fast.rounds, slow.rounds, strict=True)]
    return Ratio(statistics.median(factors), min(factors), max(factors))


# ---- One kernel ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """A kernel's timing on one problem, and where it was taken."""

    kernel: str
    problem: Problem
    device: Mapping[str, Any]
    timing: Timing
    sources: str
    peers: tuple[Timing, ...] = ()  # in turns with the kernel
    missing: Mapping[str, str] = field(default_factory=dict)  # peers that cannot, and why

    @property
    def seconds(self) -> float:
        return self.timing.seconds

    @property
    def spread(self) -> float:
        return self.timing.spread

    @property
    def rounds(self) -> tuple[float, ...]:
        return self.timing.rounds

    @property
    def predicted_s(self) -> float | None:
        return self.timing.predicted_s

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kernel": self.kernel,
            "problem": self.problem.to_json(),
            "device": dict(self.device),
            "sources": self.sources,
            **self.timing.to_json(),
            "peers": [
                {**peer.to_json(), "ratio": vars(ratio(self.timing, peer))} for peer in self.peers
            ],
            "missing": dict(self.missing),
        }


def measure(kernel: Kernel, problem: Problem | None = None) -> Measurement:
    """Run a kernel on random inputs of ``problem``'s shape (default: the planned one) and time it,
    in turns with what PyTorch has for the problem.

    Raises MissingToolError without a GPU, UsageError if the kernel cannot do this problem.
    """
    problem = problem or kernel.plan.problem
    launch = kernel.plan.launch_for(problem)
    check_device()
    call = gpu.launch_on_device(kernel, random_inputs(launch), launch)
    candidate = Candidate(kernel.stem, call, predicted_s(kernel, problem))
    rivals, missing = rivals_of(problem)
    timing, *others = interleave([candidate, *rivals])
    sources = sources_sha(kernel)
    return Measurement(kernel.stem, problem, device(), timing, sources, tuple(others), missing)


def check_device() -> None:
    """Raises MissingToolError where no kernel can be timed."""
    if reason := gpu.available():
        raise MissingToolError(
            "nothing here can be timed",
            why=reason,
            hint="run on a machine with an NVIDIA GPU and PyCUDA (`pip install 'fasim[gpu]'`);"
            " `fasim plan` predicts the time anywhere",
        )


def rivals_of(problem: Problem) -> tuple[list[Candidate], dict[str, str]]:
    """What to time beside a kernel: PyTorch's attention for plain forward problems, the wheel of
    FlashAttention-3 where it is installed, both in the type of the inputs. And, by name, why others
    are not there."""
    options = (problem.mask == "window", problem.softcap, problem.bias != "none", problem.varlen)
    if problem.pass_ != "fwd" or any(options) or problem.in_dtype == "e4m3":
        return [], {"torch": "only plain forward problems are timed beside it"}
    if find_spec("torch") is None:
        return [], {"torch": "it is not installed"}
    from fasim import peers

    if problem.quantises:  # theirs is attention in the type of the inputs
        changes = {"dtype": problem.in_dtype, "scales": "tensor", "incoherent": False}
        problem = problem.with_(**changes, scale=problem.scale, out_dtype=problem.in_dtype)
    try:
        found = peers.peers(problem, **peers.tensors(problem))
    except (FasimError, RuntimeError) as error:  # no device for torch, or too little memory on it
        return [], {"torch": str(error).split("\n")[0]}
    rivals = [Candidate(peer.name, peer.launch) for peer in found if peer.launch]
    return rivals, {peer.name: peer.reason for peer in found if not peer.launch}


def predicted_s(kernel: Kernel, problem: Problem) -> float | None:
    """The model's seconds for this kernel's tile on the GPU here; None if it does not know it."""
    from fasim import planner
    from fasim.gpu import load

    spec = kernel.plan.kernel
    with suppress(FasimError):
        entry = planner.plan(problem, load("auto"), spec.algo, tile=spec.tile, form=spec.form)
        return float(entry.time.seconds)
    return None


def random_inputs(launch: Launch) -> dict[str, Any]:
    """Unit-normal arrays; ALiBi's usual slopes, packed sequences of one length."""
    draw, options = np.random.default_rng(0), option_arrays(launch)
    return {
        name: draw.standard_normal(shape, np.float32).astype(DTYPES[dtype])
        for name, (shape, dtype) in launch.inputs.items()
        if name not in options
    } | options


# ---- Where it was measured ----------------------------------------------------------------------


def device() -> dict[str, Any]:
    """The GPU with its driver and what it reads now."""
    return {**gpu.device(), "driver": _smi("driver_version"), "clocks_now": dict(clock_reader()())}


def sources_sha(*kernels: Kernel) -> str:
    """One hash over the templates and the kernels measured."""
    files = sorted(path for path in template_root().rglob("*") if path.is_file())
    parts = [*(_read(path) for path in files), *(kernel.source.encode() for kernel in kernels)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _read(path: Path) -> bytes:
    return path.name.encode() + b"\0" + path.read_bytes()


def clock_reader() -> Callable[[], Clocks]:
    """A call that reads SM clock, power and temperature; {} where nothing can be read."""
    with suppress(Exception):  # pynvml's errors share no base with anything here
        return _nvml_reader()
    return _smi_clocks if shutil.which("nvidia-smi") else dict


def _nvml_reader() -> Callable[[], Clocks]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def read() -> Clocks:
        return {
            "sm_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": float(pynvml.nvmlDeviceGetTemperature(handle, 0)),
        }

    read()  # a driver that does not answer is found out here
    return read


def _smi_clocks() -> Clocks:
    numbers = _smi("clocks.sm,power.draw,temperature.gpu").split(",")
    with suppress(ValueError):
        return dict(zip(("sm_mhz", "power_w", "temperature_c"), map(float, numbers), strict=True))
    return {}


def _smi(query: str) -> str:
    """The first GPU's values as nvidia-smi prints them, "" if it does not."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

"""How wrong attention in FP8 is: errors against float64 on inputs that are not all alike.

The float64 result is that of the inputs as they were in 16 bits, so that what quantising loses
counts. Beside it stands standard attention in bf16 on the same inputs. Of outliers tells section
4.3 of the FlashAttention-3 paper (Shah et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasim import inputs, properties, reference
from fasim.plan import tensor_shapes
from fasim.problem import Problem
from fasim.reference import DTYPES
from fasim.render import Kernel
from fasim.runners import Runner

Array = NDArray[Any]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]

SHAPE = {"batch": 1, "heads": 2, "kv_heads": 1, "seq": 128, "seq_kv": 1024}  # quick to emulate
OUTLIERS, OUTLIER_SIZE = 0.001, 10.0  # N(0, 100) has a standard deviation of 10
DEGREES = 3  # of freedom of Student's t
DRIFT = (1 / 8, 2)  # standard deviations at the ends of the sequence


@dataclass(frozen=True)
class Errors:
    """Root mean square and largest error of a tensor, and its cosine with the right one."""

    rmse: float
    largest: float
    cosine: float

    @classmethod
    def of(cls, got: Array, want: Array) -> Errors:
        """``want`` is float64."""
        got = got.astype(np.float64)
        off, norms = got - want, np.linalg.norm(got) * np.linalg.norm(want)
        cosine = float((got * want).sum() / norms) if norms else 1.0
        return cls(math.sqrt((off**2).mean()), float(np.abs(off).max()), cosine)


@dataclass(frozen=True)
class Accuracy:
    """Errors of a kernel on one distribution of inputs, and those of standard attention in bf16;
    ``rms`` is the size of the right result."""

    inputs: str
    kernel: Errors
    bf16: Errors
    rms: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    more = OUTLIER_SIZE * rng.standard_normal(shape)
    return rng.standard_normal(shape) + np.where(rng.random(shape) < OUTLIERS, more, 0)


def _drifting(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape) * np.linspace(*DRIFT, shape[2])[:, None]


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "outliers": _outliers,
    "heavy": lambda rng, shape: rng.standard_t(DEGREES, shape),
    "drifting": _drifting,
}


def drawn(name: str, problem: Problem, seed: int = 0) -> dict[str, Array]:
    """q, k and v of a distribution, rounded to the 16 bits that they are quantised from."""
    rng, shapes = np.random.default_rng(seed), tensor_shapes(problem)
    dtype = DTYPES[problem.in_dtype if problem.quantises else "bf16"]
    return {n: DISTRIBUTIONS[name](rng, shapes[n]).astype(dtype) for n in ("q", "k", "v")}


def unmeasured(kernel: Kernel) -> str:
    """Why the accuracy of a kernel is not reported; "" if it is."""
    spec = kernel.plan.kernel
    if spec.dtype != "e4m3":
        return "only that of e4m3 depends on what the inputs look like"
    return "a dense bias would be drawn too" if spec.bias_dtype or spec.varlen else ""


def measure(kernel: Kernel, runner: Runner) -> list[Accuracy]:
    """Errors of a kernel in e4m3 on every distribution, at SHAPE. What comes in e4m3 is quantised
    from 16 bits by ``reference.quantise``."""
    planned = kernel.plan.problem
    problem = planned.with_(**SHAPE, scale=planned.scale)
    return [_measured(name, kernel, problem, runner) for name in DISTRIBUTIONS]


def _measured(name: str, kernel: Kernel, problem: Problem, runner: Runner) -> Accuracy:
    launch, given = kernel.plan.launch_for(problem), drawn(name, problem)
    arrays = dict(given)
    if not problem.quantises:
        arrays = properties.quantised(given, problem.scales)
    arrays = inputs.option_arrays(launch) | arrays
    got = runner.run(kernel, arrays, launch)["o"]
    return compared(name, got, given, problem)


def compared(
    name: str, got: Array, given: Mapping[str, Array], problem: Problem, rows: Any = None
) -> Accuracy:
    """Errors of a result, of some ``rows`` of queries, beside those of bf16."""
    options = reference.options_of(problem)
    q, k, v = (given[n] for n in ("q", "k", "v"))
    want = reference.attention(q, k, v, rows=rows, **options).o
    bf16 = reference.standard(q, k, v, "bf16", rows=rows, **options).o
    rms = math.sqrt((want**2).mean())
    return Accuracy(name, Errors.of(got, want), Errors.of(bf16, want), rms)

"""Bugs that kernels have, planted in a runner that is right without them: verify must name each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fasim.errors import CheckFailed, CompilerError
from fasim.plan import Launch
from fasim.properties import Report, parse_replay, verify
from fasim.render import Kernel
from fasim.runners import DeviceFault
from fasim.runners.numpy import NumpyRunner

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Outputs = dict[str, Array]
Run = Callable[[Kernel, Arrays, Launch], Outputs]
Sketch = Callable[..., Kernel]


class Runner:
    """The tiles in NumPy with a bug around them; it claims to run the file."""

    name = "planted"

    def __init__(self, bug: Callable[[Run, Kernel, Arrays, Launch], Outputs]) -> None:
        self.bug = bug

    def run(self, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
        return self.bug(NumpyRunner().run, kernel, arrays, launch)


def right(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    return run(kernel, arrays, launch)


def last_key_dropped(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """The tail of the last tile of keys is one short."""
    short = {name: arrays[name][:, :, :-1] for name in ("k", "v")}
    return run(kernel, {**arrays, **short} if arrays["k"].shape[2] > 1 else arrays, launch)


def scale_off_by_a_hundredth(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    scalars: dict[str, Any] = dict(launch.scalars)
    scalars["scale_log2"] *= 1.01
    changed = Launch(**{**vars(launch), "scalars": scalars})
    return run(kernel, arrays, changed)


def mask_off_by_one(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """k < q where k <= q is meant: as if one more query came after the last."""
    q = arrays["q"]
    late = run(kernel, {**arrays, "q": np.pad(q, [(0, 0), (0, 0), (0, 1), (0, 0)])}, _more(launch))
    return {name: x[:, :, :-1] for name, x in late.items()}


def last_key_leaks(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """Every query gets a little of the last value, seen or not."""
    outputs, v = run(kernel, arrays, launch), arrays["v"][:, :, -1:]
    if v.size:
        leak = np.repeat(v, outputs["o"].shape[1] // v.shape[1], 1).astype(np.float32)
        outputs["o"] = (outputs["o"] + 0.1 * leak).astype(outputs["o"].dtype)
    return outputs


def _more(launch: Launch) -> Launch:
    """The launch with one query more."""
    grown = {n: ((*s[:2], s[2] + 1, *s[3:]), d) for n, (s, d) in launch.outputs.items()}
    return Launch(**{**vars(launch), "outputs": grown})


def row_not_written(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """The last row of o keeps the bytes it had."""
    outputs = run(kernel, arrays, launch)
    o = outputs["o"]
    o.view(f"u{o.itemsize}")[:, :, -1:] = np.iinfo(f"u{o.itemsize}").max
    return outputs


def lse_in_log2(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    outputs = run(kernel, arrays, launch)
    return {**outputs, "lse": outputs["lse"] * np.float32(np.log2(np.e))}


def kv_head_by_remainder(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """Query head h reads kv head h % kv_heads, not h // group."""
    heads, kv_heads = arrays["q"].shape[1], arrays["k"].shape[1]
    read = {name: arrays[name][:, np.arange(heads) % kv_heads] for name in ("k", "v")}
    return run(kernel, {**arrays, **read}, launch)


def strides_of_k_for_v(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """V is read as if it were laid out compactly: amid NaN that reads NaN."""
    v = arrays["v"]
    if v.flags.c_contiguous or not v.size:
        return run(kernel, arrays, launch)
    return run(kernel, {**arrays, "v": np.full(v.shape, np.nan, v.dtype)}, launch)


def tail_of_v_not_zeroed(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """Keys past the end get weight 0, and 0 * NaN from the memory behind V is NaN."""
    outputs, v = run(kernel, arrays, launch), arrays["v"]
    if v.base is not None and not v.flags.c_contiguous and v.size and outputs["o"].size:
        shape, steps = (*v.shape[:2], v.shape[2] + 1, v.shape[3]), v.strides
        behind = np.lib.stride_tricks.as_strided(v, shape, steps)[:, :, -1:]
        outputs["o"][...] += 0 * np.repeat(behind, outputs["o"].shape[1] // v.shape[1], 1)
    return outputs


def nan_becomes_zero(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """The guard for rows that see no key swallows NaN as well."""
    outputs = run(kernel, arrays, launch)
    return {name: np.where(np.isnan(x), 0, x).astype(x.dtype) for name, x in outputs.items()}


def nan_spreads_to_the_tile(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """A row takes its maximum from the whole tile."""
    outputs = run(kernel, arrays, launch)
    if np.isnan(outputs["lse"]).any():
        outputs["o"][...] = np.nan
    return outputs


def race() -> Callable[[Run, Kernel, Arrays, Launch], Outputs]:
    """Every second run loses the last bits of one element."""
    turn = itertools.count()

    def bug(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
        outputs = run(kernel, arrays, launch)
        if next(turn) % 2 and outputs["o"].size:
            first = outputs["o"].view(f"u{outputs['o'].itemsize}")
            first[0, 0, 0, 0] ^= 1
        return outputs

    return bug


def empty_rows_are_nan(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """0 / 0 where a row sees no key."""
    outputs = run(kernel, arrays, launch)
    outputs["o"][np.isneginf(outputs["lse"])] = np.nan
    return outputs


def exponent_above_zero(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """The scaled maximum is rounded, the scaled score is not, and exp2 of the rest overflows."""
    outputs = run(kernel, arrays, launch)
    outputs["o"][np.abs(outputs["lse"]) > 1e9] = np.nan
    return outputs


def writes_outside(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    if arrays["q"].shape[2] > 3:
        raise CheckFailed("it wrote outside o", why="4 bytes after it changed")
    return run(kernel, arrays, launch)


PLANTED = [
    (last_key_dropped, False, "matches_float64"),
    (scale_off_by_a_hundredth, False, "matches_float64"),
    (scale_off_by_a_hundredth, True, "matches_float64"),
    (mask_off_by_one, True, "matches_float64"),
    (last_key_leaks, True, "matches_float64"),
    (row_not_written, False, "outputs_are_fully_written"),
    (row_not_written, True, "outputs_are_fully_written"),
    (lse_in_log2, False, "matches_float64"),
    (kv_head_by_remainder, False, "matches_float64"),
    (race(), False, "repeated_runs_are_identical"),
    (strides_of_k_for_v, False, "matches_float64"),
    (tail_of_v_not_zeroed, True, "poisoned_padding_never_leaks"),
    (nan_becomes_zero, False, "nan_stays_in_its_row"),
    (nan_spreads_to_the_tile, True, "nan_stays_in_its_row"),
    (empty_rows_are_nan, True, "matches_float64"),
    (exponent_above_zero, False, "matches_float64"),
    (writes_outside, False, "outputs_are_fully_written"),
]


def names(report: Report) -> set[str]:
    return {outcome.name for outcome in report.outcomes if outcome.failure}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("bug", "causal", "name"), PLANTED)
def test_a_planted_bug_breaks_its_property(
    sketch: Sketch, bug: Any, causal: bool, name: str, dtype: str
) -> None:
    kernel = sketch(dtype=dtype, causal=causal)
    report = verify(kernel, Runner(bug), 30)
    assert name in names(report)
    with pytest.raises(CheckFailed, match=kernel.stem):
        report.check()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("algo", ["v1", "v2"])
def test_a_right_kernel_breaks_none(sketch: Sketch, algo: str, causal: bool, dtype: str) -> None:
    report = verify(sketch(algo=algo, dtype=dtype, causal=causal), Runner(right), 30)
    report.check()
    assert report.ok


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_key_is_shrunk_to_two_keys_and_replays(sketch: Sketch, seed: int) -> None:
    kernel, runner = sketch(), Runner(last_key_dropped)
    failure = verify(kernel, runner, 30, seed).failure
    assert failure
    assert (failure.case.batch, failure.case.heads, failure.case.seq) == (1, 1, 1)
    assert failure.case.seq_kv == 2
    again = verify(kernel, runner, replay=failure.replay).failure
    assert again
    assert (again.name, again.case) == (failure.name, failure.case)
    assert verify(kernel, Runner(right), replay=failure.replay).ok


def test_a_lost_key_shows_without_a_reference_too(sketch: Sketch) -> None:
    report = verify(sketch(), Runner(last_key_dropped), 30)
    assert {
        "matches_float64",
        "permuting_keys_changes_nothing",
        "splitting_keys_and_merging_by_lse_gives_the_whole",
    } <= names(report)


def test_a_leak_of_the_future_shows_without_a_reference_too(sketch: Sketch) -> None:
    report = verify(sketch(causal=True), Runner(last_key_leaks), 30)
    assert "later_keys_change_nothing" in names(report)


def test_a_race_that_hides_while_shrinking_is_still_reported(sketch: Sketch) -> None:
    report = verify(sketch(), Runner(race()), 30)
    failure = report.failure
    assert failure
    assert parse_replay(failure.replay)[1] == failure.case


def test_after_a_fault_nothing_more_is_tried(sketch: Sketch) -> None:
    faults = itertools.count()

    def bug(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
        if arrays["q"].shape[2] > 5:
            next(faults)
            raise DeviceFault("failed on the device", why="an illegal memory access")
        return run(kernel, arrays, launch)

    report = verify(sketch(), Runner(bug), 30)
    assert next(faults) == 1, "one fault, no launch after it"
    assert report.failure
    assert report.failure.case.seq > 5
    skipped = [outcome.skipped for outcome in report.outcomes[1:]]
    assert set(skipped) == {"the device failed before"}


def test_an_error_that_is_not_the_kernels_comes_through(sketch: Sketch) -> None:
    tries = itertools.count()

    def bug(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
        next(tries)
        raise CompilerError("no compiler here")

    with pytest.raises(CompilerError, match="no compiler here"):
        verify(sketch(), Runner(bug), 30)
    assert next(tries) == 1

"""Bugs that kernels have, planted in a runner that is right without them: verify must name each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from fasim import tiled
from fasim.emulator.program import Execution, Operation
from fasim.errors import CheckFailed, CompilerError
from fasim.plan import Launch
from fasim.problem import DTYPE_BYTES
from fasim.properties import Report, parse_replay, verify, verify_all
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


def tail_of_keys_not_masked(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """The zeros that fill the last tile of keys take part."""
    missing = -arrays["k"].shape[2] % kernel.plan.kernel.tile.block_kv
    tail = [(0, 0), (0, 0), (0, missing), (0, 0)]
    return run(kernel, {**arrays, **{n: np.pad(arrays[n], tail) for n in ("k", "v")}}, launch)


def sums_not_rescaled(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    """A new maximum leaves what was summed up before relative to the old one."""
    right = tiled.online_softmax

    def wrong(s: Array, m: Array, l: Array) -> Any:  # noqa: E741
        p, alpha, m_new, _ = right(s, m, l)
        alpha = np.ones_like(alpha)
        return p, alpha, m_new, l + p.sum(axis=1)

    with patch.object(tiled, "online_softmax", wrong):
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
    (tail_of_keys_not_masked, False, "matches_float64"),
    (sums_not_rescaled, False, "matches_float64"),
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


def broken_by(kernel: Kernel, bug: Any, values: str, seq_kv: int) -> str:
    """The tensor that is off, "" if none."""
    report = verify(kernel, Runner(bug), replay=f"seq=4 seq_kv={seq_kv} values={values}")
    return report.failure.error.where.partition("[")[0] if report.failure else ""


def test_one_key_among_many_shows_in_o_where_it_outweighs_them(sketch: Sketch) -> None:
    kernel = sketch(dtype="bf16")
    assert broken_by(kernel, tail_of_keys_not_masked, "below", 1023) == "o"
    assert broken_by(kernel, tail_of_keys_not_masked, "normal", 1023) == "lse"


@pytest.mark.parametrize("algo", ["v1", "v2"])
def test_a_lost_rescaling_shows_where_every_tile_moves_the_maximum(
    sketch: Sketch, algo: str
) -> None:
    """The loops of tiled.py walk the keys upwards."""
    kernel = sketch(algo=algo, dtype="bf16")
    assert broken_by(kernel, sums_not_rescaled, "rising", 96) == "o"
    assert not broken_by(kernel, sums_not_rescaled, "falling", 96)


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


def test_in_a_hurry_the_first_failure_ends_all(sketch: Sketch) -> None:
    outcomes = verify(sketch(), Runner(last_key_dropped), 30, hurry=True).outcomes
    assert [bool(outcome.failure) for outcome in outcomes[-2:]] == [False, True]
    assert len(outcomes) < len(verify(sketch(), Runner(right), 1).outcomes)


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


# ---- a runner that counts -----------------------------------------------------------------------


class Emulator(Runner):
    """The planted runner with schedules and counts: those of the loops, walked block by block."""

    name, schedules = "emulator", 1

    def __init__(self, bug: Any = right, miscount: Any = lambda executed: executed) -> None:
        super().__init__(bug)
        self.miscount, self.next_seed = miscount, 0
        self.last = self.executed = Execution()

    def run(self, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
        self.next_seed += 1
        outputs = super().run(kernel, arrays, launch)
        self.last = self.miscount(counted(kernel, arrays, launch))
        self.executed += self.last
        return outputs


def steps(kernel: Kernel, queries: int, keys: int) -> Iterator[tuple[int, int, range]]:
    """First query, queries and tiles of keys of every block of queries of one head."""
    tile, causal = kernel.plan.kernel.tile, kernel.plan.kernel.mask == "causal"
    for first in range(0, queries, tile.block_q):
        rows = min(tile.block_q, queries - first)
        seen = max(0, first + rows + keys - queries) if causal else keys
        yield first, rows, range(-(-seen // tile.block_kv))


def counted(kernel: Kernel, arrays: Arrays, launch: Launch) -> Execution:
    """What a right kernel of these tiles executes."""
    spec, (batch, heads, queries, _), keys = (
        kernel.plan.kernel,
        arrays["q"].shape,
        arrays["k"].shape[2],
    )
    size, tile = DTYPE_BYTES[spec.dtype], spec.tile
    rows = again = loaded = tiles = 0
    for _, count, seen in steps(kernel, queries, keys):
        rows, again = rows + count, again + count * max(0, len(seen) - 1)
        loaded += sum(min(tile.block_kv, keys - j * tile.block_kv) for j in seen)
        tiles += len(seen)
    if spec.algo == "v1":
        loaded = keys if queries else 0
    else:
        again = 0
    d, d_v, each = spec.head_dim, spec.head_dim_v, batch * heads
    kept = {"o_acc": each * again * d_v * 4, "m": each * again * 4, "l": each * again * 4}
    reads = {"q": each * (rows + again) * d * size}
    reads |= {"k": each * loaded * d * size, "v": each * loaded * d_v * size, **kept}
    writes = {"o": each * rows * d_v * DTYPE_BYTES[spec.out_dtype], "lse": each * rows * 4, **kept}
    pairs = each * tiles * tile.block_q * tile.block_kv
    depth = sum(-(-width // 16) * 16 for width in (d, d_v))
    mma = Operation(pairs * depth // (16 * 8 * 16), 0, 0, 0)
    stage = launch.stages[0]
    return Execution(1, stage.grid, stage.grid * stage.block, reads, writes, {"mma": mma})


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("algo", ["v1", "v2"])
def test_counts_of_a_right_kernel_are_those_predicted(
    sketch: Sketch, algo: str, causal: bool, dtype: str
) -> None:
    report = verify(sketch(algo=algo, dtype=dtype, causal=causal), Emulator(), 20)
    report.check()
    skipped = {outcome.name for outcome in report.outcomes if outcome.skipped}
    flops = "matrix_instructions_do_the_flops_predicted"
    assert skipped & {flops, "bytes_moved_are_bytes_predicted"} == (
        {flops} if dtype == "fp32" else set()
    )
    assert report.executed
    assert report.executed.launches > 20 * len(report.outcomes) / 2
    assert report.executed.bytes == report.to_json()["executed"]["bytes"]


def values_loaded_twice(executed: Execution) -> Execution:
    return replace(executed, reads={**executed.reads, "v": 2 * executed.reads["v"]})


def statistics_never_written(executed: Execution) -> Execution:
    return replace(executed, writes={**executed.writes, "m": 0})


def masked_products_left_out(executed: Execution) -> Execution:
    mma = replace(executed.operations["mma"], count=executed.operations["mma"].count // 2)
    return replace(executed, operations={"mma": mma})


def rows_in_one_bank(executed: Execution) -> Execution:
    return replace(executed, operations={**executed.operations, "ldmatrix": Operation(1, 0, 8, 7)})


@pytest.mark.parametrize(
    ("miscount", "name", "where"),
    [
        (values_loaded_twice, "bytes_moved_are_bytes_predicted", "v"),
        (statistics_never_written, "bytes_moved_are_bytes_predicted", "m"),
        (masked_products_left_out, "matrix_instructions_do_the_flops_predicted", "mma"),
        (rows_in_one_bank, "main_loop_has_no_bank_conflicts", "ldmatrix"),
    ],
)
def test_a_wrong_count_is_named(sketch: Sketch, miscount: Any, name: str, where: str) -> None:
    report = verify(sketch(algo="v1", dtype="bf16"), Emulator(right, miscount), 20)
    assert names(report) == {name}
    assert report.failure
    assert report.failure.error.where == where


def test_a_race_of_few_schedules_replays(sketch: Sketch) -> None:
    """The line names the schedule: it is drawn with the values."""

    def bug(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
        if emulator.next_seed % 5 == 4:
            raise CheckFailed(
                "data race", where="kernel.cu:120", why="block 3, thread 7", hint="add a barrier"
            )
        return run(kernel, arrays, launch)

    emulator = Emulator(bug)
    failure = verify(sketch(), emulator, 30).failure
    assert failure
    assert not failure.flaky
    for _ in range(2):
        again = verify(sketch(), emulator, replay=failure.replay)
        assert again.failure
        assert again.failure.case == failure.case
        with pytest.raises(CheckFailed, match="data race") as error:
            again.check()
        assert error.value.where.startswith("kernel.cu:120 with batch=1")
        assert error.value.why == "block 3, thread 7"
        assert error.value.hint == f'add a barrier\nrepeat it with --replay "{failure.replay}"'
        assert again.failure.to_json()["hint"] == "add a barrier"
    with pytest.raises(CheckFailed) as error:
        replace(again, schedules=4).check()
    assert "repeat it with --schedules 4 --replay" in error.value.hint


def one_too_large(run: Run, kernel: Kernel, arrays: Arrays, launch: Launch) -> Outputs:
    return {n: x + x.dtype.type(1) for n, x in run(kernel, arrays, launch).items()}


def test_two_runners_must_agree(sketch: Sketch) -> None:
    kernel = sketch()
    good = verify_all(kernel, [Emulator(), Runner(right)], 10)
    assert [(report.runner, report.ok) for report in good] == [
        ("emulator", True),
        ("planted", True),
    ]
    assert "both_runners_agree" not in {outcome.name for outcome in good[0].outcomes}
    first, second = verify_all(kernel, [Emulator(), Runner(one_too_large)], 10)
    assert first.ok
    assert "both_runners_agree" in names(second)
    line = "property=both_runners_agree seq=3"
    first, second = verify_all(kernel, [Emulator(), Runner(one_too_large)], 1, 0, line)
    assert first.outcomes[0].skipped
    assert names(second) == {"both_runners_agree"}

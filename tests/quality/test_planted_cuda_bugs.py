"""Bugs planted in the text of rendered kernels: the emulator or a property must find each."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_bugs import BUGS, NOTHING, SEEDS, USUAL, Bug, kernel_of
from numpy.typing import NDArray

from fasim.emulator.program import Fault
from fasim.properties import Trial
from fasim.render import parse
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]

pytestmark = pytest.mark.emulator

each_bug = pytest.mark.parametrize("bug", BUGS, ids=str)


@each_bug
def test_a_planted_bug_is_found_whatever_the_seed(bug: Bug) -> None:
    kernel = bug.planted()
    assert kernel.edited
    found = {bug.finder(kernel, seed) for seed in SEEDS}
    assert found <= bug.finders, f"found by {found}"


# What the bugs were looked for with, each combination once.
SEARCHES = {(bug.kernel, bug.property.name, bug.case): bug for bug in BUGS}


@pytest.mark.parametrize(("kernel", "property_", "case"), SEARCHES)
def test_nothing_is_found_in_the_right_kernel(kernel: str, property_: str, case: Any) -> None:
    search = SEARCHES[kernel, property_, case]
    assert {search.finder(kernel_of(kernel), seed) for seed in range(3)} == {NOTHING}


def test_a_read_that_lands_in_the_next_tensor_is_found() -> None:
    """Q ends where K begins: what lies beyond Q is a tensor's memory, and still not Q's."""
    (bug,) = (bug for bug in BUGS if bug.name == "keys past the last are read")
    trial = Trial(bug.planted(), EmulatorRunner(), bug.case)
    memory = np.concatenate([x.ravel() for x in trial.arrays.values()])
    ends = np.cumsum([x.size for x in trial.arrays.values()])[:-1]
    parts = zip(trial.arrays.items(), np.split(memory, ends), strict=True)
    with pytest.raises(Fault) as fault:
        trial.run({name: part.reshape(x.shape) for (name, x), part in parts})
    assert fault.value.rule == "out of bounds"
    assert " q[" in fault.value.why


# ---- offsets beyond 2^31 ------------------------------------------------------------------------

SPARSE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: only what is used is there


def far_apart(x: Array, axis: int, stride: int) -> Array:
    """The same values with ``stride`` elements between neighbours along one axis."""
    strides = list(x.strides)
    strides[axis] = stride * x.itemsize
    memory = mmap.mmap(-1, x.shape[axis] * strides[axis], flags=SPARSE)
    view: Array = np.ndarray(x.shape, x.dtype, memory, 0, strides)
    view[...] = x
    return view


WIDE_OFFSETS = {
    "keys": ("v2 bf16 causal", "k", 2, 2**26, "k + key * k_strides.seq;"),
    "values": ("v1 fp32 full", "v", 2, 2**26, "v + first_key * v_strides.seq;"),
    "batches": ("v2 fp16 full", "q", 0, 2**31 + 8, "  q += batch * q_strides.batch + "),
}
NARROWED = {
    "keys": ("k + int(key) * int(k_strides.seq);", "undefined arithmetic"),
    "values": ("v + int(first_key * v_strides.seq);", "out of bounds"),
    "batches": ("  q += int(batch) * int(q_strides.batch) + ", "out of bounds"),
}


def wide_trial(what: str) -> tuple[Trial, dict[str, Array]]:
    name, tensor, axis, stride, _ = WIDE_OFFSETS[what]
    trial = Trial(kernel_of(name), EmulatorRunner(), replace(USUAL, batch=2))
    return trial, {**trial.arrays, tensor: far_apart(trial.arrays[tensor], axis, stride)}


@pytest.mark.parametrize("what", WIDE_OFFSETS)
def test_offsets_beyond_2_to_the_31_are_followed(what: str) -> None:
    trial, arrays = wide_trial(what)
    for name, x in trial.run(arrays).items():
        assert x.tobytes() == trial.outputs[name].tobytes()


@pytest.mark.parametrize("what", WIDE_OFFSETS)
def test_an_offset_of_32_bits_is_found(what: str) -> None:
    trial, arrays = wide_trial(what)
    right, (wrong, rule) = WIDE_OFFSETS[what][-1], NARROWED[what]
    assert trial.kernel.source.count(right) == 1
    narrow = replace(trial, kernel=parse(trial.kernel.source.replace(right, wrong)))
    with pytest.raises(Fault) as fault:
        narrow.run(arrays)
    assert fault.value.rule == rule

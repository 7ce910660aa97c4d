"""Every instruction the templates use, on the emulator, against NumPy and against a device.

The device's results are in results/ (``record.py`` makes them). They say what silicon does, down to
the bits of a NaN; NumPy says what the PTX ISA means, without either.
"""

import json
from functools import cache

import numpy as np
import pytest
from cases import CASES, Array, Bound, Case, bits
from record import RESULTS, cubin

from fasim.emulator.program import Mapped, Program
from fasim.runners.emulator import available
from fasim.toolchain import find_nvcc

BY_NAME = {case.name: case for case in CASES}
COMPILED = {  # one of those that differ in sizes alone
    (case.kernel, *(str(case.values.get(name)) for name in ("instruction", "type", "source"))): case
    for case in CASES
}

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
emulated_only = pytest.mark.skipif(bool(available()), reason=available() or "")


@cache
def emulated(name: str) -> dict[str, Array]:
    case, arrays = BY_NAME[name], BY_NAME[name].arrays()
    maps = {
        key: Mapped(arrays[key], boxes.map(arrays[key], arrays[key].ctypes.data))
        for key, boxes in case.maps.items()
    }
    Program.load(case.source, case.kernel).launch(
        {**arrays, **maps},
        outputs=case.expected,
        initialised=case.initial,
        grid=case.grid,
        block=case.block,
        smem_bytes=case.smem_bytes,
        seed=0,
    )
    return {output: arrays[output] for output in case.expected}


def recorded(case: Case) -> dict[str, Array]:
    """What a device gave, or a skip."""
    path = RESULTS / f"{case.name}.npz"
    if not path.exists():
        pytest.skip(f"{case.name} has not run on a device yet (tests/conformance/record.py)")
    with np.load(path) as results:
        return dict(results)


@emulated_only
@each_case
def test_the_emulator_does_what_numpy_expects(case: Case) -> None:
    assert not case.disagreements(emulated(case.name), case.expected, any_nan=True)


@emulated_only
@each_case
def test_the_emulator_does_what_the_device_did(case: Case) -> None:
    emulator, device = emulated(case.name), recorded(case)
    assert not case.disagreements(emulator, device, exact=case.silicon)


@each_case
def test_the_device_did_what_numpy_expects(case: Case) -> None:
    assert not case.disagreements(recorded(case), case.expected, any_nan=True)


@each_case
def test_results_belong_to_these_sources_and_inputs(case: Case) -> None:
    recorded(case)
    known = json.loads((RESULTS / "device.json").read_text())["cases"]
    assert known[case.name] == case.digest, "record again: python tests/conformance/record.py"


@pytest.mark.nvcc
@pytest.mark.parametrize("case", COMPILED.values(), ids=lambda case: case.name)
def test_compiles_without_a_warning(case: Case) -> None:
    assert cubin(case, find_nvcc(), "sm_90a").startswith(b"\x7fELF")


# ---- the comparison itself ----------------------------------------------------------------------


def made(y: Array, bound: Bound | None = None) -> Case:
    bounds = {"y": bound} if bound else {}
    return Case("made", "unary", 1, 32, {}, {"y": y}, bounds=bounds)


def test_one_bit_is_a_disagreement() -> None:
    y = np.arange(4, dtype=np.float32)
    flipped = bits(y).copy()
    flipped[2] ^= 1
    assert made(y).disagreements({"y": flipped}, {"y": y})[0].startswith("y[2] is ")
    assert not made(y).disagreements({"y": bits(y)}, {"y": y})


def test_nans_are_told_apart_unless_any_will_do() -> None:
    y = np.array([0x7FFF, 0x3C00], np.uint16).view(np.float16)
    other = {"y": np.array([0x7E00, 0x3C00], np.uint16)}
    assert made(y).disagreements(other, {"y": y})
    assert not made(y).disagreements(other, {"y": y}, any_nan=True)
    number = {"y": np.array([0x3C00, 0x3C00], np.uint16)}
    assert made(y).disagreements(number, {"y": y}, any_nan=True)


@pytest.mark.parametrize(("error", "good"), [(0.9, True), (1.1, False), (np.inf, False)])
def test_a_bound_is_kept(error: float, good: bool) -> None:
    y = np.array([-4, np.inf], np.float32)
    case = made(y, Bound("for the test", absolute=0.5, relative=0.125))
    found = {"y": bits(y + np.array([error, 0], np.float32))}
    assert (not case.disagreements(found, {"y": y})) == good

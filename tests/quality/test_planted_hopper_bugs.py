"""Bugs planted in kernels with TMA, mbarriers and wgmma: a rule or the numbers must find each."""

from __future__ import annotations

from dataclasses import replace

import hopper
import pytest
from hopper import NOTHING, Shape, finder, launch, source
from hopper_bugs import BUGS, SEEDS, Bug, look, right

from fasim.emulator.program import Fault, Mapped, Span
from fasim.emulator.trace import roles

pytestmark = pytest.mark.emulator

SHAPES = (
    Shape(),
    Shape(rows=1, keys=1),
    Shape(rows=128, keys=128),
    Shape(heads=2, rows=129, keys=257, grid=2),
    Shape(heads=3, rows=64, keys=640),
)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_planted_bug_is_found_whatever_the_seed(bug: Bug) -> None:
    found = {bug.finder(seed) for seed in SEEDS[:: len(SEEDS) // 2]}
    assert found <= bug.finders, f"found by {found}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_found_in_the_right_kernel(shape: Shape) -> None:
    assert {finder(source(), shape, seed) for seed in range(3)} == {NOTHING}


@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS if bug.kernel}))
def test_nothing_is_found_in_the_right_case(kernel: str) -> None:
    assert {look(kernel, right(kernel), seed) for seed in range(3)} == {NOTHING}


def test_a_map_that_begins_before_its_array_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All boxes lie in the array; a device faults nevertheless."""
    right_map = hopper.mapped

    def early(name: str, x: hopper.Array) -> Mapped:
        made = right_map(name, x)
        tensor = replace(made.map, address=made.map.address - (1 << 20))
        return replace(made, map=tensor)

    monkeypatch.setattr(hopper, "mapped", early)
    assert finder(source(), Shape(), 0) == "tensor map in no memory"


def test_every_byte_of_a_box_is_counted() -> None:
    shape = Shape(heads=2, rows=256, keys=256, grid=2)
    _, executed = launch(source(), shape, 0)
    blocks, tile = shape.heads * 2, 128 * 128 * 2
    assert executed.operations["tma load"].bytes == blocks * (1 + 2 * 2) * tile
    assert executed.reads == {"q": 4 * tile, "k": blocks * 2 * tile, "v": blocks * 2 * tile}
    assert executed.writes["o"] == executed.operations["tma store"].bytes == 4 * tile
    products = executed.operations["wgmma"].count * 64 * 8 * 16
    assert products == 2 * shape.heads * shape.rows * shape.keys * 128


def test_a_deadlock_tells_who_waits_for_what() -> None:
    (bug,) = (bug for bug in BUGS if bug.name == "V is never released")
    with pytest.raises(Fault) as fault:
        launch(bug.planted(), Shape(), 0)
    assert "is in phase 0, parity 0, and misses 2 of 2 arrivals and 0 bytes" in fault.value.why
    assert "mbarrier_init(&barriers.empty_v[i], kConsumers)" in fault.value.why
    assert "warp 1 has exited" in fault.value.why


def test_a_trace_tells_who_produces_and_who_consumes() -> None:
    spans: list[Span] = []
    launch(source(), Shape(rows=128, keys=256), 0, spans)
    assert roles(spans) == {0: "producer", **dict.fromkeys(range(4, 12), "consumer")}
    copies = [span for span in spans if span.kind == "tma load"]
    assert [(span.array, span.count > 0) for span in copies] == [
        *[("q", True), ("k", True), ("v", True), ("k", True), ("v", True)]
    ]
    assert copies[0].shared == (0, 32768)  # both slabs
    waits = [span for span in spans if span.kind == "mbarrier" and span.warp == 0]
    assert len(waits) == 5
    products = {span.warp for span in spans if span.kind == "wgmma"}
    assert products == set(range(4, 12))

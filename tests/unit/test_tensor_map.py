"""How TMA is told of a tensor, and where parameters lie."""

import ctypes
import struct
from typing import Any

import pytest

from fasim import gpu, planner
from fasim.errors import UsageError
from fasim.plan import Launch, Tile, contiguous_strides
from fasim.problem import Problem
from fasim.runners.arrays import PACKED_END, tensor_maps
from fasim.tensor_map import BYTES, TensorMap, _Aligned, placed

GOOD: dict[str, Any] = {
    "address": 4096,
    "dtype": "bf16",
    "sizes": (128, 300, 4),
    "strides": (256, 76800),
    "box": (64, 128, 1),
    "swizzle": 128,
}


def test_the_emulators_map_is_128_bytes_with_every_field() -> None:
    made = TensorMap(**GOOD).emulated()
    assert len(made) == BYTES
    magic, rank, size, adds, swizzle, address = struct.unpack_from("<I4BQ", made)
    assert (magic, rank, size, adds, swizzle, address) == (0x50414D46, 3, 2, 0, 1, 4096)
    rest = struct.unpack_from("<5Q4Q5I", made, 16)
    assert rest == (128, 300, 4, 0, 0, 256, 76800, 0, 0, 64, 128, 1, 0, 0)
    assert TensorMap(**GOOD).box_bytes == 64 * 128 * 2


@pytest.mark.parametrize(("swizzle", "code"), [(0, 0), (128, 1), (64, 2), (32, 3)])
def test_swizzles_have_the_numbers_of_descriptors(swizzle: int, code: int) -> None:
    box = ((swizzle or 128) // 2, 8, 1)
    assert TensorMap(**{**GOOD, "swizzle": swizzle, "box": box}).emulated()[7] == code


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"address": 4104}, "multiple of 16"),
        ({"strides": (264, 76800)}, "not all 16 n"),
        ({"strides": (256,)}, "do not match"),
        ({"sizes": (128, 0, 4)}, "empty"),
        ({"box": (64, 257, 1)}, "at most 256"),
        ({"box": (4, 8, 1), "swizzle": 0}, "a row of the box has 8 bytes"),
        ({"swizzle": 64}, "do not fill 64"),
        ({"swizzle": 16}, "a swizzle of 16"),
        ({"sizes": (2,) * 6, "strides": (16,) * 5, "box": (8, 1, 1, 1, 1, 1)}, "6 dimensions"),
    ],
)
def test_what_the_driver_would_refuse_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as error:
        TensorMap(**{**GOOD, **change})
    assert why in error.value.why


def test_a_stride_of_0_repeats_a_head() -> None:
    assert TensorMap(**{**GOOD, "strides": (256, 0)}).strides[1] == 0


def test_the_driver_writes_at_a_multiple_of_64() -> None:
    for _ in range(8):
        aligned = _Aligned()
        assert aligned.address % 64 == 0
        ctypes.memset(aligned.address, 7, BYTES)
        assert aligned.content == b"\7" * BYTES


@pytest.mark.parametrize(
    ("formats", "offsets", "wanted", "gaps"),
    [
        (["P", "i", "f"], [0, 8, 12], ["P", "i", "f"], []),
        (["i", "P"], [0, 8], ["i", "P"], []),
        (["128s", "P"], [48, 176], ["48s", "128s", "P"], [0]),
        (["P", "P", "128s", "i"], [0, 8, 48, 176], ["P", "P", "32s", "128s", "i"], [2]),
        (["128s", "128s", "3q"], [48, 176, 304], ["48s", "128s", "128s", "3q"], [0]),
        (["i", "128s"], [0, 48], ["i", "44s", "128s"], [1]),
    ],
)
def test_parameters_are_put_where_the_driver_wants_them(
    formats: list[str], offsets: list[int], wanted: list[str], gaps: list[int]
) -> None:
    assert placed(formats, offsets) == (wanted, gaps)


def test_a_parameter_cannot_overlap_another() -> None:
    with pytest.raises(UsageError):
        placed(["P", "P"], [0, 4])


# ---- The maps of a launch of V3 ------------------------------------------------------------------


def launch(tokens: tuple[int, int] | None = None, **options: Any) -> Launch:
    problem = Problem(batch=2, heads=4, kv_heads=2, seq=300, seq_kv=200, head_dim=72, **options)
    tile = Tile(block_q=128, block_kv=64, warps=8, stages=2)
    plan = planner.plan(problem, gpu.load("h200"), "v3", tile).plan
    assert plan
    return plan.launch_for(tokens=tokens)


def maps(launched: Launch) -> dict[str, TensorMap]:
    shapes = {**launched.inputs, **launched.outputs}
    steps = {name: contiguous_strides(shapes[name][0]) for name in launched.boxes}
    return tensor_maps(launched, dict.fromkeys(launched.boxes, 1 << 32), steps)


def test_tma_sees_slabs_of_a_head() -> None:
    """The box's rows are those of a consumer, or of a tile of keys."""
    made = maps(launch())
    assert {name: one.sizes for name, one in made.items()} == {
        "q": (72, 300, 4, 2),
        "k": (72, 200, 2, 2),
        "v": (72, 200, 2, 2),
        "o": (72, 300, 4, 2),
    }
    assert made["k"].strides == (144, 200 * 144, 2 * 200 * 144)
    assert [made[name].box for name in "qkvo"] == [(64, rows, 1, 1) for rows in (64, 64, 64, 64)]
    assert all(one.swizzle == 128 and one.address == 1 << 32 for one in made.values())


def test_every_packed_token_ends_a_sequence() -> None:
    """Row ``PACKED_END - n + i`` of the sequence that ends at token e is token e - n + i."""
    made = maps(launch(tokens=(500, 390), varlen=True))
    for name, tokens, heads in (("q", 500, 4), ("v", 390, 2), ("o", 500, 4)):
        one, token = made[name], heads * 144
        assert one.sizes == (72, PACKED_END, heads, tokens + 1, PACKED_END + 1)
        assert one.address == 1 << 32
        for end, count, row in ((tokens, 7, 0), (150, 100, 99), (200, 200, 0)):
            at = (PACKED_END - count + row, 0, end, PACKED_END)
            offset = sum(i * step for i, step in zip(at, one.strides, strict=True))
            assert offset % 2**64 == (end - count + row) * token


def test_arrays_without_elements_have_maps() -> None:
    empty = maps(launch(tokens=(0, 0), varlen=True))
    assert empty["q"].sizes == (72, PACKED_END, 4, 1, PACKED_END + 1)


def test_a_kernel_with_other_parameters_is_of_another_version() -> None:
    with pytest.raises(UsageError, match="takes 3 parameters, and its plan has 2"):
        placed(["P", "i"], [0, 8, 16])

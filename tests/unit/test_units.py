"""Reading and writing numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import units
from fasim.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("4096", 4096), ("8k", 8192), ("2M", 2 * 1024**2), (" 7 ", 7)]
)
def test_counts(text: str, value: int) -> None:
    assert units.parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("14GiB", 14 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("80GB", 80 * 10**9),
        ("1.5kib", 1536),
        ("1000", 1000),
        ("0B", 0),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert units.parse_size(text) == value


def test_tiles_and_windows() -> None:
    assert units.parse_tile("128x64") == (128, 64)
    assert units.parse_tile("16X8") == (16, 8)
    assert units.parse_window("4095,0") == (4095, 0)
    assert units.parse_window("-1, 256") == (-1, 256)


@pytest.mark.parametrize(
    ("text", "sweep"),
    [
        ("seq=512..4096", ("seq", (512, 1024, 2048, 4096))),
        ("seq=1k..3k", ("seq", (1024, 2048))),
        ("heads=8,16,71", ("heads", (8, 16, 71))),
        ("head-dim=64", ("head-dim", (64,))),
        ("seq=7..7", ("seq", (7,))),
    ],
)
def test_sweeps(text: str, sweep: tuple[str, tuple[int, ...]]) -> None:
    assert units.parse_sweep(text) == sweep


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_count, "-1"),
        (units.parse_count, "1.5"),
        (units.parse_count, "8g"),
        (units.parse_count, ""),
        (units.parse_count, "٣"),  # a digit to str.isdigit, not to us
        (units.parse_size, "14 gibi"),
        (units.parse_size, "-1GiB"),
        (units.parse_size, "1" * 30),
        (units.parse_tile, "128"),
        (units.parse_tile, "0x64"),
        (units.parse_tile, "128x64x2"),
        (units.parse_window, "4096"),
        (units.parse_window, "-2,0"),
        (units.parse_sweep, "512..1024"),
        (units.parse_sweep, "dtype=fp16"),
        (units.parse_sweep, "seq=1024..512"),
        (units.parse_sweep, "seq=0..512"),
        (units.parse_sweep, "seq=512.."),
        (units.parse_sweep, "seq="),
    ],
)
def test_nonsense_is_refused_with_a_hint(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(UsageError) as failure:
        parse(text)
    assert failure.value.hint


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0104, "0.0104"),
        (1.156, "1.16"),
        (9.999, "10.0"),
        (62.31, "62.3"),
        (671.4, "671"),
        (1979.0, "1979"),
        (0, "0"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert units.digits(value) == text


def test_capacities_are_binary_and_traffic_is_decimal() -> None:
    assert units.capacity(98304) == "96 KiB"
    assert units.capacity(188_580) == "184.2 KiB"
    assert units.capacity(150_754_820_096) == "140.4 GiB"
    assert units.capacity(0) == "0 B"
    assert units.used(98304, 232448) == "96 of 227 KiB (42 %)"
    assert units.traffic(671e6) == "671 MB"
    assert units.traffic(999.9e6) == "1.00 GB"
    assert units.traffic(1e3) == "1.00 kB"
    assert units.scaled(2.2e12, "FLOP") == "2.20 TFLOP"
    assert units.scaled(12.0, "B") == "12.0 B"


def test_times() -> None:
    shown = [units.seconds(t) for t in (2.0, 5.74e-3, 2.5e-6, 0.99999e-3, 4e-8, 0.0)]
    assert shown == ["2.00 s", "5.74 ms", "2.50 us", "1.00 ms", "40.0 ns", "0 ns"]


@given(st.integers(0, 2**62))
def test_a_plain_count_survives(value: int) -> None:
    assert units.parse_count(str(value)) == value


@given(st.floats(1e-12, 1e17))
def test_scaled_shows_the_value_within_half_a_percent(value: float) -> None:
    number, unit = units.scaled(value, "B").split()
    factor = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}[unit[:-1]]
    assert abs(float(number) * factor - value) <= 0.0051 * value
    assert len(number.replace(".", "").lstrip("0")) <= 4


@given(st.integers(0, 2**55))
def test_capacity_shows_the_value_within_a_thousandth(size: int) -> None:
    number, unit = units.capacity(size).split()
    power = ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)
    assert abs(float(number) * 1024**power - size) <= max(0.001 * size, 0.5)

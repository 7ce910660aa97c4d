"""Numbers as people write and read them: parsed in, three digits and a unit out.

Capacities (what must fit) are binary: KiB, MiB, GiB. Traffic and rates are decimal: MB, TB/s.
"""

from __future__ import annotations

import math
import re

from fasim.errors import UsageError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_COUNT = re.compile(r"([0-9]+)([km]?)", re.IGNORECASE)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]i?b|b|)", re.IGNORECASE)
_LARGEST = 2**63


def parse_count(text: str) -> int:
    """``"4096"``, ``"8k"`` (8 x 1024) or ``"1m"`` (1024 x 1024) as a number."""
    match = _COUNT.fullmatch(text.strip())
    if not match:
        raise UsageError(
            f"{text!r} is not a count",
            hint="give a whole number; the suffixes k and m stand for 1024 and 1024 x 1024",
        )
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def parse_size(text: str) -> int:
    """``"14GiB"``, ``"512MiB"`` (binary), ``"80GB"`` (decimal) or plain bytes as bytes."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise _not_a_size(text)
    unit = match[2].lower()
    base = 1024 if "i" in unit else 1000
    size = float(match[1]) * base ** "bkmgt".index(unit[:1] or "b")
    if size >= _LARGEST:
        raise _not_a_size(text)
    return int(size)


def _not_a_size(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is not a size",
        hint="write it like 14GiB or 512MiB (binary), 80GB (decimal), or as plain bytes",
    )


def parse_tile(text: str) -> tuple[int, int]:
    """``"128x64"`` as (block_q, block_kv)."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(
            f"{text!r} is not a tile", hint="write queries x keys, for example --tile 128x64"
        )
    return int(match[1]), int(match[2])


def parse_window(text: str) -> tuple[int, int]:
    """``"4095,0"`` as keys left and right of the aligned one; -1 is open."""
    match = re.fullmatch(r"(-1|[0-9]{1,10}),(-1|[0-9]{1,10})", text.replace(" ", ""))
    if not match:
        raise UsageError(
            f"{text!r} is not a window",
            why="it takes two counts LEFT,RIGHT of keys beside the aligned one, -1 for open",
            hint="a model's sliding_window of W keys is --window W-1,0, for example 4095,0",
        )
    return int(match[1]), int(match[2])


def parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """``"seq=512..65536"`` (doubling) or ``"heads=8,16"`` as (option, values)."""
    name, _, values = text.partition("=")
    if name not in _SWEPT or not values:
        raise UsageError(
            f"{text!r} is not a sweep",
            why=f"it names one of {', '.join(_SWEPT)}, then values",
            hint="for example --sweep seq=512..65536 (doubling) or --sweep heads=8,16,32",
        )
    low, dots, high = values.partition("..")
    if not dots:
        return name, tuple(parse_count(value) for value in values.split(","))
    return name, _doubling(text, parse_count(low), parse_count(high))


_SWEPT = ("batch", "heads", "seq", "seq-kv", "head-dim")


def _doubling(text: str, low: int, high: int) -> tuple[int, ...]:
    if not 0 < low <= high:
        raise UsageError(f"the sweep {text!r} is empty", hint="give LOW..HIGH with 0 < LOW <= HIGH")
    steps = math.floor(math.log2(high / low))
    return tuple(low * 2**step for step in range(steps + 1))


def digits(value: float, count: int = 3) -> str:
    """``count`` significant digits without an exponent: 0.0104, 1.16, 62.3, 1979."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = count - 1 - math.floor(math.log10(abs(float(f"{value:.{count - 1}e}"))))
    return f"{value:.{max(decimals, 0)}f}"


def capacity(size: float) -> str:
    """Bytes that must fit somewhere: ``184.2 KiB``, ``96 KiB``."""
    step = min(int(math.log2(size) // 10), len(_BINARY) - 1) if size >= 1 else 0
    return f"{_in_binary(size, step)} {_BINARY[step]}"


def _in_binary(size: float, step: int) -> str:
    text = digits(size / 1024**step, 4)
    return text.rstrip("0").rstrip(".") if "." in text else text


def scaled(value: float, unit: str) -> str:
    """A decimal quantity with its prefix: ``671 MB``, ``4.80 TB/s``, ``2.20 TFLOP``."""
    step = 0
    if value >= 1000:
        step = min(int((math.log10(value) + 1e-12) // 3), len(_DECIMAL) - 1)
    text = digits(value / 1000**step)
    if text == "1000" and step + 1 < len(_DECIMAL):
        step, text = step + 1, "1.00"
    return f"{text} {_DECIMAL[step]}{unit}" if unit or step else text


def traffic(size: float) -> str:
    """Bytes moved: ``671 MB``."""
    return scaled(size, "B")


def seconds(time_s: float) -> str:
    """``5.74 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if time_s * factor >= 0.9995:
            return f"{digits(time_s * factor)} {unit}"
    return f"{digits(time_s * 1e9)} ns"


def factor(ratio: float) -> str:
    """``3.61x``."""
    return f"{digits(ratio)}x"


def percent(share: float) -> str:
    """``81 %``."""
    return f"{share * 100:.0f} %"


def used(part: float, whole: float) -> str:
    """``96 of 227 KiB (42 %)``: both in the unit of the whole."""
    number, unit = capacity(whole).split()
    return f"{_in_binary(part, _BINARY.index(unit))} of {number} {unit} ({percent(part / whole)})"


def tflops(rate: float) -> str:
    """``989 TFLOP/s``, whatever the size, so that a column compares at a glance."""
    return f"{digits(rate / 1e12)} TFLOP/s"


def grouped(value: int) -> str:
    """A whole number with its thousands apart: ``5 183 311``."""
    return f"{value:,}".replace(",", " ")


def plural(count: int, noun: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{count} {noun}{'s' * (count != 1)}"

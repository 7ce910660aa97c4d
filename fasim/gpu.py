"""The silicon: one GPU as data, every number with its source.

A GPU is a TOML file (``fasim/gpus/*.toml`` or your own, docs/adding-a-gpu.md). A value nobody has
published is absent there, None here and listed in ``unknown``; the model then says what it assumes.
Rates are per SM and clock, sizes in bytes, clocks in Hz, bandwidths in bytes per second, latencies
in SM clocks. ``load`` reads a file, ``names`` lists the built-in ones, ``detected`` names this
machine's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fasim.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. A field that may be None is a value its file does not give."""

    name: str  # "h200-sxm5-141gb": file stem and what the user types
    title: str  # "NVIDIA H200 SXM 141GB"
    aliases: tuple[str, ...] = ()
    compute_capability: tuple[int, int]
    arch: str  # best target of its own: "sm_80", "sm_90a"

    sm_count: int
    base_clock_hz: float | None
    boost_clock_hz: float
    tensor_clock_hz: float | None  # the clock the vendor's dense tensor peak assumes
    load_clock_wgmma_hz: float | None  # measured under sustained wgmma load, power limited
    load_clock_mma_hz: float | None  # the same under mma.sync load
    power_w: float | None

    hbm_bytes: int  # capacity as the driver reports it, else as sold
    hbm_bandwidth: float  # datasheet
    hbm_bandwidth_measured: float | None
    hbm_latency_clocks: float | None
    l2_bytes: int
    l2_bandwidth: float | None  # distinct bytes, whole chip
    l2_latency_clocks: float | None

    smem_per_sm: int
    smem_per_block: int  # opt-in maximum of one block
    smem_granularity: int
    smem_reserved: int  # per block, taken by the system
    smem_carveouts: tuple[int, ...]
    smem_bytes_per_clock: float | None
    smem_latency_clocks: float | None

    registers_per_sm: int
    registers_per_thread: int
    register_granularity: int  # per warp
    sub_partitions: int
    warps_per_sm: int
    blocks_per_sm: int
    barrier_blocks_factor: int
    threads_per_block: int

    # dense, fp32 accumulate: fp16 bf16 tf32 e4m3; 0 = the tensor cores do not take it
    tensor_flops: Mapping[str, float | None] = field(hash=False)
    mma_fraction: float | None  # share of that rate which mma.sync reaches; None = all of it
    mufu_per_clock: float | None
    fp32_flops: float  # an FMA counts 2
    launch_s: float | None  # one kernel launch in a stream

    cp_async: bool
    tma: bool
    wgmma: bool

    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # field -> source
    notes: tuple[str, ...] = ()  # disagreements between sources, caveats

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the values this GPU's file does not give, without those it has no use for."""
        spare = () if self.wgmma else ("load_clock_wgmma_hz", "mma_fraction")
        missing = [n for n in _OPTIONAL if getattr(self, n) is None and n not in spare]
        return (*missing, *(f"tensor_flops.{k}" for k, v in self.tensor_flops.items() if v is None))

    @property
    def sram_bytes(self) -> int:
        """Shared memory of the whole chip: the paper's SRAM."""
        return self.sm_count * self.smem_per_sm

    def tensor_peak(self, dtype: str) -> float | None:
        """Dense FLOP/s of the tensor cores at the vendor's tensor clock; None if unknown."""
        rate = self.tensor_flops.get(dtype)
        return rate and rate * self.sm_count * (self.tensor_clock_hz or self.boost_clock_hz)

    def ridge_point(self, dtype: str) -> float | None:
        """FLOP per HBM byte above which dense work is bound by the tensor cores."""
        peak = self.tensor_peak(dtype)
        return peak and peak / self.hbm_bandwidth


_TYPES = {f.name: str(f.type) for f in fields(Gpu)}
_OPTIONAL = tuple(name for name, type_ in _TYPES.items() if type_.endswith("| None"))

DEFAULT = "h100-sxm5-80gb"  # what "auto" means where no known GPU is found
DTYPES = ("fp16", "bf16", "tf32", "e4m3")

ALIASES: Mapping[str, tuple[str, ...]] = {
    # what people type, then what nvidia-smi says where that differs; vendor words are dropped
    "a10": (),
    "a100-pcie-40gb": (),
    "a100-pcie-80gb": ("a100-80gb-pcie",),
    "a100-sxm4-40gb": ("a100-40gb", "a100-sxm-40gb"),
    "a100-sxm4-80gb": ("a100", "a100-80gb", "a100-sxm", "a100-sxm4", "a100-sxm-80gb"),
    "b200-sxm-180gb": ("b200", "b200-sxm", "b200-180gb"),
    "gh200-144gb": ("gh200-144g-hbm3e",),
    "gh200-96gb": ("gh200", "gh200-480gb"),
    "h100-nvl-94gb": ("h100-nvl", "h100-94gb"),
    "h100-pcie-80gb": ("h100-pcie",),
    "h100-sxm5-80gb": ("h100", "h100-80gb", "h100-sxm", "h100-sxm5", "h100-80gb-hbm3"),
    "h200-sxm5-141gb": ("h200", "h200-sxm", "h200-sxm5", "h200-141gb"),
    "l4": (),
    "l40s": (),
    "rtx3090": ("3090",),
    "rtx4090": ("4090",),
    "rtx5090": ("5090",),
    "t4": (),
    "v100-pcie-16gb": ("v100-pcie",),
    "v100-sxm2-16gb": ("v100", "v100-16gb", "v100-sxm2", "v100-sxm-16gb"),
    "v100-sxm2-32gb": ("v100-32gb", "v100-sxm-32gb"),
}

_FOLDER = Path(__file__).parent / "gpus"
_GUIDE = "docs/adding-a-gpu.md says what every value is"
_BASE_HINT = 'add it, or start from an architecture with based_on = "sm_90"'
_MAX_BYTES = 1 << 20  # a GPU file has a few KiB; anything larger is not one


def names() -> tuple[str, ...]:
    """The built-in GPUs, by name."""
    return _stems(_FOLDER)


def load(name_or_path: str | Path) -> Gpu:
    """The GPU of that name, alias or ``*.toml`` path; "auto" is this machine's, else ``DEFAULT``.

    Case, spaces, dashes and underscores of a name do not matter. Raises UsageError for an unknown
    name, and for a file that cannot be read or says something impossible.
    """
    text = str(name_or_path)
    if text.lower() == "auto":
        return _built_in(detected() or DEFAULT)
    if isinstance(name_or_path, Path) or text.lower().endswith(".toml") or "/" in text:
        return _from_file(Path(text))
    return _built_in(_resolve(text) or _unknown(text))


@cache
def detected() -> str | None:
    """Name of this machine's first NVIDIA GPU; None without one, or if it is none of ``names()``.

    Asks nvidia-smi, so nothing of CUDA is loaded or initialised.
    """
    first = _nvidia_smi().partition("\n")[0]
    device, _, memory = first.rpartition(",")
    name = _resolve(device)
    mib = re.search(r"\d+", memory)
    if name and mib and not _same_size(int(mib[0]) << 20, _built_in(name).hbm_bytes):
        return None  # a board of that name with other memory is another board
    return name


def _nvidia_smi() -> str:
    import subprocess  # here, not above: most commands never ask

    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()


def _same_size(one: int, other: int) -> bool:
    return abs(one - other) <= 0.1 * other  # the driver keeps some; ECC takes up to 1/16


# Names


def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def _squash(text: str) -> str:
    words = re.sub(r"nvidia|geforce|tesla", "", text.lower())
    return re.sub(r"[^a-z0-9]", "", words)


def _resolve(text: str) -> str | None:
    wanted = _squash(text)
    spelled = ((name, (name, *ALIASES.get(name, ()))) for name in names())
    return next((name for name, all_ in spelled if wanted in map(_squash, all_)), None)


def _unknown(text: str) -> NoReturn:
    known = (*names(), *(alias for all_ in ALIASES.values() for alias in all_))
    guess = _closest(_squash(text), {_squash(name): name for name in known})
    listing = "`fasim gpus` lists all, and --gpu my.toml takes your own (docs/adding-a-gpu.md)"
    raise UsageError(
        f"no GPU is called {text!r}",
        where="--gpu",
        hint=f"did you mean {guess}? {listing}" if guess else listing,
    )


def _closest(word: str, known: Mapping[str, str]) -> str:
    import difflib  # here, not above: only a mistake needs it

    return next((known[k] for k in difflib.get_close_matches(word, known, 1)), "")


# Files


class _Key(NamedTuple):
    """What one key of a GPU file means: its field, one unit in the field's unit, a sane range."""

    field: str
    unit: float
    low: float
    high: float


_CLOCK = (1e6, 100, 6000)
_LATENCY = (1, 5, 10_000)

FORMAT: Mapping[str, Mapping[str, _Key]] = {
    "chip": {
        "sm_count": _Key("sm_count", 1, 1, 2048),
        "base_clock_mhz": _Key("base_clock_hz", *_CLOCK),
        "boost_clock_mhz": _Key("boost_clock_hz", *_CLOCK),
        "tensor_clock_mhz": _Key("tensor_clock_hz", *_CLOCK),
        "load_clock_wgmma_mhz": _Key("load_clock_wgmma_hz", *_CLOCK),
        "load_clock_mma_mhz": _Key("load_clock_mma_hz", *_CLOCK),
        "power_w": _Key("power_w", 1, 5, 10_000),
        "launch_us": _Key("launch_s", 1e-6, 0.1, 1000),
    },
    "memory": {
        "hbm_mib": _Key("hbm_bytes", 2**20, 256, 2**24),
        "hbm_bandwidth_gbs": _Key("hbm_bandwidth", 1e9, 10, 100_000),
        "hbm_bandwidth_measured_gbs": _Key("hbm_bandwidth_measured", 1e9, 10, 100_000),
        "hbm_latency_clocks": _Key("hbm_latency_clocks", *_LATENCY),
    },
    "l2": {
        "l2_mib": _Key("l2_bytes", 2**20, 0.125, 4096),
        "l2_bandwidth_gbs": _Key("l2_bandwidth", 1e9, 50, 1_000_000),
        "l2_latency_clocks": _Key("l2_latency_clocks", *_LATENCY),
    },
    "shared_memory": {
        "smem_per_sm_kib": _Key("smem_per_sm", 1024, 16, 4096),
        "smem_per_block_kib": _Key("smem_per_block", 1024, 16, 4096),
        "smem_granularity_bytes": _Key("smem_granularity", 1, 1, 65_536),
        "smem_reserved_bytes": _Key("smem_reserved", 1, 0, 65_536),
        "smem_carveouts_kib": _Key("smem_carveouts", 1024, 0, 4096),
        "smem_bytes_per_clock": _Key("smem_bytes_per_clock", 1, 8, 4096),
        "smem_latency_clocks": _Key("smem_latency_clocks", *_LATENCY),
    },
    "occupancy": {
        "registers_per_sm": _Key("registers_per_sm", 1, 1024, 2**22),
        "registers_per_thread": _Key("registers_per_thread", 1, 16, 4096),
        "register_granularity": _Key("register_granularity", 1, 1, 4096),
        "sub_partitions": _Key("sub_partitions", 1, 1, 64),
        "warps_per_sm": _Key("warps_per_sm", 1, 1, 1024),
        "blocks_per_sm": _Key("blocks_per_sm", 1, 1, 1024),
        "barrier_blocks_factor": _Key("barrier_blocks_factor", 1, 1, 16),
        "threads_per_block": _Key("threads_per_block", 1, 32, 16_384),
    },
    "tensor": {
        **{f"{d}_flop_per_clock": _Key(f"tensor_flops.{d}", 1, 0, 10**6) for d in DTYPES},
        "mma_fraction": _Key("mma_fraction", 1, 0.01, 1),
    },
    "scalar": {
        "mufu_per_clock": _Key("mufu_per_clock", 1, 1, 4096),
        "fp32_flop_per_clock": _Key("fp32_flops", 1, 1, 65_536),
    },
    "features": {name: _Key(name, 1, 0, 1) for name in ("cp_async", "tma", "wgmma")},
}
_HEAD = ("title", "based_on", "compute_capability", "arch", "notes")
_KEYS = {key: (section, spec) for section, keys in FORMAT.items() for key, spec in keys.items()}


class _Fact(NamedTuple):
    value: Any
    source: str


@dataclass(frozen=True)
class _Document:
    """One TOML file, its text kept to say where in it something is wrong."""

    path: Path
    text: str
    data: Mapping[str, Any]

    def error(self, what: str, key: str = "", *, why: str = "", hint: str = _GUIDE) -> UsageError:
        return UsageError(what, why=why, hint=hint, where=self._place(key))

    def _place(self, key: str) -> str:
        pattern = re.compile(rf"\s*\[?[\s\"']*{re.escape(key)}\b")
        lines = enumerate(self.text.splitlines() if key else (), 1)
        return next(
            (f"{self.path}, line {n}" for n, x in lines if pattern.match(x)), str(self.path)
        )

    def facts(self) -> Iterator[tuple[str, _Fact]]:
        """Every value of the sections as (field of Gpu, value in its unit and source)."""
        for section, table in self.data.items():
            if section not in _HEAD:
                for key, entry in self._section(section, table).items():
                    yield self._fact(section, key, entry)

    def _section(self, name: str, table: object) -> Mapping[str, object]:
        if name in _KEYS:
            hint = f"move it below a line [{_KEYS[name][0]}]"
            raise self.error(f"{name} stands outside its section", name, hint=hint)
        if name not in FORMAT:
            guess = _closest(name, {n: n for n in (*FORMAT, *_HEAD)})
            hint = f"did you mean {guess}?" if guess else f"the sections are {', '.join(FORMAT)}"
            raise self.error(f"a GPU file has no {name!r}", name, hint=hint)
        if not isinstance(table, dict):
            raise self.error(f"{name} must be a section", name, hint=f"begin it with [{name}]")
        return table

    def _fact(self, section: str, key: str, entry: object) -> tuple[str, _Fact]:
        if key not in FORMAT[section]:
            raise self._misplaced(section, key)
        spec = FORMAT[section][key]
        value, source = self._entry(key, entry)
        return spec.field, _Fact(self._converted(key, spec, value), source)

    def _misplaced(self, section: str, key: str) -> UsageError:
        guess = key if key in _KEYS else _closest(key, {k: k for k in _KEYS})
        hint = f"did you mean {guess} in [{_KEYS[guess][0]}]?" if guess else _GUIDE
        return self.error(f"[{section}] has no {key!r}", key, hint=hint)

    def _entry(self, key: str, entry: object) -> tuple[object, str]:
        example = f'write {key} = {{ value = ..., source = "where it is from" }}'
        if not isinstance(entry, dict) or "value" not in entry or "source" not in entry:
            raise self.error(f"{key} needs a value and its source", key, hint=example)
        if extra := sorted(entry.keys() - {"value", "source"}):
            raise self.error(f"{key} has no {extra[0]!r}", key, hint=example)
        if not isinstance(entry["source"], str) or not entry["source"].strip():
            raise self.error(f"the source of {key} must say where it is from", key, hint=example)
        return entry["value"], entry["source"]

    def _converted(self, key: str, spec: _Key, value: object) -> Any:
        kind = _TYPES.get(spec.field, "float")
        if kind == "bool":
            if not isinstance(value, bool):
                raise self.error(f"{key} must be true or false, not {_shown(value)}", key)
            return value
        if kind.startswith("tuple"):
            if not isinstance(value, list) or not value:
                raise self.error(f"{key} must be a list of numbers, not {_shown(value)}", key)
            return tuple(self._number(key, spec, item, whole=True) for item in value)
        return self._number(key, spec, value, whole=kind == "int")

    def _number(self, key: str, spec: _Key, value: object, *, whole: bool) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key} must be a number, not {_shown(value)}", key)
        if not spec.low <= value <= spec.high:
            why = f"a real one lies between {spec.low:g} and {spec.high:g}"
            hint = f"the unit is the last part of the key; {_GUIDE}"
            raise self.error(f"{key} = {_shown(value)} cannot be", key, why=why, hint=hint)
        scaled = value * spec.unit
        if whole and scaled != int(scaled):
            raise self.error(f"{key} = {value} is not a whole number", key)
        return int(scaled) if whole else float(scaled)

    def head(self, key: str, pattern: str) -> str | None:
        """A line of text from the head of the file, checked against a pattern."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            example = {"compute_capability": '"9.0"', "arch": '"sm_90a"'}.get(key, '"a text"')
            raise self.error(
                f"{key} = {_shown(value)} cannot be", key, hint=f"write {key} = {example}"
            )
        return value

    def notes(self) -> tuple[str, ...]:
        value = self.data.get("notes", [])
        if not isinstance(value, list) or not all(isinstance(note, str) for note in value):
            raise self.error("notes must be a list of texts", "notes", hint='write notes = ["..."]')
        return tuple(value)

    def base(self) -> Path | None:
        """The built-in file this one starts from."""
        name = self.head("based_on", ".+")
        if name is None:
            return None
        arches = _stems(_FOLDER / "arch")
        if name in arches:
            return _FOLDER / "arch" / f"{name}.toml"
        if gpu := _resolve(name):
            return _FOLDER / f"{gpu}.toml"
        known = (*arches, *names())
        guess = _closest(name.lower(), {n: n for n in known})
        hint = (
            f"did you mean {guess}?" if guess else f"it can be {', '.join(arches)} or a GPU's name"
        )
        raise self.error(f"nothing built in is called {name!r}", "based_on", hint=hint)


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@cache
def _built_in(name: str) -> Gpu:
    return _from_file(_FOLDER / f"{name}.toml")


def _from_file(path: Path) -> Gpu:
    document = _read(path)
    layers = [document]
    while (base := layers[0].base()) is not None:
        layers.insert(0, _read(base))
    facts = {name: fact for layer in layers for name, fact in layer.facts()}
    head = _head(layers)
    _complete(document, facts)
    gpu = _assemble(path.stem, head, facts, tuple(note for x in layers for note in x.notes()))
    _consistent(document, gpu)
    return gpu


def _read(path: Path) -> _Document:
    text = _text(path)
    try:
        return _Document(path, text, tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; lists 1,000 deep
        line = re.search(r"at line (\d+)", str(error))
        raise UsageError(
            "this is not a valid TOML file",
            where=f"{path}, line {line[1]}" if line else str(path),
            why=str(error),
            hint=f"compare with a built-in file: {_FOLDER / DEFAULT}.toml",
        ) from None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ValueError("it is larger than 1 MiB")
        return raw.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        why = error.strerror if isinstance(error, OSError) else str(error)
        hint = "give the path of a GPU file, or a name from `fasim gpus`"
        raise UsageError(
            "this GPU file cannot be read", where=str(path), why=why or "", hint=hint
        ) from None


def _head(layers: list[_Document]) -> dict[str, str]:
    """title, compute_capability and arch, the last file that says so winning."""
    patterns = {"title": r".*\S.*", "compute_capability": r"\d+\.\d", "arch": r"sm_\d+[af]?"}
    found: dict[str, str] = {}
    for layer in layers:
        found |= {key: v for key, x in patterns.items() if (v := layer.head(key, x)) is not None}
    if missing := [key for key in patterns if key not in found]:
        raise layers[-1].error(f"{missing[0]} is missing", hint=_BASE_HINT)
    return found


def _complete(document: _Document, facts: Mapping[str, _Fact]) -> None:
    needed = {spec.field: key for key, (_, spec) in _KEYS.items() if spec.field in _TYPES}
    missing = [key for name, key in needed.items() if name not in (*facts, *_OPTIONAL)]
    if missing:
        section = _KEYS[missing[0]][0]
        raise document.error(
            f"[{section}] {missing[0]} is missing",
            why=f"fasim cannot do without {', '.join(missing)}" if len(missing) > 1 else "",
            hint=f"{_BASE_HINT}; {_GUIDE}",
        )


def _assemble(
    name: str, head: Mapping[str, str], facts: Mapping[str, _Fact], notes: tuple[str, ...]
) -> Gpu:
    major, minor = head["compute_capability"].split(".")
    values: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    values |= {n: fact.value for n, fact in facts.items() if n in _TYPES}
    rates = {d: facts.get(f"tensor_flops.{d}") for d in DTYPES}
    return Gpu(
        name=name,
        title=head["title"],
        aliases=ALIASES.get(name, ()),
        compute_capability=(int(major), int(minor)),
        arch=head["arch"],
        tensor_flops={d: fact and fact.value for d, fact in rates.items()},
        sources={n: fact.source for n, fact in facts.items()},
        notes=notes,
        **values,
    )


def _consistent(document: _Document, gpu: Gpu) -> None:
    """Refuse values that are sane alone and impossible together."""
    target = "sm_{}{}".format(*gpu.compute_capability)
    block = gpu.smem_per_block + gpu.smem_reserved
    base, tensor = gpu.base_clock_hz or 0, gpu.tensor_clock_hz or 0
    measured = gpu.hbm_bandwidth_measured or 0
    largest = max(gpu.smem_carveouts)
    clock = "it is above boost_clock_mhz"
    rules = (  # key, what is wrong, whether it is
        ("arch", f"it is not of {target}", gpu.arch.rstrip("af") != target),
        ("base_clock_mhz", clock, base > gpu.boost_clock_hz),
        ("tensor_clock_mhz", clock, tensor > gpu.boost_clock_hz),
        ("smem_per_block_kib", "the SM has less, reserve included", block > gpu.smem_per_sm),
        ("smem_carveouts_kib", "the largest is not the SM's", largest != gpu.smem_per_sm),
        ("hbm_bandwidth_measured_gbs", "hbm_bandwidth_gbs is less", measured > gpu.hbm_bandwidth),
    )
    for key, what, broken in rules:
        if broken:
            raise document.error(f"{key} cannot be right: {what}", key)


__all__ = ["ALIASES", "DEFAULT", "DTYPES", "FORMAT", "Gpu", "detected", "load", "names"]

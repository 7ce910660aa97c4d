"""What is computed: one attention problem, validated, independent of any GPU.

Conventions (docs/numerics.md): scores are ``scale * q @ k.T``, then softcap, bias, mask, softmax.
Causal is aligned bottom-right: key k is visible to query q when k <= q + seq_kv - seq.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fasim.errors import UsageError

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "e4m3": 1}
QUANTISED = ("fp16", "bf16")  # what a kernel of e4m3 can make it of by itself
BIASES = ("none", "alibi", "dense", "dense_fp32")  # dense: in the type of the inputs
SCALES = ("tensor", "head", "block")
PASSES = ("fwd", "bwd", "train")
MAX_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem. Shapes: q (batch, heads, seq, head_dim), k (batch, kv_heads, seq_kv,
    head_dim), v (batch, kv_heads, seq_kv, head_dim_v), o (batch, heads, seq, head_dim_v).

    Fields left as None take the value named beside them. ``window`` counts the keys left and right
    of the aligned one, -1 is open. ``softcap`` 0 is off. Raises UsageError for anything illegal.
    """

    batch: int = 1
    heads: int = 16
    kv_heads: int = None  # type: ignore[assignment]  # heads
    seq: int = 4096
    seq_kv: int = None  # type: ignore[assignment]  # seq
    head_dim: int = 128
    head_dim_v: int = None  # type: ignore[assignment]  # head_dim
    dtype: str = "fp16"
    in_dtype: str = None  # type: ignore[assignment]  # dtype; e4m3 may be made of fp16 or bf16
    out_dtype: str = None  # type: ignore[assignment]  # dtype, or bf16 for e4m3
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: str = "none"
    scale: float = None  # type: ignore[assignment]  # 1 / sqrt(head_dim)
    varlen: bool = False
    deterministic: bool = False
    scales: str = "tensor"
    incoherent: bool = False
    pass_: str = "fwd"

    def __post_init__(self) -> None:
        self._check_types()
        self._fill_defaults()
        self._check_values()

    def _check_types(self) -> None:
        for name, value in self.options().items():
            if value is not None and not _has_type(name, value):
                raise _bad(name, value, f"it must be {_TYPES[name][1]}")

    def _fill_defaults(self) -> None:
        self._default("kv_heads", self.heads)
        self._default("seq_kv", self.seq)
        self._default("head_dim_v", self.head_dim)
        self._default("in_dtype", self.dtype)
        self._default("out_dtype", "bf16" if self.dtype == "e4m3" else self.dtype)
        self._default("scale", 1 / math.sqrt(self.head_dim) if self.head_dim > 0 else 1.0)

    def _default(self, name: str, value: object) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        for name in ("batch", "heads", "kv_heads"):
            _in_range(name, getattr(self, name), 1, 2**31 - 1)
        for name in ("seq", "seq_kv"):
            _in_range(name, getattr(self, name), 0, 2**31 - 1024)  # a tile past the end fits int32
        for name in ("head_dim", "head_dim_v"):
            _in_range(name, getattr(self, name), 1, MAX_HEAD_DIM)
        _one_of("dtype", self.dtype, tuple(DTYPE_BYTES))
        _one_of("out_dtype", self.out_dtype, ("fp32", "fp16", "bf16"))
        _one_of("bias", self.bias, BIASES)
        _one_of("scales", self.scales, SCALES)
        _one_of("pass", self.pass_, PASSES)
        if min(self.window) < -1:
            raise _bad("window", self.window, "each side must be -1 (open) or a count of keys")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.heads % self.kv_heads:
            raise _bad("kv_heads", self.kv_heads, f"it must divide heads ({self.heads})")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise _bad("softcap", self.softcap, "it must be finite and at least 0 (0 is off)")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise _bad("scale", self.scale, "it must be finite and positive", "negate q instead")
        if self.dtype != "e4m3" and (self.incoherent or self.scales != "tensor"):
            raise UsageError(
                f"scales and incoherent belong to e4m3, not {self.dtype}",
                hint="add --dtype e4m3, or drop --scales and --incoherent",
            )
        if self.in_dtype not in (self.dtype, *(QUANTISED if self.dtype == "e4m3" else ())):
            why = "only e4m3 is made of other types, of fp16 and bf16"
            raise _bad("in_dtype", self.in_dtype, why, "drop it, or add --dtype e4m3")
        if self.incoherent:
            self._check_incoherent()
        if self.dtype != "e4m3" and self.out_dtype != self.dtype:
            raise _bad("out_dtype", self.out_dtype, f"with {self.dtype} it must be {self.dtype}")
        if self.dtype == "e4m3" and self.pass_ != "fwd":
            raise _bad("pass", self.pass_, "e4m3 has a forward pass only", "use fp16 or bf16")

    def _check_incoherent(self) -> None:
        if not self.quantises:
            raise UsageError(
                "--incoherent is not possible with inputs in e4m3",
                why="Q and K are rotated before they are quantised",
                hint="add --in-dtype bf16 or fp16, or rotate them before you quantise",
            )
        if self.head_dim & (self.head_dim - 1):
            raise UsageError(
                f"--incoherent is not possible with head_dim {self.head_dim}",
                why="a Hadamard transform takes a power of two",
                hint="use head_dim 16, 32, 64, 128 or 256, or drop --incoherent",
            )

    @property
    def quantises(self) -> bool:
        """Whether inputs are quantised before they are multiplied."""
        return self.in_dtype != self.dtype

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def in_bytes(self) -> int:
        return DTYPE_BYTES[self.in_dtype]

    @property
    def out_bytes(self) -> int:
        return DTYPE_BYTES[self.out_dtype]

    @property
    def reach(self) -> tuple[int, int]:
        """Keys visible left and right of the aligned one, -1 open: window and causal in one."""
        left, right = self.window
        return (-1 if left >= self.seq + self.seq_kv else left, 0 if self.causal else right)

    def keys_seen(self, first: int, last: int) -> tuple[int, int]:
        """The first key that one of queries ``first`` to ``last`` sees, and one past the last."""
        (left, right), aligned = self.reach, self.seq_kv - self.seq
        begin = 0 if left < 0 else first + aligned - left
        end = self.seq_kv if right < 0 else last + 1 + aligned + right
        return min(max(begin, 0), self.seq_kv), min(max(end, 0), self.seq_kv)

    @property
    def mask(self) -> str:
        """The kind of mask a kernel is built for: full, causal or window."""
        return {(-1, -1): "full", (-1, 0): "causal"}.get(self.reach, "window")

    @property
    def dense(self) -> bool:
        """Whether a number of its own is added to every score."""
        return self.bias.startswith("dense")

    @property
    def bias_bytes(self) -> int:
        """Of one element of a dense bias."""
        return 4 if self.bias == "dense_fp32" else self.in_bytes

    def with_(self, **changes: Any) -> Problem:
        """A copy with some options changed; defaults that depend on them move along."""
        return Problem(**{**self._explicit(), **changes})

    def _explicit(self) -> dict[str, Any]:
        """Options without those that still carry the value their default rule gives."""
        options = self.options()
        if not self.quantises:
            del options["in_dtype"]
        base = {k: v for k, v in options.items() if k not in _DERIVED}
        derived = Problem(**base).options()
        return base | {k: options[k] for k in _DERIVED if options[k] != derived[k]}

    def options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_json(self) -> dict[str, Any]:
        """Every option, under its command-line name (``pass``, not ``pass_``)."""
        options = self.options()
        options["window"] = list(self.window)
        if not self.quantises:  # an option that came later
            del options["in_dtype"]
        return {("pass" if name == "pass_" else name): value for name, value in options.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Inverse of to_json. Raises UsageError for unknown or illegal entries."""
        options = {("pass_" if name == "pass" else name): value for name, value in data.items()}
        unknown = sorted(set(options) - {f.name for f in fields(cls)})
        if unknown:
            raise UsageError(f"unknown problem option {unknown[0]!r}", hint=f"known: {_known()}")
        if isinstance(options.get("window"), list):
            options["window"] = tuple(options["window"])
        return cls(**options)


_DERIVED = ("kv_heads", "seq_kv", "head_dim_v", "out_dtype", "scale")
_INT, _BOOL, _STR = (int, "a whole number"), (bool, "true or false"), (str, "a word")
_REAL = ((int, float), "a number")
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("batch", "heads", "kv_heads", "seq", "seq_kv", "head_dim", "head_dim_v"), _INT
    ),
    **dict.fromkeys(("dtype", "in_dtype", "out_dtype", "bias", "scales", "pass_"), _STR),
    **dict.fromkeys(("causal", "varlen", "deterministic", "incoherent"), _BOOL),
    **dict.fromkeys(("softcap", "scale"), _REAL),
    "window": (tuple, "two whole numbers LEFT,RIGHT"),
}


def _has_type(name: str, value: object) -> bool:
    if name == "window":
        return isinstance(value, tuple) and len(value) == 2 and all(map(_is_int, value))
    kind = _TYPES[name][0]
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _known() -> str:
    return ", ".join("pass" if f.name == "pass_" else f.name for f in fields(Problem))


def _bad(name: str, value: object, why: str, hint: str = "") -> UsageError:
    option = name.rstrip("_").replace("_", "-")
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return UsageError(f"--{option} {shown} is not possible", why=why, hint=hint or _hint(option))


def _hint(option: str) -> str:
    return f"see `fasim plan --help` for what --{option} takes"


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _bad(name, value, f"it must be between {low} and {high}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _bad(name, value, f"it must be one of {', '.join(choices)}")


__all__ = ["BIASES", "DTYPE_BYTES", "MAX_HEAD_DIM", "PASSES", "SCALES", "Problem"]

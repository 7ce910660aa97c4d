"""Attention problems of known models: built-in names, and Hugging Face ``config.json`` files.

A preset is a set of problem options; whatever the user gives explicitly wins over it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasim.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """Problem options (keyword arguments of Problem) and what a reader should know about them."""

    options: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())


def _decoder(heads: int, kv_heads: int, head_dim: int, seq: int, dtype: str, **more: Any) -> Preset:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "seq": seq}
    return Preset({**shape, "dtype": dtype, "causal": True, **more})


def _diffusion(seq: int, head_dim: int) -> Preset:
    """Self-attention of one level of the Stable Diffusion 1.5 U-Net at 512 x 512 pixels."""
    return Preset({"heads": 8, "seq": seq, "head_dim": head_dim, "dtype": "fp16"})


PRESETS: Mapping[str, Preset] = {
    "gpt2-medium": _decoder(16, 16, 64, 1024, "fp16"),
    "llama-3-8b": _decoder(32, 8, 128, 8192, "bf16"),
    "mistral-7b": _decoder(32, 8, 128, 32768, "bf16", window=(4095, 0)),
    "sd-1.5": _diffusion(4096, 40),
    "sd-1.5-mid": _diffusion(1024, 80),
    "sd-1.5-deep": _diffusion(256, 160),
}


def load(name_or_path: str) -> Preset:
    """The preset of that name, or the one a ``config.json`` describes. Raises UsageError."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if name_or_path.endswith(".json"):
        return from_config(_read(Path(name_or_path)), where=name_or_path)
    close = difflib.get_close_matches(name_or_path.lower(), PRESETS, n=1)
    raise UsageError(
        f"unknown model {name_or_path!r}",
        why=f"known: {', '.join(PRESETS)}; or the path of a Hugging Face config.json",
        hint=f"did you mean {close[0]}?" if close else "for example --model llama-3-8b",
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            "cannot read the model's configuration",
            where=str(path),
            why=error.strerror or str(error),
            hint="give the path of a Hugging Face config.json, or a preset name",
        ) from error
    except ValueError as error:
        raise _unusable(str(path), f"it is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise _unusable(str(path), "it is not a JSON object")
    return config


def _unusable(where: str, why: str) -> UsageError:
    return UsageError(
        "this is not a model configuration fasim understands",
        where=where,
        why=why,
        hint="give --heads, --kv-heads, --head-dim and --seq instead of --model",
    )


def from_config(config: Mapping[str, Any], where: str = "config.json") -> Preset:
    """Problem options of a decoder or encoder described by a Hugging Face configuration.

    ``head_dim`` is read where it is given (it need not be hidden_size / heads); a sliding window of
    W keys includes the aligned one, so it is window (W - 1, 0).
    """
    return _Config(config.get("text_config", config), where).preset()


_NAMES = {
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx"),
    "head_dim": ("head_dim",),
    "window": ("sliding_window",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "head_dim_v": ("v_head_dim",),
}
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_CAUSAL = ("CausalLM", "LMHead", "ConditionalGeneration")


class _Config:
    """One configuration while it is being read; collects what the reader should know."""

    def __init__(self, config: object, where: str) -> None:
        if not isinstance(config, dict):
            raise _unusable(where, "text_config is not a JSON object")
        self.config, self.where = config, where
        self.notes: list[str] = []

    def preset(self) -> Preset:
        heads = self._required("heads")
        options = {
            "heads": heads,
            "kv_heads": self._kv_heads(),
            "seq": self._number("seq"),
            "causal": self._causal(),
            "dtype": self._dtype(),
            "window": self._window(),
            **self._head_dims(heads),
            **self._score(),
        }
        given = {name: value for name, value in options.items() if value is not None}
        return Preset(given, tuple(self.notes))

    def _number(self, name: str) -> int | None:
        for key in _NAMES[name]:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _unusable(self.where, f"{key} is {value!r}, not a positive whole number")
            return value
        return None

    def _required(self, name: str) -> int:
        value = self._number(name)
        if value is None:
            raise _unusable(self.where, f"it has none of {', '.join(_NAMES[name])}")
        return value

    def _kv_heads(self) -> int | None:
        """Falcon writes multi_query beside a num_kv_heads that its first architecture ignores."""
        if self.config.get("multi_query") is True and not self.config.get(
            "new_decoder_architecture"
        ):
            return 1
        return self._number("kv_heads")

    def _head_dims(self, heads: int) -> dict[str, int | None]:
        nope, rope = self._number("nope"), self._number("rope")
        if nope and rope:  # multi-head latent attention, as computed in prefill
            return {"head_dim": nope + rope, "head_dim_v": self._number("head_dim_v")}
        return {"head_dim": self._number("head_dim") or self._derived_head_dim(heads)}

    def _derived_head_dim(self, heads: int) -> int:
        hidden = self._required("hidden")
        if hidden % heads:
            raise _unusable(self.where, f"hidden size {hidden} is not a multiple of {heads} heads")
        self.notes.append(
            f"{self.where} gives no head_dim: derived {hidden // heads} = {hidden} / {heads} heads"
        )
        return hidden // heads

    def _window(self) -> tuple[int, int] | None:
        window = self._number("window")
        if window is None or self.config.get("use_sliding_window") is False:
            return None
        if len(set(self._words("layer_types"))) > 1 or "sliding_window_pattern" in self.config:
            self.notes.append("not every layer has the window: --window -1,0 plans the others")
        return (window - 1, 0)

    def _dtype(self) -> str | None:
        name = self.config.get("torch_dtype", self.config.get("dtype"))
        if name is None:
            return None
        if str(name) not in _DTYPES:
            raise _unusable(self.where, f"torch_dtype is {name!r}, not one of {', '.join(_DTYPES)}")
        return _DTYPES[str(name)]

    def _causal(self) -> bool:
        names = self._words("architectures")
        causal = not names or any(word in name for name in names for word in _CAUSAL)
        if not causal:
            self.notes.append(f"{names[0]} is taken as not causal")
        return causal

    def _score(self) -> dict[str, float | None]:
        """Options of the score itself: soft-capping, and a scale that is not 1 / sqrt(head_dim)."""
        scalar = self._real("query_pre_attn_scalar")
        return {
            "softcap": self._real("attn_logit_softcapping"),
            "scale": scalar and scalar**-0.5,
        }

    def _real(self, key: str) -> float | None:
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise _unusable(self.where, f"{key} is {value!r}, not a positive number")
        return float(value)

    def _words(self, key: str) -> list[str]:
        value = self.config.get(key) or []
        if not isinstance(value, list):
            raise _unusable(self.where, f"{key} is {value!r}, not a list")
        return list(map(str, value))


__all__ = ["PRESETS", "Preset", "from_config", "load"]

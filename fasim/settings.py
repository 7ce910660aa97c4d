"""Every environment variable fasim reads: one table, listed by ``fasim doctor``."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable, its meaning, and its typed value; empty counts as not set."""

    name: str
    meaning: str
    parse: Callable[[str], T]
    default: Callable[[], T]

    @property
    def text(self) -> str | None:
        """What the environment says, unparsed."""
        return os.environ.get(self.name) or None

    @property
    def value(self) -> T:
        """The environment's value, else the default."""
        return self.default() if self.text is None else self.parse(self.text)

    @property
    def origin(self) -> str:
        """Where the value comes from: ``environment`` or ``default``."""
        return "environment" if self.text else "default"


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _program(text: str) -> Path:
    return _path(shutil.which(text) or text)


def _command(text: str) -> tuple[str, ...]:
    """The words of a command, the first as a full path."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that nothing closes
        words = [text]
    return (str(_program(words[0])), *words[1:]) if words else ()


def _user_cache() -> Path:
    from platformdirs import user_cache_path  # only the commands that compile need it

    return user_cache_path("fasim")


def _none() -> None:
    return None


GPU = Setting[str | None]("FASIM_GPU", "the GPU to plan for where --gpu is not given", str, _none)
CACHE_DIR = Setting[Path](
    "FASIM_CACHE_DIR", "the folder where compiled kernels are kept", _path, _user_cache
)
NVCC = Setting[Path | None]("FASIM_NVCC", "the nvcc to compile with", _program, _none)
CXX = Setting[tuple[str, ...] | None]("CXX", "the C++ compiler for the emulator", _command, _none)
NO_COLOR = Setting[str | None]("NO_COLOR", "no colour, even on a terminal", str, _none)
FORCE_COLOR = Setting[str | None]("FORCE_COLOR", "colour, even without a terminal", str, _none)

ALL: tuple[Setting[Any], ...] = (GPU, CACHE_DIR, NVCC, CXX, NO_COLOR, FORCE_COLOR)

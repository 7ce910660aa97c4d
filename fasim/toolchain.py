"""The compilers and tools of this machine: where they are, what they can do, how they are run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fasim import settings
from fasim.errors import MissingToolError

TOOLKIT = Path("/usr/local/cuda")  # where NVIDIA's installers put it
ENGLISH = {"LC_ALL": "C"}  # what compilers say is read here
CXX_NAMES = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Nvcc:
    """A working nvcc. ``kind`` says where it was found, ``banner`` is all of ``nvcc --version``."""

    path: Path
    version: str
    kind: str
    banner: str

    @property
    def targets(self) -> tuple[str, ...]:
        """What ``nvcc --list-gpu-code`` lists: sm_75, sm_80, ... Empty for a very old nvcc."""
        return tuple(re.findall(r"^sm_\d+[af]?$", _ask(self.path, "--list-gpu-code"), re.MULTILINE))

    def check_target(self, arch: str) -> None:
        """Raises MissingToolError if this nvcc cannot compile for ``arch``."""
        # Variants such as sm_90a are not listed by every version that has them.
        if not {arch, arch.rstrip("af")} & set(self.targets):
            raise self.cannot(arch)

    def cannot(self, arch: str) -> MissingToolError:
        """The error that this compiler does not know ``arch``."""
        return MissingToolError(
            f"nvcc {self.version} ({self.path}) cannot compile for {arch}",
            why=f"it lists {', '.join(self.targets) or 'no targets'}",
            hint=f"set FASIM_NVCC to an nvcc that knows {arch} (`pip install 'fasim[nvcc]'` brings"
            " a recent one), or choose one of its targets with --gpu or --arch",
        )


def find_nvcc() -> Nvcc:
    """FASIM_NVCC, else the first of cuda-pathfinder (wheels), CUDA_HOME, PATH, /usr/local/cuda.

    Raises MissingToolError if there is none, or if the one found does not work.
    """
    chosen = settings.NVCC.value
    path, kind = (chosen, settings.NVCC.name) if chosen else find_tool("nvcc")
    banner = _ask(path, "--version")
    version = re.search(r"release \d+\.\d+, V([\d.]+)", banner)
    if not version:
        raise broken(path, f"`nvcc --version` says {first_line(banner)!r}")
    return Nvcc(path, version[1], kind, banner)


def find_tool(name: str) -> tuple[Path, str]:
    """Path of a CUDA tool and where it was found. Raises MissingToolError."""
    for kind, path in _candidates(name):
        if path and os.access(path, os.X_OK):
            return Path(path), kind
    raise MissingToolError(
        f"{name} is not on this machine",
        why=f"looked in the installed wheels, CUDA_HOME, PATH and {TOOLKIT}",
        hint="`pip install 'fasim[nvcc]'`, or set FASIM_NVCC to the nvcc of a CUDA toolkit",
    )


def _candidates(name: str) -> Iterator[tuple[str, str | Path | None]]:
    chosen, home = settings.NVCC.value, os.environ.get("CUDA_HOME")
    yield settings.NVCC.name, chosen and chosen.with_name(name)
    yield "cuda-pathfinder", _pathfinder(name)
    yield "CUDA_HOME", home and f"{home}/bin/{name}"
    yield "PATH", shutil.which(name)
    yield str(TOOLKIT), TOOLKIT / "bin" / name


def _pathfinder(name: str) -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    found: str | None = find_nvidia_binary_utility(name)
    return found


def _ask(path: Path, option: str) -> str:
    try:
        return run([str(path), option])[1]
    except OSError as error:
        raise broken(path, error.strerror or str(error)) from error


def broken(path: Path, why: str) -> MissingToolError:
    """The error that an nvcc is there and does not work."""
    other = "unset it" if settings.NVCC.text else "`pip install 'fasim[nvcc]'`"
    hint = f"set FASIM_NVCC to the nvcc of a CUDA toolkit, or {other}"
    return MissingToolError(f"{path} is not a working nvcc", why=why, hint=hint)


@dataclass(frozen=True)
class Cxx:
    """A working C++ compiler: the words that start it, and all of its ``--version``."""

    command: tuple[str, ...]
    banner: str

    @property
    def name(self) -> str:
        """The last word of the command without its folder: g++, clang++-18."""
        return Path(self.command[-1]).name

    @property
    def version(self) -> str:
        """The first line of the banner."""
        return first_line(self.banner)

    @property
    def is_clang(self) -> bool:
        """Whether it takes clang's options; zig's C++ compiler does."""
        return "clang version" in self.banner


def find_cxx() -> Cxx:
    """CXX (which may be several words), else the first of c++, g++ and clang++ on PATH.

    Raises MissingToolError if there is none, or if the one found does not work.
    """
    found = (path for name in CXX_NAMES if (path := shutil.which(name)))
    command = settings.CXX.value or tuple(islice(found, 1))
    if not command:
        raise MissingToolError(
            "no C++ compiler is on this machine", why="looked for CXX, c++, g++, clang++", hint=_CXX
        )
    try:
        status, banner = run([*command, "--version"])
    except OSError as error:
        status, banner = 1, error.strerror or str(error)
    if status or not banner.strip():
        why = f"`{shlex.join(command)} --version` says {first_line(banner)!r}"
        raise MissingToolError(
            f"{shlex.join(command)} is not a working C++ compiler", why=why, hint=_CXX
        )
    return Cxx(command, banner)


_CXX = (
    "install g++ (Debian, Ubuntu: `apt install g++`), or `pip install ziglang` and set"
    ' CXX="python -m ziglang c++"'
)


def find_addr2line() -> Path | None:
    """addr2line, else llvm-addr2line; None where neither is on PATH."""
    found = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    return Path(found) if found else None


def run(command: Sequence[str], folder: Path | None = None) -> tuple[int, str]:
    """Exit status and output; ``folder`` is where it works and leaves temporary files.

    An interrupt ends the command and all that it started.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | ENGLISH | ({"TMPDIR": str(folder)} if folder else {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a process group of its own, to end it as one
    ) as process:
        try:
            output = process.communicate()[0]
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def first_line(text: str) -> str:
    """The first line that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")

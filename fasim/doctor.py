"""What this machine offers: tools, packages, cache, environment, GPU. Nothing here ever fails."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fasim import __version__, settings, toolchain
from fasim.errors import MissingToolError

SCHEMA = "fasim.doctor/1"
PACKAGES = ("numpy", "jinja2", "hypothesis", "ml_dtypes", "pycuda", "torch")


def examine() -> dict[str, Any]:
    """Everything ``fasim doctor`` knows, as one JSON document."""
    return {
        "schema": SCHEMA,
        "fasim": __version__,
        "python": {"version": platform.python_version(), "path": sys.executable},
        "platform": platform.platform(),
        "nvcc": _nvcc(),
        "host_compiler": shutil.which("c++") or shutil.which("g++"),
        "emulator": _emulator(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpu": _gpu(),
        "cache": _cache(),
        "environment": [_setting(setting) for setting in settings.ALL],
    }


def clear_cache() -> tuple[Path, int]:
    """Remove every compiled kernel; the folder, and the bytes that were in it."""
    cache = settings.CACHE_DIR.value
    size = _cache()["bytes"]
    for entry in _entries(cache):
        shutil.rmtree(entry, ignore_errors=True)
    return cache, size


def _nvcc() -> dict[str, Any]:
    try:
        nvcc = toolchain.find_nvcc()
    except MissingToolError as error:
        return {"found": False, "reason": f"{error.what}: {error.why}", "hint": error.hint}
    targets = list(nvcc.targets)
    return {
        "found": True,
        "path": str(nvcc.path),
        "version": nvcc.version,
        "from": nvcc.kind,
        "targets": targets,
    }


def _emulator() -> dict[str, Any]:
    """Whether generated files can run on the CPU here, and what compiles them."""
    try:
        cxx = toolchain.find_cxx()
    except MissingToolError as error:
        return {"found": False, "reason": f"{error.what}: {error.why}", "hint": error.hint}
    addr2line = toolchain.find_addr2line()
    return {
        "found": True,
        "command": list(cxx.command),
        "version": cxx.version,
        "addr2line": addr2line and str(addr2line),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, Any]:
    """Asked through PyCUDA where that works, else through nvidia-smi."""
    from fasim import gpu
    from fasim.runners.gpu import available, device

    reason = available()
    found = {"known_as": gpu.detected(), "runs_kernels": reason is None, "reason": reason}
    return found if reason else {**found, **device()}


def _cache() -> dict[str, Any]:
    path = settings.CACHE_DIR.value
    entries = _entries(path)
    size = sum(file.stat().st_size for e in entries for file in e.rglob("*") if file.is_file())
    return {"path": str(path), "kernels": len(entries), "bytes": size}


def _entries(cache: Path) -> list[Path]:
    """Folders that the compilers made here, and no other: each holds a kernel or the emulator's
    runtime, or is the build of one."""
    if not cache.is_dir():
        return []
    folders = (path for path in cache.iterdir() if path.is_dir() and not path.is_symlink())
    return [path for path in folders if path.name.startswith(".build-") or _is_entry(path)]


def _is_entry(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("kernel.cu", "runtime.o"))


def _setting(setting: settings.Setting[Any]) -> dict[str, str | None]:
    value = setting.value
    text = shlex.join(value) if isinstance(value, tuple) else value and str(value)
    return {
        "name": setting.name,
        "value": text,
        "origin": setting.origin,
        "meaning": setting.meaning,
    }

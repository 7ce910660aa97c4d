"""Kernel text to cubin: finds nvcc, compiles, caches, and says what the compiler meant.

A cache entry is a folder ``<cache>/<stem>-<12 hex>/`` with kernel.cu, kernel.ptx, kernel.cubin,
log.txt and build.json. It is built beside its final place and renamed into it when complete, so no
process ever sees half of one; build.json holds the hash of every file, so a damaged entry is
noticed, reported once and built again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fasim import settings
from fasim.errors import CheckFailed, CompilerError, FasimError, MissingToolError, UsageError
from fasim.toolchain import Nvcc, broken, find_nvcc, find_tool, first_line, run

if TYPE_CHECKING:
    from fasim.plan import Plan
    from fasim.render import Kernel

FORMAT = 3  # of a cache entry; part of its key
# No -lineinfo: it writes the build folder's path into the cubin, and equal sources must give equal
# cubins. No -O: ptxas optimises fully by default. -keep leaves the PTX, to read and trace errors.
FLAGS = ("-std=c++17", "-cubin", "-keep", "-Xptxas", "-v")
# Near its register cap ptxas now and then spills a few addresses, and not if asked to care more or
# less about registers (its default level is 5). Tried in turn, only when the first build spills.
OTHER_LEVELS = (0, 10, 3, 8)
KEPT = ("kernel.cu", "kernel.ptx", "kernel.cubin", "log.txt")
RECORD = "build.json"
STALE_S = 24 * 3600.0  # a build folder this old was left by a process that was killed

log = logging.getLogger("fasim")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel: registers per thread; bytes per thread of spills and stack
    frame; bytes per block of static shared memory."""

    registers: int
    spill_stores: int
    spill_loads: int
    smem_static: int
    stack: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel. ``cached`` is true when nothing had to be compiled."""

    cubin: Path
    resources: Resources
    log: str
    command: tuple[str, ...]
    cached: bool

    @property
    def warnings(self) -> tuple[str, ...]:
        """ptxas notices (C75xx) of a broken pipeline: wgmma serialised, setmaxnreg ignored."""
        return tuple(re.findall(r"\(C75\d\d\).*", self.log))


@dataclass(frozen=True)
class _Job:
    """Everything that decides the bytes of a cubin."""

    kernel: Kernel
    nvcc: Nvcc
    arch: str

    @property
    def command(self) -> tuple[str, ...]:
        files = ("-o", "kernel.cubin", "kernel.cu")
        return (str(self.nvcc.path), f"-arch={self.arch}", *FLAGS, *files)

    @property
    def key(self) -> str:
        inherited = [os.environ.get(f"NVCC_{n}_FLAGS", "") for n in ("PREPEND", "APPEND")]
        parts = {
            "format": FORMAT,
            "source": _sha(self.kernel.body.encode()),
            "nvcc": self.nvcc.banner,
            "arch": self.arch,
            "flags": [*FLAGS, *inherited],
        }
        return _sha(json.dumps(parts, sort_keys=True).encode())

    @property
    def entry(self) -> Path:
        return settings.CACHE_DIR.value / f"{self.kernel.stem}-{self.key[:12]}"


def compile_kernel(kernel: Kernel, *, arch: str | None = None, keep: Path | None = None) -> Binary:
    """The cubin of a kernel for ``arch`` (default: the plan's), from the cache if it is there.

    ``keep`` is a folder that receives a copy of source, PTX, cubin, log and build record.
    Raises MissingToolError (no nvcc, it does not know the target, the cache cannot be written),
    CompilerError (the file does not compile), UsageError (a target that is none).
    """
    arch = arch or kernel.plan.kernel.arch
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        hint = "targets look like sm_80 or sm_90a"
        raise UsageError(f"--arch {arch} is not a GPU target", hint=hint)
    job = _Job(kernel, find_nvcc(), arch)
    known, binary = os.path.exists(job.entry), _load(job)
    if known and not binary:
        log.warning("%s was damaged; it is built again", job.entry)
    binary = binary or replace(_build(job), cached=False)
    if keep:
        _copy(job.entry, keep)
    return binary


def check_promises(binary: Binary, plan: Plan) -> None:
    """Raises CheckFailed if the compiler used more than the plan promised: registers above the
    prediction, any spill, stack or static shared memory, or a pipeline that ptxas broke (C75xx)."""
    used = binary.resources
    promises = [
        (used.registers <= plan.registers, f"{used.registers} registers, not {plan.registers}"),
        (not used.spill_stores, f"{used.spill_stores} bytes of spill stores, not 0"),
        (not used.spill_loads, f"{used.spill_loads} bytes of spill loads, not 0"),
        (not used.stack, f"{used.stack} bytes of stack, not 0"),
        (not used.smem_static, f"{used.smem_static} bytes of static shared memory, not 0"),
        *((False, notice) for notice in binary.warnings),
    ]
    if failures := [text for kept, text in promises if not kept]:
        raise CheckFailed(
            f"{plan.kernel.stem} uses more than its plan promised",
            why="\n  ".join(failures),
            hint=f"try a smaller --tile; ptxas's report is in {binary.cubin.with_name('log.txt')}",
        )


def sass(binary: Binary) -> str:
    """The machine code as text, by nvdisasm. Raises MissingToolError or CompilerError."""
    tool, _ = find_tool("nvdisasm")
    status, text = run([str(tool), "--print-code", str(binary.cubin)])
    if status:
        raise CompilerError(f"{tool} cannot read {binary.cubin}", why=first_line(text))
    return text


def _build(job: _Job) -> Binary:
    job.nvcc.check_target(job.arch)
    with _build_folder(job.entry.parent) as folder:
        (folder / "kernel.cu").write_bytes(job.kernel.source.encode())
        started = time.perf_counter()
        command, text = _compiled(job, folder)
        (folder / "log.txt").write_text(text, encoding="utf-8")
        _record(job, folder, command, _resources(job, text), time.perf_counter() - started)
        return _install(job, folder)


def _compiled(job: _Job, folder: Path) -> tuple[tuple[str, ...], str]:
    """The command that left the better cubin in the folder, and what the compiler said."""
    levels = (("-Xptxas", f"--register-usage-level={level}") for level in OTHER_LEVELS)
    for more in ((), *levels):
        command = (*job.command, *more)
        text = _run(job, folder, command)
        if not _resources(job, text).spill_stores:
            return command, text
    return job.command, _run(job, folder, job.command)


def _run(job: _Job, folder: Path, command: tuple[str, ...]) -> str:
    status, text = run(command, folder)
    if status:
        raise _refusal(job, folder, status, text)
    return text


def _record(
    job: _Job, folder: Path, command: tuple[str, ...], resources: Resources, seconds: float
) -> None:
    if not (folder / "kernel.cubin").read_bytes().startswith(b"\x7fELF"):
        raise broken(job.nvcc.path, "it reported success and wrote no cubin")
    for path in folder.iterdir():
        if path.name not in KEPT:
            path.unlink()
    record = {
        "key": job.key,
        "nvcc": job.nvcc.banner,
        "command": command,
        "seconds": round(seconds, 3),
        "resources": asdict(resources),
        "files": {path.name: _sha(path.read_bytes()) for path in sorted(folder.iterdir())},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2))


def _resources(job: _Job, text: str) -> Resources:
    """From ``ptxas -v``; frames and spills of functions that were not inlined count as well."""
    entries = {part.split("'")[0]: part for part in text.split("Compiling entry function '")[1:]}
    report = entries.get(job.kernel.stem, "")
    used = re.search(r"Used (\d+) registers(.*)", report)
    if not used:
        raise CompilerError(
            f"{job.kernel.stem}.cu defines no kernel {job.kernel.stem}",
            why=f"it defines {', '.join(entries) or 'no kernel at all'}",
            hint='the kernel carries the name of its plan: extern "C" __global__ void NAME(...)',
        )
    return Resources(
        registers=int(used[1]),
        spill_stores=_total(r"(\d+) bytes spill stores", report),
        spill_loads=_total(r"(\d+) bytes spill loads", report),
        smem_static=_total(r"(\d+) bytes smem", used[2]),
        stack=_total(r"(\d+) bytes stack frame", report),
    )


def _total(pattern: str, text: str) -> int:
    return sum(map(int, re.findall(pattern, text)))


# ---- the cache ----------------------------------------------------------------------------------


def _load(job: _Job) -> Binary | None:
    """The cached binary; None if there is none or any byte of it changed."""
    try:
        record = json.loads((job.entry / RECORD).read_text())
        files = {name: _sha((job.entry / name).read_bytes()) for name in record["files"]}
        if record["key"] != job.key or files != record["files"]:
            return None
        return Binary(
            cubin=job.entry / "kernel.cubin",
            resources=Resources(**record["resources"]),
            log=(job.entry / "log.txt").read_text(encoding="utf-8"),
            command=tuple(record["command"]),
            cached=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _build_folder(cache: Path) -> Iterator[Path]:
    """A folder in the cache that is gone afterwards, unless it was renamed into an entry."""
    folder = cache / f".build-{uuid.uuid4().hex}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        folder.mkdir()
        yield folder
    except OSError as error:
        raise MissingToolError(
            f"cannot build in the cache {cache}",
            why=error.strerror or str(error),
            hint="set FASIM_CACHE_DIR to a folder that you can write to",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Removes what killed processes and failed builds left a day ago."""
    for path in (*cache.glob(".build-*"), *cache.glob("*.failed")):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path)


def _install(job: _Job, folder: Path) -> Binary:
    """Renames a complete build into its place. Of two processes the second discards its own; a
    damaged entry is moved out of the way first."""
    if not _rename(folder, job.entry) and not _load(job):
        damaged = folder.with_name(f"{folder.name}-damaged")
        _rename(job.entry, damaged)
        shutil.rmtree(damaged, ignore_errors=True)
        _rename(folder, job.entry)
    binary = _load(job)
    if not binary:
        raise OSError(f"{job.entry.name} cannot be replaced")
    return binary


def _rename(source: Path, target: Path) -> bool:
    try:
        source.rename(target)
    except OSError:
        return False
    return True


def _copy(entry: Path, keep: Path) -> None:
    try:
        shutil.copytree(entry, keep, dirs_exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {keep}", why=str(error)) from error


# ---- what the compiler said ---------------------------------------------------------------------

_CU_ERROR = re.compile(
    r"^kernel\.cu[(:](\d+)[):\d]* (?:\w+ )?error[^:]*: (.*)(?:\n(.*)\n( *)\^)?", re.MULTILINE
)
_PTX_ERROR = re.compile(r"^ptxas kernel\.ptx, line (\d+); error +: (.*)", re.MULTILINE)
_PTX_SOURCE_LINE = re.compile(r"^\s*\.loc\s+1\s+(\d+)", re.MULTILINE)
_NO_HOST_COMPILER = re.compile(r".*(?:host compiler|Cannot find compiler).*")


def _refusal(job: _Job, folder: Path, status: int, text: str) -> FasimError:
    """The error for a failed compilation; source, PTX and log stay in ``<entry>.failed``."""
    if "Unsupported gpu architecture" in text:
        return job.nvcc.cannot(job.arch)
    if host := _NO_HOST_COMPILER.search(text):
        return _no_host_compiler(job.nvcc, host[0])
    if _PTX_ERROR.search(text):  # with line information, PTX says which source line it is from
        text = run([*job.command, "-lineinfo"], folder)[1]
    (folder / "log.txt").write_text(text, encoding="utf-8")
    hint = f"the compiler's output is in {_keep_failed(job, folder)}"
    if found := list(_CU_ERROR.finditer(text)):
        number, message, *shown = found[0].groups()
        return _pointing(job.kernel, int(number), message, len(found), hint, shown)
    if found := list(_PTX_ERROR.finditer(text)):
        number = _source_line((folder / "kernel.ptx").read_text(), int(found[0][1]))
        return _pointing(job.kernel, number, found[0][2], len(found), hint)
    said = text.strip().splitlines() or [f"exit status {status} and no output"]
    return CompilerError(f"nvcc failed: {said[-1]}", where=f"{job.kernel.stem}.cu", hint=hint)


def _source_line(ptx: str, number: int) -> int:
    """The line of kernel.cu from which a line of PTX was made."""
    before = "\n".join(ptx.splitlines()[:number])
    return int((["1", *_PTX_SOURCE_LINE.findall(before)])[-1])


def _pointing(
    kernel: Kernel,
    number: int,
    message: str,
    count: int,
    hint: str,
    shown: Sequence[str | None] = (),
) -> CompilerError:
    """An error that names the template's line and shows the generated one with a caret."""
    origin = kernel.origins[number - 1] if number <= len(kernel.origins) else None
    here = f"{kernel.stem}.cu:{number}"
    line = (kernel.source.splitlines()[number - 1 : number] or [""])[0]
    gutter = " " * len(str(number))
    more = f" (and {count - 1} more)" if count > 1 else ""
    return CompilerError(
        f"nvcc rejected the kernel: {message}{more}",
        where=f"templates/{origin[0]}:{origin[1]} ({here})" if origin else here,
        why=f"{gutter} |\n  {number} | {line}\n  {gutter} | {' ' * _column(line, shown)}^",
        hint=hint,
    )


def _column(line: str, shown: Sequence[str | None]) -> int:
    """Where in ``line`` the word stands under which nvcc put its caret; nvcc shows the line as the
    preprocessor left it. The start of the line if the word is not there or nothing was shown."""
    start = len(line) - len(line.lstrip())
    text, indent = (shown[0] or "", len(shown[1] or "")) if shown else ("", 0)
    word = re.match(r"\w+|\S", text[indent:])
    if not word:
        return start
    same = rf"\b{word[0]}\b" if word[0].isidentifier() else re.escape(word[0])
    places = [found.start() for found in re.finditer(same, line)]
    before = len(re.findall(same, text[:indent]))
    return places[before] if before < len(places) else start


def _keep_failed(job: _Job, folder: Path) -> Path:
    failed = job.entry.with_name(f"{job.entry.name}.failed")
    failed.mkdir(exist_ok=True)
    for name in KEPT:
        with suppress(FileNotFoundError):
            shutil.copy(folder / name, failed)
    return failed / "log.txt"


def _no_host_compiler(nvcc: Nvcc, said: str) -> MissingToolError:
    return MissingToolError(
        f"nvcc {nvcc.version} ({nvcc.path}) needs a host compiler",
        why=said,
        hint="install g++ (Debian, Ubuntu: `apt install g++`), or name one that this nvcc takes:"
        " NVCC_PREPEND_FLAGS='-ccbin g++-13'",
    )


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

"""Kernel text to cubin: finds nvcc, compiles, caches, and says what the compiler meant.

An entry of the cache holds kernel.cu, kernel.ptx, kernel.cubin and log.txt.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fasim.cache import Entry, Facts, key_of, sha256
from fasim.diagnostics import Diagnostic, failure, line_of, no_kernel, rejection
from fasim.errors import CheckFailed, CompilerError, FasimError, MissingToolError, UsageError
from fasim.toolchain import Nvcc, broken, find_nvcc, find_tool, first_line, run

if TYPE_CHECKING:
    from fasim.plan import Plan
    from fasim.render import Kernel

# No -lineinfo: it writes the build folder's path into the cubin, and equal sources must give equal
# cubins. No -O: ptxas optimises fully by default. -keep leaves the PTX, to read and trace errors.
FLAGS = ("-std=c++17", "-cubin", "-keep", "-Xptxas", "-v")
# Near its register cap ptxas now and then spills a few addresses, and not if asked to care more or
# less about registers (its default level is 5). Tried in turn, only when the first build spills.
OTHER_LEVELS = (0, 10, 3, 8)
KEPT = ("kernel.cu", "kernel.ptx", "kernel.cubin", "log.txt")


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
    def entry(self) -> Entry:
        inherited = [os.environ.get(f"NVCC_{n}_FLAGS", "") for n in ("PREPEND", "APPEND")]
        key = key_of(
            source=sha256(self.kernel.body.encode()),
            nvcc=self.nvcc.banner,
            arch=self.arch,
            flags=[*FLAGS, *inherited],
        )
        return Entry(self.kernel.stem, key, KEPT)


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
    entry = job.entry
    facts, cached = entry.get(lambda folder: _build(job, folder))
    if keep:
        _copy(entry.path, keep)
    return _binary(entry.path, facts, cached)


def _binary(entry: Path, facts: Facts, cached: bool) -> Binary:
    return Binary(
        cubin=entry / "kernel.cubin",
        resources=Resources(**facts["resources"]),
        log=(entry / "log.txt").read_text(encoding="utf-8"),
        command=tuple(facts["command"]),
        cached=cached,
    )


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


def _build(job: _Job, folder: Path) -> Facts:
    """Fills the folder of an entry."""
    job.nvcc.check_target(job.arch)
    (folder / "kernel.cu").write_bytes(job.kernel.source.encode())
    command, text = _compiled(job, folder)
    (folder / "log.txt").write_text(text, encoding="utf-8")
    if not (folder / "kernel.cubin").read_bytes().startswith(b"\x7fELF"):
        raise broken(job.nvcc.path, "it reported success and wrote no cubin")
    resources = asdict(_resources(job, text))
    return {"nvcc": job.nvcc.banner, "command": command, "resources": resources}


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


def _resources(job: _Job, text: str) -> Resources:
    """From ``ptxas -v``; frames and spills of functions that were not inlined and of the other
    stages of a launch, whose names begin alike, count as well."""
    entries = {part.split("'")[0]: part for part in text.split("Compiling entry function '")[1:]}
    report = entries.get(job.kernel.stem, "")
    whole = "".join(part for name, part in entries.items() if name.startswith(job.kernel.stem))
    used = re.search(r"Used (\d+) registers(.*)", report)
    if not used:
        raise no_kernel(job.kernel, f"it defines {', '.join(entries) or 'no kernel at all'}")
    return Resources(
        registers=int(used[1]),
        spill_stores=_total(r"(\d+) bytes spill stores", whole),
        spill_loads=_total(r"(\d+) bytes spill loads", whole),
        smem_static=_total(r"(\d+) bytes smem", used[2]),
        stack=_total(r"(\d+) bytes stack frame", whole),
    )


def _total(pattern: str, text: str) -> int:
    return sum(map(int, re.findall(pattern, text)))


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
    hint = f"the compiler's output is in {job.entry.keep_failed(folder) / 'log.txt'}"
    if found := list(_CU_ERROR.finditer(text)):
        where = [_diagnostic(job.kernel, *match.groups()) for match in found]
        return rejection("nvcc", job.kernel, where, hint)
    if found := list(_PTX_ERROR.finditer(text)):
        ptx = (folder / "kernel.ptx").read_text()
        where = [Diagnostic(_source_line(ptx, int(match[1])), match[2]) for match in found]
        return rejection("nvcc", job.kernel, where, hint)
    return failure("nvcc", job.kernel, status, text, hint)


def _diagnostic(kernel: Kernel, number: str, message: str, *shown: str | None) -> Diagnostic:
    line = line_of(kernel, int(number))
    return Diagnostic(int(number), message, _column(line, shown))


def _source_line(ptx: str, number: int) -> int:
    """The line of kernel.cu from which a line of PTX was made."""
    before = "\n".join(ptx.splitlines()[:number])
    return int((["1", *_PTX_SOURCE_LINE.findall(before)])[-1])


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


def _no_host_compiler(nvcc: Nvcc, said: str) -> MissingToolError:
    return MissingToolError(
        f"nvcc {nvcc.version} ({nvcc.path}) needs a host compiler",
        why=said,
        hint="install g++ (Debian, Ubuntu: `apt install g++`), or name one that this nvcc takes:"
        " NVCC_PREPEND_FLAGS='-ccbin g++-13'",
    )

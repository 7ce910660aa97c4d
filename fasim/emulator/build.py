"""From the text of a generated file to a shared library that the emulator can run.

The library is two objects. The runtime is optimised, knows nothing of the kernel and is built once
for each compiler; so is what every kernel includes first, which GCC keeps compiled. The kernel is
the unchanged file, with every access to memory instrumented by ``-fsanitize=thread``, whose hooks
the runtime defines: so nothing is linked with ``-fsanitize``. All are kept in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fasim.cache import Entry, Facts, key_of, sha256
from fasim.diagnostics import Diagnostic, Text, failure, no_kernel, rejection
from fasim.errors import CompilerError
from fasim.render import PLAN_END, Kernel
from fasim.toolchain import Cxx, find_addr2line, find_cxx, run

SOURCES = Path(__file__).parent  # of the C++ files
LIBRARY = "kernel.so"
WORDS = "cuda_words.h"  # what every kernel includes first
RUNTIME_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=off")
KERNEL_FLAGS = (
    "-std=c++20",
    "-O0",  # one access in the source is one access in the binary
    "-g1",
    "-gdwarf-4",  # binutils name wrong files for version 5
    "-fPIC",
    "-pthread",
    "-DFASIM_EMULATE",
    "-ffp-contract=off",
    "-Werror=frame-larger-than=49152",  # of a fiber's 64 KB
    "-fsanitize=thread",
    "-fsanitize=signed-integer-overflow,integer-divide-by-zero,bounds,shift,float-cast-overflow",
    "-fno-exceptions",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
)
GCC_FLAGS = ("--param", "tsan-instrument-func-entry-exit=0")
CLANG_FLAGS = (
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
    "-fno-sanitize-trap=undefined",  # zig's default is to trap instead of calling the runtime
)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,-z,defs")


@dataclass(frozen=True)
class _File:
    """A generated file of which only the text is known."""

    stem: str
    source: str
    origins: tuple[tuple[str, int] | None, ...] = ()


def build(source: str, symbol: str) -> Path:
    """The shared library of the kernel ``symbol`` in the text of a generated file.

    The text lies beside it as kernel.cu. Raises MissingToolError (no C++ compiler, or the cache
    cannot be written) and CompilerError, with the line (the file does not compile as C++).
    """
    return _library(_File(symbol, source))


def build_kernel(kernel: Kernel) -> Path:
    """As ``build``; errors name the template's line where the kernel's is known."""
    return _library(kernel)


def lines(library: Path, offsets: Iterable[int]) -> dict[int, int]:
    """The line of kernel.cu for each return address, an offset in the library.

    Code inlined from a header, or from a function that only waits, counts as the line that called
    it. Offsets without a line are left out; all are where the machine has no addr2line.
    """
    tool, wanted = find_addr2line(), sorted(set(offsets))
    if not tool or not wanted:
        return {}
    calls = [hex(offset - 1) for offset in wanted]  # the call itself lies before
    _, text = run([str(tool), "-a", "-f", "-C", "-i", "-e", str(library), *calls])
    frames = re.split(r"^0x[0-9a-f]+\n", text, flags=re.MULTILINE)[1:]
    found = zip(wanted, map(_line, frames), strict=True)
    return {offset: line for offset, line in found if line}


def _line(frames: str) -> int:
    """The kernel's line in what addr2line says of one address, from the inside out; 0 for none."""
    inside = _KERNEL_LINE.findall(frames)
    outside = [line for function, line in inside if function != "wait"] or [
        line for _, line in inside
    ]
    return int(outside[0]) if outside else 0


_KERNEL_LINE = re.compile(r"^(\w+).*\n.*\bkernel\.cu:(\d+)", re.MULTILINE)


# ---- building -----------------------------------------------------------------------------------


def _library(text: Text) -> Path:
    cxx = find_cxx()
    body = text.source.partition(PLAN_END)[2] or text.source
    entry = Entry(
        f"{text.stem}-emulator",
        key_of(
            symbol=text.stem,
            body=sha256(body.encode()),
            lines=text.source.count("\n"),  # a header of another length moves all others
            compiler=cxx.banner,
            flags=[*_kernel_flags(cxx), *LINK_FLAGS],
            runtime=_runtime_entry(cxx).key,
        ),
        ("kernel.cu", LIBRARY, "log.txt"),
    )
    entry.get(lambda folder: _build(cxx, text, entry, folder))
    return entry.path / LIBRARY


def _runtime_entry(cxx: Cxx) -> Entry:
    files = sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")))
    sources = {file.name: sha256(file.read_bytes()) for file in files}
    flags = [*RUNTIME_FLAGS, *_kernel_flags(cxx)]
    key = key_of(compiler=cxx.banner, flags=flags, sources=sources, place=str(SOURCES))
    words = (WORDS,) if cxx.is_clang else (WORDS, f"{WORDS}.gch")
    return Entry("emulator-runtime", key, ("runtime.o", *words, "log.txt"))


def _kernel_flags(cxx: Cxx) -> tuple[str, ...]:
    return (*KERNEL_FLAGS, *(CLANG_FLAGS if cxx.is_clang else GCC_FLAGS))


def _build(cxx: Cxx, text: Text, entry: Entry, folder: Path) -> Facts:
    """Fills the folder of a kernel's entry."""
    runtime = _runtime_entry(cxx)
    runtime.get(lambda place: _build_runtime(cxx, runtime, place))
    (folder / "kernel.cu").write_bytes(text.source.encode())
    (folder / "unit.cpp").write_text(_unit(text))
    words = ("-include", str(runtime.path / WORDS), f"-I{SOURCES}")
    command = [*cxx.command, *_kernel_flags(cxx), *words, "-c", "unit.cpp", "-o", "unit.o"]
    objects = ["unit.o", str(runtime.path / "runtime.o")]
    for step in (command, [*cxx.command, *LINK_FLAGS, *objects, "-o", LIBRARY]):
        status, output = _logged(step, folder)
        if status:
            raise _refusal(cxx, text, status, output, entry.keep_failed(folder))
    return {"compiler": cxx.banner, "command": command}


def _unit(text: Text) -> str:
    """What is compiled: the file, an entry for each of its kernels with the number of its blocks
    that are to share an SM, and their shared memory.

    That lies at a multiple of 1024 bytes if the file declares it so, else, as on a device with
    static variables before it, only at one of 128. Nothing lies in the KB before it.
    """
    entries = {text.stem: "1"}
    for found in _KERNEL.finditer(text.source):
        together = _BLOCKS.search(found[0])
        entries[found[1]] = together[1] if together else "1"
    declared = (int(n) for n in _DECLARED.findall(text.source))
    aligned = max(declared, default=0) >= MOST_ALIGNED
    skipped = MOST_ALIGNED + (0 if aligned else DECLARED_LEAST)
    return "\n".join(
        [
            '#include "kernel.cu"',
            *(f"FASIM_KERNEL({entry}, {blocks})" for entry, blocks in entries.items()),
            f"FASIM_SHARED_MEMORY({MOST_ALIGNED}, {skipped}, {MOST_SHARED})\n",
        ]
    )


MOST_SHARED = 227 << 10  # of a block, on any GPU so far
MOST_ALIGNED, DECLARED_LEAST = 1024, 128
_DECLARED = re.compile(r"extern __shared__ __align__\((\d+)\)")


_KERNEL = re.compile(r'^extern "C" __global__ [^{]*?\b(\w+)\([^()]*\) \{', re.MULTILINE)
_BLOCKS = re.compile(r"__launch_bounds__\([^,()]+, ([^,()]+)\)")


def _build_runtime(cxx: Cxx, entry: Entry, folder: Path) -> Facts:
    source = str(SOURCES / "runtime.cpp")
    command = [*cxx.command, *RUNTIME_FLAGS, "-c", source, "-o", "runtime.o"]
    (folder / WORDS).write_text(f'#include "{SOURCES / WORDS}"\n')
    words = [*cxx.command, *_kernel_flags(cxx), "-x", "c++-header", WORDS, "-o", f"{WORDS}.gch"]
    for step in [command] if cxx.is_clang else [command, words]:
        status, output = _logged(step, folder)
        if status:
            raise _unusable(cxx, status, output, entry.keep_failed(folder))
    return {"compiler": cxx.banner, "command": command}


def _unusable(cxx: Cxx, status: int, output: str, kept: Path) -> CompilerError:
    return CompilerError(
        f"{cxx.name} cannot compile the emulator",
        why=failure(cxx.name, _File("runtime", ""), status, output, "").what,
        hint=f"set CXX to g++ 12, clang++ 14 or newer; this is {cxx.version};"
        f" its output is in {kept / 'log.txt'}",
    )


def _logged(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Exit status and output of a command; the output is added to the log as well."""
    status, output = run(command, folder)
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(output)
    return status, output


# ---- what the compiler said ---------------------------------------------------------------------

_PLACE = r"^(?:.*/)?kernel\.cu:(\d+):(\d+): "
_ERROR_HERE = re.compile(rf"{_PLACE}(?:fatal )?error: (.*)", re.MULTILINE)
_ANY_PLACE = re.compile(_PLACE, re.MULTILINE)
_ANY_ERROR = re.compile(r"^(.*)\berror: (.*)", re.MULTILINE)


def _refusal(cxx: Cxx, text: Text, status: int, output: str, failed: Path) -> CompilerError:
    """The error for a failed compilation, whose files are in ``failed``."""
    hint = f"the compiler's output is in {failed / 'log.txt'}"
    if found := _diagnostics(output):
        return rejection(cxx.name, text, found, hint)
    error = _ANY_ERROR.search(output)
    if error and error[1].startswith("unit.cpp:2:"):
        return no_kernel(text, error[2])
    return failure(cxx.name, text, status, output, hint)


def _diagnostics(output: str) -> list[Diagnostic]:
    """Errors in the kernel; else the first in a header, at the first line of the kernel that is
    named as its cause."""
    here = [match.groups() for match in _ERROR_HERE.finditer(output)]
    error, place = _ANY_ERROR.search(output), _ANY_PLACE.search(output)
    if not here and error and place:
        here = [(place[1], place[2], error[2])]
    return [Diagnostic(int(line), message, int(column) - 1) for line, column, message in here]

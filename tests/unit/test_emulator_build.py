"""Building for the emulator, with a small stand-in for its C++ and the machine's own compiler."""

from __future__ import annotations

import ctypes
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fasim import doctor, toolchain
from fasim.emulator import build as building
from fasim.emulator.build import build, build_kernel, lines
from fasim.errors import CompilerError, MissingToolError
from fasim.render import PLAN_END, Kernel
from fasim.toolchain import Cxx, find_addr2line, find_cxx

WORDS = """#define __global__
#define FASIM_KERNEL(name, blocks) extern "C" const void* address() { return (const void*)name; }
#define FASIM_SHARED_MEMORY(align, skip, bytes)
"""
HELPERS = """inline __attribute__((always_inline)) void twice(float* x) { *x += *x; }
template <int kBytes> void copy(float* x) { static_assert(kBytes == 4, "4 bytes"); *x = 0; }
"""
RUNTIME = """#include <cstdint>
extern "C" {
std::uintptr_t seen[64];
int count, overflows;
#define HOOK(name) \\
  void name(void*) { seen[count++] = (std::uintptr_t)__builtin_return_address(0) - 1; }
HOOK(__tsan_read4) HOOK(__tsan_write4)
void __tsan_init() {}
void __ubsan_handle_add_overflow(void*, void*, void*) { ++overflows; }
}
"""
HEADER = f"// a header\n{PLAN_END}0123\n"
BODY = """#include "helpers.h"
extern "C" __global__ void k(float* x, int n) {
  x[0] = 1;
  twice(x + 1);
  x[2] = n + 1;
}
"""


def has_compiler() -> bool:
    try:
        find_cxx()
    except MissingToolError:
        return False
    return True


compiles = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the C++ files, with the stand-in."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, text in [("cuda_words.h", WORDS), ("helpers.h", HELPERS), ("runtime.cpp", RUNTIME)]:
        (folder / name).write_text(text)
    monkeypatch.setattr(building, "SOURCES", folder)
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """How often the compiler was asked for more than its version."""
    real, log = shlex.join(find_cxx().command), tmp_path / "calls"
    counting = f'case "$*" in *--version*);; *) echo >> {log};; esac\nexec {real} "$@"\n'
    program(tmp_path / "counting", counting)
    monkeypatch.setenv("CXX", str(tmp_path / "counting"))
    return lambda: log.read_text().count("\n")


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return path


# ---- finding the compiler


def test_order_of_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for name in ("clang++", "g++", "c++"):
        path = program(tmp_path / name, f"echo {name} 1.2")
        assert find_cxx() == Cxx((str(path),), f"{name} 1.2\n")
    words = program(tmp_path / "several", 'echo "$@"')
    monkeypatch.setenv("CXX", f"{words} -m 'a b'")
    assert find_cxx() == Cxx((str(words), "-m", "a b"), "-m a b --version\n")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingToolError, match=r"no C\+\+ compiler is on this machine") as caught:
        build(BODY, "k")
    assert "apt install g++" in caught.value.hint
    assert "ziglang" in caught.value.hint
    assert not doctor.examine()["emulator"]["found"]


@pytest.mark.parametrize("script", ["exit 0", "echo no such module; exit 1", None])
def test_something_else_called_cxx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None
) -> None:
    if script:
        program(tmp_path / "cxx", script)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    with pytest.raises(MissingToolError, match=r"cxx is not a working C\+\+ compiler"):
        find_cxx()


@pytest.mark.parametrize(
    ("banner", "is_clang"),
    [
        ("g++ (Debian 12.2.0-14) 12.2.0\nCopyright", False),
        ("Debian clang version 14.0.6\nTarget: x86_64", True),
        ("Apple clang version 15.0.0", True),
    ],
)
def test_each_family_gets_its_own_flags(banner: str, is_clang: bool) -> None:
    cxx = Cxx(("/usr/bin/c++",), banner)
    assert (cxx.name, cxx.version, cxx.is_clang) == ("c++", banner.splitlines()[0], is_clang)
    assert ("-mllvm" in building._kernel_flags(cxx)) == is_clang
    assert ("--param" in building._kernel_flags(cxx)) != is_clang


def test_order_of_addr2lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_addr2line() is None
    for name in ("llvm-addr2line", "addr2line"):
        path = program(tmp_path / name, "")
        assert find_addr2line() == path


# ---- the library


@compiles
def test_every_access_is_seen_with_its_line() -> None:
    library = build(HEADER + BODY, "k")
    assert library.with_name("kernel.cu").read_text() == HEADER + BODY
    loaded, x = ctypes.CDLL(str(library)), (ctypes.c_float * 4)(9, 9, 9, 9)
    loaded.k(x, 6)
    assert list(x) == [1, 18, 7, 9]
    count, overflows = (ctypes.c_int.in_dll(loaded, n).value for n in ("count", "overflows"))
    assert (count >= 4, overflows) == (True, 0), "a load and three stores, or more"
    seen = list((ctypes.c_size_t * 64).in_dll(loaded, "seen")[:count])
    found = lines(library, [pc + 1 - base_of(library) for pc in seen])
    if find_addr2line():
        assert set(found.values()) >= {5, 6, 7}
        assert lines(library, []) == {}
    loaded.k(x, 2**31 - 1)
    assert ctypes.c_int.in_dll(loaded, "overflows").value == 1


def base_of(library: Path) -> int:
    """Where this process has loaded a library."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(library)))


@compiles
def test_no_line_without_addr2line(monkeypatch: pytest.MonkeyPatch) -> None:
    library = build(BODY, "k")
    monkeypatch.setattr(building, "find_addr2line", lambda: None)
    assert lines(library, [0x1000]) == {}


@compiles
def test_builds_once_and_the_runtime_once_for_all(calls: Callable[[], int], cache: Path) -> None:
    once = 1 if find_cxx().is_clang else 2  # the runtime, and what kernels include first
    first = build(BODY, "k")
    assert (build(BODY, "k"), calls()) == (first, once + 2)
    assert sorted(path.name for path in first.parent.iterdir()) == sorted(
        ["build.json", "kernel.cu", "kernel.so", "log.txt"]
    )
    build(BODY + "//\n", "k")
    assert calls() == once + 4
    runtimes = list(cache.glob("emulator-runtime-*/runtime.o"))
    assert (len(runtimes), len(list(cache.iterdir()))) == (1, 3)
    assert doctor.clear_cache()[1] > 0
    assert list(cache.iterdir()) == []


@compiles
def test_key_covers_everything_that_decides_the_library(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = [build(HEADER + BODY, "k"), build(HEADER.replace("a h", "no h") + BODY, "k")]
    assert same[0] == same[1], "what a header says decides nothing"
    built = [same[0], build("//\n" + HEADER + BODY, "k"), build(HEADER + BODY + "//\n", "k")]
    monkeypatch.setattr(building, "KERNEL_FLAGS", (*building.KERNEL_FLAGS, "-DX"))
    built.append(build(HEADER + BODY, "k"))
    (sources / "helpers.h").write_text(HELPERS + "//\n")
    built.append(build(HEADER + BODY, "k"))
    other = find_cxx()
    other = replace(other, banner=f"{other.banner} of another version")
    monkeypatch.setattr(building, "find_cxx", lambda: other)
    built.append(build(HEADER + BODY, "k"))
    assert len(set(built)) == len(built)


@compiles
def test_a_damaged_library_is_built_again(caplog: pytest.LogCaptureFixture) -> None:
    library = build(BODY, "k")
    whole = library.stat().st_size
    library.write_bytes(b"\x7fELF")
    assert build(BODY, "k") == library
    assert library.stat().st_size == whole
    assert [record.getMessage() for record in caplog.records] == [
        f"{library.parent} was damaged; it is built again"
    ]


# ---- what the compiler said


def refusal(source: str) -> CompilerError:
    with pytest.raises(CompilerError) as caught:
        build(source, "k")
    return caught.value


@compiles
def test_error_points_at_the_template(sketch: Callable[..., Kernel], cache: Path) -> None:
    origins = (None, ("kernels/k.cu", 7), ("kernels/k.cu", 8), None)
    kernel = sketch()
    source = f"//\nvoid {kernel.stem}(float* x) {{\n  x[0] = bb;  // sum\n}}\n"
    with pytest.raises(CompilerError, match=r"rejected the kernel: .*\bbb\b") as caught:
        build_kernel(replace(kernel, source=source, origins=origins))
    error = caught.value
    assert error.where == f"templates/kernels/k.cu:8 ({kernel.stem}.cu:3)"
    assert error.why.splitlines()[1:] == ["  3 |   x[0] = bb;  // sum", "    |          ^"]
    log = Path(error.hint.split(" is in ")[1])
    assert "bb" in log.read_text()
    assert log.with_name("kernel.cu").read_text() == source
    assert list(cache.glob(".build-*")) == []


@compiles
def test_error_in_a_header_points_at_the_line_that_led_there() -> None:
    error = refusal('#include "helpers.h"\n\nvoid k(float* x) {\n  copy<3>(x);\n}\n')
    assert "static assertion failed" in error.what
    assert error.where == "k.cu:4"


@compiles
def test_kernel_of_another_name() -> None:
    assert refusal("void other() {}\n").what == "k.cu defines no kernel k"


@compiles
def test_a_function_without_a_body_is_found_when_linking() -> None:
    assert "undefined" in refusal("void f();\nvoid k() { f(); }\n").what


@compiles
def test_a_compiler_that_cannot_build_the_runtime(sources: Path) -> None:
    (sources / "runtime.cpp").write_text("#include <no_such_header>\n")
    error = refusal(BODY)
    assert "cannot compile the emulator" in error.what
    assert "no_such_header" in error.why
    assert "no_such_header" in Path(error.hint.split(" is in ")[1]).read_text()


@pytest.mark.parametrize("language", ["de_DE.UTF-8", "C"])
def test_compilers_are_asked_in_english(monkeypatch: pytest.MonkeyPatch, language: str) -> None:
    monkeypatch.setenv("LC_ALL", language)
    assert toolchain.run(["sh", "-c", "echo $LC_ALL"]) == (0, "C\n")


def test_the_doctor_names_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", f"{program(tmp_path / 'cxx', 'echo cxx 1.0')} -x")
    found = json.loads(json.dumps(doctor.examine()["emulator"]))
    assert found["command"] == [str(tmp_path / "cxx"), "-x"]
    assert (found["found"], found["version"]) == (True, "cxx 1.0")


def test_a_wait_is_named_by_who_calls_it() -> None:
    inside = "wait(unsigned long long*, unsigned int)\n/x/kernel.cu:430\n"
    assert building._line(f"{inside}produce(Barriers&)\n/x/kernel.cu:589\n") == 589
    assert building._line(inside) == 430
    assert building._line("??\n??:0\n") == 0

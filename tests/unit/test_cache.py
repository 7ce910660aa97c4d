"""compile.py with a stub in place of nvcc: everything but real machine code, on any machine."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import fasim
from fasim import compile as compiler
from fasim import toolchain
from fasim.cache import STALE_S, Entry, Facts
from fasim.compile import Binary, Resources, check_promises, compile_kernel, sass
from fasim.errors import CheckFailed, CompilerError, MissingToolError, UsageError
from fasim.plan import KernelSpec, Plan, Tile
from fasim.problem import Problem
from fasim.render import Kernel
from fasim.toolchain import find_nvcc

SPEC = KernelSpec(
    algo="v2",
    pass_="fwd",
    arch="sm_90a",
    dtype="fp16",
    out_dtype="fp16",
    head_dim=64,
    head_dim_v=64,
    tile=Tile(block_q=64, block_kv=64, registers=64),
)
PLAN = Plan(problem=Problem(head_dim=64), gpu="h100", kernel=SPEC, smem_bytes=0)
SOURCE = "// header\nfloat add(float a) {\n  return a + bb;  // sum\n}\n"
KERNEL = Kernel(SPEC.stem, SOURCE, PLAN, (None, ("device/a.cuh", 7), ("device/a.cuh", 8), None))

BANNER = """nvcc: NVIDIA (R) Cuda compiler driver
Cuda compilation tools, release {0}, V{0}.88
"""
REPORT = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 99 registers, used 0 barriers
ptxas info    : Compiling entry function '{SPEC.stem}' for 'sm_90a'
ptxas info    : Function properties for {SPEC.stem}
    1080 bytes stack frame, 1476 bytes spill stores, 1984 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1080 bytes cumulative stack size, 308 bytes smem
"""
CLEAN = REPORT.replace("1476", "0").replace("1984", "0").replace("1080", "0")
STUB = """#!{python} -SE
import json, os, pathlib, sys, time
here = pathlib.Path(__file__)
says = json.loads(here.with_suffix(".json").read_text())
if "--version" in sys.argv:
    print(says["banner"], end="")
elif "--list-gpu-code" in sys.argv:
    print(says["targets"])
else:
    with open(here.with_suffix(".calls"), "a") as calls:
        print(os.getpid(), file=calls, flush=True)
    time.sleep(says["seconds"])
    source = pathlib.Path("kernel.cu").read_text()
    pathlib.Path("kernel.cubin").write_bytes(says["magic"].encode() + source.encode() * 99)
    pathlib.Path("kernel.ptx").write_text(says["ptx"] if "-lineinfo" in sys.argv else "// PTX")
    pathlib.Path("kernel.cudafe1.c").write_text("an intermediate file")
    second = "--register-usage-level=0" in sys.argv
    print(says["second"] if second and says["second"] else says["log"], end="")
    sys.exit(says["status"])
"""
WORKER = """
import pickle, sys
from fasim.compile import compile_kernel
print(compile_kernel(pickle.load(open(sys.argv[1], "rb"))).cubin.read_bytes()[:4])
"""


@dataclass(frozen=True)
class Stub:
    """An executable that answers like nvcc; ``says`` changes its answers."""

    path: Path

    def says(self, **answers: object) -> None:
        file = self.path.with_suffix(".json")
        file.write_text(json.dumps(json.loads(file.read_text()) | answers))

    @property
    def calls(self) -> list[int]:
        """Process id of every compilation."""
        file = self.path.with_suffix(".calls")
        return list(map(int, file.read_text().split())) if file.exists() else []

    @classmethod
    def at(cls, folder: Path) -> Stub:
        folder.mkdir(parents=True, exist_ok=True)
        stub = cls(folder / "nvcc")
        stub.path.write_text(STUB.format(python=sys.executable))
        stub.path.chmod(0o755)
        answers = {"banner": BANNER.format("13.0"), "targets": "sm_80\nsm_90", "log": CLEAN}
        rest = {"seconds": 0, "magic": "\x7fELF", "ptx": "", "status": 0, "second": ""}
        stub.path.with_suffix(".json").write_text(json.dumps(answers | rest))
        return stub


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache's folder; nothing of the machine's own CUDA is visible."""
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "_pathfinder", lambda name: None)
    monkeypatch.setattr(toolchain, "TOOLKIT", tmp_path / "no-toolkit")
    for name in ("FASIM_NVCC", "CUDA_HOME", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stub:
    stub = Stub.at(tmp_path / "stub")
    monkeypatch.setenv("FASIM_NVCC", str(stub.path))
    return stub


def start_worker(folder: Path) -> subprocess.Popen[str]:
    """A process of its own that compiles KERNEL."""
    job = folder / "kernel.pickle"
    job.write_bytes(pickle.dumps(KERNEL))
    environment = os.environ | {"PYTHONPATH": str(Path(fasim.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(job)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in 30 s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob(".build-*"))


# ---- finding nvcc


def test_order_of_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stubs = {name: Stub.at(tmp_path / name / "bin") for name in "abcde"}
    paths = {name: str(stub.path) for name, stub in stubs.items()}
    monkeypatch.setenv("FASIM_NVCC", paths["a"])
    monkeypatch.setattr(toolchain, "_pathfinder", lambda name: paths["b"])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("PATH", str(tmp_path / "d" / "bin"))
    monkeypatch.setattr(toolchain, "TOOLKIT", tmp_path / "e")
    found = [find_nvcc()]
    monkeypatch.delenv("FASIM_NVCC")
    for name in "bcde":
        found.append(find_nvcc())
        stubs[name].path.unlink()
    assert [str(nvcc.path) for nvcc in found] == list(paths.values())
    kinds = ["FASIM_NVCC", "cuda-pathfinder", "CUDA_HOME", "PATH", str(tmp_path / "e")]
    assert [nvcc.kind for nvcc in found] == kinds
    assert (found[0].version, found[0].banner) == ("13.0.88", BANNER.format("13.0"))


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingToolError, match="nvcc is not on this machine") as caught:
        compile_kernel(KERNEL)
    assert caught.value.exit_code == 3
    assert "pip install 'fasim[nvcc]'" in caught.value.hint


def test_chosen_nvcc_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASIM_NVCC", "/nonexistent/nvcc")
    with pytest.raises(MissingToolError, match="/nonexistent/nvcc is not a working nvcc") as caught:
        find_nvcc()
    assert caught.value.why == "No such file or directory"
    assert caught.value.hint.endswith("or unset it")


@pytest.mark.parametrize("banner", ["", "hello\n"])
def test_something_else_called_nvcc(stub: Stub, banner: str) -> None:
    stub.says(banner=banner)
    with pytest.raises(MissingToolError, match=r"is not a working nvcc[^!]*--version"):
        find_nvcc()


def test_nvcc_that_cannot_be_executed(stub: Stub) -> None:
    stub.path.write_text("not a program")
    with pytest.raises(MissingToolError, match=r"is not a working nvcc[^!]*Exec format error"):
        find_nvcc()


# ---- the target


@pytest.mark.parametrize(("release", "targets"), [("11.6", "sm_80\nsm_86"), ("10.2", "")])
def test_nvcc_too_old_for_the_gpu(stub: Stub, release: str, targets: str) -> None:
    stub.says(banner=BANNER.format(release), targets=targets)
    with pytest.raises(MissingToolError) as caught:
        compile_kernel(KERNEL)
    line = str(caught.value).splitlines()[0]
    assert line == f"nvcc {release}.88 ({stub.path}) cannot compile for sm_90a"
    assert "FASIM_NVCC" in caught.value.hint
    assert "--arch" in caught.value.hint
    assert stub.calls == []


def test_nvcc_too_new_for_the_gpu(stub: Stub) -> None:
    with pytest.raises(MissingToolError, match="cannot compile for sm_70"):
        compile_kernel(KERNEL, arch="sm_70")
    assert stub.calls == []


def test_nvcc_that_lists_sm_90_but_not_sm_90a(stub: Stub) -> None:
    stub.says(status=1, log="nvcc fatal   : Unsupported gpu architecture 'sm_90a'\n")
    with pytest.raises(MissingToolError, match="cannot compile for sm_90a"):
        compile_kernel(KERNEL)


@pytest.mark.parametrize("arch", ["hopper", "sm_9", "compute_90", "sm_90b", "sm_90 -x"])
def test_words_that_are_no_target(stub: Stub, arch: str) -> None:
    with pytest.raises(UsageError, match="is not a GPU target"):
        compile_kernel(KERNEL, arch=arch)


# ---- the cache


def test_compiles_once(stub: Stub, cache: Path) -> None:
    first, second = compile_kernel(KERNEL), compile_kernel(KERNEL)
    assert (first.cached, second.cached) == (False, True)
    assert first == replace(second, cached=False)
    assert len(stub.calls) == 1
    assert first.cubin.read_bytes().startswith(b"\x7fELF")
    assert first.cubin.parent.name.startswith(f"{SPEC.stem}-")
    assert list(cache.iterdir()) == [first.cubin.parent]
    names = {"kernel.cu", "kernel.cubin", "kernel.ptx", "log.txt", "build.json"}
    assert {path.name for path in first.cubin.parent.iterdir()} == names


def test_reads_the_report_of_its_own_kernel(stub: Stub) -> None:
    stub.says(log=REPORT)
    binary = compile_kernel(KERNEL)
    assert binary.resources == Resources(
        registers=32, spill_stores=1476, spill_loads=1984, smem_static=308, stack=1080
    )
    assert binary.log == REPORT
    assert binary.command[1:3] == ("-arch=sm_90a", "-std=c++17")


def test_spills_are_worth_another_try(stub: Stub) -> None:
    stub.says(log=REPORT, second=CLEAN)
    binary = compile_kernel(KERNEL)
    assert (binary.resources.spill_stores, binary.log, len(stub.calls)) == (0, CLEAN, 2)
    assert binary.command[-1] == "--register-usage-level=0"


def test_tries_that_all_spill_leave_the_plain_build(stub: Stub) -> None:
    stub.says(log=REPORT)
    binary = compile_kernel(KERNEL)
    tries = 1 + len(compiler.OTHER_LEVELS) + 1
    assert (binary.resources.spill_stores, len(stub.calls)) == (1476, tries)
    assert "-level" not in " ".join(binary.command)


def test_key_covers_everything_that_decides_the_cubin(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [compile_kernel(KERNEL).cubin.parent]
    folders.append(compile_kernel(KERNEL, arch="sm_80").cubin.parent)
    folders.append(compile_kernel(replace(KERNEL, source=SOURCE + "//\n")).cubin.parent)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-G"))
        folders.append(compile_kernel(KERNEL).cubin.parent)
    with monkeypatch.context() as patch:
        patch.setenv("NVCC_APPEND_FLAGS", "-G")
        folders.append(compile_kernel(KERNEL).cubin.parent)
    stub.says(banner=BANNER.format("13.1"))
    folders.append(compile_kernel(KERNEL).cubin.parent)
    assert len(set(folders)) == len(folders) == len(stub.calls)


def test_the_same_compiler_elsewhere_shares_the_entry(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_kernel(KERNEL)
    monkeypatch.setenv("FASIM_NVCC", str(Stub.at(tmp_path / "elsewhere").path))
    assert compile_kernel(KERNEL).cached


FILES = ["kernel.cu", "kernel.ptx", "kernel.cubin", "log.txt", "build.json"]


@pytest.mark.parametrize("names", [*([name] for name in FILES), FILES])
def test_truncated_entry_is_rebuilt_with_one_warning(
    stub: Stub, caplog: pytest.LogCaptureFixture, names: list[str]
) -> None:
    entry = compile_kernel(KERNEL).cubin.parent
    whole = (entry / "kernel.cubin").read_bytes()
    for name in names:
        os.truncate(entry / name, (entry / name).stat().st_size // 2)
    assert not compile_kernel(KERNEL).cached
    assert [record.getMessage() for record in caplog.records] == [
        f"{entry} was damaged; it is built again"
    ]
    assert compile_kernel(KERNEL).cached
    assert (entry / "kernel.cubin").read_bytes() == whole
    assert len(caplog.records) == 1
    assert leftovers(entry.parent) == []


@pytest.mark.parametrize("record", ["null", "[]", '"x"', "{}", '{"files": [], "key": 1}', "\xff"])
def test_any_nonsense_in_the_record_is_damage(stub: Stub, record: str) -> None:
    entry = compile_kernel(KERNEL).cubin.parent
    (entry / "build.json").write_bytes(record.encode("latin-1"))
    assert not compile_kernel(KERNEL).cached
    assert compile_kernel(KERNEL).cached


def test_the_warning_is_one_line_on_stderr(stub: Stub, tmp_path: Path) -> None:
    entry = compile_kernel(KERNEL).cubin.parent
    (entry / "kernel.cubin").write_bytes(b"")
    _, said = start_worker(tmp_path).communicate(timeout=60)
    assert said == f"{entry} was damaged; it is built again\n"


def test_an_entry_that_appears_meanwhile_is_no_damage(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = Entry.load

    def overtaken(entry: Entry) -> Facts | None:
        monkeypatch.setattr(Entry, "load", load)
        found = load(entry)
        compile_kernel(KERNEL)  # another process is faster
        return found

    monkeypatch.setattr(Entry, "load", overtaken)
    assert not compile_kernel(KERNEL).cached
    assert len(stub.calls) == 2
    assert caplog.records == []


@pytest.mark.parametrize("damaged", [False, True])
def test_eight_processes_at_once(stub: Stub, cache: Path, tmp_path: Path, damaged: bool) -> None:
    if damaged:
        compile_kernel(KERNEL).cubin.write_bytes(b"\x7fELF, but not the whole of it")
    stub.says(seconds=0.2)
    workers = [start_worker(tmp_path) for _ in range(8)]
    outputs = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 8, outputs
    assert {out for out, _ in outputs} == {"b'\\x7fELF'\n"}
    assert damaged or {err for _, err in outputs} == {""}
    assert len(stub.calls) > 2, "the processes did not overlap: the test proves nothing"
    assert len(list(cache.iterdir())) == 1
    assert compile_kernel(KERNEL).cached


def test_killed_process_leaves_nothing_that_hurts(stub: Stub, cache: Path, tmp_path: Path) -> None:
    stub.says(seconds=60)
    worker = start_worker(tmp_path)
    wait_for(lambda: stub.calls)
    worker.kill()
    worker.communicate()
    os.kill(stub.calls[0], signal.SIGKILL)
    (junk,) = leftovers(cache)
    stub.says(seconds=0)
    assert not compile_kernel(KERNEL).cached
    assert junk.exists(), "a young folder may belong to a process at work"
    day_before = time.time() - STALE_S - 1
    os.utime(junk, (day_before, day_before))
    compile_kernel(KERNEL, arch="sm_80")
    assert leftovers(cache) == []


def test_interrupt_ends_the_compiler_and_cleans_up(stub: Stub, cache: Path, tmp_path: Path) -> None:
    stub.says(seconds=60)
    worker = start_worker(tmp_path)
    wait_for(lambda: stub.calls)
    assert len(leftovers(cache)) == 1
    worker.send_signal(signal.SIGINT)
    _, said = worker.communicate(timeout=30)
    assert "KeyboardInterrupt" in said
    assert list(cache.iterdir()) == []
    assert not alive(stub.calls[0])


def test_cache_that_cannot_be_written(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(MissingToolError, match="cannot build in the cache") as caught:
        compile_kernel(KERNEL)
    assert "FASIM_CACHE_DIR" in caught.value.hint


def test_keep_copies_the_entry(stub: Stub, tmp_path: Path) -> None:
    keep = tmp_path / "kept" / "here"
    entry = compile_kernel(KERNEL, keep=keep).cubin.parent
    assert {p.name: p.read_bytes() for p in keep.iterdir()} == {
        p.name: p.read_bytes() for p in entry.iterdir()
    }
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to"):
        compile_kernel(KERNEL, keep=tmp_path / "file")


# ---- what the compiler said

UNDEFINED = """kernel.cu(3): error: identifier "bb" is undefined
    return a + bb;
               ^

kernel.cu(4): error: expected a ";"
  }
  ^

2 errors detected in the compilation of "kernel.cu".
"""


def refusal(stub: Stub, log: str, kernel: Kernel = KERNEL, **answers: object) -> CompilerError:
    stub.says(status=1, log=log, **answers)
    with pytest.raises(CompilerError) as caught:
        compile_kernel(kernel)
    assert caught.value.exit_code == 4
    return caught.value


def test_error_points_at_the_template(stub: Stub, cache: Path) -> None:
    error = refusal(stub, UNDEFINED)
    head, hint = str(error).split("\n\nhint: ")
    assert head == "\n".join(
        [
            'nvcc rejected the kernel: identifier "bb" is undefined (and 1 more)',
            f"  --> templates/device/a.cuh:8 ({SPEC.stem}.cu:3)",
            "    |",
            "  3 |   return a + bb;  // sum",
            "    |              ^",
        ]
    )
    path = Path(hint.split(" is in ")[1])
    assert path.read_text() == UNDEFINED
    assert path.with_name("kernel.cu").read_text() == SOURCE
    assert leftovers(cache) == []


def test_error_in_an_edited_file_points_at_its_own_line(stub: Stub) -> None:
    error = refusal(stub, UNDEFINED, replace(KERNEL, origins=(), edited=True))
    assert error.where == f"{SPEC.stem}.cu:3"


def test_caret_skips_what_the_preprocessor_rewrote() -> None:
    line = "__global__ void k(float x, float* xs) { xs[0] = x + y; }  // y"
    shown = "  __attribute__((global)) void k(float x, float* xs) { xs[0] = x + y; }"
    assert line.index("y;") == compiler._column(line, (shown, " " * shown.index("y;")))
    assert line.index("x +") == compiler._column(line, (shown, " " * shown.index("x +")))
    assert compiler._column("  no such word", (shown, " " * shown.index("y;"))) == 2
    assert compiler._column("  nothing shown", (None, None)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kernel.cu:3:10: fatal error: a.h: No such file or directory", "a.h: No such file"),
        ("kernel.cu(3): error #20: identifier is undefined", "identifier is undefined"),
        ("kernel.cu(3): catastrophic error: cannot open file", "cannot open file"),
    ],
)
def test_other_shapes_of_errors(stub: Stub, line: str, message: str) -> None:
    error = refusal(stub, f"kernel.cu(2): warning #177-D: unused\n{line}\n")
    assert error.what.startswith(f"nvcc rejected the kernel: {message}")
    assert ":8 " in error.where


def test_ptxas_error_is_traced_to_the_source(stub: Stub) -> None:
    ptx = '.file 1 "k.cu"\n.loc 1 2 1\nmov\n .loc\t1 3 5, function_name x, inlined_at 1 9 1\nbad\n'
    log = "ptxas kernel.ptx, line 5; error   : Unknown modifier '.bar'\nptxas fatal   : aborted\n"
    error = refusal(stub, log, ptx=ptx)
    assert error.what == "nvcc rejected the kernel: Unknown modifier '.bar'"
    assert error.where == f"templates/device/a.cuh:8 ({SPEC.stem}.cu:3)"
    assert len(stub.calls) == 2


@pytest.mark.parametrize("log", ["nvcc fatal   : out of patience\n", ""])
def test_error_without_a_place(stub: Stub, log: str) -> None:
    error = refusal(stub, log)
    assert error.what == f"nvcc failed: {log.strip() or 'exit status 1 and no output'}"


def test_no_host_compiler(stub: Stub) -> None:
    said = "nvcc fatal   : Failed to preprocess host compiler properties."
    stub.says(status=1, log=f"gcc: No such file or directory\n{said}\n")
    with pytest.raises(MissingToolError, match="needs a host compiler") as caught:
        compile_kernel(KERNEL)
    assert "g++" in caught.value.hint
    assert caught.value.why == said


def test_file_without_the_kernel(stub: Stub, cache: Path) -> None:
    stub.says(log=REPORT.replace(SPEC.stem, "renamed"))
    with pytest.raises(CompilerError, match="it defines other, renamed"):
        compile_kernel(KERNEL)
    assert list(cache.iterdir()) == []


def test_success_without_a_cubin(stub: Stub, cache: Path) -> None:
    stub.says(magic="text")
    with pytest.raises(MissingToolError, match="wrote no cubin"):
        compile_kernel(KERNEL)
    assert list(cache.iterdir()) == []


# ---- promises

KEPT = Resources(registers=64, spill_stores=0, spill_loads=0, smem_static=0, stack=0)


def binary(resources: Resources, log: str = "") -> Binary:
    return Binary(Path("/x/kernel.cubin"), resources, log, (), False)


def test_kept_promises_pass() -> None:
    check_promises(binary(KEPT), PLAN)
    check_promises(binary(replace(KEPT, registers=1)), PLAN)


@pytest.mark.parametrize(
    ("field", "used", "said"),
    [
        ("registers", 65, "65 registers, not 64"),
        ("spill_stores", 4, "4 bytes of spill stores, not 0"),
        ("spill_loads", 8, "8 bytes of spill loads, not 0"),
        ("smem_static", 16, "16 bytes of static shared memory, not 0"),
        ("stack", 32, "32 bytes of stack, not 0"),
    ],
)
def test_each_broken_promise_fails_with_its_number(field: str, used: int, said: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        check_promises(binary(replace(KEPT, **{field: used})), PLAN)
    assert caught.value.why == said


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7512", "C7519"])
def test_broken_pipelines_fail(code: str) -> None:
    log = f"ptxas info    : ({code}) Potential Performance Loss: wgmma serialized\n"
    with pytest.raises(CheckFailed, match=code):
        check_promises(binary(KEPT, log), PLAN)


# ---- machine code


def test_sass(stub: Stub) -> None:
    built = compile_kernel(KERNEL)
    tool = stub.path.with_name("nvdisasm")
    tool.write_text('#!/bin/sh\necho "$1 of $(basename $2)"\n')
    tool.chmod(0o755)
    assert sass(built) == "--print-code of kernel.cubin\n"
    tool.write_text("#!/bin/sh\necho no such format; exit 1\n")
    with pytest.raises(CompilerError, match="no such format"):
        sass(built)


def test_sass_without_a_disassembler(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    built = compile_kernel(KERNEL)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingToolError, match="nvdisasm is not on this machine"):
        sass(built)

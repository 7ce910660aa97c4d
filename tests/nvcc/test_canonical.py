"""Every canonical kernel compiles for its architecture and keeps the plan's promises."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fasim.compile import check_promises, compile_kernel
from fasim.render import Kernel, arch_flags, parse

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "generated").glob("*.cu"))

pytestmark = pytest.mark.nvcc


def kernel(path: Path) -> Kernel:
    return parse(path.read_text(), str(path))


def test_there_are_canonical_kernels() -> None:
    assert len(FILES) >= 10


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_compiles_without_spills_within_the_plan(path: Path) -> None:
    parsed = kernel(path)
    binary = compile_kernel(parsed)
    check_promises(binary, parsed.plan)
    assert binary.resources.spill_stores == 0
    assert binary.resources.smem_static == 0
    assert 0 < binary.resources.registers <= parsed.plan.registers


OPTIONS = (
    "full_8858c1e0",
    "v3",
    "sm75",
    "e4m3",
    "window",
    "softcap",
    "alibi",
    "dense",
    "varlen",
    "packed",
    "incoherent",
)
BACKWARD = ("v1_bwd", "_ordered_", "_secondpass_")


@pytest.mark.parametrize("option", [*OPTIONS, *BACKWARD])
def test_the_host_harness_builds(tmp_path: Path, option: str) -> None:
    path = next(path for path in FILES if option in path.stem)
    flags = arch_flags(kernel(path).plan.kernel).split()
    command = ["nvcc", "-std=c++17", *flags, "-DFASIM_MAIN"]
    command.append("-DFASIM_DEBUG")  # what waits then gives up
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on PATH: the harness needs the toolkit's runtime library")
    subprocess.run([*command, "-o", str(tmp_path / "a.out"), str(path)], check=True)

"""generated/ is what the templates render, formatted as clang-format would."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fasim import catalogue
from fasim.errors import CheckFailed

ROOT = Path(__file__).parents[2]
CLANG_FORMAT = shutil.which("clang-format", path=str(Path(sys.executable).parent)) or shutil.which(
    "clang-format"
)


def test_committed_kernels_are_current() -> None:
    assert catalogue.check(ROOT / "generated") >= 10


def test_a_stale_a_missing_and_an_extra_file_are_noticed(tmp_path: Path) -> None:
    names = catalogue.write(tmp_path)
    (tmp_path / names[0]).write_text("edited")
    (tmp_path / names[1]).unlink()
    (tmp_path / "stray.cu").write_text("")
    with pytest.raises(CheckFailed) as caught:
        catalogue.check(tmp_path)
    for word, name in (("stale", names[0]), ("missing", names[1]), ("extra", "stray.cu")):
        assert f"{word} " in caught.value.why
        assert name in caught.value.why


@pytest.mark.skipif(not CLANG_FORMAT, reason="clang-format is not installed")
def test_canonical_kernels_are_formatted() -> None:
    files = map(str, sorted((ROOT / "generated").glob("*.cu")))
    subprocess.run([str(CLANG_FORMAT), "--dry-run", "--Werror", *files], check=True, cwd=ROOT)


def test_v3_reads_in_150_lines() -> None:
    """The body of a V3 kernel in 16 bits without options; the rest has names."""
    plain = [
        path
        for path in (ROOT / "generated").glob("v3_fwd*16_*.cu")
        if len(path.stem.split("_")) == 7
    ]
    assert len(plain) >= 3
    for path in plain:
        kernel = path.read_text().split("// ---- Kernel ---", 1)[1]
        body = kernel.split("// clang-format on\n", 1)[1].split("\n}\n", 1)[0]
        assert body.count("\n") < 150, path.name

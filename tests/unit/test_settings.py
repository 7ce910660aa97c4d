from pathlib import Path

import platformdirs
import pytest

import fasim
from fasim import settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.ALL:
        monkeypatch.delenv(setting.name, raising=False)


def test_default() -> None:
    assert settings.CACHE_DIR.value == platformdirs.user_cache_path("fasim")
    assert settings.NVCC.value is None
    assert {setting.origin for setting in settings.ALL} == {"default"}


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASIM_CACHE_DIR", "~/kernels")
    assert settings.CACHE_DIR.value == Path.home() / "kernels"
    assert settings.CACHE_DIR.origin == "environment"


def test_relative_folders_do_not_follow_a_later_chdir(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASIM_CACHE_DIR", "kernels")
    assert settings.CACHE_DIR.value == tmp_path / "kernels"


def test_empty_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASIM_GPU", "")
    assert (settings.GPU.value, settings.GPU.origin) == (None, "default")


def test_a_bare_compiler_name_is_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc-12"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FASIM_NVCC", "nvcc-12")
    assert settings.NVCC.value == compiler


def test_a_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for text, words in [
        ("python -m ziglang 'c++ '", (str(python), "-m", "ziglang", "c++ ")),
        (str(python), (str(python),)),
        ("  ", ()),
        ("/no quote' here", ("/no quote' here",)),
    ]:
        monkeypatch.setenv("CXX", text)
        assert settings.CXX.value == words


def test_every_setting_is_used() -> None:
    files = Path(fasim.__file__).parent.rglob("*.py")
    source = "".join(file.read_text() for file in files if file.name != "settings.py")
    used = {name for name, value in vars(settings).items() if f"settings.{name}." in source}
    declared = {n for n, v in vars(settings).items() if isinstance(v, settings.Setting)}
    assert declared == {name for name in used if name in declared}
    assert len(settings.ALL) == len(declared)

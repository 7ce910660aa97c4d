"""The console sessions of the documents are real: run again, they print what is written.

A line ``...`` stands for any lines. ``<!-- needs nvcc -->`` or ``cxx`` before a block runs it only
where nvcc, or a C++ compiler, is found; ``<!-- needs gpu -->`` never runs it. After a wanted change
of some output,

    python tests/unit/test_readme.py --update

writes the sessions anew and keeps the elisions.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import SequenceMatcher
from io import StringIO
from pathlib import Path

import pytest

from fasim import settings
from fasim.cli import run
from fasim.errors import MissingToolError
from fasim.runners import emulator
from fasim.toolchain import find_nvcc

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/claims.md")
BLOCK = re.compile(r"(?:<!-- needs (?P<needs>\w+) -->\n)?```console\n(?P<session>.*?)```\n", re.S)
PYTHON = re.compile(r"```python\n(.*?)```\n", re.S)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def refreshed(document: str, tools: Sequence[str] = ()) -> str:
    """The document with every session as it runs now; one that still matches is kept as it is."""

    def again(block: re.Match[str]) -> str:
        if block["needs"] and block["needs"] not in tools:
            return block[0]
        return block[0].replace(block["session"], "".join(map(_rerun, _commands(block["session"]))))

    with _fresh_desk():
        return BLOCK.sub(again, document)


@contextmanager
def _fresh_desk() -> Iterator[None]:
    """An empty folder to work in, no colour, none of the user's settings or compiled kernels."""
    before, environment = Path.cwd(), dict(os.environ)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for setting in settings.ALL:
                os.environ.pop(setting.name, None)
            os.environ |= {"NO_COLOR": "1", "FASIM_CACHE_DIR": f"{folder}/cache"}
            os.chdir(folder)
            yield
            os.chdir(before)
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


def _commands(session: str) -> Iterator[tuple[str, list[str]]]:
    """Each command line of a session with the output written below it."""
    for part in re.split(r"^\$ ", session, flags=re.M)[1:]:
        command, *lines = part.splitlines()
        yield command, lines


def _rerun(written: tuple[str, list[str]]) -> str:
    command, lines = written
    now = output(command)
    return "\n".join([f"$ {command}", *(lines if matches(lines, now) else elided(lines, now)), ""])


def output(command: str) -> list[str]:
    """What a terminal would show: both streams, in order."""
    program, *arguments = shlex.split(command)
    assert program == "fasim", f"not a command of fasim: {command}"
    shown = StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        code = run(arguments)
    assert bool(code) == ("error: " in shown.getvalue()), f"{command} exits with {code}"
    return shown.getvalue().splitlines()


def matches(written: Sequence[str], now: Sequence[str]) -> bool:
    pattern = "".join(r"(?:.*\n)*?" if w == "..." else re.escape(f"{w}\n") for w in written)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in now)) is not None


def elided(written: Sequence[str], now: Sequence[str]) -> list[str]:
    """The new output with the old elisions: each piece between them is found by likeness."""
    pieces = [piece.splitlines() for piece in re.split(r"^\.\.\.$\n?", _text(written), flags=re.M)]
    if len(pieces) == 1:
        return list(now)
    first, *middle, last = pieces
    shown, place, end = list(now[: len(first)]), len(first), len(now) - len(last)
    for piece in middle:
        place = max(range(place, end), key=lambda at: _likeness(piece, now[at:end]))
        shown += ["...", *now[place : place + len(piece)]]
        place += len(piece)
    return [*shown, "...", *now[end:]]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _likeness(piece: Sequence[str], now: Sequence[str]) -> float:
    old, new = (re.sub(r"[\d.]+", "#", _text(t)) for t in (piece, now[: len(piece)]))
    return SequenceMatcher(None, old, new, autojunk=False).ratio()


def _tools() -> tuple[str, ...]:
    found = () if emulator.available() else ("cxx",)
    try:
        find_nvcc()
    except MissingToolError:
        return found
    return (*found, "nvcc")


# ---- the documents ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sessions_print_what_is_written(name: str) -> None:
    document = (ROOT / name).read_text()
    assert refreshed(document) == document


@pytest.mark.nvcc
def test_sessions_that_compile_print_what_is_written() -> None:
    document = (ROOT / "README.md").read_text()
    assert refreshed(document, tools=("nvcc",)) == document


@pytest.mark.skipif(bool(emulator.available()), reason=str(emulator.available()))
def test_sessions_in_the_emulator_print_what_is_written() -> None:
    document = (ROOT / "README.md").read_text()
    assert refreshed(document, tools=("cxx",)) == document


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_stands_in_a_session_that_is_checked(name: str) -> None:
    document = (ROOT / name).read_text()
    assert BLOCK.search(document)
    assert "$ fasim" not in BLOCK.sub("", document)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    missing = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]
    assert not missing


def test_the_python_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    (lines,) = PYTHON.findall((ROOT / "README.md").read_text())
    exec(lines, {})
    assert 'extern "C"' in capsys.readouterr().out


# ---- the check itself ---------------------------------------------------------------------------

VERSION = "```console\n$ fasim --version\n{}\n```\n"


def test_a_wrong_output_is_found_and_corrected() -> None:
    right = refreshed(VERSION.format("fasim 0.0.9"))
    assert re.fullmatch(VERSION.format(r"fasim \d+\.\d+\.\d+").replace("$", r"\$"), right)
    assert refreshed(right) == right


def test_an_elision_stands_for_any_lines() -> None:
    now = ["one", "two", "three"]
    assert matches(["one", "...", "three"], now)
    assert matches(["..."], now)
    assert matches(now, now)
    assert not matches(["one", "..."], ["two"])
    assert not matches(["one", "three"], now)
    assert not matches(["one", "...", "two"], now)


def test_an_update_keeps_the_elisions() -> None:
    written = ["plan 1", "...", "time 5 us", "...", "end 7"]
    now = ["plan 2", "tile 64", "time 6 us", "memory 8", "more 1", "end 9"]
    assert elided(written, now) == ["plan 2", "...", "time 6 us", "...", "end 9"]
    assert elided(["plan 1", "..."], now) == ["plan 2", "..."]
    assert elided(["plan 1", "end"], now) == now


@pytest.mark.parametrize("tool", ["gpu", "nvcc", "cxx"])
def test_a_session_that_lacks_its_tool_is_left_alone(tool: str) -> None:
    session = f"<!-- needs {tool} -->\n{VERSION.format('anything')}"
    assert refreshed(session) == session


def test_a_failure_must_be_shown_as_one() -> None:
    with pytest.raises(AssertionError, match="not a command of fasim"):
        output("rm -rf nothing")
    assert "error: " in "\n".join(output("fasim plan --gpu nonsense"))


if __name__ == "__main__":
    assert sys.argv[1:] == ["--update"], "usage: python tests/unit/test_readme.py --update"
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(refreshed(path.read_text(), _tools()))
        print(f"refreshed {document}")

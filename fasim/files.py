"""Plans and kernels on disk: reading what a user names, writing so that nothing is half there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from fasim.errors import FasimError, NoPlanError, UsageError
from fasim.plan import Plan, senseless
from fasim.render import Kernel, parse, render

_HINT = "give a plan (`fasim plan --json`), a kernel (`fasim gen`), or - for standard input"


def read_plan(argument: str) -> Plan:
    """The plan in a ``plan.json``, in a generated ``.cu``, or on standard input (``-``)."""
    found = _read(argument)
    return found if isinstance(found, Plan) else found.plan


def read_kernel(argument: str) -> Kernel:
    """The kernel of a generated ``.cu``, as it stands in the file, or the one a plan renders to."""
    found = _read(argument)
    return render(found) if isinstance(found, Plan) else found


def read_json(path: str) -> Any:
    """The JSON document of a file. Raises UsageError if it holds none."""
    text, where = _text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError("this is not JSON", where=where, why=str(error), hint=_HINT) from error


def _read(argument: str) -> Plan | Kernel:
    text, where = _text(argument)
    try:
        found = _plan(text, where) if text.lstrip().startswith("{") else parse(text, where)
        _check(found if isinstance(found, Plan) else found.plan)
    except FasimError as error:
        error.where = error.where or where
        raise
    except Exception as error:  # a file can say anything
        raise senseless(f"{type(error).__name__}: {error}", where) from error
    return found


def _check(plan: Plan) -> None:
    """A plan that was edited by hand must still be one that can be built and launched."""
    from fasim.model.footprint import smem_bytes
    from fasim.model.tiles import Tiles

    kernel, tiles = plan.kernel, Tiles.of([plan.kernel.tile])
    needed = int(smem_bytes(plan.problem, kernel.variant, kernel.pass_, tiles)[0])
    if plan.smem_bytes != needed:
        raise senseless(f"smem_bytes is {plan.smem_bytes}, this tile needs {needed}")


def _text(argument: str) -> tuple[str, str]:
    if argument == "-":
        return _decoded(sys.stdin.buffer.read(), "standard input"), "standard input"
    try:
        return _decoded(Path(argument).read_bytes(), argument), argument
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError("cannot read the plan", where=argument, why=why, hint=_HINT) from error


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            "this is neither a plan nor a kernel", where=where, why="it is not text", hint=_HINT
        ) from error


def _plan(text: str, where: str) -> Plan:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "this plan is not JSON", where=where, why=str(error), hint=_HINT
        ) from error
    _refuse_without_kernel(data, where)
    return Plan.from_json(data)


def _refuse_without_kernel(data: dict[str, Any], where: str) -> None:
    """A plan may predict an algorithm that cannot be generated; it then carries the reason."""
    if data.get("generable") is False:
        raise NoPlanError(
            "this plan has no kernel",
            where=where,
            why=str(data.get("reason", "")),
            hint="plan with --algo v2 or v1, or read it with `fasim plan`",
        )


def target(out: str | None, name: str) -> Path:
    """Where to write a file called ``name``: the current directory, ``out``, or inside it."""
    if out is None:
        return Path(name)
    path = Path(out)
    return path / name if path.is_dir() or out.endswith(("/", os.sep)) else path


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all: a temporary file beside it, then a rename.

    What is no regular file (a pipe, /dev/null) is written to, never replaced.
    """
    if path.is_dir():
        raise _unwritable(path, "it is a directory")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unwritable(path, getattr(error, "strerror", None) or str(error)) from error


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(path: Path, why: str) -> UsageError:
    return UsageError(
        "cannot write the file",
        where=str(path),
        why=why,
        hint="give -o a file in a directory that exists and is writable",
    )

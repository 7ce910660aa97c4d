"""What a compiler says of a generated file, told with the template's line behind it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fasim.errors import CompilerError


class Text(Protocol):
    """A generated file; a ``fasim.render.Kernel`` is one."""

    @property
    def stem(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def origins(self) -> Sequence[tuple[str, int] | None]:
        """The template and line that wrote each line; may be shorter than the file, or empty."""
        ...


@dataclass(frozen=True)
class Diagnostic:
    """An error at a line (from 1), with the column (from 0) of the caret where that is known."""

    line: int
    message: str
    column: int | None = None


def line_of(text: Text, number: int) -> str:
    """Line ``number``, from 1, of the generated file; "" beyond its end."""
    return (text.source.splitlines()[number - 1 : number] or [""])[0]


def rejection(compiler: str, text: Text, found: Sequence[Diagnostic], hint: str) -> CompilerError:
    """The error of the first diagnostic: it names the template's line and shows the generated one
    with a caret."""
    first, count = found[0], len(found)
    number, line = first.line, line_of(text, first.line)
    origin = text.origins[number - 1] if number <= len(text.origins) else None
    here = f"{text.stem}.cu:{number}"
    column = len(line) - len(line.lstrip()) if first.column is None else first.column
    gutter = " " * len(str(number))
    more = f" (and {count - 1} more)" if count > 1 else ""
    return CompilerError(
        f"{compiler} rejected the kernel: {first.message}{more}",
        where=f"templates/{origin[0]}:{origin[1]} ({here})" if origin else here,
        why=f"{gutter} |\n  {number} | {line}\n  {gutter} | {' ' * column}^",
        hint=hint,
    )


def no_kernel(text: Text, why: str) -> CompilerError:
    """The error that the file lacks the kernel of its own name."""
    return CompilerError(
        f"{text.stem}.cu defines no kernel {text.stem}",
        why=why,
        hint='the kernel carries the name of its plan: extern "C" __global__ void NAME(...)',
    )


def failure(compiler: str, text: Text, status: int, output: str, hint: str) -> CompilerError:
    """The error of a compiler that failed without naming a line of the file."""
    said = output.strip().splitlines() or [f"exit status {status} and no output"]
    telling = next((line for line in said if re.search("error:|undefined", line)), said[-1])
    return CompilerError(f"{compiler} failed: {telling}", where=f"{text.stem}.cu", hint=hint)

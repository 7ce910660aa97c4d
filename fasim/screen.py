"""Where a command line writes: answers on standard output, remarks and failures on standard error.

Whether there is colour is decided here, once: --no-color, then NO_COLOR, then FORCE_COLOR, then
whether the stream is a terminal. Colour never carries meaning that the words do not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, TextIO

from fasim import settings
from fasim.errors import FasimError

WIDTH = 200  # columns a table may have: wider than any, so that nothing is ever cropped
_RED, _CYAN, _RESET = "\x1b[31m", "\x1b[36m", "\x1b[0m"


@dataclass
class Screen:
    """The two streams of one command line."""

    debug: bool = False
    no_color: bool = False

    def line(self, text: str = "") -> None:
        print(text)

    def text(self, text: str) -> None:
        """A whole file, as it is."""
        sys.stdout.write(text)

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """One fact a line: name, then value."""
        for name, value in facts:
            print(f"{name:<15} {value}".rstrip())

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Columns without boxes: the first to the left, the others to the right."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=any(header))
        for place, name in enumerate(header):
            table.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        drawn = StringIO()
        colored = self._colored(sys.stdout)
        Console(file=drawn, width=WIDTH, force_terminal=colored, no_color=not colored).print(table)
        print("\n".join(line.rstrip() for line in drawn.getvalue().splitlines()))

    def document(self, data: Mapping[str, Any]) -> None:
        """The one JSON document of a command."""
        sys.stdout.write(dumped(data))

    def remark(self, text: str) -> None:
        print(text, file=sys.stderr)

    def note(self, text: str) -> None:
        self.remark(f"note: {text}")

    def error(self, failure: FasimError) -> None:
        """What, where, why, a blank line, and what to do next."""
        hint = failure.hint or "see `fasim --help`"
        lines = [f"{self._paint(_RED, 'error:')} {failure.what}"]
        lines += [f"  --> {failure.where}"] if failure.where else []
        lines += [f"  {failure.why}"] if failure.why else []
        self.remark("\n".join([*lines, "", f"{self._paint(_CYAN, 'hint:')} {hint}"]))

    def _paint(self, color: str, text: str) -> str:
        return f"{color}{text}{_RESET}" if self._colored(sys.stderr) else text

    def _colored(self, stream: TextIO) -> bool:
        if self.no_color or settings.NO_COLOR.text:
            return False
        if settings.FORCE_COLOR.text:
            return True
        return stream.isatty() and os.environ.get("TERM") != "dumb"


def dumped(data: Mapping[str, Any]) -> str:
    """A JSON document as text."""
    return json.dumps(data, indent=2) + "\n"

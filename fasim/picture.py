"""The score matrix as a picture of characters: which tiles are computed, masked or skipped."""

from __future__ import annotations

import math

from fasim.plan import Tile
from fasim.problem import Problem

FULL, PARTIAL, SKIPPED = "#", "/", "."
LEGEND = f"{FULL} whole   {PARTIAL} partly masked or ragged   {SKIPPED} skipped"
ROWS, COLUMNS = 32, 64


def draw(problem: Problem, tile: Tile) -> list[str]:
    """One line a row of tiles, one character a tile; a large matrix draws several tiles as one."""
    rows = _spans(problem.seq, tile.block_q, ROWS)
    columns = _spans(problem.seq_kv, tile.block_kv, COLUMNS)
    return ["".join(_character(problem, row, column) for column in columns) for row in rows]


def scale(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Tiles (of queries, of keys) that one character stands for."""
    return _group(problem.seq, tile.block_q, ROWS), _group(problem.seq_kv, tile.block_kv, COLUMNS)


def _group(length: int, block: int, most: int) -> int:
    return max(1, math.ceil(math.ceil(length / block) / most))


def _spans(length: int, block: int, most: int) -> list[range]:
    """Rows (or columns) of each character; the last may reach past the end."""
    step = block * _group(length, block, most)
    return [range(start, start + step) for start in range(0, length, step)]


def _character(problem: Problem, rows: range, keys: range) -> str:
    """Query r sees the keys from r + offset - left to r + offset + right."""
    last_row, last_key = min(rows.stop, problem.seq) - 1, min(keys.stop, problem.seq_kv) - 1
    offset, (left, right) = problem.seq_kv - problem.seq, problem.reach
    above = left >= 0 and rows.start + offset - left > last_key
    below = right >= 0 and last_row + offset + right < keys.start
    if above or below:
        return SKIPPED
    ragged = rows.stop > problem.seq or keys.stop > problem.seq_kv
    from_left = left < 0 or last_row + offset - left <= keys.start
    to_right = right < 0 or rows.start + offset + right >= last_key
    return FULL if from_left and to_right and not ragged else PARTIAL

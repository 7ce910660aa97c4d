"""Which tiles a mask leaves: exact counts in closed form, for any length.

Query r sees the keys [r + seq_kv - seq - left, r + seq_kv - seq + right], clipped to the sequence.
A q tile visits every K/V tile that holds a key which one of its rows sees. First and last key move
linearly with the tile's index until they are clipped, so every count is a sum of
floor((a i + b) / m), which Euclid's algorithm gives in a few steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasim.model.tiles import Ints, Tiles, ceil_div
from fasim.plan import rows_before
from fasim.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Counts of one head, an array entry per tile shape.

    ``steps``: (q tile, K/V tile) pairs visited; ``rows``: query rows of those pairs, tails clipped;
    ``keys``: keys of those pairs, clipped to the sequence; ``pairs``: rows times keys, summed over
    them; ``longest``: most steps of one q tile, ``widest``: of one K/V tile (bounds by one when
    windowed); ``blind``, ``blind_rows``: q tiles that see no key, and their rows.
    """

    q_tiles: Ints
    kv_tiles: Ints
    steps: Ints
    rows: Ints
    keys: Ints
    pairs: Ints
    longest: Ints
    widest: Ints
    blind: Ints
    blind_rows: Ints


@dataclass(frozen=True, kw_only=True)
class PackedVisits:
    """Counts of one K/V head whose query heads' rows are packed into q tiles, heads fastest; the
    names mean what they mean in Visits."""

    q_tiles: Ints
    kv_tiles: Ints
    steps: Ints
    keys: Ints
    longest: Ints


def grouped_visits(problem: Problem, tiles: Tiles) -> Visits:
    """Visits of one K/V head where a tile packs the rows of a group whose size divides it: those
    of a tile of as many times fewer queries, under any mask."""
    return visits(problem, np.maximum(tiles.block_q // problem.group, 1), tiles.block_kv)


def packed_visits(problem: Problem, tiles: Tiles) -> PackedVisits:
    """Visited tiles of packed rows, under a full or causal mask, q tile by q tile: such kernels
    have few of them."""
    shapes = zip(tiles.block_q.tolist(), tiles.block_kv.tolist(), strict=True)
    counts = np.array([_packed_counts(problem, m, n) for m, n in shapes], dtype=np.int64)
    steps, keys, longest = counts.reshape(-1, 3).T
    return PackedVisits(
        q_tiles=np.asarray(ceil_div(problem.group * problem.seq, tiles.block_q)),
        kv_tiles=np.asarray(ceil_div(problem.seq_kv, tiles.block_kv)),
        steps=steps,
        keys=keys,
        longest=longest,
    )


def _packed_counts(problem: Problem, block_q: int, block_kv: int) -> tuple[int, int, int]:
    """steps, keys and longest of one tile shape."""
    rows = problem.group * problem.seq
    last_rows = np.minimum(np.arange(0, rows, block_q) + block_q, rows) - 1
    seen = last_rows // problem.group + 1 + problem.seq_kv - problem.seq
    seen = np.clip(seen if problem.causal else problem.seq_kv + 0 * seen, 0, problem.seq_kv)
    steps = ceil_div(seen, block_kv)
    keys = np.minimum(steps * block_kv, problem.seq_kv)
    return int(steps.sum()), int(keys.sum()), int(steps.max(initial=0))


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs of one head that the mask leaves."""
    first, last = _shifts(problem)
    seq, seq_kv = problem.seq, problem.seq_kv
    return _clipped_sum(seq, last + 1, seq_kv) - _clipped_sum(seq, first, seq_kv)


def visits(problem: Problem, block_q: Ints, block_kv: Ints, before: Ints | int = 0) -> Visits:
    """Visited tiles for every pair of block_q and block_kv (arrays of one shape). The first q tile
    may begin so many rows before the first query; none of them counts as one."""
    return _Walk(problem, block_q, block_kv, before).visits()


def tile_visits(
    problem: Problem, algo: str, pass_: str, tiles: Tiles, block_kv: Ints | None = None
) -> Visits:
    """Visits of a kernel's tiles of queries; of its own tiles of keys unless others are given."""
    before = rows_before(problem, algo, pass_, tiles.block_q)
    keys = tiles.block_kv if block_kv is None else block_kv
    return visits(problem, tiles.block_q, keys, before)


def floor_sum(n: Ints, m: Ints, a: Ints, b: Ints) -> Ints:
    """Sum of floor((a i + b) / m) over i in [0, n), elementwise; a, b >= 0, m > 0."""
    n, m, a, b = (np.array(x, dtype=np.int64) for x in np.broadcast_arrays(n, m, a, b))
    total = np.zeros_like(n)
    while np.any(n > 0):
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        n, b = top // m, top % m
        m, a = np.where(a > 0, a, 1), m
    return total


def _shifts(problem: Problem) -> tuple[int, int]:
    """First and last visible key of query 0, unclipped; open sides lie beyond every clip."""
    left, right = problem.reach
    aligned = problem.seq_kv - problem.seq
    first = -problem.seq if left < 0 else aligned - left
    last = problem.seq_kv if right < 0 else aligned + right
    return first, last


def _clipped_sum(n: int, shift: int, top: int) -> int:
    """Sum of clip(i + shift, 0, top) over i in [0, n)."""
    low = min(max(-shift, 0), n)
    high = min(max(top - shift, low), n)
    linear = (high - low) * shift + (high * (high - 1) - low * (low - 1)) // 2
    return linear + (n - high) * top


class _Walk:
    """The q tiles of one head: ``full`` whole ones, then the last, which may be ragged. Rows before
    the first query are walked as if there were some, and then taken off.

    Only the first ``alive`` q tiles start before the last key; the others see nothing.
    """

    def __init__(self, problem: Problem, block_q: Ints, block_kv: Ints, before: Ints | int) -> None:
        first, last = _shifts(problem)
        self.before = np.asarray(before)
        self.seq, self.seq_kv = problem.seq + self.before, problem.seq_kv
        self.block_q, self.block_kv = np.broadcast_arrays(block_q, block_kv)
        # Tile i sees [i*M + begin, end of its rows + end).
        self.begin, self.end = first - self.before, last - self.before
        self.window = 0 if problem.mask in ("full", "causal") else last - first
        self.q_tiles = np.asarray(ceil_div(self.seq, self.block_q))
        self.kv_tiles = np.asarray(ceil_div(self.seq_kv, self.block_kv))
        starting = ceil_div(self.seq_kv - self.begin, self.block_q)
        self.alive = np.clip(starting, 0, self.q_tiles)
        self.full = np.clip(self.alive, 0, np.maximum(self.q_tiles - 1, 0))
        self.has_last = (self.alive == self.q_tiles) & (self.q_tiles > 0)
        self.last_end = min(max(problem.seq + last, 0), self.seq_kv)

    def visits(self) -> Visits:
        last_steps = np.where(self.has_last, self._last_steps(), 0)
        steps = self._steps_to_ends() - self._steps_to_starts()
        missing = self.q_tiles * self.block_q - self.seq
        keys = steps * self.block_kv - self._missing_keys()
        last_keys = last_steps * self.block_kv - self._lacking * self._last_touches
        unseeing, last_blind = self._blind()
        first_keys, first_steps, first_blind = self._first()
        return Visits(
            q_tiles=self.q_tiles,
            kv_tiles=self.kv_tiles,
            steps=steps,
            rows=steps * self.block_q - missing * last_steps - self.before * first_steps,
            keys=keys,
            pairs=keys * self.block_q - missing * last_keys - self.before * first_keys,
            longest=self._most(self.kv_tiles, self.block_q, self.block_kv),
            widest=self._most(self.q_tiles, self.block_kv, self.block_q),
            blind=unseeing,
            blind_rows=unseeing * self.block_q - missing * last_blind - self.before * first_blind,
        )

    def _first(self) -> tuple[Ints, Ints, Ints]:
        """Of the first q tile, where it begins before the first query (and so sees all keys up to
        its last): keys, steps, whether it sees none."""
        seen = np.clip(np.minimum(self.block_q, self.seq) + self.end, 0, self.seq_kv)
        steps = np.asarray(ceil_div(seen, self.block_kv))
        return np.minimum(steps * self.block_kv, self.seq_kv), steps, seen == 0

    def _steps_to_ends(self) -> Ints:
        """Sum over alive q tiles of ceil(last visible key / block_kv)."""
        m, n = self.block_q, self.block_kv
        dark = np.clip(-self.end // m, 0, self.full)  # tiles that end before the first key
        bright = np.clip(ceil_div(self.seq_kv - self.end, m) - 1, dark, self.full)  # see the end
        count = bright - dark
        offset = np.where(count > 0, (dark + 1) * m + self.end + n - 1, 0)
        whole = floor_sum(count, n, m, offset) + (self.full - bright) * self.kv_tiles
        return np.asarray(whole + self.has_last * ceil_div(self.last_end, n))

    def _steps_to_starts(self) -> Ints:
        """Sum over alive q tiles of floor(first visible key / block_kv)."""
        m, n = self.block_q, self.block_kv
        zero = np.clip(ceil_div(-self.begin, m), 0, self.alive)
        count = self.alive - zero
        offset = np.where(count > 0, zero * m + self.begin, 0)
        return floor_sum(count, n, m, offset)

    def _last_steps(self) -> Ints:
        start = np.clip((self.q_tiles - 1) * self.block_q + self.begin, 0, None)
        seen = ceil_div(self.last_end, self.block_kv) - start // self.block_kv
        return np.asarray(seen)

    def _missing_keys(self) -> Ints:
        """Keys that ragged last K/V tiles lack, over all visits of them."""
        before = np.clip(ceil_div(self._edge + 1 - self.end, self.block_q) - 1, 0, self.full)
        return np.asarray(self._lacking * (self.full - before + self._last_touches))

    @property
    def _lacking(self) -> Ints:
        """Keys that the last K/V tile lacks."""
        return np.asarray(self.kv_tiles * self.block_kv - self.seq_kv)

    @property
    def _edge(self) -> Ints:
        """Where the last K/V tile begins: a q tile that ends beyond it visits it."""
        return np.asarray((self.kv_tiles - 1) * self.block_kv)

    @property
    def _last_touches(self) -> Ints:
        return np.asarray(self.has_last & (self.last_end > self._edge))

    def _blind(self) -> tuple[Ints, Ints]:
        """Number of q tiles without a visible key, and whether the last one is among them."""
        ends_dark = np.clip(-self.end // self.block_q, 0, self.full)
        dark = ends_dark if self.seq_kv else self.full
        last_dark = self.has_last & (self.last_end == 0)
        last_late = (self.alive < self.q_tiles).astype(np.int64)
        return dark + (self.q_tiles - self.alive) + last_dark, last_late + last_dark

    def _most(self, tiles: Ints, own: Ints, other: Ints) -> Ints:
        """Of ``tiles`` of ``other`` rows the most that one of ``own`` rows meets."""
        if not self.window:
            return tiles
        return np.asarray(np.minimum(tiles, ceil_div(own + self.window, other) + 1))

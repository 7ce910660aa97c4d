"""Quantities a reader asks for that follow from an entry and the model: work of a level, odds."""

from __future__ import annotations

import numpy as np

from fasim.candidates import candidates
from fasim.entry import Entry
from fasim.gpu import Gpu
from fasim.legality import Case, legal
from fasim.model.silicon import rates
from fasim.model.tiles import Tiles
from fasim.model.visits import grouped_visits, packed_visits, tile_visits


def smem_bytes(entry: Entry, gpu: Gpu) -> float:
    """Bytes that shared memory serves, over the whole chip."""
    speed = rates(gpu, entry.algo, entry.problem)
    return float(entry.time.terms["smem"] * speed.smem_bytes * speed.sms * speed.clock_hz)


def exponentials(entry: Entry) -> int:
    """Scores that are computed, masked parts of visited tiles included: an exp each."""
    p = entry.problem
    if entry.tile is None:
        return p.batch * p.heads * p.seq * p.seq_kv
    tiles = Tiles.of([entry.tile])
    if entry.splits:
        scores = int(packed_visits(p, tiles).steps[0]) * entry.tile.block_q * entry.tile.block_kv
        return p.batch * p.kv_heads * scores
    if entry.packed:
        scores = int(grouped_visits(p, tiles).steps[0]) * entry.tile.block_q * entry.tile.block_kv
        return p.batch * p.kv_heads * scores
    steps = int(tile_visits(p, entry.variant, "fwd", tiles).steps[0])
    return p.batch * p.heads * steps * entry.tile.block_q * entry.tile.block_kv


def legal_tiles(entry: Entry, gpu: Gpu) -> tuple[int, int]:
    """How many candidates are legal, and how many are tried."""
    tried = candidates(entry.problem, gpu, entry.variant, entry.pass_)
    case = Case.of(entry.problem, gpu, entry.variant, entry.pass_, tried)
    return int(np.count_nonzero(legal(case))), len(tried)

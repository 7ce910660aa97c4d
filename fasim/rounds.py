"""How V3 deals tiles of queries out to the blocks that stay on their SMs (device/schedule.cuh).

Heads come in groups. A group's last tiles come first, those of all its heads side by side, and
every other round goes through the blocks in reverse order. Nobody takes work from another, so
whether all end together is decided by the size of the groups: it is found by playing them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

MOST_TOGETHER = 64  # heads that are tried
PLAYED_TILES = 16384  # of more tiles the rounds look alike, and the rest of a round hardly counts
HEAD_COSTS = 0.00075  # of the time, for each head whose keys compete for the L2 (docs/kernels.md)


@lru_cache(maxsize=256)
def heads_together(costs: tuple[float, ...], heads: int, blocks: int, fewest: int = 1) -> int:
    """Heads in a group, so that ``blocks`` blocks end soonest and few keys are at work at once;
    ``fewest`` at least, if there are as many. ``costs``: of a head's tiles of queries, in any unit,
    the last one first."""
    if not costs or heads < 1 or blocks < 1:
        return 1
    played = min(heads, -(-PLAYED_TILES // len(costs)))
    most = min(played, MOST_TOGETHER)
    tries = range(min(fewest, most), most + 1)
    return min(tries, key=lambda n: longest(costs, played, blocks, n) * (1 + n * HEAD_COSTS))


def longest(costs: tuple[float, ...], heads: int, blocks: int, together: int) -> float:
    """What the busiest of ``blocks`` blocks is dealt, in the unit of ``costs``."""
    turn = np.arange(heads * len(costs))
    first_head = turn // (together * len(costs)) * together
    members = np.minimum(together, heads - first_head)
    tile = (turn - first_head * len(costs)) // members
    round_, place = np.divmod(turn, blocks)
    block = np.where(round_ % 2, blocks - 1 - place, place)
    return float(np.bincount(block, weights=np.asarray(costs)[tile]).max())

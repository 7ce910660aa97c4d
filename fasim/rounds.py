"""How V3 deals tiles of queries out to the blocks that stay on their SMs (device/schedule.cuh).

Heads come in groups. A group's last tiles come first, those of all its heads side by side, and
every other round goes through the blocks in reverse order. Nobody takes work from another, so
whether all end together is decided by the size of the groups: it is found by playing them.
"""

from __future__ import annotations

from functools import lru_cache
from operator import add

MOST_TOGETHER = 64  # heads that are tried
PLAYED_TILES = 8192  # of more tiles the rounds look alike, and the rest of a round hardly counts
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
    turns: list[float] = []
    for first in range(0, heads, together):
        members = min(together, heads - first)
        turns += [cost for cost in costs for _ in range(members)]
    dealt = [0.0] * blocks
    for place, start in enumerate(range(0, len(turns), blocks)):
        round_ = turns[start : start + blocks]
        round_ += [0.0] * (blocks - len(round_))
        dealt = list(map(add, dealt, reversed(round_) if place % 2 else round_))
    return max(dealt)

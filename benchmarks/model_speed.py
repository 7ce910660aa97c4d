"""How fast the model is: candidates a second on one core, and the time of whole plans.

python benchmarks/model_speed.py
"""

import statistics
import time

import numpy as np

from fasim import gpu, planner
from fasim.candidates import KEYS
from fasim.legality import Case, broken
from fasim.model import timeline, traffic
from fasim.model.tiles import Tiles
from fasim.plan import Tile
from fasim.problem import Problem


def seconds(run, rounds=9):
    """Median seconds of a call, after one to warm up."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def evaluate(problem, device, algo, tiles):
    """Everything the planner asks of a candidate."""
    case = Case.of(problem, device, algo, "fwd", tiles)
    broken(case)
    traffic.issued(problem, algo, "fwd", tiles)
    timeline.predict(problem, device, algo, "fwd", tiles, np.maximum(case.blocks_per_sm, 1))


def main():
    device = gpu.load("h200")
    shapes = [
        (rows, n, w, s) for rows in (16, 32) for n in KEYS for w in (1, 2, 4, 8) for s in (1, 2)
    ]
    tiles = Tiles.of(
        [Tile(block_q=r * w, block_kv=n, warps=w, stages=s) for r, n, w, s in shapes * 8]
    )
    for causal in (False, True):
        problem = Problem(batch=4, seq=4096, causal=causal)
        mask = "causal" if causal else "full"
        for algo in ("v1", "v2"):
            spent = seconds(lambda a=algo, p=problem: evaluate(p, device, a, tiles))
            print(f"{algo} {mask:6}  {len(tiles) / spent:12,.0f} candidates/s")
        for algo in ("v1", "v2", "v3", "auto"):
            spent = seconds(lambda a=algo, p=problem: planner.plan(p, device, a))
            print(f"plan {algo:4} {mask:6}  {spent * 1e3:6.1f} ms")
        spent = seconds(lambda p=problem: planner.crossover(p, device), 3)
        print(f"crossover {mask:6}  {spent * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()

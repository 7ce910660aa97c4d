"""Floating-point operations: what the mathematics needs, and what whole tiles execute.

A matmul of (m, k) by (k, n) counts 2 m n k. The forward pass has two of them (QK', PV); the
backward four that are needed (dV, dP, dQ, dK), and a fifth where S is computed again.
"""

from __future__ import annotations

from fasim.model.tiles import Ints, Tiles, ceil_div, padded
from fasim.model.visits import grouped_visits, packed_visits, visible_pairs, visits
from fasim.plan import rows_before, transposed_rows, transposes
from fasim.problem import Problem

USEFUL = {"fwd": (1, 1), "bwd": (2, 2), "train": (3, 3)}  # matmuls over head_dim, over head_dim_v
RECOMPUTED = {"fwd": (1, 1), "bwd": (3, 2)}


def useful(problem: Problem, pass_: str) -> int:
    """FLOPs over visible (query, key) pairs: 2 (d + d_v) a pair forward, twice that backward."""
    over_d, over_dv = USEFUL[pass_]
    per_pair = 2 * (over_d * problem.head_dim + over_dv * problem.head_dim_v)
    return problem.batch * problem.heads * visible_pairs(problem) * per_pair


def executed(problem: Problem, algo: str, pass_: str, tiles: Tiles) -> Ints:
    """FLOPs the matrix units do: whole tiles (V1: whole steps over a tile's keys; V2 forward: what
    a warp's rows see of a tile; V3 forward: one even
    where nothing is seen; V3 in e4m3: what a warpgroup's rows see), padded head
    dimensions, S again in flash backward.

    Standard attention masks after its matmul, so it multiplies every pair.
    """
    over_d, over_dv = (USEFUL if algo == "standard" else RECOMPUTED)[pass_]
    heads = problem.batch * problem.heads
    if algo == "standard":
        per_pair = 2 * (over_d * problem.head_dim + over_dv * problem.head_dim_v)
        return 0 * tiles.block_q + heads * problem.seq * problem.seq_kv * per_pair
    d, dv = (padded(n, problem.dtype) for n in (problem.head_dim, problem.head_dim_v))
    if transposes(algo, problem.dtype):
        dv = transposed_rows(problem.head_dim_v)  # a column of ones sums the weights
    per_pair = 2 * (over_d * d + over_dv * dv)
    if algo == "v2_split":
        steps = packed_visits(problem, tiles).steps
        return heads // problem.group * per_pair * steps * tiles.block_q * tiles.block_kv
    if algo == "v3_packed":
        packed = grouped_visits(problem, tiles)
        steps = packed.steps + packed.blind
        return heads // problem.group * per_pair * steps * tiles.block_q * tiles.block_kv
    if algo == "v2_second_pass":
        return heads * _two_passes(problem, tiles)
    rows = tiles.rows_apart(algo, problem) if pass_ == "fwd" else tiles.block_q
    before = rows_before(problem, algo, pass_, tiles.block_q) * (rows == tiles.block_q)
    seen = visits(problem, rows, tiles.step_kv, before)
    shows = (algo, pass_, problem.dtype == "e4m3") == ("v3", "fwd", False)
    steps = seen.steps + (seen.blind + _without_rows(problem, tiles, rows)) * shows
    return heads * per_pair * steps * rows * tiles.step_kv


def _without_rows(problem: Problem, tiles: Tiles, rows: Ints) -> Ints:
    """Groups of so many rows in tiles of queries, beyond the last query."""
    groups: Ints = ceil_div(problem.seq, tiles.block_q) * (tiles.block_q // rows)
    held: Ints = ceil_div(problem.seq, rows)
    return groups - held


def _two_passes(problem: Problem, tiles: Tiles) -> Ints:
    """FLOPs of a head where dQ has a kernel of its own: S, dP, dV and dK of blocks of keys, then S,
    dP and dQ of blocks of as many queries."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    main = visits(problem, tiles.block_q, tiles.block_kv).steps * (4 * d + 4 * dv)
    queries = visits(problem, tiles.block_kv, tiles.block_q).steps * (4 * d + 2 * dv)
    return (main + queries) * tiles.block_q * tiles.block_kv

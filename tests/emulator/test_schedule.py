"""The schedule of V3: which block works on which tile of queries, and when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu, planner
from fasim.emulator.program import Program
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.render import render_text

pytestmark = pytest.mark.emulator

BLOCK_Q, ROUNDS = 128, 64
KERNEL = """//% include "device/integers.cuh"

constexpr int kBlockQ = 128, kBlockKV = 64;

struct Work {
  int first_query, head, batch;
};

struct Span {
  int seq_q, seq_kv;
};

__device__ int visible_keys(int query, const Span& span) { return span.seq_kv; }

//% include "device/schedule.cuh"

extern "C" __global__ void list(int* y, int batch, int heads, int queries, int together) {
  for (int round = 0; round < 64; ++round) {
    const Work work = work_at(round, {batch, heads, queries, together});
    int* row = y + (blockIdx.x * 64 + round) * 3;
    row[0] = work.first_query, row[1] = work.head, row[2] = work.batch;
  }
}
"""
CAUSAL = planner.plan(
    Problem(seq=1024, causal=True),
    gpu.load("h200"),
    "v3",
    Tile(block_q=128, block_kv=64, warps=8, stages=2),
).plan
assert CAUSAL


def listed(blocks: int, batch: int, heads: int, queries: int, together: int) -> np.ndarray:
    """(first query, head, batch) of every block and round."""
    text = render_text(KERNEL, kernel=CAUSAL.kernel)
    y = np.zeros((blocks, ROUNDS, 3), np.int32)
    numbers = {"batch": batch, "heads": heads, "queries": queries, "together": together}
    scalars = {name: np.int32(value).tobytes() for name, value in numbers.items()}
    Program.load(text, "list").launch(
        {"y": y, **scalars}, ["y"], grid=blocks, block=1, smem_bytes=16
    )
    return y


@given(
    st.integers(1, 9), st.integers(1, 3), st.integers(1, 5), st.integers(1, 700), st.integers(1, 15)
)
def test_every_tile_is_someones_once(
    blocks: int, batch: int, heads: int, queries: int, together: int
) -> None:
    tiles = -(-queries // BLOCK_Q)
    blocks = max(blocks, -(-batch * heads * tiles // (ROUNDS - 1)))
    works = listed(blocks, batch, heads, queries, min(together, batch * heads))
    spare = (tiles * BLOCK_Q - queries) // 64 * 64  # rows that the first tile lacks
    done = works[:, :, 1] < 0
    found = sorted(map(tuple, works[~done].tolist()))
    firsts = range(-spare, queries, BLOCK_Q)
    assert found == sorted(
        (first, head, b) for first in firsts for head in range(heads) for b in range(batch)
    )
    assert (done[:, 1:] >= done[:, :-1]).all(), "a block that has no tile gets none later"


def test_the_longest_tiles_of_a_group_come_first_and_rounds_balance() -> None:
    works = listed(blocks=4, batch=1, heads=4, queries=4 * BLOCK_Q, together=4)
    firsts = works[:, :4, 0] // BLOCK_Q
    assert firsts.tolist() == [[3, 2, 1, 0]] * 4
    alone = listed(blocks=4, batch=1, heads=4, queries=4 * BLOCK_Q, together=1)[:, :4]
    assert (alone[:, :, 0].sum(axis=1) == 6 * BLOCK_Q).all()
    assert alone[:, :, 1].tolist() == [[0, 1, 2, 3]] * 4

"""Bytes and FLOPs against published numbers and a brute-force walk over tiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu as gpus
from fasim.model import flops, traffic
from fasim.model.footprint import compulsory
from fasim.model.tiles import Tiles, padded
from fasim.model.visits import floor_sum, visible_pairs, visits
from fasim.plan import Tile
from fasim.problem import Problem

GPT2 = Problem(batch=64, heads=16, seq=1024, head_dim=64)  # the shape of the FA1 paper's table


def one(block_q, block_kv, **more):
    return Tiles.of([Tile(block_q=block_q, block_kv=block_kv, **more)])


def total(problem, algo, pass_, tiles):
    return int(np.ravel(traffic.issued(problem, algo, pass_, tiles).total)[0])


# ---- published totals, GB -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "tiles", "expected"),
    [
        ("v1", one(64, 256, step_kv=64), 2.61),
        ("v1", one(64, 512, step_kv=64), 1.23),
        ("v1", one(128, 256, step_kv=64), 2.61),
        ("v2", one(64, 64), 4.57),
        ("v2", one(128, 64), 2.42),
        ("v2", one(256, 64), 1.35),
        ("v3", one(192, 128), 1.88),
        ("standard", one(1, 1), 9.13),
    ],
)
def test_forward_issues(algo, tiles, expected):
    assert total(GPT2, algo, "fwd", tiles) / 1e9 == pytest.approx(expected, rel=0.01)


def test_standard_training_issues():
    both = sum(total(GPT2, "standard", pass_, one(1, 1)) for pass_ in ("fwd", "bwd"))
    assert both / 1e9 == pytest.approx(25.2, rel=0.01)


def test_compulsory():
    assert compulsory(GPT2) / 1e9 == pytest.approx(0.54, rel=0.01)


@pytest.mark.parametrize(
    ("block_kv", "forward", "backward"),
    [(32, 13.7, 22.3), (64, 6.98, 11.4), (128, 3.62, 6.0), (256, 1.95, 3.25), (512, 1.11, 1.90)],
)
def test_the_papers_own_formula(block_kv, forward, backward):
    assert traffic.paper(GPT2, "fwd", block_kv) / 1e9 == pytest.approx(forward, rel=0.01)
    assert traffic.paper(GPT2, "bwd", block_kv) / 1e9 == pytest.approx(backward, rel=0.015)
    both = traffic.paper(GPT2, "train", block_kv)
    assert both == sum(traffic.paper(GPT2, p, block_kv) for p in ("fwd", "bwd"))


# ---- a walk over every tile ---------------------------------------------------------------------


def sees(problem, r, k):
    left, right = problem.reach
    distance = k - (r + problem.seq_kv - problem.seq)
    return (left < 0 or distance >= -left) and (right < 0 or distance <= right)


def walk(problem, m, n, before=0):
    """The K/V tiles each q tile visits, from the definition: some row sees some key of it. The
    first may begin before the first query."""
    tiles = []
    for first in range(-before, problem.seq, m):
        rows = range(max(first, 0), min(first + m, problem.seq))
        keys = [k for k in range(problem.seq_kv) if any(sees(problem, r, k) for r in rows)]
        tiles.append((len(rows), sorted({k // n for k in keys})))
    return tiles


def sizes(problem, n, visited):
    return sum(min(n, problem.seq_kv - j * n) for j in visited)


problems = st.builds(
    lambda seq, seq_kv, causal, window, d, dv, group, dtype: Problem(
        batch=2,
        heads=4,
        kv_heads=4 // group,
        seq=seq,
        seq_kv=seq_kv,
        causal=causal,
        window=window,
        head_dim=d,
        head_dim_v=dv,
        dtype=dtype,
    ),
    st.integers(0, 150),
    st.integers(0, 150),
    st.booleans(),
    st.tuples(st.integers(-1, 70), st.integers(-1, 70)),
    st.sampled_from([8, 40, 64]),
    st.sampled_from([8, 64]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["fp32", "fp16"]),
)
blocks = st.sampled_from([16, 32, 48, 64, 112])


@given(problems, blocks, blocks, st.integers(0, 111))
def test_visits_count_the_tiles_a_mask_leaves(problem, m, n, lacks):
    before = min(lacks, -problem.seq % m) * (problem.reach[0] < 0)  # open on the left
    seen = visits(problem, np.array([m]), np.array([n]), np.array([before]))
    tiles = walk(problem, m, n, before)
    blind = [rows for rows, visited in tiles if not visited]
    assert seen.q_tiles[0] == len(tiles)
    assert seen.steps[0] == sum(len(visited) for _, visited in tiles)
    assert seen.rows[0] == sum(rows * len(visited) for rows, visited in tiles)
    assert seen.keys[0] == sum(sizes(problem, n, visited) for _, visited in tiles)
    assert seen.pairs[0] == sum(rows * sizes(problem, n, visited) for rows, visited in tiles)
    assert (seen.blind[0], seen.blind_rows[0]) == (len(blind), sum(blind))
    assert seen.longest[0] >= max((len(visited) for _, visited in tiles), default=0)


@given(problems)
def test_visible_pairs(problem):
    pairs = sum(sees(problem, r, k) for r in range(problem.seq) for k in range(problem.seq_kv))
    assert visible_pairs(problem) == pairs


@given(problems, blocks, blocks)
def test_v2_issues_what_its_loops_name(problem, m, n):
    e, d, dv = problem.element_bytes, problem.head_dim, problem.head_dim_v
    reads = writes = 0
    for rows, visited in walk(problem, m, n):
        reads += rows * d * e + sizes(problem, n, visited) * (d + dv) * e
        writes += rows * (dv * problem.out_bytes + 4)
    asked = traffic.issued(problem, "v2", "fwd", one(m, n)).at(0)
    assert (asked.read, asked.write) == (8 * reads, 8 * writes)


@given(problems, blocks, blocks)
def test_v1_issues_what_its_loops_name(problem, m, n):
    """The template's loops: K/V blocks outside, each loaded once; q blocks inside."""
    e, d, dv = problem.element_bytes, problem.head_dim, problem.head_dim_v
    q_tiles = walk(problem, m, n)
    reads = writes = 0
    if q_tiles:
        reads += problem.seq_kv * (d + dv) * e
    for rows, visited in q_tiles:
        steps = visited or [0]
        for j in steps:
            reads += rows * d * e
            if j != steps[0]:
                reads += rows * (4 * dv + 8)
            writes += rows * (dv * e + 4 if j == steps[-1] else 4 * dv + 8)
    asked = traffic.issued(problem, "v1", "fwd", one(m, n)).at(0)
    assert (asked.read, asked.write) == (8 * reads, 8 * writes)


@given(problems, blocks, blocks, st.sampled_from(["v1", "v2"]), st.booleans())
def test_options_read_what_their_loops_name(problem, m, n, algo, varlen):
    """A dense bias where tiles (V2: a warp's rows and tiles) meet; slopes and the ends of sequences
    in every thread."""
    apart = algo == "v2" and problem.dtype != "fp32"
    tiles, owned = walk(problem, m, n), walk(problem, m // 4 if apart else m, n)
    blocks = 8 * (min(len(tiles), 1) if algo == "v1" else len(tiles))
    ends = {f"cu_seqlens_{name}": 8 * 128 * blocks for name in "qk"} if varlen else {}
    pairs = 8 * sum(rows * sizes(problem, n, visited) for rows, visited in owned)
    plain = traffic.issued(problem, algo, "fwd", one(m, n)).at(0)
    for bias, own in (
        ("none", {}),
        ("alibi", {"slopes": 4 * 128 * blocks}),
        ("dense", {"bias": pairs * problem.element_bytes}),
        ("dense_fp32", {"bias": pairs * 4}),
    ):
        asked = traffic.issued(problem.with_(bias=bias, varlen=varlen), algo, "fwd", one(m, n))
        assert asked.at(0).reads == {**plain.reads, **own, **ends}
        assert asked.at(0).writes == plain.writes


@given(problems, blocks, blocks)
def test_v2_backward_issues_what_its_loops_name(problem, m, n):
    """Whole tiles of dQ, padded to the matrix instructions: zeroed, added to, read at the end. A
    block serves all query heads that share its keys."""
    e, d, dv = problem.element_bytes, problem.head_dim, problem.head_dim_v
    q_tiles = walk(problem, m, n)
    steps = sum(len(visited) for _, visited in q_tiles)
    rows = sum(rows * len(visited) for rows, visited in q_tiles)
    seq, kv = problem.seq, 8 // problem.group * problem.seq_kv * (d + dv) * e
    tile = m * padded(d, "fp16") * 4
    reads = rows * ((d + dv) * e + 8) + seq * 2 * dv * e + len(q_tiles) * tile
    writes = (steps + len(q_tiles)) * tile + seq * (4 + e * d)
    asked = traffic.issued(problem, "v2", "bwd", one(m, n)).at(0)
    assert (asked.read, asked.write) == (8 * reads + kv, 8 * writes + kv)


@given(problems, blocks, blocks)
def test_no_tile_meets_more_than_the_most(problem, m, n):
    walked = [visited for _, visited in walk(problem, m, n)]
    meetings = [sum(j in visited for visited in walked) for j in range(-(-problem.seq_kv // n))]
    seen = visits(problem, np.array([m]), np.array([n]))
    assert max(map(len, walked), default=0) <= seen.longest[0]
    assert max(meetings, default=0) <= seen.widest[0]


@given(problems, blocks, blocks, st.booleans())
def test_backward_options_read_what_their_loops_name(problem, m, n, varlen):
    """A dense bias where tiles meet; a slope in every thread, for each tile of queries; the ends of
    sequences in every thread of the three kernels, of V1 two, of which one has a block a head."""
    q_tiles = walk(problem, m, n)
    steps = sum(len(visited) for _, visited in q_tiles)
    pairs = 8 * sum(rows * sizes(problem, n, visited) for rows, visited in q_tiles)
    kv_heads, kv_tiles = 8 // problem.group, -(-problem.seq_kv // n)
    blocks = {"v1": 8 * len(q_tiles) + kv_heads * min(kv_tiles, 1)}
    blocks |= dict.fromkeys(("v2", "v2_ordered"), 2 * 8 * len(q_tiles) + kv_heads * kv_tiles)
    for algo, count in blocks.items():
        ends = {f"cu_seqlens_{name}": 8 * 128 * count for name in "qk"} if varlen else {}
        _options_read(problem, algo, (m, n), varlen, ends, steps, pairs)


@given(problems, blocks, blocks, st.booleans())
def test_a_second_pass_reads_its_options_again(problem, m, n, varlen):
    """A bias where its own tiles meet, a slope once a thread."""
    q_tiles, turned = walk(problem, m, n), walk(problem, n, m)
    steps = sum(len(visited) for _, visited in q_tiles) + len(turned)
    pairs = 8 * sum(rows * sizes(problem, n, visited) for rows, visited in q_tiles)
    pairs += 8 * sum(rows * sizes(problem, m, visited) for rows, visited in turned)
    blocks = 8 * (len(q_tiles) + len(turned)) + 8 // problem.group * -(-problem.seq_kv // n)
    ends = {f"cu_seqlens_{name}": 8 * 128 * blocks for name in "qk"} if varlen else {}
    _options_read(problem, "v2_second_pass", (m, n), varlen, ends, steps, pairs)


def _options_read(problem, algo, tile, varlen, ends, steps, pairs):
    """``ends`` of sequences, slopes of ``steps``, biases of ``pairs``, and nothing else besides."""
    plain = traffic.issued(problem, algo, "bwd", one(*tile)).at(0)
    for bias, own in (
        ("none", {}),
        ("alibi", {"slopes": 4 * 128 * 8 * steps}),
        ("dense", {"bias": pairs * problem.element_bytes}),
        ("dense_fp32", {"bias": pairs * 4}),
    ):
        asked = traffic.issued(problem.with_(bias=bias, varlen=varlen), algo, "bwd", one(*tile))
        assert asked.at(0).reads == {**plain.reads, **own, **ends}
        assert asked.at(0).writes == plain.writes


@given(problems, blocks, blocks)
def test_v1_backward_updates_dq_in_every_step_but_the_first_and_the_last(problem, m, n):
    """The rest is V2's, whose first step finds zeros and whose last one leaves fp32."""
    visited = [len(steps) for _, steps in walk(problem, m, n)]
    again = 8 * sum(count - 1 for count in visited if count) * m * padded(problem.head_dim) * 4
    v1, v2 = (traffic.issued(problem, algo, "bwd", one(m, n)).at(0) for algo in ("v1", "v2"))
    assert (v1.reads, v1.writes) == ({**v2.reads, "dq_acc": again}, {**v2.writes, "dq_acc": again})


@given(problems, blocks, blocks)
def test_turns_are_asked_for_and_ended_once_a_step(problem, m, n):
    q_tiles = walk(problem, m, n)
    steps, tiles = 8 * sum(len(visited) for _, visited in q_tiles), 8 * len(q_tiles)
    blocks = 8 // problem.group * -(-problem.seq_kv // n)
    got, atomic = (traffic.issued(problem, x, "bwd", one(m, n)).at(0) for x in ("v2_ordered", "v2"))
    zeroed = (tiles + 1 + blocks) * (problem.seq > 0)
    assert got.reads == {**atomic.reads, "turns": 4 * steps}
    assert got.writes == {**atomic.writes, "turns": 4 * (steps + zeroed)}


@given(problems, blocks, blocks)
def test_a_second_pass_reads_keys_again_and_keeps_dq_in_registers(problem, m, n):
    e, d, dv, seq = problem.element_bytes, problem.head_dim, problem.head_dim_v, problem.seq
    keys = 8 * sum(
        min(n_ * m + m, problem.seq_kv) - n_ * m
        for _, visited in walk(problem, n, m)
        for n_ in visited
    )
    got, atomic = (
        traffic.issued(problem, x, "bwd", one(m, n)).at(0) for x in ("v2_second_pass", "v2")
    )
    more = {"q": 8 * seq * d * e, "do": 8 * seq * dv * e, "lse": 32 * seq, "delta": 32 * seq}
    more |= {"k": keys * d * e, "v": keys * dv * e}
    want = {name: read + more.get(name, 0) for name, read in atomic.reads.items()}
    del want["dq_acc"]
    assert got.reads == want
    assert got.writes == {name: n for name, n in atomic.writes.items() if name != "dq_acc"}


@given(problems, blocks, blocks)
def test_v3_backward_issues_what_its_loops_name(problem, m, n):
    e, d, dv = problem.element_bytes, problem.head_dim, problem.head_dim_v
    rows = sum(rows * len(visited) for rows, visited in walk(problem, m, n))
    seq, seq_kv, group = problem.seq, problem.seq_kv, problem.group
    reads = rows * ((d + dv) * e + 8) + seq * (2 * dv * e + 4 * d) + seq_kv * (d + dv) * e
    writes = rows * 4 * d + seq * (4 + 4 * d + e * d) + seq_kv * (d + dv) * e
    summed = 8 // group * seq_kv * (d + dv) * e if group > 1 else 0
    summed_reads = 8 * seq_kv * (d + dv) * e if group > 1 else 0
    asked = traffic.issued(problem, "v3", "bwd", one(m, n)).at(0)
    assert (asked.read, asked.write) == (8 * reads + summed_reads, 8 * writes + summed)


@given(
    problems.map(lambda problem: problem.with_(bias="dense")) | problems,
    blocks,
    blocks,
    st.sampled_from(
        [(algo, pass_) for algo in ("v1", "v2", "v3") for pass_ in ("fwd", "bwd")]
        + [("v2_ordered", "bwd"), ("v2_second_pass", "bwd")]
    ),
)
def test_dram_is_at_most_issued_and_tensors_add_up(problem, m, n, kind):
    (algo, pass_), tiles = kind, one(m, n)
    asked = traffic.issued(problem, algo, pass_, tiles)
    dram = traffic.dram(problem, gpus.load("a10"), algo, pass_, tiles, np.array([1]))
    assert dram.at(0).read <= asked.at(0).read
    assert dram.at(0).write <= asked.at(0).write
    assert asked.at(0).read == sum(asked.at(0).reads.values())
    assert asked.at(0).write == sum(asked.at(0).writes.values())


@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(0, 5),
)
def test_floor_sum(n, m, a, b, other):
    lanes = floor_sum(np.array([n, other]), np.array(m), np.array([a, a]), np.array([b, b]))
    assert list(lanes) == [sum((a * i + b) // m for i in range(k)) for k in (n, other)]


def test_counts_stay_exact_for_a_million_tokens():
    problem = Problem(seq=2**20, causal=True)
    seen = visits(problem, np.array([128]), np.array([96]))
    assert seen.steps[0] == sum(-(-(i + 1) * 128 // 96) for i in range(2**20 // 128))


# ---- reuse --------------------------------------------------------------------------------------


def test_keys_that_fit_the_l2_come_from_hbm_once():
    problem = Problem(batch=4, heads=16, seq=4096)
    tiles, blocks = one(128, 64), np.array([2])
    dram = traffic.dram(problem, gpus.load("h200"), "v2", "fwd", tiles, blocks)
    lse = problem.batch * problem.heads * problem.seq * 4
    assert dram.total[0] == compulsory(problem) + lse


def test_keys_that_overflow_the_l2_come_again():
    problem = Problem(batch=4, heads=16, seq=65536)
    tiles, blocks = one(128, 64), np.array([2])
    dram = traffic.dram(problem, gpus.load("a10"), "v2", "fwd", tiles, blocks)
    assert dram.total[0] > 2 * compulsory(problem)


def test_grouped_keys_are_compulsory_once_a_group():
    problem = Problem(heads=32, kv_heads=8, seq=8192, causal=True)
    dram = traffic.dram(problem, gpus.load("h200"), "v2", "fwd", one(128, 64), np.array([2]))
    assert dram.read[0] == 2 * 8192 * 128 * (32 + 8 + 8)


# ---- FLOPs --------------------------------------------------------------------------------------


def test_causal_halves_the_useful_flops():
    """Public report: 322 TFLOP/s on a 312 TFLOP/s GPU, because the masked half was counted."""
    problem = Problem(heads=32, seq=65536, causal=True)
    dense = flops.useful(problem.with_(causal=False), "fwd")
    assert dense == 4 * 32 * 65536**2 * 128
    assert flops.useful(problem, "fwd") / dense == (65536 + 1) / (2 * 65536)


def test_executed_flops_count_whole_tiles():
    problem = Problem(heads=32, seq=65536, causal=True)
    useful = flops.useful(problem, "fwd")
    executed = flops.executed(problem, "v2", "fwd", one(128, 64))[0]
    assert useful < executed < useful * (1 + (128 + 64) / 65536)
    standard = flops.executed(problem, "standard", "fwd", one(1, 1))[0]
    assert standard == flops.useful(problem.with_(causal=False), "fwd")


def test_flash_backward_multiplies_five_times():
    problem = Problem(seq=4096)
    pair = 16 * 4096**2 * 128
    assert flops.useful(problem, "bwd") == 8 * pair
    assert flops.executed(problem, "v2", "bwd", one(64, 64))[0] == 10 * pair
    assert flops.executed(problem, "standard", "bwd", one(64, 64))[0] == 8 * pair


def test_rows_lack_at_the_front_of_v3_forward_alone():
    problem = Problem(heads=1, seq=1000, causal=True)
    tiles = one(192, 128, warps=12)
    forward, backward = (flops.executed(problem, "v3", pass_, tiles)[0] for pass_ in ("fwd", "bwd"))
    ends = [min(1000, 192 * (i + 1) - 128) for i in range(6)], [192 * (i + 1) for i in range(6)]
    steps = [sum(-(-min(end, 1000) // 128) for end in each) for each in ends]
    assert forward == 4 * 128 * steps[0] * 192 * 128
    assert backward == 10 * 128 * steps[1] * 192 * 128


@pytest.mark.parametrize(
    ("seq", "seq_kv", "d", "expected"),
    [(4096, 4096, 40, 42.95), (1024, 1024, 80, 5.37), (256, 256, 160, 0.671), (64, 64, 160, 0.042)],
)
def test_stable_diffusion(seq, seq_kv, d, expected):
    problem = Problem(batch=2, heads=8, seq=seq, seq_kv=seq_kv, head_dim=d)
    assert flops.useful(problem, "fwd") / 1e9 == pytest.approx(expected, rel=0.01)


def test_llama3_8b_layer():
    problem = Problem(heads=32, kv_heads=8, seq=8192, dtype="bf16", causal=True)
    assert flops.useful(problem, "fwd") == 549_822_922_752


def test_a_window_keeps_one_percent_of_the_pairs():
    assert visible_pairs(Problem(seq=40320, head_dim=2, window=(256, 256))) == 20_618_368

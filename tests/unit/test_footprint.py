"""Shared memory, registers and HBM against published kernels and hand arithmetic."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu as gpus
from fasim.candidates import candidates
from fasim.legality import Case, legal
from fasim.model import footprint
from fasim.model.occupancy import residency
from fasim.model.tiles import Tiles, padded
from fasim.plan import V3_TAIL_BYTES, Tile, v3_layout
from fasim.problem import Problem

KIB, MIB, GIB = 2**10, 2**20, 2**30
FORMS = ("", "_ordered", "_second_pass")  # of V2's backward pass


def one(**fields):
    return Tiles.of([Tile(**fields)])


# d, dv, block_q, block_kv, stages: tiles of Q, parts of O, more of K, bytes of the tiles.
V3_LAYOUTS = [
    (64, 64, 192, 128, 2, (2, 1, 0), 2 * 24_576 + 24_576 + 2 * 32_768),
    (40, 40, 192, 128, 2, (2, 1, 0), 2 * 24_576 + 24_576 + 2 * 32_768),  # whole slabs of 64 columns
    (128, 128, 128, 128, 2, (1, 1, 1), 32_768 + 32_768 + 3 * 32_768 + 2 * 32_768),  # Q is kept
    (128, 128, 128, 144, 2, (1, 1, 0), 32_768 + 32_768 + 2 * 73_728),
    (128, 128, 128, 176, 2, (1, 2, 0), 32_768 + 16_384 + 2 * 90_112),
    (192, 192, 128, 96, 2, (1, 3, 0), 49_152 + 16_384 + 2 * 73_728),
    (256, 256, 128, 64, 2, (1, 2, 0), 65_536 + 32_768 + 2 * 65_536),
    (64, 256, 128, 96, 2, (2, 1, 0), 2 * 16_384 + 65_536 + 2 * 61_440),
    (64, 256, 128, 112, 2, (1, 1, 0), 16_384 + 65_536 + 2 * 71_680),
]


@pytest.mark.parametrize(("d", "dv", "m", "n", "stages", "layout", "expected"), V3_LAYOUTS)
def test_v3_lays_out_what_fits(d, dv, m, n, stages, layout, expected):
    """Two tiles of Q where there is room, or one that leaves for registers, and a third K; O in
    parts where there is little."""
    problem = Problem(head_dim=d, head_dim_v=dv, dtype="bf16")
    tile = Tile(block_q=m, block_kv=n, stages=stages, warps=m // 16)
    assert v3_layout(problem, tile) == layout
    used = footprint.smem_bytes(problem, "v3", "fwd", Tiles.of([tile]))[0]
    assert used == expected + V3_TAIL_BYTES


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 0),
        ({"window": (9, 0)}, 12),
        ({"softcap": 30.0}, 0),
        ({"bias": "alibi", "varlen": True}, 16),
        ({"bias": "dense_fp32"}, 12 + 24),
        ({"bias": "dense", "softcap": 30.0}, 12 + 40),
    ],
)
def test_options_of_v3_keep_registers(options, kept):
    tiles = one(block_q=192, block_kv=128, stages=2, warps=12)
    plain = footprint.registers(Problem(), "v3", "fwd", tiles)[0]
    assert footprint.registers(Problem(**options), "v3", "fwd", tiles)[0] == plain + kept


def test_v3_keeps_q_where_registers_are_left():
    """A quarter of a register a column; not beside a dense bias, nor in three consumers."""
    two = one(block_q=128, block_kv=128, stages=2, warps=8)
    three = one(block_q=192, block_kv=128, stages=2, warps=12)
    for dtype in ("fp16", "bf16"):
        kept, plain = (
            footprint.registers(Problem(dtype=dtype), "v3", "fwd", t)[0] for t in (two, three)
        )
        assert kept == plain + 128 // 4
    dense = footprint.registers(Problem(bias="dense"), "v3", "fwd", two)[0]
    assert dense == footprint.registers(Problem(bias="dense"), "v3", "fwd", three)[0]


def test_v1_backward_holds_one_tile_of_everything():
    """K and V; Q and dO with L and D; dS."""
    tiles = one(block_q=64, block_kv=128, stages=1, warps=8)
    used = footprint.smem_bytes(Problem(head_dim=128), "v1", "bwd", tiles)[0]
    assert used == 2 * (128 * 256 + 64 * 256 + 64 * 128) + 64 * 8
    shared = one(block_q=64, block_kv=128, stages=1, warps=8, p_in="shared")
    more = footprint.smem_bytes(Problem(head_dim=128), "v1", "bwd", shared)[0] - used
    assert more == 2 * 64 * 128  # P


@pytest.mark.parametrize("stages", [1, 2])
def test_addresses_of_long_rows_give_way_beside_few_scores(stages):
    """32 rows of 160 columns and 32 scores each leave just what the rest needs; not on Blackwell,
    not in fp32, not beside more scores."""
    tiles = one(block_q=128, block_kv=32, stages=stages, warps=4)
    problem, kept = Problem(head_dim=160), 8 * stages
    needed = footprint.registers(problem, "v2", "fwd", tiles, (9, 0))[0]
    assert needed == 160 + 32 + footprint.FRAGMENTS + footprint.BASE_REGISTERS
    assert footprint.registers(problem, "v2", "fwd", tiles, (12, 0))[0] == needed + kept
    fp32 = footprint.registers(problem.with_(dtype="fp32", scale=None), "v2", "fwd", tiles)[0]
    assert fp32 == needed + kept + footprint.FP32_REGISTERS
    more = one(block_q=128, block_kv=48, stages=stages, warps=4)
    assert footprint.remade_registers(problem, more)[0] == 0


@pytest.mark.parametrize(("p_in", "stages"), [("registers", 2), ("shared", 3)])
def test_a_second_pass_shares_ds_only_where_warps_share_keys(p_in, stages):
    tiles = one(block_q=64, block_kv=128, stages=stages, warps=8, p_in=p_in)
    used = {name: footprint.smem_bytes(Problem(), f"v2{name}", "bwd", tiles)[0] for name in FORMS}
    assert used[""] == used["_ordered"]
    assert used[""] - used["_second_pass"] == (2 * 64 * 128 * 2 if p_in == "registers" else 0)


def test_what_dq_needs_in_hbm():
    problem = Problem(pass_="bwd", seq=1000, head_dim=64)
    need = {name: footprint.hbm(problem, f"v2{name}", "bwd").workspace for name in FORMS}
    rows = 16 * 1024
    assert need[""] - need["_second_pass"] == rows * 64 * 4
    assert need["_ordered"] - need[""] == 4 * (rows // footprint.MMA_ROWS + 1)


@pytest.mark.parametrize(
    ("d", "dv", "m", "n", "expected"),
    [
        (64, 64, 64, 128, (2 * 128 * 64 + 4 * 64 * 64 + 2 * 64 * 128) * 2 + 4 * 64 * 4),
        (40, 96, 32, 64, (64 * (48 + 96) + 2 * 32 * (48 + 96) + 2 * 32 * 64) * 2 + 4 * 32 * 4),
    ],
)
def test_v2_backward_shared_memory_by_hand(d, dv, m, n, expected):
    """K and V, two tiles of Q and dO, two of dS, L and D of two tiles."""
    tiles = one(block_q=m, block_kv=n, stages=2, warps=4)
    problem = Problem(head_dim=d, head_dim_v=dv)
    assert footprint.smem_bytes(problem, "v2", "bwd", tiles)[0] == expected


def test_shared_memory_where_four_warps_share_keys():
    """K and V, two tiles of Q and dO, two of dS and one of P, L and D of two tiles."""
    tiles = one(block_q=64, block_kv=64, stages=2, warps=8, p_in="shared", sharers=4)
    used = footprint.smem_bytes(Problem(head_dim=256), "v2", "bwd", tiles)[0]
    assert used == (3 * 64 * 512 + 3 * 64 * 64) * 2 + 2 * 64 * 8


@pytest.mark.parametrize(
    ("d", "dv", "dtype", "tile", "accumulators"),
    [
        # 16 keys a warp: dK and dV, S of 32 queries, dP of as many
        (128, 128, "bf16", {"block_q": 64, "block_kv": 64, "warps": 4}, 16 * 256 + 32 * 32),
        # two warps to 32 keys, half of the columns each; dP of 16 keys at a time
        (128, 128, "bf16", {"block_q": 64, "block_kv": 64, "warps": 4, "p_in": "shared"},
         32 * 128 + (32 + 16) * 32),
        # two warps to 16 keys, 16 queries each
        (256, 256, "bf16", {"block_q": 32, "block_kv": 64, "warps": 8, "p_in": "shared"},
         16 * 256 + 32 * 16),
        # four warps to 32 keys, a quarter of the columns and 16 queries each
        (256, 256, "bf16",
         {"block_q": 64, "block_kv": 64, "warps": 8, "p_in": "shared", "sharers": 4},
         32 * 128 + 32 * (16 + 16)),
        # 11 and 3 blocks of 16 columns: 6 and 2 for the first warp
        (176, 48, "fp32", {"block_q": 16, "block_kv": 32, "warps": 4, "p_in": "shared"},
         16 * 16 * 8 + 32 * 8),
    ],
)  # fmt: skip
def test_v2_backward_registers_by_hand(d, dv, dtype, tile, accumulators):
    problem, tiles = Problem(head_dim=d, head_dim_v=dv, dtype=dtype), one(**tile)
    needed = footprint.registers(problem, "v2", "bwd", tiles)[0]
    assert needed == accumulators // 32 + footprint.V2_BACKWARD_REGISTERS
    capped = footprint.registers(problem.with_(softcap=1.0), "v2", "bwd", tiles)[0]
    more = footprint.BACKWARD_OPTION_REGISTERS["softcap"]
    assert capped == min(needed + more, footprint.MOST_REGISTERS)


def test_v3_backward_shared_memory_is_that_of_fa4():
    tiles = one(block_q=80, block_kv=128, stages=2, warps=8)
    used = footprint.smem_bytes(Problem(head_dim=128), "v3", "bwd", tiles)[0]
    assert used == 208_896 + footprint.BARRIER_BYTES


@given(
    st.sampled_from(["fp32", "fp16", "bf16"]),
    st.integers(1, 256),
    st.integers(1, 256),
    st.sampled_from([16, 64, 128]),
    st.sampled_from([16, 48, 256]),
    st.sampled_from([1, 2]),
)
def test_v1_v2_shared_memory_by_hand(dtype, d, dv, m, n, stages):
    problem = Problem(head_dim=d, head_dim_v=dv, dtype=dtype)
    (wide_q, wide_v), e = (padded(n, dtype) for n in (d, dv)), problem.element_bytes
    wide = max(wide_q, wide_v)
    tiles = one(block_q=m, block_kv=n, stages=stages)
    v1, v2 = (footprint.smem_bytes(problem, algo, "fwd", tiles)[0] for algo in ("v1", "v2"))
    assert v1 == e * (m * wide + n * (wide_q + wide_v))
    assert v2 == e * wide * (m + 2 * stages * n)


@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("d", "dv"), [(128, 128), (64, 40), (33, 256), (256, 16)])
def test_v2_shared_memory_in_e4m3_by_hand(d, dv, out_dtype):
    """O leaves through Q's tile, which is as wide as O then is; K and V have a byte an element."""
    problem = Problem(head_dim=d, head_dim_v=dv, dtype="e4m3", out_dtype=out_dtype)
    wide_q, wide_v = -(-d // 32) * 32, -(-dv // 32) * 32
    tiles = one(block_q=64, block_kv=96, stages=2)
    used = footprint.smem_bytes(problem, "v2", "fwd", tiles)[0]
    o_row = wide_v * problem.out_bytes
    assert used == 64 * max(wide_q, o_row) + 4 * 96 * max(wide_q, wide_v)


@pytest.mark.parametrize(
    ("d", "m", "n", "accumulators"),
    [(64, 128, 112, 64 + 112), (128, 128, 64, 128 + 64), (256, 64, 64, 128 + 32)],
)
def test_registers_hold_the_accumulators_of_four_warps(d, m, n, accumulators):
    used = footprint.registers(Problem(head_dim=d), "v2", "fwd", one(block_q=m, block_kv=n))[0]
    assert accumulators < used <= accumulators + 66


def needs(problem, algo="v1", **tile):
    return int(footprint.registers(problem, algo, "fwd", one(**tile))[0])


@pytest.mark.parametrize("block_kv", [64, 128, 512, 1024])
@pytest.mark.parametrize(("block_q", "rows"), [(64, 16), (128, 32)])
def test_v1_scores_a_step_at_a_time(block_q, rows, block_kv):
    """Registers follow the step, not the block: 32 more keys a step are so many more scores."""
    problem = Problem(head_dim=32)
    short, long = (needs(problem, block_q=block_q, block_kv=block_kv, step_kv=s) for s in (32, 64))
    assert short == needs(problem, block_q=block_q, block_kv=64, step_kv=32)
    assert long == needs(problem, block_q=block_q, block_kv=64, step_kv=64)
    assert rows <= long - short <= 2 * rows
    whole = needs(problem, block_q=block_q, block_kv=block_kv)
    assert whole >= rows * (32 + block_kv) // 32 + 52
    assert (whole > 255) == (block_kv >= 512 or rows * block_kv > 2048)


def test_v1_needs_what_it_takes_by_itself():
    """88 registers and 1.2 an accumulator (fp32: 2.6), up to a multiple of 8; V2 needs fewer."""
    tile = {"block_q": 64, "block_kv": 64, "step_kv": 32}
    assert needs(Problem(head_dim=32), **tile) == 128  # 88 + 1.2 x 16 x (32 + 32) / 32
    assert needs(Problem(head_dim=32, dtype="fp32"), **tile) == 176
    assert needs(Problem(head_dim=64), **tile) == 152
    assert needs(Problem(head_dim=64, dtype="fp32"), **tile) == 216
    assert needs(Problem(head_dim=192), **tile) == 255
    v2 = {"block_q": 64, "block_kv": 32}
    assert needs(Problem(head_dim=64), "v2", **v2) == 48 + 16 + 41


mma_problems = st.builds(
    lambda d, dv, dtype, causal: Problem(head_dim=d, head_dim_v=dv, dtype=dtype, causal=causal),
    st.integers(1, 256),
    st.integers(1, 256),
    st.sampled_from(["fp32", "fp16", "bf16"]),
    st.booleans(),
)
mma_tiles = st.builds(
    lambda warps, rows, steps, stages: Tile(
        block_q=warps * rows, block_kv=32 * steps, stages=stages, warps=warps
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([16, 32]),
    st.integers(1, 8),
    st.sampled_from([1, 2]),
)
mma_algos = st.sampled_from(["v1", "v2"])


@given(mma_problems, mma_algos, mma_tiles, st.integers(24, 255))
def test_a_grant_lies_between_need_and_cap(problem, algo, tile, cap):
    tiles = Tiles.of([tile])
    needed = footprint.registers(problem, algo, "fwd", tiles)[0]
    granted = footprint.granted(problem, algo, "fwd", tiles, np.array([cap]))[0]
    assert min(needed, cap) <= granted <= cap


def test_a_grant_is_what_the_compiler_wants_where_there_is_room():
    """62 and 1.17 an accumulator, up to a multiple of 8; the need is 48 + 4 + 8 + 40."""
    tiles = one(block_q=64, block_kv=32)
    caps = [255, 120, 119, 100, 99]
    granted = [
        footprint.granted(Problem(head_dim=64), "v2", "fwd", tiles, np.array([cap]))[0]
        for cap in caps
    ]
    assert granted == [120, 120, 119, 100, 99]


@given(mma_problems, mma_algos, mma_tiles, st.integers(24, 255))
def test_a_grant_grows_with_the_accumulators(problem, algo, tile, cap):
    """More keys a step or a longer row of O never cost registers."""

    def granted(head_dim_v, keys):
        tiles = Tiles.of([replace(tile, block_kv=keys)])
        wider = problem.with_(head_dim_v=head_dim_v)
        return footprint.granted(wider, algo, "fwd", tiles, np.array([cap]))[0]

    dv, keys = problem.head_dim_v, tile.block_kv
    assert granted(dv, keys) <= granted(dv, keys + 32)
    assert granted(dv, keys) <= granted(min(dv + 16, 256), keys)


@pytest.mark.parametrize(("algo", "pass_"), [("v3", "bwd"), ("v3", "fwd")])
def test_v3_kernels_are_granted_what_they_need(algo, pass_):
    tiles = one(block_q=64, block_kv=64)
    needed = footprint.registers(Problem(), algo, pass_, tiles)
    assert (footprint.granted(Problem(), algo, pass_, tiles, np.array([255])) == needed).all()


@pytest.mark.parametrize("algo", ["v1", *(f"v2{name}" for name in FORMS)])
def test_v1_and_v2_backward_are_granted_all_there_is_room_for(algo):
    tiles = one(block_q=64, block_kv=64)
    assert footprint.granted(Problem(), algo, "bwd", tiles, np.array([255])) == [255]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("algo", ["v1", "v2"])
@pytest.mark.parametrize("name", ["a100-80gb", "4090", "h200"])
def test_every_legal_tile_is_granted_its_need_within_its_share(name, algo, dtype):
    problem, gpu = Problem(head_dim=64, dtype=dtype, causal=True), gpus.load(name)
    case = Case.of(problem, gpu, algo, "fwd", candidates(problem, gpu, algo, "fwd"))
    kept = case.take(legal(case))
    assert len(kept) > 10
    assert (kept.tiles.registers >= kept.registers).all()
    used = kept.tiles.registers * kept.threads * kept.blocks_per_sm
    assert (used <= gpu.registers_per_sm).all()
    assert (kept.tiles.registers <= gpu.registers_per_thread).all()
    blocks, _ = residency(gpu, kept.threads, kept.tiles.registers, kept.smem)
    assert (blocks >= kept.blocks_per_sm).all()


def test_standard_attention_keeps_s_and_p_of_every_head():
    problem = Problem(heads=16, seq=32768, head_dim=64)
    assert footprint.hbm(problem, "standard", "fwd").s_and_p == 16 * (2 + 2) * GIB


@pytest.mark.parametrize(("seq", "standard_fits"), [(32768, False), (4096, True)])
def test_v100_runs_out_of_memory_only_with_standard_attention(seq, standard_fits):
    gpu = gpus.load("v100-32gb")
    problem = Problem(heads=16, seq=seq, head_dim=64)
    fits = {
        algo: footprint.hbm(problem, algo, "fwd").total <= footprint.budget(gpu)
        for algo in ("standard", "v1", "v2", "v3")
    }
    assert fits == {"standard": standard_fits, "v1": True, "v2": True, "v3": True}


def test_longest_standard_sequence_beside_a_reserve():
    problem = Problem(heads=16, head_dim=64)
    longest = footprint.max_seq(problem, "standard", "fwd", gpus.load("v100-32gb"), 14 * GIB)
    assert 16_700 <= longest <= 17_300


@given(
    st.sampled_from(["standard", "v1", "v2", "v3"]),
    st.sampled_from(["fwd", "bwd", "train"]),
    st.integers(1, 64),
    st.sampled_from([None, 77, 4096]),
)
def test_max_seq_is_the_edge(algo, pass_, batch, seq_kv):
    gpu = gpus.load("a10")
    problem = Problem(batch=batch, seq=4000, seq_kv=seq_kv)
    longest = footprint.max_seq(problem, algo, pass_, gpu)

    def fits(seq):
        moved = problem.with_(seq=seq, seq_kv=seq_kv or seq)
        return footprint.hbm(moved, algo, pass_).total <= footprint.budget(gpu)

    assert fits(longest)
    assert not fits(longest + 1)


def test_no_sequence_fits_beside_too_large_a_reserve():
    assert footprint.max_seq(Problem(), "v2", "fwd", gpus.load("a10"), 2**50) == 0


def test_training_saves_p_or_o_and_lse():
    problem = Problem(batch=2, heads=8, seq=2048, head_dim=64)
    rows = 2 * 8 * 2048
    assert footprint.hbm(problem, "standard", "train").saved == rows * 2048 * 2
    assert footprint.hbm(problem, "v2", "train").saved == rows * (64 * 2 + 4)


def test_training_needs_at_least_either_pass():
    problem = Problem(seq=8192)
    for algo in ("standard", "v1", "v2", "v3"):
        fwd, bwd, train = (footprint.hbm(problem, algo, p).total for p in ("fwd", "bwd", "train"))
        assert max(fwd, bwd) <= train < fwd + bwd


def test_a_window_saves_standard_attention_no_memory():
    """Public report: window 512 at 40,320 tokens of head_dim 2 still builds 48.45 GiB of scores."""
    problem = Problem(heads=16, seq=40320, head_dim=2, window=(256, 256))
    standard = footprint.hbm(problem, "standard", "fwd")
    flash = footprint.hbm(problem, "v2", "fwd")
    assert standard.s_and_p / 2 / GIB == pytest.approx(48.45, abs=0.005)
    assert flash.total / MIB == pytest.approx(9.84 + 2.46, abs=0.01)
    gpu = gpus.load("4090")
    assert standard.total > footprint.budget(gpu) > flash.total


def test_llama3_8b_layer():
    problem = Problem(heads=32, kv_heads=8, seq=8192, dtype="bf16", causal=True)
    assert footprint.compulsory(problem) == 160 * MIB
    assert footprint.hbm(problem, "standard", "fwd").s_and_p == 8 * GIB
    assert footprint.hbm(problem, "v2", "fwd").total == 161 * MIB


def test_hbm_total_is_the_sum_of_its_parts():
    need = footprint.HbmBytes(inputs=1, outputs=2, s_and_p=4, saved=8, workspace=16)
    assert need.total == 31


def test_budget_leaves_the_driver_its_share():
    gpu = gpus.load("h200")
    assert footprint.budget(gpu, 5) == pytest.approx(gpu.hbm_bytes - 0.6 * GIB - 5, abs=1)


def test_padding_is_to_sixteen():
    assert [padded(d, "fp16") for d in (1, 16, 40, 80, 255)] == [16, 16, 48, 80, 256]
    assert [padded(d, "e4m3") for d in (1, 32, 40, 80, 255)] == [32, 32, 64, 96, 256]
    assert math.isclose(1 - 40 / padded(40, "fp16"), 1 / 6)


def on(gpu, problem, algo="v2", **tile):
    capability = gpus.load(gpu).compute_capability
    return int(footprint.registers(problem, algo, "fwd", one(**tile), capability)[0])


def test_before_ampere_copies_pass_through_registers():
    """16 registers, and one for each of more than 56 keys whose weights are rounded one by one."""
    for keys, more in ((32, 16), (64, 24), (128, 88)):
        tile = {"block_q": 64, "block_kv": keys}
        assert (
            on("t4", Problem(head_dim=64), **tile)
            == needs(Problem(head_dim=64), "v2", **tile) + more
        )
    fp32, tile = Problem(head_dim=64, dtype="fp32"), {"block_q": 64, "block_kv": 64}
    assert on("t4", fp32, **tile) == needs(fp32, "v2", **tile) + 16


def test_v1_on_turing_gets_what_there_is():
    tile = {"block_q": 128, "block_kv": 64, "step_kv": 32}
    assert on("t4", Problem(head_dim=32), "v1", **tile) == needs(Problem(head_dim=32), **tile) + 16
    assert (
        on("t4", Problem(head_dim=96), "v1", **tile) == needs(Problem(head_dim=96), **tile) == 255
    )
    assert (
        on("t4", Problem(head_dim=128), "v1", **tile) > 255 >= needs(Problem(head_dim=112), **tile)
    )


def test_sums_of_an_e4m3_tile_by_architecture():
    """Half a register a key on Hopper, a quarter on Blackwell, and what columns of O take."""
    tile = {"block_q": 64, "block_kv": 64}
    for d, ada, hopper, blackwell in ((64, 0, 64, 24), (128, 0, 88, 40), (192, 24, 80, 48)):
        problem = Problem(head_dim=d, dtype="e4m3")
        plain = 16 * (d + 64) // 32 + 16 + 41 + 8 * (d > 128)
        assert on("4090", problem, **tile) == plain + ada
        assert on("h200", problem, **tile) == plain + hopper
        assert on("5090", problem, **tile) == on("b200", problem, **tile) == plain + blackwell

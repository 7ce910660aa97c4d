"""What the planner chooses, refuses and explains."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu as gpus
from fasim import planner
from fasim.errors import NoPlanError, UsageError
from fasim.legality import Case, broken, sentence
from fasim.model import traffic
from fasim.model.tiles import Tiles
from fasim.plan import FORMS, Plan, Tile, keeps_q
from fasim.problem import Problem

GIB = 2**30
GPT2 = Problem(batch=64, heads=16, seq=1024, head_dim=64)


def verdict(problem, gpu, algo, tile, pass_="fwd"):
    """The sentence of the first rule a tile breaks; empty if it is legal."""
    case = Case.of(problem, gpus.load(gpu), algo, pass_, Tiles.of([tile]))
    place = int(broken(case)[0])
    try:
        return sentence(case, 0, place)
    except IndexError:
        return ""


# ---- V3 against FlashAttention-3's table ---------------------------------------------------------

# dtype, d, dv, M, N of the table, and what our layout lacks for it: FlashAttention-3 keeps P in
# shared memory where registers are few, and lets O leave through Q's tile.
FA3 = [
    ("bf16", 64, 64, 192, 192, "registers 208 per thread exceed 160"),
    ("bf16", 64, 256, 128, 96, ""),
    ("bf16", 96, 96, 192, 144, "registers 188 per thread exceed 160"),
    ("bf16", 128, 128, 128, 176, ""),
    ("bf16", 192, 128, 128, 128, ""),
    ("bf16", 192, 192, 128, 112, "shared memory 233.0 KiB exceeds 227.0 KiB"),
    ("bf16", 256, 256, 128, 80, "shared memory 241.0 KiB exceeds 227.0 KiB"),
    ("e4m3", 64, 64, 192, 160, "block_kv 160 is not one slab of 128 keys of V"),
    ("e4m3", 96, 96, 192, 128, ""),
    ("e4m3", 128, 128, 128, 224, "block_kv 224 is not one slab of 128 keys of V"),
    ("e4m3", 192, 192, 128, 160, "block_kv 160 is not one slab of 128 keys of V"),
    ("e4m3", 256, 256, 128, 128, ""),
]
WITHIN = 1.05  # of the best prediction
KEPT_GAIN = 1.03  # measured of Q in registers, for which FlashAttention-3's wider tiles have none


def v3_tile(m, n):
    return Tile(block_q=m, block_kv=n, warps=m // 16, stages=2)


@pytest.mark.parametrize(("dtype", "d", "dv", "m", "n", "why"), FA3)
def test_published_fa3_tiles_are_legal_or_say_why(dtype, d, dv, m, n, why):
    problem = Problem(head_dim=d, head_dim_v=dv, dtype=dtype)
    assert verdict(problem, "h200", "v3", v3_tile(m, n)) == why
    step = 32 if dtype == "e4m3" else 16
    if not why:
        assert verdict(problem, "h200", "v3", v3_tile(m, n + step)) != ""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [case for case in FA3 if case[0] == "bf16" and not case[-1]])
def test_published_fa3_tiles_are_among_the_best(case, causal):
    dtype, d, dv, m, n, _ = case
    problem = Problem(seq=16384, head_dim=d, head_dim_v=dv, dtype=dtype, causal=causal)
    theirs = planner.plan(problem, gpus.load("h200"), "v3", v3_tile(m, n)).time.seconds
    best = planner.plan(problem, gpus.load("h200"), "v3")
    kept = keeps_q(problem, best.tile) and not keeps_q(problem, v3_tile(m, n))
    assert theirs <= WITHIN * best.time.seconds * (KEPT_GAIN if kept else 1)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (255, 0)},
        {"softcap": 30.0, "causal": True},
        {"bias": "alibi", "causal": True},
        {"bias": "dense"},
        {"bias": "dense_fp32", "softcap": 30.0},
        {"varlen": True, "causal": True},
        {"dtype": "e4m3", "varlen": True, "scales": "block"},
        {"dtype": "e4m3", "bias": "dense_fp32", "head_dim": 192, "window": (63, 64)},
        {"dtype": "e4m3", "bias": "dense", "in_dtype": "fp16", "scales": "head"},
        {"dtype": "e4m3", "head_dim": 33, "head_dim_v": 65, "softcap": 30.0},
    ],
    ids=str,
)
def test_v3_is_generated_with_every_option(options):
    problem = Problem(**{"seq": 4096, "dtype": "bf16", **options})
    entry = planner.plan(problem, gpus.load("h200"), "v3")
    assert entry.generable, entry.reason
    assert Plan.from_json(entry.plan.to_json()) == entry.plan


def test_a_dense_bias_has_no_room_in_e4m3_beside_256_columns():
    problem = Problem(seq=4096, dtype="e4m3", bias="dense_fp32", head_dim=256)
    with pytest.raises(NoPlanError, match="registers 260 per thread exceed 240"):
        planner.plan(problem, gpus.load("h200"), "v3")


@pytest.mark.parametrize(
    ("dims", "names"), [((33, 33), "Q, K, V, O"), ((33, 64), "Q, K"), ((64, 100), "V, O")]
)
def test_a_plan_says_which_rows_v3_pads(dims, names):
    problem = Problem(seq=512, head_dim=dims[0], head_dim_v=dims[1])
    entry = planner.plan(problem, gpus.load("h200"), "v3")
    moved = traffic.padding(problem).total / 1e6
    said = [reason for reason in entry.reasons if "TMA takes rows of whole 16 bytes" in reason]
    assert len(said) == 1
    assert f"{names} go through padded copies, {moved:.1f} MB" in said[0]
    wide = planner.plan(Problem(seq=512, head_dim=64), gpus.load("h200"), "v3")
    assert not any("padded" in reason for reason in wide.reasons)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"dtype": "e4m3", "out_dtype": "fp32"},
            "v3 with fp32 output is planned, not generated yet",
        ),
        ({"varlen": True, "bias": "dense"}, "a dense bias of packed sequences has no layout yet"),
        (
            {"dtype": "e4m3", "bias": "dense"},
            "a dense bias in e4m3 is too coarse: --bias dense_fp32 is exact",
        ),
    ],
)
def test_what_v3_is_not_generated_for_says_why(changes, why):
    entry = planner.plan(Problem(seq=4096, **changes), gpus.load("h200"), "v3")
    assert (entry.generable, entry.reason) == (False, why)


# ---- legality: one sentence each -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "gpu", "problem", "tile", "expected"),
    [
        ("v2", "a100-80gb", {"head_dim": 64}, {"block_q": 256, "block_kv": 64},
         "registers # per thread exceed 255"),
        ("v2", "a100-80gb", {"head_dim": 256}, {"block_q": 128, "block_kv": 64},
         "registers # per thread exceed 255"),
        ("v2", "a100-80gb", {"head_dim": 192}, {"block_q": 128, "block_kv": 64},
         "registers # per thread exceed 255"),
        ("v2", "a100-80gb", {"head_dim": 256}, {"block_q": 128, "block_kv": 64, "stages": 2},
         "shared memory 192.0 KiB exceeds 163.0 KiB"),
        ("v2", "a100-80gb", {}, {"block_q": 100, "block_kv": 64},
         "block_q 100 is no multiple of 16 rows x 4 warps = 64"),
        ("v2", "a100-80gb", {}, {"block_q": 64, "block_kv": 24},
         "block_kv 24 is no multiple of the 16 keys of one fp16 matmul step"),
        ("v2", "a100-80gb", {"head_dim": 16}, {"block_q": 192, "block_kv": 16},
         "48 rows per warp are not 16 or 32"),
        ("v2", "h200", {}, {"block_q": 128, "block_kv": 64, "step_kv": 32},
         "step_kv 32 differs from block_kv 64"),
        ("v1", "h200", {}, {"block_q": 64, "block_kv": 64, "stages": 2},
         "2 stages, but v1 copies and computes in turn"),
        ("v1", "h200", {}, {"block_q": 64, "block_kv": 96, "step_kv": 64},
         "block_kv 96 is not two or more whole steps of 64 keys, themselves a multiple of 16"),
        ("v1", "h200", {}, {"block_q": 64, "block_kv": 32, "step_kv": 32},
         "block_kv 32 is not two or more whole steps of 32 keys, themselves a multiple of 16"),
        ("v1", "h200", {}, {"block_q": 64, "block_kv": 96, "step_kv": 24},
         "block_kv 96 is not two or more whole steps of 24 keys, themselves a multiple of 16"),
        ("v1", "h200", {}, {"block_q": 64, "block_kv": 80},
         "block_kv 80 is not two or more whole steps of 80 keys, themselves a multiple of 16"),
        ("v1", "h200", {}, {"block_q": 64, "block_kv": 64, "step_kv": 32}, ""),
        ("v2", "h200", {"head_dim": 16}, {"block_q": 1024, "block_kv": 16, "warps": 64},
         "2048 threads exceed 1024 per block"),
        ("v3", "h200", {}, {"block_q": 192, "block_kv": 208, "warps": 12, "stages": 2},
         "shared memory 281.0 KiB exceeds 227.0 KiB"),
        ("v3", "h200", {}, {"block_q": 192, "block_kv": 128, "warps": 12, "stages": 2},
         "registers # per thread exceed 160"),
        ("v3", "h200", {"dtype": "e4m3"}, {"block_q": 128, "block_kv": 80, "warps": 8, "stages": 2},
         "block_kv 80 is no multiple of the 32 keys of one e4m3 matmul step"),
        ("v3", "h200", {"head_dim": 16}, {"block_q": 128, "block_kv": 272, "warps": 8},
         "block_kv 272 exceeds the 256 columns of a wgmma"),
        ("v3", "h200", {"dtype": "e4m3"}, {"block_q": 64, "block_kv": 128, "warps": 4},
         "4 consumer warps are not 2 to 3 warpgroups"),
        ("v3", "h200", {"head_dim": 64}, {"block_q": 64, "block_kv": 64, "warps": 4, "stages": 4},
         "3 blocks are to share an SM, and 2 of 89.0 KiB fit"),
        ("v3", "h200", {"head_dim": 16, "head_dim_v": 208},
         {"block_q": 192, "block_kv": 16, "warps": 12, "stages": 2},
         "a product needs 134 registers, and a thread starts with 128"),
        ("v3", "h200", {"head_dim": 64},
         {"block_q": 64, "block_kv": 64, "warps": 4, "stages": 2}, ""),
        ("v3", "h200", {}, {"block_q": 256, "block_kv": 64, "warps": 16},
         "16 consumer warps are not 1 to 3 warpgroups"),
        ("v3", "h200", {}, {"block_q": 192, "block_kv": 64, "warps": 8, "stages": 2},
         "block_q 192 is not 64 rows for each of 2 consumer warpgroups"),
        ("v2", "h200", {"batch": 2**20, "heads": 2**10, "seq": 512, "head_dim": 16},
         {"block_q": 64, "block_kv": 64}, "grid 8589934592 exceeds 2147483647 blocks"),
    ],
)  # fmt: skip
def test_the_rule_a_tile_breaks_says_so(algo, gpu, problem, tile, expected):
    said = verdict(Problem(**problem), gpu, algo, Tile(**tile))
    assert re.sub(r"registers \d+", "registers #", said) == expected


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize(("gpu", "limit"), [("4090", 99), ("3090", 99), ("a10", 99), ("t4", 64)])
def test_no_offered_tile_exceeds_shared_memory(gpu, limit, pass_):
    """Public report: kernels that need 131,074 bytes on cards that allow 101,376."""
    problem = Problem(seq=2048, causal=True, pass_=pass_)
    entry = planner.plan(problem, gpus.load(gpu), "v2", top=50)
    for offered in (entry, *entry.alternatives):
        assert 0 < offered.smem_bytes <= limit * 1024
    assert any("KiB exceeds" in why or "exceed" in why for _, why in entry.rejected)


def test_two_stages_fit_99_kib_and_three_do_not():
    fits, exceeds = (
        verdict(Problem(), "4090", "v2", Tile(block_q=128, block_kv=32, stages=s)) for s in (2, 5)
    )
    assert fits == ""
    assert exceeds == "shared memory 112.0 KiB exceeds 99.0 KiB"


# ---- choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "head_dim", "causal", "expected"),
    [
        ("a100-80gb", 64, False, "128x112"),
        ("a100-80gb", 128, False, "128x64"),
        ("3090", 128, True, "64x64"),
        ("3090", 128, False, "128x32"),
    ],
)
def test_fa2s_tile_is_the_best_or_ties_with_it(gpu, head_dim, causal, expected):
    """FlashAttention-2's choice, from its launch templates, is within 2.5 % of the best tile. Its
    128x128 at head_dim 64 is 128x112 here, where weights lie beside their scores. Under a causal
    mask it chose for an order of blocks whose end costs large tiles more."""
    problem = Problem(batch=8, heads=2048 // head_dim, seq=2048, head_dim=head_dim, causal=causal)
    block_q, block_kv = map(int, expected.split("x"))
    fa2s = Tile(block_q=block_q, block_kv=block_kv, warps=4)
    best = planner.plan(problem, gpus.load(gpu), "v2")
    theirs = planner.plan(problem, gpus.load(gpu), "v2", tile=fa2s)
    assert theirs.time.seconds <= 1.025 * best.time.seconds


def test_the_papers_tile():
    """M = 100 KiB of fp16 and d = 64: B_c = ceil(51200 / 256), B_r = d."""
    assert planner.paper_tile(51200, 64) == (64, 200)
    assert planner.paper_tile(51201, 64) == (64, 201)
    assert planner.paper_tile(16384, 128) == (32, 32)


def test_v1_tries_the_papers_tile():
    gpu = gpus.load("a100-80gb")
    paper = planner.rounded_paper_tile(GPT2, gpu)
    assert (paper.block_q, paper.block_kv) == (64, 320)  # 64 x 326 before rounding
    tried = planner.candidates(GPT2, gpu, "v1", "fwd")
    assert paper in [tried.tile(i) for i in range(len(tried))]
    assert verdict(GPT2, "a100-80gb", "v1", paper) == ""


@pytest.mark.parametrize(("tile", "issued"), [((64, 256), 2.61), ((128, 512), 1.23)])
def test_v1_judges_the_tiles_of_the_papers_plot(tile, issued):
    entry = planner.plan(GPT2, gpus.load("a100-80gb"), "v1", tile=tile)
    assert (entry.tile.block_q, entry.tile.block_kv) == tile
    assert entry.issued.total / 1e9 == pytest.approx(issued, rel=0.01)
    assert entry.paper / 1e9 == pytest.approx({256: 1.95, 512: 1.11}[tile[1]], rel=0.01)


def test_a_judged_tile_is_completed_never_changed():
    gpu = gpus.load("a100-80gb")
    entry = planner.plan(Problem(), gpu, "v2", tile=(128, 64))
    assert str(entry.tile) == "128x64"
    whole = Tile(block_q=64, block_kv=32, warps=2, stages=2)
    judged = planner.plan(Problem(), gpu, "v2", tile=whole).tile
    assert (judged.block_q, judged.block_kv, judged.warps, judged.stages) == (64, 32, 2, 2)


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        ((128, 24), "block_kv 24 is no multiple of the 16 keys"),
        ((1024, 64), "exceed"),
        (Tile(block_q=128, block_kv=64, warps=4, stages=5), "KiB exceeds"),
    ],
)
def test_an_illegal_tile_is_refused_with_the_rule(tile, why):
    with pytest.raises(NoPlanError) as refused:
        planner.plan(Problem(), gpus.load("a100-80gb"), "v2", tile=tile)
    assert why in refused.value.why


@pytest.mark.parametrize(
    "tile", [(0, 64), (128, 0), (-64, 64), Tile(block_q=128, block_kv=64, warps=0)]
)
def test_counts_must_be_positive(tile):
    with pytest.raises(UsageError, match="is not a tile"):
        planner.plan(Problem(), gpus.load("a100-80gb"), "v2", tile=tile)


# ---- what runs where -----------------------------------------------------------------------------


def reasons(gpu, **options):
    return {
        e.algo: (e.available, e.generable, e.reason)
        for e in planner.compare(Problem(**options), gpus.load(gpu))
    }


def test_v3_needs_a_hopper():
    for gpu in ("5090", "b200", "a100-80gb", "v100-32gb"):
        assert reasons(gpu)["v3"] == (
            False,
            False,
            "wgmma and TMA exist only on sm_90a",
        )
    assert reasons("h200")["v3"][0]


def test_v100_is_planned_not_generated():
    found = reasons("v100-32gb")
    for algo in ("v1", "v2"):
        available, generable, reason = found[algo]
        assert (available, generable) == (True, False)
        assert "m8n8k4" in reason
        assert "sm_70" in reason
    assert reasons("v100-32gb", dtype="bf16")["v2"] == (
        False,
        False,
        "v100-sxm2-32gb has no bf16 tensor cores",
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"varlen": True, "bias": "dense"}, "packed sequences"),
        ({"dtype": "e4m3", "scales": "block"}, "only V3 has scale factors of blocks"),
        ({"dtype": "e4m3", "bias": "dense"}, "--bias dense_fp32"),
        ({"pass_": "bwd", "varlen": True, "bias": "dense"}, "packed sequences"),
        ({"pass_": "bwd", "deterministic": True, "varlen": True, "bias": "dense"}, "dense bias"),
        ({"pass_": "train"}, "backward"),
    ],
)
def test_what_is_missing_is_named(options, word):
    available, generable, reason = reasons("4090", **options)["v2"]
    assert available
    assert not generable
    assert word in reason


def test_only_v3_quantises_its_inputs():
    found = reasons("h200", dtype="e4m3", in_dtype="bf16")
    assert found["v2"] == (False, False, "only V3 makes e4m3 of bf16 itself")
    assert found["v3"] == (True, True, "")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("gpu", ["a100-80gb", "a10", "l4", "h200", "b200", "5090"])
def test_v1_and_v2_are_generated_from_ampere_on(gpu, dtype):
    arch = "sm_{}{}".format(*gpus.load(gpu).compute_capability)
    for algo in ("v1", "v2"):
        entry = planner.plan(Problem(dtype=dtype, causal=True), gpus.load(gpu), algo)
        assert entry.generable
        assert entry.reason == ""
        assert entry.plan.kernel.arch == arch
        assert entry.plan.smem_bytes == entry.smem_bytes


def test_what_is_not_charged_is_said():
    """Standard attention's backward has no launch for the derivative of a softcap."""
    gpu = gpus.load("h200")
    plain = planner.plan(Problem(pass_="bwd"), gpu, "standard").assumed
    entry = planner.plan(Problem(softcap=30.0, pass_="bwd"), gpu, "standard")
    (sentence,) = set(entry.assumed) - set(plain)
    assert sentence == "softcap is charged forward only: backward is that without it"


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"bias": "dense"}, {"bias": "alibi"}])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_options_cost_time(options, pass_):
    gpu = gpus.load("h200")
    plain = planner.plan(Problem(pass_=pass_), gpu, "v2")
    entry = planner.plan(Problem(**options, pass_=pass_), gpu, "v2")
    assert entry.assumed == plain.assumed
    assert entry.time.terms["mufu"] > plain.time.terms["mufu"]
    assert entry.time.seconds > plain.time.seconds


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [1, 40, 80, 128, 176, 192, 240, 256])
@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_backward_kernels_reach_every_head_dim(gpu, head_dim, dtype):
    problem = Problem(head_dim=head_dim, dtype=dtype, pass_="bwd")
    entry = planner.plan(problem, gpus.load(gpu), "v2")
    assert entry.generable
    assert entry.smem_bytes <= gpus.load(gpu).smem_per_block


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("head_dim", [192, 224, 256])
def test_four_warps_share_keys_where_rows_are_long(head_dim, options):
    problem = Problem(heads=8, head_dim=head_dim, dtype="bf16", pass_="bwd", **options)
    entry = planner.plan(problem, gpus.load("h200"), "v2")
    assert str(entry.tile) == "64x64"
    assert (entry.tile.warps, entry.tile.sharing, entry.tile.stages) == (8, 4, 2)


@pytest.mark.parametrize(
    ("gpu", "options"),
    [
        ("h200", {"head_dim": 128, "dtype": "bf16"}),
        ("h200", {"head_dim": 256, "dtype": "fp32"}),
        ("a100-80gb", {"head_dim": 256, "dtype": "bf16"}),
    ],
)
def test_one_or_two_warps_share_keys_elsewhere(gpu, options):
    """Rows are short, are fp32, or two slots of 64 queries do not fit."""
    entry = planner.plan(Problem(**options, pass_="bwd"), gpus.load(gpu), "v2")
    assert entry.tile.sharing < 4


@pytest.mark.parametrize(
    ("algo", "dtype", "tile", "expected"),
    [
        ("v2", "fp16", {}, ""),
        ("v2", "fp32", {}, "4 warps share keys"),
        ("v1", "fp16", {"stages": 1}, "4 warps share keys"),
        ("v2", "fp16", {"p_in": "registers"}, "4 warps share keys"),
        ("v2", "fp16", {"sharers": 3}, "3 warps share keys"),
        ("v2", "fp16", {"stages": 3}, "3 stages, but a backward pass holds 2 tiles of Q"),
        ("v2", "fp16", {"block_q": 32}, "block_q 32 is no multiple of 16 and of 64"),
    ],
)
def test_what_four_warps_do_not_share_is_named(algo, dtype, tile, expected):
    four = {"block_q": 64, "block_kv": 64, "warps": 8, "stages": 2, "p_in": "shared"}
    mine = Tile(**{**four, "sharers": 4, **tile})
    said = verdict(Problem(head_dim=32, dtype=dtype), "h200", algo, mine, "bwd")
    assert said.startswith(expected)
    assert bool(said) == bool(expected)


def test_a_tile_to_judge_may_have_four_warps_to_its_keys():
    problem = Problem(head_dim=256, dtype="bf16", pass_="bwd")
    entry = planner.plan(problem, gpus.load("h200"), "v2", tile=(64, 64))
    assert entry.tile.frees
    assert planner.describe(entry.tile).endswith("P in shared, 4 warps share keys")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("algo", ["v1", "v2"])
def test_turing_has_forward_kernels(algo, dtype):
    entry = planner.plan(Problem(dtype=dtype, causal=True), gpus.load("t4"), algo)
    assert entry.generable
    assert entry.plan.kernel.arch == "sm_75"
    assert entry.smem_bytes <= 64 * 1024


def test_what_turing_lacks_is_named():
    assert reasons("t4", dtype="bf16")["v2"] == (False, False, "t4 has no bf16 tensor cores")
    assert reasons("t4", dtype="e4m3")["v2"] == (False, False, "t4 has no e4m3 tensor cores")
    available, generable, reason = reasons("t4", pass_="bwd", head_dim=64)["v2"]
    assert (available, generable) == (True, False)
    assert reason == "backward kernels start at compute capability 8.0, t4 has 7.5"


@pytest.mark.parametrize("scales", ["tensor", "head"])
@pytest.mark.parametrize("gpu", ["4090", "l4", "l40s", "5090", "h200"])
def test_v2_is_generated_in_e4m3_where_tensor_cores_take_it(gpu, scales):
    problem = Problem(dtype="e4m3", scales=scales, causal=True)
    entry = planner.plan(problem, gpus.load(gpu), "v2")
    assert entry.generable
    kernel = entry.plan.kernel
    assert (kernel.dtype, kernel.out_dtype, kernel.scales) == ("e4m3", "bf16", scales)
    assert kernel.tile.block_kv % 32 == 0


def test_e4m3_pays_on_ada_and_not_by_mma_sync_on_hopper():
    """Hopper emulates the instruction: V2 in e4m3 is slower than in bf16 there, and not chosen."""
    problem = Problem(heads=32, seq=8192)
    for gpu, pays in (("4090", True), ("l40s", True), ("h200", False)):
        e4m3, bf16 = (
            planner.plan(problem.with_(dtype=d), gpus.load(gpu), "v2").time.seconds
            for d in ("e4m3", "bf16")
        )
        assert (e4m3 < bf16) == pays
    assert planner.plan(problem.with_(dtype="e4m3"), gpus.load("h200")).algo == "v3"
    assert planner.plan(problem.with_(dtype="e4m3"), gpus.load("4090")).algo == "v2"


@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0)},
        {"softcap": 30.0, "bias": "alibi"},
        {"bias": "dense_fp32", "causal": True},
        {"varlen": True},
    ],
)
def test_backward_kernels_have_every_option(options):
    assert planner.plan(Problem(**options, pass_="bwd"), gpus.load("4090"), "v2").generable


@pytest.mark.parametrize("algo", ["standard", "v1", "v2"])
@pytest.mark.parametrize("pass_", ["fwd", "train"])
def test_varlen_is_charged_as_the_longest(algo, pass_):
    gpu = gpus.load("h200")
    plain = planner.plan(Problem(pass_=pass_), gpu, algo)
    entry = planner.plan(Problem(varlen=True, pass_=pass_), gpu, algo)
    assert set(entry.assumed) - set(plain.assumed) == {
        "varlen: every sequence is charged as the longest"
    }


@pytest.mark.parametrize("algo", ["v1", "v2"])
def test_softcap_costs_time_and_a_dense_bias_memory_too(algo):
    gpu, problem = gpus.load("h200"), Problem(heads=4, seq=2048)
    plain = planner.plan(problem, gpu, algo, tile=(64, 64))
    capped = planner.plan(problem.with_(softcap=50.0), gpu, algo, tile=(64, 64))
    biased = planner.plan(problem.with_(bias="dense"), gpu, algo, tile=(64, 64))
    assert capped.time.seconds > plain.time.seconds
    assert biased.time.seconds > plain.time.seconds
    assert biased.hbm.total - plain.hbm.total == 4 * 2048 * 2048 * 2
    assert biased.dram.read - plain.dram.read == 4 * 2048 * 2048 * 2


def test_compare_has_four_entries_and_auto_takes_the_fastest():
    gpu, problem = gpus.load("h200"), Problem(batch=4)
    entries = planner.compare(problem, gpu)
    assert [e.algo for e in entries] == ["standard", "v1", "v2", "v3"]
    fastest = min((e for e in entries if e.available), key=lambda e: e.time.seconds)
    assert planner.plan(problem, gpu).algo == fastest.algo == "v3"


def test_auto_skips_what_does_not_fit():
    entry = planner.plan(Problem(seq=32768, head_dim=64), gpus.load("v100-32gb"))
    assert entry.algo == "v2"


def test_v100_memory_story():
    gpu = gpus.load("v100-32gb")
    long = {e.algo: e for e in planner.compare(Problem(seq=32768, head_dim=64), gpu)}
    assert [long[a].fits for a in ("standard", "v1", "v2")] == [False, True, True]
    assert long["standard"].hbm.s_and_p == 64 * GIB
    assert all(e.fits for e in planner.compare(Problem(seq=4096, head_dim=64), gpu))
    tight = planner.compare(Problem(seq=4096, head_dim=64), gpu, reserve=14 * GIB)[0]
    assert tight.max_seq == pytest.approx(17_000, rel=0.02)


def test_what_does_not_fit_is_refused_with_both_sizes():
    with pytest.raises(NoPlanError) as refused:
        planner.plan(Problem(seq=32768, head_dim=64), gpus.load("v100-32gb"), "standard")
    assert "64.2 GiB of HBM" in refused.value.why
    assert "seq that fits is" in refused.value.hint


def test_a_reserve_beyond_the_card_is_called_that():
    with pytest.raises(NoPlanError, match=r"--reserve 100.0 GiB leaves no memory") as refused:
        planner.plan(Problem(), gpus.load("a100-80gb"), reserve=100 * GIB)
    assert "80.0 GiB" in refused.value.why


def test_standard_has_no_tile_to_judge():
    with pytest.raises(NoPlanError):
        planner.plan(Problem(), gpus.load("h200"), "standard", tile=(64, 64))


def test_a_problem_beyond_exact_counting_is_refused():
    huge = Problem(heads=128, seq=2**31 - 1024)
    assert not any(e.available for e in planner.compare(huge, gpus.load("h200")))
    with pytest.raises(NoPlanError, match="nothing runs"):
        planner.plan(huge, gpus.load("h200"))


def test_what_stops_every_algorithm_is_the_reason():
    a100 = gpus.load("a100-80gb")
    with pytest.raises(NoPlanError, match="nothing runs") as refused:
        planner.plan(Problem(dtype="e4m3"), a100)
    assert refused.value.why == "a100-sxm4-80gb has no e4m3 tensor cores"
    assert {reason for *_, reason in reasons("a100-80gb", dtype="e4m3").values()} == {
        refused.value.why
    }


def test_crossover():
    """One head leaves a flash kernel most of the SMs idle; many heads never do."""
    gpu = gpus.load("h200")
    single = planner.crossover(Problem(heads=1, head_dim=256), gpus.load("a100-80gb"))
    assert single is None or single >= 64
    assert planner.crossover(Problem(batch=8, heads=32), gpu) is None


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", planner.ALGOS)
def test_training_is_the_sum_of_its_passes(algo):
    entry = planner.plan(GPT2.with_(pass_="train"), gpus.load("h200"), algo)
    fwd, bwd = entry.fwd, entry.bwd
    assert (fwd.pass_, bwd.pass_) == ("fwd", "bwd")
    assert entry.time.seconds == pytest.approx(fwd.time.seconds + bwd.time.seconds)
    assert entry.issued.total == fwd.issued.total + bwd.issued.total
    assert entry.useful_flops == fwd.useful_flops + bwd.useful_flops
    assert entry.executed_flops == fwd.executed_flops + bwd.executed_flops
    assert entry.hbm.saved > 0
    json.dumps(entry.to_json())


def test_standard_training_moves_25_gb():
    entry = planner.plan(GPT2.with_(pass_="train"), gpus.load("a100-80gb"), "standard")
    assert entry.issued.total / 1e9 == pytest.approx(25.2, rel=0.01)


# ---- the entry -----------------------------------------------------------------------------------


def test_json_has_the_documented_shape():
    entry = planner.plan(Problem(causal=True), gpus.load("a100-80gb"), "v2")
    document = json.loads(json.dumps(entry.to_json()))
    assert document["schema"] == "fasim.plan/1"
    assert set(document["gpu"]) == {"name", "arch"}
    assert set(document["launch"]) == {"grid", "block", "smem_bytes", "splits", "arch"}
    assert {"smem_bytes", "registers_per_thread", "hbm_bytes", "fits", "max_seq"} == set(
        document["footprint"]
    )
    parts = {"inputs", "outputs", "s_and_p", "saved", "workspace", "total"}
    assert set(document["footprint"]["hbm_bytes"]) == parts
    assert {"issued", "dram", "paper"} == set(document["traffic"])
    assert {"useful", "executed"} == set(document["flops"])
    assert {"blocks_per_sm", "limiter"} == set(document["occupancy"])
    assert {"seconds", "low", "high", "bound", "terms"} == set(document["time"])
    assert set(document["time"]["terms"]) == {"tensor", "mufu", "smem", "l2", "hbm", "launch"}
    assert all(set(r) == {"tile", "reason"} for r in document["rejected"])
    assert len(document["alternatives"]) == 4
    assert Plan.from_json(document) == entry.plan


def test_an_unavailable_entry_is_json_too():
    entry = planner.compare(Problem(), gpus.load("5090"))[-1]
    document = json.loads(json.dumps(entry.to_json()))
    assert (document["available"], document["time"], document["tile"]) == (False, None, None)
    assert document["footprint"]["max_seq"] > 0


def test_the_launch_is_the_plans():
    for algo in ("v1", "v2"):
        entry = planner.plan(Problem(batch=3, seq=1000), gpus.load("a100-80gb"), algo)
        (stage,) = entry.plan.launch_for().stages
        assert (stage.grid, stage.block, stage.smem_bytes) == (
            entry.grid,
            entry.block,
            entry.smem_bytes,
        )


def test_the_choice_is_explained():
    entry = planner.plan(Problem(), gpus.load("a100-80gb"), "v2")
    text = "\n".join(entry.reasons)
    assert "blocks of 128 threads" in text
    assert "slower" in text
    assert re.search(r"is not legal: .*\d+.* exceeds? \d+", text)
    times = [e.time.seconds for e in (entry, *entry.alternatives)]
    assert times == sorted(times)
    assert len({str(e.tile) for e in (entry, *entry.alternatives)}) == len(times)


# ---- any problem ---------------------------------------------------------------------------------

any_problem = st.builds(
    lambda seq, seq_kv, d, dv, dtype, causal, pass_: Problem(
        batch=2,
        heads=4,
        kv_heads=2,
        seq=seq,
        seq_kv=seq_kv,
        head_dim=d,
        head_dim_v=dv,
        dtype=dtype,
        causal=causal,
        pass_=pass_ if dtype != "e4m3" else "fwd",
    ),
    st.integers(0, 9000),
    st.integers(0, 9000),
    st.integers(1, 256),
    st.integers(1, 256),
    st.sampled_from(["fp32", "fp16", "bf16", "e4m3"]),
    st.booleans(),
    st.sampled_from(["fwd", "bwd"]),
)


@given(any_problem, st.sampled_from(gpus.names()))
def test_compare_answers_every_problem(problem, name):
    gpu = gpus.load(name)
    for entry in planner.compare(problem, gpu):
        assert entry.available or entry.reason
        assert entry.generable or entry.reason
        if entry.available and entry.tile:
            assert entry.smem_bytes <= gpu.smem_per_block
            assert 1 <= entry.blocks_per_sm <= gpu.blocks_per_sm
            assert entry.registers <= 256
            assert entry.time.seconds > 0
        if entry.plan:
            assert entry.registers <= 255
            stages = {stage.entry: stage for stage in entry.plan.launch_for().stages}
            assert stages[entry.plan.kernel.stem].grid == entry.grid


DETERMINISTIC = Problem(batch=4, head_dim=64, dtype="bf16", pass_="bwd", deterministic=True)


def test_many_heads_add_in_turns_and_one_head_gets_a_second_pass():
    gpu = gpus.load("h200")
    many, one = DETERMINISTIC, DETERMINISTIC.with_(batch=1, heads=1, kv_heads=1)
    assert planner.plan(many, gpu, "v2").dq == "ordered"
    assert planner.plan(one, gpu, "v2").dq == "second_pass"


@pytest.mark.parametrize("name", ["a100-80gb", "h200", "4090"])
def test_the_faster_form_is_taken_and_the_other_named(name):
    gpu = gpus.load(name)
    forms = {form: planner.plan(DETERMINISTIC, gpu, "v2", form=form) for form in FORMS}
    best = planner.plan(DETERMINISTIC, gpu, "v2")
    other = next(form for form in FORMS if form != best.dq)
    assert best.time.seconds == min(entry.time.seconds for entry in forms.values())
    ratio = forms[other].time.seconds / best.time.seconds
    assert best.reasons[-1].endswith(f"would take {ratio:.2f} times as long")
    assert best.plan.kernel.deterministic
    assert best.plan.kernel.dq == best.dq == best.to_json()["launch"]["dq"]


def test_repeatable_bits_cost_time():
    gpu = gpus.load("h200")
    atomic = planner.plan(DETERMINISTIC.with_(deterministic=False), gpu, "v2")
    for form in FORMS:
        entry = planner.plan(DETERMINISTIC, gpu, "v2", form=form)
        assert 1 < entry.time.seconds / atomic.time.seconds < 2
    assert entry.hbm.workspace < atomic.hbm.workspace  # no fp32 dQ
    assert entry.executed_flops / atomic.executed_flops == pytest.approx(7 / 5)


@pytest.mark.parametrize(("algo", "form"), [("v1", ""), *(("v2", form) for form in FORMS)])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "options"),
    [
        ("bf16", 256, {"window": (99, 0), "softcap": 5.0, "bias": "dense"}),
        ("bf16", 256, {"causal": True, "softcap": 5.0, "varlen": True}),
        ("bf16", 128, {"window": (99, 9), "softcap": 5.0, "bias": "alibi", "varlen": True}),
        ("fp32", 128, {"causal": True, "bias": "alibi", "varlen": True}),
        ("fp32", 128, {"window": (99, 0), "softcap": 5.0, "bias": "dense"}),
    ],
)
@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_whatever_repeats_has_every_option(gpu, dtype, head_dim, options, algo, form):
    problem = DETERMINISTIC.with_(dtype=dtype, head_dim=head_dim, **options)
    assert planner.plan(problem, gpus.load(gpu), algo, form=form).plan.kernel.repeats("dq")


def test_what_repeats_anyway_is_the_same_kernel():
    gpu = gpus.load("a100-80gb")
    for algo, pass_ in (("v1", "fwd"), ("v2", "fwd"), ("v1", "bwd")):
        problem = DETERMINISTIC.with_(pass_=pass_)
        asked, plain = (
            planner.plan(problem.with_(deterministic=wanted), gpu, algo).plan.kernel
            for wanted in (True, False)
        )
        assert asked == plain
        assert asked.repeats("dq") or pass_ == "fwd"


def test_a_pass_without_a_deterministic_form_says_so():
    gpu = gpus.load("h200")
    said = [planner.plan(DETERMINISTIC, gpu, algo).assumed for algo in ("v2", "v3")]
    assert [any("deterministic" in line for line in lines) for lines in said] == [False, True]


def test_a_form_belongs_to_a_deterministic_backward_pass():
    gpu = gpus.load("a100-80gb")
    for options in ({"deterministic": False}, {"pass_": "fwd"}):
        with pytest.raises(UsageError, match="deterministic backward"):
            planner.plan(DETERMINISTIC.with_(**options), gpu, "v2", form="ordered")


@given(any_problem)
def test_planning_is_deterministic(problem):
    gpu = gpus.load("h200")
    assert planner.compare(problem, gpu) == planner.compare(problem, gpu)

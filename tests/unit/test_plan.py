"""Plans: the freeze point, JSON in and out, launches."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu, planner
from fasim.errors import UsageError
from fasim.plan import MADE, KernelSpec, Plan, Tile, contiguous_strides, copy_bytes
from fasim.problem import Problem

SPEC = KernelSpec(
    algo="v2", pass_="fwd", arch="sm_80", dtype="fp16", out_dtype="fp16", head_dim=64,
    head_dim_v=64, tile=Tile(block_q=128, block_kv=64),
)  # fmt: skip
PLAN = Plan(problem=Problem(head_dim=64), gpu="a100", kernel=SPEC, smem_bytes=32768)


def test_json_round_trip() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


@pytest.mark.parametrize("field", dataclasses.fields(KernelSpec), ids=lambda f: f.name)
def test_every_compile_time_field_changes_the_stem(field: dataclasses.Field[Any]) -> None:
    value = getattr(SPEC, field.name)
    other = {bool: lambda x: not x, int: lambda x: x + 8, str: lambda x: f"{x}x"}
    changed = Tile(block_q=64, block_kv=64) if field.name == "tile" else other[type(value)](value)
    assert dataclasses.replace(SPEC, **{field.name: changed}).stem != SPEC.stem


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000), st.integers(0, 1000))
def test_launch_for_any_shape(batch: int, heads: int, seq: int, seq_kv: int) -> None:
    problem = PLAN.problem.with_(batch=batch, heads=heads, kv_heads=1, seq=seq, seq_kv=seq_kv)
    launch = PLAN.launch_for(problem)
    assert launch.stages[0].grid == batch * heads * -(-seq // 128)
    assert launch.scalars["q_strides"] == (heads * seq * 64, seq * 64, 64)
    assert launch.scalars["k_strides"] == (seq_kv * 64, seq_kv * 64, 64)
    assert launch.outputs["o"] == ((batch, heads, seq, 64), "fp16")
    assert {name for name, kind in SPEC.arguments if kind != "ptr"} == set(launch.scalars)


def test_v1_runs_one_block_per_head_and_asks_for_its_workspace() -> None:
    plan = dataclasses.replace(PLAN, kernel=dataclasses.replace(SPEC, algo="v1"))
    launch = plan.launch_for(PLAN.problem.with_(batch=2, heads=3, seq=1000))
    assert launch.stages[0].grid == 6
    assert launch.workspaces["o_acc"] == ((2, 3, 1000, 64), "fp32")
    assert plan.launch_for(PLAN.problem.with_(seq=0)).stages[0].grid == 0


BACKWARD = dataclasses.replace(
    PLAN,
    problem=PLAN.problem.with_(pass_="bwd"),
    kernel=dataclasses.replace(SPEC, pass_="bwd", tile=Tile(block_q=64, block_kv=128, stages=2)),
)


def deterministic(dq: str) -> Plan:
    problem = BACKWARD.problem.with_(deterministic=True)
    kernel = dataclasses.replace(BACKWARD.kernel, deterministic=True, dq=dq)
    return dataclasses.replace(BACKWARD, problem=problem, kernel=kernel)


def test_ordered_additions_keep_a_counter_for_every_tile_of_dq() -> None:
    plan = deterministic("ordered")
    problem = plan.problem.with_(batch=2, heads=6, kv_heads=3, seq=100, seq_kv=300)
    launch = plan.launch_for(problem)
    assert launch.workspaces["turns"] == ((1 + 2 * 6 * 2,), "int32")
    assert (
        launch.workspaces["dq_acc"]
        == BACKWARD.launch_for(problem.with_(deterministic=False)).workspaces["dq_acc"]
    )
    assert plan.kernel.repeats("dq")


def test_a_second_pass_has_blocks_of_as_many_queries_as_others_have_keys() -> None:
    plan = deterministic("second_pass")
    problem = plan.problem.with_(batch=2, heads=6, kv_heads=3, seq=300, seq_kv=100)
    launch = plan.launch_for(problem)
    last = launch.stages[-1]
    assert (last.entry, last.grid) == (f"{plan.kernel.stem}_queries", 2 * 6 * 3)
    assert last.smem_bytes == plan.smem_bytes
    assert list(launch.workspaces) == ["delta"]


def test_v1_backward_runs_one_block_per_key_head_in_two_kernels() -> None:
    tile = Tile(block_q=64, block_kv=128)
    kernel = dataclasses.replace(BACKWARD.kernel, algo="v1", tile=tile)
    plan = dataclasses.replace(BACKWARD, kernel=kernel)
    problem = plan.problem.with_(batch=2, heads=6, kv_heads=3, seq=100, seq_kv=300)
    stages = plan.launch_for(problem).stages
    assert [stage.grid for stage in stages] == [2 * 6 * 2, 2 * 3]
    assert plan.kernel.repeats("dq")
    plan.launch_for(problem.with_(deterministic=True))
    assert plan.launch_for(problem.with_(seq_kv=0)).stages[1].grid == 0


def test_a_kernel_that_adds_in_any_order_does_not_serve_a_deterministic_problem() -> None:
    with pytest.raises(UsageError, match="cannot run this problem"):
        BACKWARD.launch_for(BACKWARD.problem.with_(deterministic=True))
    PLAN.launch_for(PLAN.problem.with_(deterministic=True))  # every forward is


def test_a_field_that_came_later_leaves_the_names_of_older_kernels_alone() -> None:
    assert "dq" not in PLAN.to_json()["kernel"]
    forms = [BACKWARD, deterministic("ordered"), deterministic("second_pass")]
    stems = [plan.kernel.stem for plan in forms]
    assert len(set(stems)) == 3
    assert "_ordered_" in stems[1]
    assert "_secondpass_" in stems[2]
    for plan in forms:
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_backward_launch_has_three_kernels_and_reads_what_the_forward_left() -> None:
    problem = BACKWARD.problem.with_(batch=2, heads=6, kv_heads=3, seq=100, seq_kv=300)
    launch = BACKWARD.launch_for(problem, {"do": (1, 2, 3)})
    stem = BACKWARD.kernel.stem
    assert [
        (stage.entry, stage.grid, stage.block, stage.smem_bytes) for stage in launch.stages
    ] == [
        (f"{stem}_prepare", 2 * 6 * 2, 128, 0),
        (stem, 2 * 3 * 3, 128, 32768),
        (f"{stem}_finish", 2 * 6 * 2, 128, 0),
    ]
    assert list(launch.inputs) == ["q", "k", "v", "o", "do", "lse"]
    assert launch.inputs["lse"] == ((2, 6, 100), "fp32")
    assert launch.outputs["dk"] == ((2, 3, 300, 64), "fp16")
    assert launch.workspaces["dq_acc"] == ((2, 6, 128, 64), "fp32")
    assert launch.scalars["do_strides"] == (1, 2, 3)
    assert launch.scalars["scale"] == problem.scale
    names = {*launch.inputs, *launch.outputs, *launch.workspaces, *launch.scalars}
    assert {name for name, _ in BACKWARD.kernel.arguments} == names
    assert [BACKWARD.kernel.repeats(name) for name in ("dq", "dk", "dv")] == [False, True, True]


def test_a_backward_launch_of_packed_sequences() -> None:
    """Each of them begins in a tile of dQ of its own."""
    plan = dataclasses.replace(
        BACKWARD,
        problem=BACKWARD.problem.with_(varlen=True),
        kernel=dataclasses.replace(BACKWARD.kernel, varlen=True),
    )
    problem = plan.problem.with_(batch=3, heads=6, kv_heads=3, seq=100, seq_kv=300)
    launch = plan.launch_for(problem, tokens=(210, 700))
    assert [stage.grid for stage in launch.stages] == [3 * 6 * 2, 3 * 3 * 3, 3 * 6 * 2]
    assert launch.inputs["lse"] == ((6, 210), "fp32")
    assert launch.inputs["do"] == ((210, 6, 64), "fp16")
    assert launch.outputs["dk"] == ((700, 3, 64), "fp16")
    assert launch.workspaces["dq_acc"] == ((210 // 64 + 3, 6, 64, 64), "fp32")
    assert (launch.scalars["longest_q"], launch.scalars["longest_k"]) == (100, 300)
    names = {*launch.inputs, *launch.outputs, *launch.workspaces, *launch.scalars}
    assert {name for name, _ in plan.kernel.arguments} == names


def test_backward_factors_end_with_the_plain_scale() -> None:
    capped = dataclasses.replace(BACKWARD.kernel, softcap=True)
    assert capped.factors == ("softcap_scale", "softcap_log2", "scale")
    assert BACKWARD.kernel.factors == ("scale_log2", "scale")


_FP32 = {"dtype": "fp32", "out_dtype": "fp32"}
_ORDERED = {"deterministic": True, "dq": "ordered"}


@pytest.mark.parametrize(
    ("kernel", "tile", "why"),
    [
        ({"algo": "v1"}, {}, "2 stages, but a backward pass with P in registers has 1"),
        ({"algo": "v1"}, {"p_in": "shared", "block_q": 128}, "P in shared has 1"),
        ({"algo": "v1", "deterministic": True, "dq": "ordered"}, {}, "pass of v1_ordered"),
        ({"deterministic": True}, {}, "deterministic is True, but dq is atomic"),
        ({"dq": "ordered"}, {}, "deterministic is False, but dq is ordered"),
        ({"deterministic": True, "dq": "sorted"}, {}, "dq 'sorted'"),
        ({"dtype": "fp32", "out_dtype": "fp32"}, {}, "in fp32 with P in registers"),
        ({"varlen": True, "bias": "dense"}, {}, "varlen and a dense bias"),
        (_FP32 | {"algo": "v1"}, {"stages": 1}, "in fp32 with P in registers"),
        (_FP32 | _ORDERED, {}, "in fp32 with P in registers"),
        ({"splits": True, "pack_gqa": True}, {}, "backward pass of v2_split"),
        ({}, {"block_q": 48}, "block_q 48 is not whole steps of 32 queries"),
        ({}, {"block_kv": 96}, "block_kv 96 is not whole 16-key steps for each of 4 warps"),
        ({}, {"stages": 1}, "1 stages, but a backward pass with P in registers has 2"),
        ({}, {"step_kv": 64}, "step_kv 64, but a backward pass scores all keys at once"),
        ({}, {"sharers": 3}, "sharers is 3, not 0 or 4"),
        ({}, {"sharers": 4}, "four warps share keys, but P stays in registers"),
        (_FP32, {"sharers": 4, "p_in": "shared"}, "only V2's backward pass in 16 bits has four"),
        ({"algo": "v1"}, {"sharers": 4, "p_in": "shared"}, "only V2's backward pass in 16 bits"),
        ({}, {"sharers": 4, "p_in": "shared", "stages": 3}, "3 stages, but a backward pass"),
        ({}, {"sharers": 4, "p_in": "shared", "block_q": 32}, "not whole steps of 64 queries"),
    ],
)
def test_a_backward_plan_that_no_template_makes_is_refused(
    kernel: dict[str, Any], tile: dict[str, Any], why: str
) -> None:
    document = BACKWARD.to_json()
    document["kernel"] |= kernel
    document["kernel"]["tile"] |= tile
    with pytest.raises(UsageError) as caught:
        Plan.from_json(document)
    assert why in caught.value.why


def of_four() -> Plan:
    tile = dataclasses.replace(BACKWARD.kernel.tile, p_in="shared", sharers=4)
    return dataclasses.replace(BACKWARD, kernel=dataclasses.replace(BACKWARD.kernel, tile=tile))


def test_a_backward_plan_survives_json() -> None:
    for plan in (BACKWARD, of_four()):
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_how_many_warps_share_keys_is_said_where_four_do() -> None:
    """Plans from before they could know no such field, and their kernels keep their names."""
    four, two = of_four(), dataclasses.replace(BACKWARD.kernel.tile, p_in="shared")
    of_two = dataclasses.replace(BACKWARD.kernel, tile=two)
    assert four.to_json()["kernel"]["tile"]["sharers"] == 4
    assert "sharers" not in BACKWARD.to_json()["kernel"]["tile"]
    assert four.kernel.stem != of_two.stem
    assert (four.kernel.tile.sharing, two.sharing, BACKWARD.kernel.tile.sharing) == (4, 2, 1)


@pytest.mark.parametrize(
    "change",
    [{"head_dim": 32}, {"dtype": "bf16"}, {"causal": True}, {"softcap": 2.0}, {"bias": "alibi"}],
    ids=str,
)
def test_a_kernel_refuses_what_it_was_not_built_for(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot run this problem"):
        PLAN.launch_for(PLAN.problem.with_(**change))


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in PLAN.to_json().items() if key != name}


@pytest.mark.parametrize(
    "data",
    [
        *map(without, PLAN.to_json()), [], {}, None,
        PLAN.to_json() | {"schema": "fasim.plan/0"},
        PLAN.to_json() | {"smem_bytes": "many"},
        PLAN.to_json() | {"smem_bytes": 32768.5},
        PLAN.to_json() | {"kernel": PLAN.to_json()["kernel"] | {"tile": {"block_q": "64"}}},
        PLAN.to_json() | {"kernel": PLAN.to_json()["kernel"] | {"unknown": 1}},
        PLAN.to_json() | {"problem": {"heads": -1}},
    ],
    ids=lambda data: str(data)[:30],
)  # fmt: skip
def test_malformed_plans_are_refused(data: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Plan.from_json(data)
    assert caught.value.hint


OPTIONS = ({"mask": "window"}, {"softcap": True}, {"bias": "alibi"}, {"varlen": True})


def edited(kernel: dict[str, Any], tile: dict[str, Any], **plan: Any) -> dict[str, Any]:
    document = PLAN.to_json() | plan
    document["kernel"] |= kernel
    document["kernel"]["tile"] |= tile
    return document


@pytest.mark.parametrize(
    ("kernel", "tile", "plan", "why"),
    [
        ({"algo": "v3"}, {}, {}, "V3 is made for sm_90a, not sm_80"),
        ({"algo": "../v2"}, {}, {}, "algo '../v2'"),
        ({"pass": "train"}, {}, {}, "pass 'train'"),
        ({"dtype": "e5m2"}, {}, {}, "dtype 'e5m2'"),
        ({"dtype": "e4m3"}, {}, {}, "scales 'none' in e4m3"),
        ({"scales": "head"}, {}, {}, "scales 'head' in fp16"),
        ({"scales": "block"}, {}, {}, "scales 'block'"),
        ({"dtype": "e4m3", "scales": "head", "algo": "v1"}, {}, {}, "the v1 fwd kernel in e4m3"),
        ({"dtype": "e4m3", "scales": "head", "bias": "dense"}, {}, {}, "a dense bias in e4m3"),
        ({"dtype": "e4m3", "scales": "head"}, {"block_kv": 48}, {}, "steps of 48 keys, 32 each"),
        (
            {"dtype": "e4m3", "scales": "head", "in_dtype": "bf16"},
            {},
            {},
            "no template makes v2 in e4m3 from bf16",
        ),
        ({"in_dtype": "fp32"}, {}, {}, "in_dtype 'fp32'"),
        ({"incoherent": True}, {}, {}, "belongs to kernels that quantise"),
        ({"arch": "sm_75", "dtype": "bf16"}, {}, {}, "sm_75 has no bf16"),
        ({"arch": "sm_75", "pass": "bwd"}, {"stages": 2}, {}, "sm_75 has no bf16, and no template"),
        ({"out_dtype": "e5m2"}, {}, {}, "out_dtype 'e5m2'"),
        ({"mask": "prefix"}, {}, {}, "mask 'prefix'"),
        ({"bias": "rope"}, {}, {}, "bias 'rope'"),
        ({"bias": "dense", "varlen": True}, {}, {}, "varlen and a dense bias"),
        ({"splits": True}, {}, {}, "only V2 splits keys"),
        ({"pack_gqa": True}, {}, {}, "only V2 splits keys"),
        ({"algo": "v1", "splits": True, "pack_gqa": True}, {}, {}, "only V2 splits keys"),
        ({"splits": True, "pack_gqa": True}, {}, {}, "slots is 0"),
        ({"splits": True, "pack_gqa": True}, {}, {"slots": 1}, "block_kv 64 is not 64 for each"),
        ({"splits": True, "pack_gqa": True}, {"block_q": 24}, {"slots": 1}, "block_q 24"),
        *(
            ({"splits": True, "pack_gqa": True, **option}, {}, {}, "only plain attention")
            for option in OPTIONS
        ),
        ({"arch": "sm_80 -o /x"}, {}, {}, "arch 'sm_80 -o /x'"),
        ({"arch": "hopper"}, {}, {}, "arch 'hopper'"),
        ({}, {"warps": 0}, {}, "warps is 0"),
        ({}, {"warps": 33}, {}, "warps is 33"),
        ({}, {"stages": 10**9}, {}, "stages is 1000000000"),
        ({}, {"block_q": -128}, {}, "block_q is -128"),
        ({}, {"step_kv": -64}, {}, "keys_per_step is -64"),
        ({}, {"registers": 23}, {}, "registers is 23"),
        ({}, {"registers": 256}, {}, "registers is 256"),
        ({}, {"block_q": 72}, {}, "block_q 72"),
        ({}, {"step_kv": 48}, {}, "block_kv 64"),
        ({}, {"block_kv": 24}, {}, "block_kv 24"),
        ({}, {"p_in": "shared"}, {}, "P in 'shared'"),
        ({}, {}, {"smem_bytes": 0}, "smem_bytes is 0"),
    ],
)  # fmt: skip
def test_a_plan_that_no_template_makes_is_refused(
    kernel: dict[str, Any], tile: dict[str, Any], plan: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match="makes no sense") as caught:
        Plan.from_json(edited(kernel, tile, **plan))
    assert why in caught.value.why
    assert caught.value.hint


def test_the_edges_of_the_ranges_are_plans() -> None:
    for tile in ({"registers": 24}, {"registers": 255}, {"warps": 8}, {"step_kv": 16}):
        read = Plan.from_json(edited({}, tile)).kernel.tile
        assert read == dataclasses.replace(SPEC.tile, **tile)


def test_a_kernel_must_serve_the_problem_beside_it() -> None:
    problem = PLAN.problem.with_(head_dim=32).to_json()
    with pytest.raises(UsageError, match="cannot run this problem"):
        Plan.from_json(PLAN.to_json() | {"problem": problem})


def test_every_kernel_option_is_checked_where_a_plan_is_read() -> None:
    free = {"arch", "head_dim", "head_dim_v", "tile"}
    assert set(MADE) | free == {f.name for f in dataclasses.fields(KernelSpec)}


def test_a_window_kernel_serves_every_mask_and_no_other_does() -> None:
    problem = PLAN.problem.with_(window=(9, 2))
    windowed = dataclasses.replace(PLAN, kernel=dataclasses.replace(SPEC, mask="window"))
    for other in (problem, PLAN.problem, PLAN.problem.with_(causal=True)):
        windowed.launch_for(other)
    with pytest.raises(UsageError, match="cannot run"):
        PLAN.launch_for(problem)


@pytest.mark.parametrize(
    ("window", "left", "right"),
    [((9, 2), 9, 2), ((-1, 2), 30, 2), ((3, -1), 3, 20), ((10**9, 10**9), 30, 20)],
)
def test_an_open_side_of_a_window_is_as_wide_as_it_can_matter(
    window: tuple[int, int], left: int, right: int
) -> None:
    spec = dataclasses.replace(SPEC, mask="window")
    problem = PLAN.problem.with_(window=window, seq=20, seq_kv=30)
    scalars = dataclasses.replace(PLAN, kernel=spec).launch_for(problem).scalars
    assert (scalars["window_left"], scalars["window_right"]) == (left, right)


def test_a_softcap_has_two_factors_and_no_other() -> None:
    spec = dataclasses.replace(SPEC, softcap=True)
    problem = PLAN.problem.with_(softcap=30.0, scale=0.5)
    scalars = dataclasses.replace(PLAN, kernel=spec).launch_for(problem).scalars
    assert scalars["softcap_scale"] == 0.5 / 30
    assert scalars["softcap_log2"] == pytest.approx(30 / math.log(2))
    assert "scale_log2" not in scalars
    assert "scale_log2" not in dict(spec.arguments)


def test_packed_sequences_have_shapes_of_their_own() -> None:
    plan = dataclasses.replace(PLAN, kernel=dataclasses.replace(SPEC, algo="v1", varlen=True))
    problem = PLAN.problem.with_(varlen=True, batch=3, heads=4, kv_heads=2, seq=9, seq_kv=7)
    launch, d = plan.launch_for(problem, tokens=(20, 11)), problem.head_dim
    assert launch.inputs["q"] == ((20, 4, d), SPEC.dtype)
    assert launch.inputs["k"][0] == (11, 2, d)
    assert launch.inputs["cu_seqlens_q"] == launch.inputs["cu_seqlens_k"] == ((4,), "int32")
    assert launch.outputs["o"][0] == (20, 4, problem.head_dim_v)
    assert launch.outputs["lse"] == launch.workspaces["m"] == ((4, 20), "fp32")
    assert launch.workspaces["o_acc"][0] == (4, 20, problem.head_dim_v)
    assert launch.scalars["q_strides"] == (0, d, 4 * d)
    assert (launch.scalars["longest_q"], launch.scalars["total_q"]) == (9, 20)


@pytest.mark.parametrize(
    ("options", "arrays", "steps"),
    [
        ({}, ("q", "k"), (2 * 500 * 64, 500 * 64, 64)),
        ({"varlen": True}, ("q", "k"), (0, 64, 2 * 64)),
        ({"head_dim": 33}, ("q_padded", "k_padded"), (2 * 500 * 40, 500 * 40, 40)),
        ({"head_dim": 33, "varlen": True}, ("q_padded", "k_padded"), (0, 40, 2 * 40)),
        ({"bias": "dense"}, (), ()),
        ({"bias": "dense", "head_dim": 33}, (), ()),
        ({"dtype": "e4m3"}, (), ()),
    ],
)
def test_v3_in_16_bits_takes_q_and_k_where_tma_finds_them_by_address_too(
    options: dict[str, Any], arrays: tuple[str, ...], steps: tuple[int, ...]
) -> None:
    """The strides are those of the array that the map is of; ``steps`` are K's."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "seq": 100, "seq_kv": 500, "head_dim": 64}
    tile = Tile(block_q=128, block_kv=128, warps=8, stages=2)
    plan = planner.plan(Problem(**shape | options), gpu.load("h200"), "v3", tile=tile).plan
    assert plan
    assert plan.kernel.rescored == arrays
    kinds = dict(plan.kernel.arguments)
    assert len(kinds) == len(plan.kernel.arguments)
    for array in arrays:
        assert (kinds[array], kinds[f"{array}_strides"]) == ("ptr", "i64x3")
        assert kinds[f"{array}_map"] == "map"
    if arrays:
        assert plan.launch_for().scalars[f"{arrays[1]}_strides"] == steps
    else:
        assert "k_padded_strides" not in kinds


def test_kernels_without_an_option_keep_their_name() -> None:
    """Every field is hashed, so a field more would rename every kernel there is."""
    names = {path.stem for path in (Path(__file__).parents[2] / "generated").glob("*.cu")}
    assert "v2_fwd_sm80_bf16_d128_causal_5956bdcb" in names
    assert "v1_fwd_sm80_fp16_d64_full_8858c1e0" in names


def test_options_are_in_the_name() -> None:
    spec = dataclasses.replace(SPEC, softcap=True, bias="dense_fp32", varlen=True)
    assert "_softcap_densefp32_varlen_" in spec.stem


def test_helpers() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert [copy_bytes(d, "fp16") for d in (64, 40, 36, 34, 33)] == [16, 16, 8, 4, 2]
    assert copy_bytes(33, "fp32") == 4

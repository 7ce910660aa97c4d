"""Rendering is deterministic, self-describing, and true to the plan."""

import dataclasses
import hashlib
import re
from typing import Any

import jinja2
import pytest

from fasim import planner
from fasim import render as rendering
from fasim.errors import UsageError
from fasim.gpu import load
from fasim.plan import KernelSpec, Plan, Tile
from fasim.problem import Problem
from fasim.render import parse, render, template_root


def plan(algo: str = "v2", dtype: str = "bf16", causal: bool = True, **tile: int) -> Plan:
    tiles = {"block_q": 64, "block_kv": 64} | tile
    spec = KernelSpec(
        algo=algo, pass_="fwd", arch="sm_80", dtype=dtype, out_dtype=dtype, head_dim=80,
        head_dim_v=64, mask="causal" if causal else "full", tile=Tile(**tiles),
    )  # fmt: skip
    size, width = (4 if dtype == "fp32" else 2), 80
    columns = 80 + 64 if algo == "v1" else 2 * tiles.get("stages", 1) * width
    smem = size * (tiles["block_q"] * width + tiles["block_kv"] * columns)
    problem = Problem(dtype=dtype, head_dim=80, head_dim_v=64, causal=causal)
    return Plan(problem=problem, gpu="a100", kernel=spec, smem_bytes=smem)


PLANS = [
    plan(a, d, c) for a in ("v1", "v2") for d in ("fp32", "fp16", "bf16") for c in (False, True)
]


def backward(
    dtype: str,
    arch: str,
    p_in: str = "registers",
    algo: str = "v2",
    dq: str = "atomic",
    sharers: int = 0,
) -> Plan:
    problem = Problem(dtype=dtype, head_dim=128, head_dim_v=64, causal=True, pass_="bwd")
    split = 2 if p_in == "shared" else 1
    slots, weights = (1, split) if algo == "v1" else (1 + split, 2 * split)
    if dq == "second_pass" and split == 1:
        weights = 0
    if sharers:
        slots, weights = 2, 3
    tile = Tile(block_q=64, block_kv=64, stages=slots, p_in=p_in, sharers=sharers)
    spec = KernelSpec(
        algo=algo, pass_="bwd", arch=arch, dtype=dtype, out_dtype=dtype, head_dim=128,
        head_dim_v=64, mask="causal", tile=tile, deterministic=dq != "atomic", dq=dq,
    )  # fmt: skip
    walked = slots * 64 * (192 * 2 + 8)
    smem = 2 * (64 * 192 + weights * 64 * 64) + walked
    return Plan(problem=problem, gpu="a100", kernel=spec, smem_bytes=smem)


def planned(gpu: str, algo: str, **options: Any) -> Plan:
    found = planner.plan(Problem(head_dim=80, head_dim_v=64, **options), load(gpu), algo).plan
    assert found
    return found


TURING = [planned("t4", a, dtype=d, causal=True) for a in ("v1", "v2") for d in ("fp32", "fp16")]
E4M3 = [
    planned("4090", "v2", dtype="e4m3", causal=True, scales=scales, out_dtype=out)
    for scales in ("tensor", "head")
    for out in ("bf16", "fp32")
]
PLANS += TURING + E4M3
PLANS += [
    backward("fp16", "sm_80"),
    backward("bf16", "sm_90"),
    backward("bf16", "sm_90", "shared"),
    backward("bf16", "sm_90", dq="ordered"),
    backward("fp16", "sm_80", dq="second_pass"),
    backward("bf16", "sm_90", "shared", dq="second_pass"),
    backward("bf16", "sm_90", "shared", sharers=4),
    backward("fp16", "sm_80", "shared", dq="second_pass", sharers=4),
    backward("bf16", "sm_80", algo="v1"),
    backward("fp16", "sm_90", "shared", algo="v1"),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kernel.stem)
def test_a_file_tells_its_plan(plan: Plan) -> None:
    kernel = render(plan)
    assert parse(kernel.source) == kernel
    assert kernel == render(plan)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kernel.stem)
def test_constants_are_the_plans(plan: Plan) -> None:
    source, tile = render(plan).source, plan.kernel.tile
    constants = dict(re.findall(r"constexpr \w+ (k\w+) = (\w+);", source))
    assert constants["kBlockQ"] == str(tile.block_q)
    assert constants["kBlockKV"] == str(tile.block_kv)
    if plan.kernel.pass_ == "bwd":
        assert constants["kStepQ"] == str(tile.query_step)
    else:
        assert constants["kStepKV"] == str(tile.keys_per_step)
    assert constants["kWarps"] == str(tile.warps)
    assert constants["kRegisters"] == str(tile.registers)
    assert constants["kHeadDim"] == str(plan.kernel.head_dim)
    assert constants["kHeadDimV"] == str(plan.kernel.head_dim_v)
    assert constants["kSmemBytes"] == str(plan.smem_bytes)
    assert constants["kCausal"] == ("true" if plan.kernel.mask == "causal" else "false")
    assert 'extern "C" __global__ void' in source
    assert plan.kernel.stem in source


def test_the_body_depends_on_the_kernel_alone() -> None:
    one = plan()
    other = dataclasses.replace(one, problem=one.problem.with_(batch=7, seq=123), gpu="other")
    assert render(one).body == render(other).body
    assert render(one).source != render(other).source


def test_the_shared_memory_map_covers_every_byte() -> None:
    for each in PLANS:
        rows = rendering.memory_map(each)
        assert [start for _, start, _ in rows] == [
            sum(size for _, _, size in rows[:i]) for i in range(len(rows))
        ]
        assert sum(size for _, _, size in rows) == each.smem_bytes


def test_an_edit_is_noticed_and_the_plan_kept() -> None:
    kernel = render(plan())
    edited = parse(
        kernel.source.replace("constexpr int kBlockQ = 64", "constexpr int kBlockQ = 32")
    )
    assert edited.edited
    assert edited.plan == kernel.plan
    assert not parse(kernel.source).edited


def test_every_line_knows_its_template() -> None:
    kernel = render(plan())
    lines = kernel.source.splitlines()
    assert len(kernel.origins) == len(lines)
    known = 0
    for text, origin in zip(lines, kernel.origins, strict=True):
        if origin and text and "$(" not in (template := template_line(*origin)):
            assert text.strip() == template.strip()
            known += 1
    assert known > len(lines) / 2


def template_line(name: str, number: int) -> str:
    return (template_root() / name).read_text().splitlines()[number - 1]


def test_no_directive_survives() -> None:
    for each in PLANS:
        assert not re.search(r"//%|//#|\$\(|/\*%|[\ue000-\uf8ff]", render(each).source)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kernel.stem)
def test_a_file_holds_the_instructions_it_calls_and_no_others(plan: Plan) -> None:
    source = render(plan).source
    defined = re.findall(r"__forceinline__ \w+ (\w+)\(", instructions(source))
    calls = [*re.findall(r"ptx::(\w+)", source), *re.findall(r"= (\w+)\(", instructions(source))]
    assert sorted(defined) == sorted(set(calls))


def instructions(source: str) -> str:
    return "".join(re.findall(r"namespace ptx \{.*?\}  // namespace ptx", source, re.DOTALL))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kernel.stem)
def test_the_header_lists_the_templates_that_wrote_the_file(plan: Plan) -> None:
    kernel = render(plan)
    listed = dict(re.findall(r"^//   (\w{8})  (\S+)$", kernel.source, re.MULTILINE))
    assert set(listed.values()) == {origin[0] for origin in kernel.origins if origin}
    for digest, name in listed.items():
        text = (template_root() / name).read_bytes()
        assert hashlib.sha256(text).hexdigest().startswith(digest)


@pytest.mark.parametrize("plan", TURING, ids=lambda plan: plan.kernel.stem)
def test_turing_asks_for_nothing_that_came_with_ampere(plan: Plan) -> None:
    """PTX ISA, "target ISA notes": cp.async, m16n8k16 and conversions of pairs need sm_80."""
    source = render(plan).source
    assert not re.search(r"cp\.async|cp_async|aligned\.m16n8k16|cvt\.\w+\.f16x2", source)
    assert ("mma.sync.aligned.m16n8k8" in source) == (plan.kernel.dtype == "fp16")


@pytest.mark.parametrize(
    ("head_dim", "arch", "dtype", "stages", "form"),
    [
        (160, "sm_90", "bf16", 2, "paired"),
        (136, "sm_120", "fp16", 3, "paired"),
        (240, "sm_80", "bf16", 1, "odd"),
        (128, "sm_90", "bf16", 2, ""),
        (96, "sm_90", "bf16", 2, ""),
        (256, "sm_90", "bf16", 2, ""),
        (160, "sm_75", "fp16", 1, ""),
        (160, "sm_100", "bf16", 2, ""),
        (160, "sm_90", "fp32", 2, ""),
    ],
)
def test_long_rows_that_are_no_power_of_two_have_a_form_of_their_own(
    head_dim: int, arch: str, dtype: str, stages: int, form: str
) -> None:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    spec = dataclasses.replace(plan(dtype=dtype, stages=stages).kernel, arch=arch, **dims)
    problem = Problem(dtype=dtype, causal=True, head_dim=head_dim)
    source = render(dataclasses.replace(plan(), kernel=spec, problem=problem)).source
    if dtype != "fp32":
        assert ("kDepthUnroll = kD / kDepth;" in source) == (form != "")
    assert ("copies > 16" in source) == (form != "")
    assert ("advance(2 * j + 1)" in source) == (form != "paired")


@pytest.mark.parametrize("plan", E4M3, ids=lambda plan: plan.kernel.stem)
def test_e4m3_reads_scale_factors_of_its_granularity(plan: Plan) -> None:
    source = render(plan).source
    assert "mma.sync.aligned.m16n8k32" in source
    assert ("v_scale[0]" in source) == (plan.kernel.scales == "tensor")
    assert ("v_scale[batch * kv_heads + kv_head]" in source) == (plan.kernel.scales == "head")
    inputs = plan.launch_for().inputs
    heads = {name: inputs[f"{name}_scale"][0] for name in "qkv"}
    one_a_head = plan.kernel.scales == "head"
    assert heads == dict.fromkeys("qkv", (1, 16) if one_a_head else (1,))


def test_a_text_without_a_plan() -> None:
    text = rendering.render_text('//% include "device/integers.cuh"\nu32 $(name);', name="x")
    assert text.startswith("using u16 = unsigned short;\n")
    assert text.endswith("\n\nu32 x;\n")


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        rendering.render_text("$(plan.no_such_field)", plan=plan())


@pytest.mark.parametrize(
    "source", ["", "int main() {}", "// ---- plan\n// {}\n", "// ---- plan\n// {\n// ---- the rest of the file has sha256 00\n"]  # noqa: E501
)  # fmt: skip
def test_other_files_are_refused(source: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(source, "x.cu")
    assert caught.value.hint


def test_parameters_follow_the_argument_list() -> None:
    spec = plan().kernel
    text = rendering.parameters(spec)
    assert re.findall(r"(\w+)[,\n]|(\w+)$", text)
    names = [name for name, _ in spec.arguments]
    assert [part.split()[-1] for part in text.split(",")] == names

"""V3 in e4m3 on packed sequences: every property, every stored bit, and what a wrong index does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from thorough import share

from fasim import gpu, inputs, planner, properties, quantise, reference
from fasim.emulator.program import Fault
from fasim.errors import CheckFailed
from fasim.plan import SCALE_BLOCK, SCALE_INPUTS, Tile, tensor_shapes
from fasim.problem import Problem
from fasim.reference import DTYPES
from fasim.render import Kernel, parse, render
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]

pytestmark = pytest.mark.emulator

THREE = Tile(block_q=192, block_kv=128, stages=2, warps=12, registers=160)
CASES: dict[str, dict[str, Any]] = {
    "one factor": {"head_dim": 32, "causal": True},
    "factors of heads": {"head_dim": 64, "scales": "head", "window": (100, 3), "bias": "alibi"},
    "factors of blocks": {"head_dim": 32, "scales": "block", "causal": True},
    "three consumers": {"head_dim": 64, "scales": "block", "causal": True, "softcap": 20.0},
    "padded": {"head_dim": 36, "head_dim_v": 33, "scales": "block"},
    "quantised, one factor": {"head_dim": 32, "in_dtype": "fp16", "causal": True},
    "quantised, factors of heads": {"head_dim": 40, "in_dtype": "bf16", "scales": "head"},
    "quantised, factors of blocks": {
        **{"head_dim": 35, "head_dim_v": 48, "in_dtype": "bf16", "scales": "block"},
        **{"window": (-1, 20)},
    },
    "rotated": {"head_dim": 16, "in_dtype": "bf16", "scales": "block", "incoherent": True},
}


@cache
def kernel_of(name: str) -> Kernel:
    problem = Problem(
        **{"batch": 2, "heads": 2, "kv_heads": 1, "seq": 150, "seq_kv": 90, "dtype": "e4m3"},
        **{"varlen": True, **CASES[name]},
    )
    tile = THREE if name == "three consumers" else None
    plan = planner.plan(problem, gpu.load("h200"), "v3", tile=tile).plan
    assert plan
    return render(plan)


@pytest.mark.parametrize("name", CASES)
def test_every_property_holds(name: str) -> None:
    properties.verify(kernel_of(name), EmulatorRunner(), examples=share(2)).check()


# ---- every stored bit ---------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = [130, 0, 1, 257], [0, 129, 300, 128]


def drawn(kernel: Kernel) -> tuple[Problem, dict[str, Array]]:
    """Sequences of several lengths, whose sizes differ from one to the next."""
    problem = kernel.plan.problem.with_(batch=4, seq=257, seq_kv=300)
    rng, dtype = np.random.default_rng(0), DTYPES[problem.in_dtype]
    arrays: dict[str, Array] = {}
    for name, lengths, heads, d in (
        ("q", LENGTHS_Q, problem.heads, problem.head_dim),
        ("k", LENGTHS_K, problem.kv_heads, problem.head_dim),
        ("v", LENGTHS_K, problem.kv_heads, problem.head_dim_v),
    ):
        sizes = np.repeat([1.0, 8.0, 0.1, 3.0], lengths)[:, None, None]
        arrays[name] = (sizes * rng.standard_normal((sum(lengths), heads, d))).astype(dtype)
    arrays["cu_seqlens_q"] = inputs.cu_seqlens(LENGTHS_Q)
    arrays["cu_seqlens_k"] = inputs.cu_seqlens(LENGTHS_K)
    return problem, arrays


def left_behind(kernel: Kernel, problem: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """Outputs and workspaces of a launch."""
    launch = kernel.plan.launch_for(problem, tokens=(sum(LENGTHS_Q), sum(LENGTHS_K)))
    shown = replace(launch, outputs={**launch.outputs, **launch.workspaces}, workspaces={})
    return EmulatorRunner().run(kernel, arrays, shown)


@pytest.mark.parametrize("name", [name for name in CASES if "in_dtype" in CASES[name]])
def test_every_stored_bit_is_that_of_each_sequence_alone(name: str) -> None:
    """Or, of one factor for all, of all sequences as one."""
    kernel = kernel_of(name)
    problem, arrays = drawn(kernel)
    got = left_behind(kernel, problem, arrays)
    for tensor, ends in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", "cu_seqlens_k")):
        whole = arrays[tensor].astype(np.float32)
        if problem.incoherent and tensor != "v":
            whole = quantise.transform(whole)
        unit = quantise.unit_of(whole.shape[2]) if problem.incoherent and tensor != "v" else 1.0
        together = quantise.quantise(whole.swapaxes(0, 1)[None], "tensor", unit)[0]
        for i, (first, last) in enumerate(zip(arrays[ends], arrays[ends][1:], strict=False)):
            rows = whole[first:last].swapaxes(0, 1)[None]
            stored, scale = quantise.quantise(rows, problem.scales, unit)
            block = first // SCALE_BLOCK + i
            if problem.scales == "tensor":
                stored = together[:, :, first:last]
            else:
                check_scales(got[f"{tensor}_scale"], scale[0], i if scale.ndim == 2 else block)
            if tensor == "v":
                check_slabs(got["vt"][block:], stored[0])
            else:
                rows8 = got[f"{tensor}8"][first:last, :, : problem.head_dim]
                same(rows8.swapaxes(0, 1), stored[0])


def check_scales(got: Array, want: Array, at: int) -> None:
    """Of a sequence (heads,) or, of blocks, (heads, blocks)."""
    found = got[at] if want.ndim == 1 else got[at : at + want.shape[1]].T
    np.testing.assert_array_equal(found, want)


def check_slabs(vt: Array, v: Array) -> None:
    """Of a sequence: the slabs from its first on, and V (heads, keys, columns) in e4m3."""
    order = np.ravel([[2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9] for t in range(4)])
    keys = (16 * np.arange(SCALE_BLOCK // 16)[:, None] + order).ravel()
    for slab, start in enumerate(range(0, v.shape[1], SCALE_BLOCK)):
        part = v[:, start : start + SCALE_BLOCK]
        whole = np.zeros((v.shape[0], SCALE_BLOCK, v.shape[2]), v.dtype)
        whole[:, : part.shape[1]] = part
        same(vt[slab][:, : v.shape[2]], whole[:, keys].swapaxes(1, 2))
        assert (vt[slab][:, -1].astype(float) == 1).all()


def same(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8)
    )


# ---- scale factors of blocks, given --------------------------------------------------------------


def given_by_blocks() -> tuple[Problem, dict[str, Array], list[Array]]:
    """Sequences whose blocks and heads are of very different sizes, and what their O is."""
    kernel = kernel_of("padded")
    problem = kernel.plan.problem.with_(batch=4, heads=4, kv_heads=2, seq=257, seq_kv=300)
    rng, wanted = np.random.default_rng(0), list[Array]()
    parts: dict[str, list[Array]] = {name: [] for name in ("q", "k", "v", *SCALE_INPUTS)}
    for seq, seq_kv in zip(LENGTHS_Q, LENGTHS_K, strict=True):
        alone = problem.with_(batch=1, seq=seq, seq_kv=seq_kv, varlen=False)
        made = {}
        for name, shape in list(tensor_shapes(alone).items())[:3]:
            blocks = -(-shape[2] // SCALE_BLOCK)
            sizes = np.exp2(rng.integers(-3, 3, (1, shape[1], blocks)))
            made[name] = np.repeat(sizes, SCALE_BLOCK, 2)[:, :, : shape[2], None]
            made[name] = made[name] * rng.standard_normal(shape)
        stored = properties.quantised(made, "block")
        wanted.append(reference.attention(**_tensors(properties.real(stored)), scale=alone.scale).o)
        for name, x in stored.items():
            parts[name].append(x[0])
    arrays = {name: np.concatenate([x.swapaxes(0, 1) for x in parts[name]]) for name in "qkv"}
    ends = [inputs.cu_seqlens(lengths) for lengths in (LENGTHS_Q, LENGTHS_K)]
    arrays |= properties.pack_scales([parts[name] for name in SCALE_INPUTS], *ends)
    return problem, arrays | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True)), wanted


def _tensors(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: arrays[name] for name in ("q", "k", "v")}


def check_factors(kernel: Kernel) -> None:
    problem, arrays, wanted = given_by_blocks()
    launch = kernel.plan.launch_for(problem, tokens=(sum(LENGTHS_Q), sum(LENGTHS_K)))
    got = EmulatorRunner().run(kernel, arrays, launch)["o"].astype(np.float64)
    ends = inputs.cu_seqlens(LENGTHS_Q)
    for want, first, last in zip(wanted, ends, ends[1:], strict=False):
        error = got[first:last].swapaxes(0, 1) - want[0]
        assert (error**2).sum() <= 0.05**2 * (want**2).sum()


def test_every_block_has_its_own_factor() -> None:
    check_factors(kernel_of("padded"))


FACTORS = {
    "of another head": ("scales[i64(block) * kv_heads + head]", "scales[i64(block) * kv_heads]"),
    "of the first block": ("q_scales[i64(block) * heads]", "q_scales[0]"),
    "of the sequence before": ("i64(scaled.block) * heads", "i64(scaled.block / 2) * heads"),
}


@pytest.mark.parametrize("bug", FACTORS)
def test_a_wrong_factor_is_found(bug: str) -> None:
    kernel = kernel_of("padded")
    right, wrong = FACTORS[bug]
    assert kernel.source.count(right) == 1
    with pytest.raises((Fault, AssertionError)):
        check_factors(parse(kernel.source.replace(right, wrong)))


# ---- planted bugs -------------------------------------------------------------------------------

BUGS: dict[str, dict[str, tuple[str, str]]] = {
    "factors of blocks": {
        "slabs of two sequences are the same": (
            "first_token / kScaleBlock + sequence + first_key",
            "first_token / kScaleBlock + first_key",
        ),
        "beyond the last slab comes the next sequence": (
            "tile < keys.blocks ? keys.block + tile : -1",
            "true ? keys.block + tile : -1",
        ),
        "keys of the next sequence are laid out": ("if (first_key >= seq_kv) return;", ""),
        "tiles of the sequence before": ("work.begin = tiles.begin;", "work.begin = 0;"),
    },
    "factors of heads": {
        "the factors of the first sequence": (
            "const i64 batch = work.batch;",
            "const i64 batch = 0;",
        ),
    },
    "quantised, factors of blocks": {
        "rows of the next sequence": (
            "tokens - first)), token * heads",
            "i64(1000))), token * heads",
        ),
        "blocks of two sequences are the same": (
            "begin / kBlockRows + sequence + part.block",
            "begin / kBlockRows + part.block",
        ),
        "every head's rows are neighbours": (
            "(of_q ? heads : kv_heads) * kWide",
            "kWide",
        ),
    },
}


# Inputs that show what is rarely met.
REPLAYS = {
    "the factors of the first sequence": "batch=2 heads=1 kv_heads=1 seq=1 seq_kv=1 values=normal"
    " property=matches_float64",
    "keys of the next sequence are laid out": "batch=2 heads=3 kv_heads=1 seq=77 seq_kv=257"
    " values=rising scale=0.03125 seed=254 property=packed_sequences_are_those_one_by_one",
    "tiles of the sequence before": "heads=3 kv_heads=1 seq=256 seq_kv=257 values=huge"
    " layout=tokens scale=0.03125 seed=675 property=packed_sequences_are_those_one_by_one",
}


@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name in BUGS for bug in BUGS[name]])
def test_a_wrong_index_is_found(name: str, bug: str) -> None:
    kernel = kernel_of(name)
    right, wrong = BUGS[name][bug]
    assert kernel.source.count(right) == 1
    edited = parse(kernel.source.replace(right, wrong))
    with pytest.raises((Fault, CheckFailed)):
        properties.verify(edited, EmulatorRunner(), 15, replay=REPLAYS.get(bug), hurry=True).check()

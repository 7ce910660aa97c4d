"""A seeded sample of accepted plans, forward and backward: the compiler keeps what the planner
promised."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
from thorough import THOROUGH, share

from fasim import gpu, legality, planner
from fasim.compile import Binary, check_promises, compile_kernel
from fasim.errors import CheckFailed
from fasim.plan import FORMS, Plan, Tile
from fasim.problem import Problem
from fasim.render import render

SEED = 2026
SAMPLE, WITH_OPTIONS, SPLIT_SAMPLE = share(120, of=10), share(40, of=5), share(30, of=5)
BACKWARD_SAMPLE, BACKWARD_WITH_OPTIONS = share(40, of=5), share(30, of=5)
V3_SAMPLE = share(22, of=2)  # with options, and without: one, two and three consumers
LADDER_SAMPLE = share(12, of=2)
BACKWARD = ("v1", "v2", *(f"v2_{form}" for form in FORMS))
MOST_MEAN_EXCESS = 16  # registers promised above those used

GPUS = ("a100-80gb", "a10", "3090", "4090", "l40s", "h100", "h200", "5090")
DTYPES = ("fp32", "fp16", "bf16")
# What few GPUs have, or lack: algorithms, GPUs, types.
LADDER = {
    "turing": (("v1", "v2"), ("t4",), ("fp32", "fp16")),
    "e4m3": (("v2",), ("4090", "5090"), ("e4m3",)),
}
HEAD_DIMS = (16, 32, 33, 40, 64, 80, 96, 128, 160, 192, 224, 256)


@dataclass
class Built:
    plan: Plan
    binary: Binary

    @property
    def excess(self) -> int:
        return self.plan.registers - self.binary.resources.registers


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Window, softcap, bias and packed sequences, each in about half of the kernels."""
    varlen = rng.random() < 0.3
    biases = ("none", "alibi") if varlen else ("none", "alibi", "dense", "dense_fp32")
    return {
        "window": rng.choice(((-1, -1), (1023, 0), (63, 64))),
        "softcap": rng.choice((0.0, 50.0)),
        "bias": rng.choice(biases),
        "varlen": varlen,
    }


def draw(
    rng: random.Random,
    algos: tuple[str, ...],
    pass_: str = "fwd",
    options: bool = False,
    gpus: tuple[str, ...] = GPUS,
    dtypes: tuple[str, ...] = DTYPES,
) -> Plan | None:
    """One legal tile of one random problem, any of them as likely."""
    head_dim = rng.choice(HEAD_DIMS)
    problem = Problem(
        dtype=rng.choice(dtypes),
        head_dim=head_dim,
        head_dim_v=head_dim if rng.random() < 0.8 else rng.choice(HEAD_DIMS),
        causal=rng.random() < 0.5,
        pass_=pass_,
        **(draw_options(rng) if options else {}),
    )
    device, algo = gpu.load(rng.choice(gpus)), rng.choice(algos)
    form = algo.removeprefix("v2_") if algo.removeprefix("v2_") in FORMS else ""
    problem = problem.with_(deterministic=bool(form))
    tiles = planner.candidates(problem, device, algo, pass_)
    case = legality.Case.of(problem, device, algo, pass_, tiles)
    legal = np.flatnonzero(legality.legal(case))
    if not len(legal):
        return None
    tile = tiles.tile(int(rng.choice(list(legal))))
    return planner.plan(problem, device, algo.partition("_")[0], tile=tile, form=form).plan


def sample(
    count: int, seed: int, *algos: str, pass_: str = "fwd", options: bool = False
) -> list[Plan]:
    rng = random.Random(seed)
    drawn = iter(lambda: draw(rng, algos or ("v1", "v2"), pass_, options), object())
    return list(islice((plan for plan in drawn if plan), count))


def build(plan: Plan) -> Built:
    return Built(plan, compile_kernel(render(plan)))


def broken_promise(built: Built) -> str:
    try:
        check_promises(built.binary, built.plan)
    except CheckFailed as error:
        return f"{built.plan.kernel.stem} {built.plan.kernel.tile!r}: {error.why}"
    return ""


@pytest.mark.nvcc
def test_accepted_plans_compile_as_promised() -> None:
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, sample(SAMPLE, SEED)))
    assert not list(filter(None, map(broken_promise, built)))
    assert np.mean([each.excess for each in built]) <= MOST_MEAN_EXCESS


@pytest.mark.nvcc
def test_accepted_plans_of_split_keys_compile_as_promised() -> None:
    plans = sample(SPLIT_SAMPLE, SEED, "v2_split")
    assert all(plan.kernel.splits for plan in plans)
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, plans))
    assert not list(filter(None, map(broken_promise, built)))
    assert np.mean([each.excess for each in built]) <= MOST_MEAN_EXCESS


@pytest.mark.nvcc
@pytest.mark.parametrize("rung", LADDER)
def test_accepted_plans_of_the_ladder_compile_as_promised(rung: str) -> None:
    algos, gpus, dtypes = LADDER[rung]
    rng = random.Random(SEED)
    drawn = iter(lambda: draw(rng, algos, gpus=gpus, dtypes=dtypes), object())
    plans = list(islice((plan for plan in drawn if plan), LADDER_SAMPLE))
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, plans))
    assert not list(filter(None, map(broken_promise, built)))


@pytest.mark.nvcc
@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
def test_accepted_plans_of_v3_compile_as_promised(options: bool) -> None:
    """No spills beside the accumulators, and no product that waits for another (C75xx)."""
    rng = random.Random(SEED)
    drawn = iter(
        lambda: draw(rng, ("v3",), "fwd", options, ("h100", "h200"), ("fp16", "bf16")), object()
    )
    plans = list(islice((plan for plan in drawn if plan), V3_SAMPLE))
    assert {plan.kernel.tile.warps for plan in plans} >= ({4, 8, 12} if THOROUGH else {8, 12})
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, plans))
    assert not list(filter(None, map(broken_promise, built)))


PACKED = Problem(batch=16, heads=32, kv_heads=8, seq=16, seq_kv=8192, dtype="bf16")
V3_PACKED: tuple[dict[str, Any], ...] = (
    {"head_dim": 16},
    {"head_dim": 64, "causal": True},
    {"head_dim": 128, "causal": True, "dtype": "fp16"},
    {"head_dim": 80, "window": (63, 64), "softcap": 50.0},
    {"head_dim": 256, "softcap": 50.0},
)


@pytest.mark.nvcc
def test_packed_rows_compile_as_promised() -> None:
    """The tile of the most keys for one consumer, two and three, where they have the registers."""
    plans, device = [], gpu.load("h200")
    for problem in (PACKED.with_(**options) for options in V3_PACKED):
        tiles = planner.candidates(problem, device, "v3_packed", "fwd")
        case = legality.Case.of(problem, device, "v3_packed", "fwd", tiles)
        legal = case.take(np.flatnonzero(legality.legal(case))).tiles
        for warps in set(legal.warps.tolist()):
            widest = np.lexsort((legal.stages, legal.block_kv, legal.warps == warps))[-1]
            tile = legal.tile(int(widest))
            plans.append(planner.plan(problem, device, "v3", tile=tile, form="packed").plan)
    found = [plan for plan in plans if plan]
    assert {plan.kernel.tile.warps for plan in found} == {4, 8, 12}
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, found))
    assert not list(filter(None, map(broken_promise, built)))


V3_E4M3: tuple[dict[str, Any], ...] = (
    {"head_dim": 128, "scales": "block", "causal": True},
    {"head_dim": 256, "head_dim_v": 128, "scales": "head"},
    {"head_dim": 128, "window": (63, 64)},
    {"head_dim": 64, "softcap": 50.0, "bias": "alibi", "scales": "block"},
    {"head_dim": 80, "causal": True, "out_dtype": "fp16"},
    {"head_dim": 16, "head_dim_v": 48},
    {"head_dim": 256, "causal": True},
    {"head_dim": 64, "head_dim_v": 256, "scales": "block"},
    {"in_dtype": "bf16", "scales": "block"},
    {"in_dtype": "fp16", "scales": "head", "incoherent": True},
    {"in_dtype": "bf16", "scales": "block", "head_dim": 80, "head_dim_v": 112},
    {"in_dtype": "bf16", "head_dim": 256, "head_dim_v": 64, "incoherent": True},
    {"head_dim": 36, "head_dim_v": 33, "causal": True},
    {"head_dim": 64, "bias": "dense_fp32", "causal": True, "scales": "head"},
    {"head_dim": 128, "bias": "dense", "in_dtype": "bf16", "scales": "block"},
    {"head_dim": 96, "bias": "dense_fp32", "softcap": 50.0, "scales": "block"},
    {"head_dim": 192, "bias": "dense_fp32", "window": (63, 64), "scales": "block"},
    {"head_dim": 192, "bias": "dense", "in_dtype": "fp16", "softcap": 50.0, "causal": True},
    {"head_dim": 64, "varlen": True, "causal": True, "scales": "head"},
    {"head_dim": 128, "varlen": True},
    {"head_dim": 128, "varlen": True, "window": (63, 64), "scales": "block"},
    {"head_dim": 256, "varlen": True, "window": (63, 64), "in_dtype": "bf16", "scales": "block"},
    {"head_dim": 256, "varlen": True, "in_dtype": "fp16", "scales": "head"},
    {"head_dim": 100, "varlen": True, "in_dtype": "bf16", "bias": "alibi", "softcap": 50.0},
    {"head_dim": 255, "scales": "block", "window": (63, 64)},
    {"in_dtype": "bf16", "scales": "head", "head_dim": 100},
    {"in_dtype": "fp16", "scales": "block", "head_dim": 72, "head_dim_v": 251},
)


@pytest.mark.nvcc
def test_plans_of_v3_in_e4m3_compile_as_promised() -> None:
    entries = [
        planner.plan(Problem(dtype="e4m3", **options), gpu.load("h200"), "v3")
        for options in V3_E4M3[:: 1 if THOROUGH else 3]
    ]
    plans = [entry.plan for entry in entries if entry.plan]
    assert len(plans) == len(entries)
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, plans))
    assert not list(filter(None, map(broken_promise, built)))


@pytest.mark.nvcc
def test_accepted_plans_with_options_compile_as_promised() -> None:
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, sample(WITH_OPTIONS, SEED, options=True)))
    assert not list(filter(None, map(broken_promise, built)))


@pytest.mark.nvcc
@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
def test_accepted_backward_plans_compile_as_promised(options: bool) -> None:
    count = BACKWARD_WITH_OPTIONS if options else BACKWARD_SAMPLE
    plans = sample(count, SEED, *BACKWARD, pass_="bwd", options=options)
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, plans))
    assert not list(filter(None, map(broken_promise, built)))


FOUR = Tile(block_q=64, block_kv=64, warps=8, stages=2, p_in="shared", sharers=4)
OF_FOUR: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("h200", "", {"head_dim": 256, "window": (63, 64), "softcap": 50.0, "bias": "dense_fp32"}),
    ("h200", "ordered", {"head_dim": 256, "softcap": 50.0, "bias": "alibi", "varlen": True}),
    ("h200", "second_pass", {"head_dim": 224, "causal": True}),
    ("b200", "", {"head_dim": 192, "window": (63, 64), "softcap": 50.0}),
    ("a100-80gb", "", {"head_dim": 160}),
    ("a100-80gb", "ordered", {"head_dim": 176, "window": (63, 64), "softcap": 50.0}),
)


@pytest.mark.nvcc
def test_plans_whose_keys_four_warps_share_compile_as_promised() -> None:
    plans = [
        planner.plan(
            Problem(dtype="bf16", pass_="bwd", deterministic=bool(form), **options),
            *(gpu.load(name), "v2"),
            tile=FOUR,
            form=form,
        ).plan
        for name, form, options in OF_FOUR
    ]
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build, filter(None, plans)))
    assert len(built) == len(OF_FOUR)
    assert not list(filter(None, map(broken_promise, built)))

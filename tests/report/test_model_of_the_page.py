"""The page's code comes to the numbers of the model and the planner, and to the model's events."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import engine
import numpy as np
import pytest

from fasim import gpu, planner, report
from fasim.entry import Entry
from fasim.errors import NoPlanError
from fasim.model import traffic
from fasim.model.events import Event, events
from fasim.problem import Problem

pytestmark = pytest.mark.skipif(not engine.node(), reason="neither Node nor Playwright here")

PROBLEMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("v1", "h200", {"causal": True, "seq": 2048}),
    ("v1", "a100", {"seq": 1000, "seq_kv": 700, "causal": True, "dtype": "fp32"}),
    ("v1", "a100", {"seq": 300, "window": (100, 20), "bias": "alibi"}),
    ("v1", "t4", {"seq": 333, "bias": "dense", "head_dim": 64}),
    ("v2", "a100", {"causal": True, "seq": 8192, "heads": 32, "kv_heads": 8}),
    ("v2", "rtx4090", {"seq": 1000, "seq_kv": 700, "causal": True}),
    ("v2", "a10", {"seq": 700, "seq_kv": 1001, "causal": True, "batch": 3, "head_dim_v": 64}),
    ("v2", "h200", {"seq": 1500, "window": (127, 0), "softcap": 30.0, "varlen": True}),
    ("v2", "h200", {"seq": 777, "bias": "dense", "causal": True}),
    ("v2", "l4", {"seq": 777, "bias": "dense_fp32", "window": (90, 7), "dtype": "fp32"}),
    ("v2", "rtx4090", {"seq": 2048, "dtype": "e4m3", "causal": True}),
    ("v2", "b200", {"seq": 2048, "dtype": "e4m3", "head_dim": 256}),
    ("v2", "t4", {"seq": 513, "head_dim": 40}),
    ("v2", "h200", {"seq": 1000, "head_dim": 33, "head_dim_v": 64}),
    ("v2", "v100", {"seq": 4096, "head_dim": 80}),
    ("v2", "h200", {"seq": 1, "seq_kv": 8192, "heads": 32, "kv_heads": 8}),
    ("v2", "h200", {"seq": 3, "seq_kv": 5000, "heads": 8, "kv_heads": 2, "causal": True}),
    ("v2", "l40s", {"seq": 0}),
    ("v3", "h200", {"causal": True, "seq": 8192}),
    ("v3", "h100", {"seq": 1000, "seq_kv": 700, "causal": True, "dtype": "bf16"}),
    ("v3", "h100-pcie", {"seq": 700, "seq_kv": 1000, "head_dim": 256}),
    ("v3", "h100", {"seq": 900, "window": (200, 30), "bias": "dense", "varlen": True}),
    ("v3", "h200", {"seq": 1025, "causal": True, "bias": "dense_fp32", "softcap": 20.0}),
    ("v3", "h200", {"seq": 640, "window": (100, 0), "bias": "alibi", "head_dim": 64}),
    ("v2", "gh200", {"seq": 16384, "batch": 4, "dtype": "e4m3", "head_dim": 64}),
    ("v3", "h200", {"seq": 8192, "causal": True, "dtype": "e4m3"}),
    ("v3", "h100", {"seq": 300, "seq_kv": 1000, "dtype": "e4m3", "heads": 8, "kv_heads": 2}),
    ("v3", "h200", {"seq": 1000, "seq_kv": 700, "causal": True, "dtype": "e4m3", "head_dim": 64}),
    ("v3", "gh200", {"seq": 700, "window": (200, 30), "dtype": "e4m3", "scales": "block"}),
    ("v3", "h200", {"seq": 520, "bias": "alibi", "softcap": 9.0, "dtype": "e4m3", "head_dim": 96}),
    ("v2", "h200", {"seq": 300, "head_dim": 40, "dtype": "e4m3"}),
    ("v3", "h200", {"seq": 700, "window": (90, 7), "bias": "dense_fp32", "dtype": "e4m3"}),
    ("v3", "h200", {"seq": 520, "batch": 3, "kv_heads": 4, "dtype": "e4m3", "varlen": True}),
)
PACKED: dict[str, Any] = {"batch": 16, "heads": 16, "kv_heads": 4, "seq": 40, "dtype": "bf16"}
PROBLEMS += (
    ("v3", "h200", {**PACKED, "seq_kv": 3000, "causal": True}),
    ("v3", "h100", {**PACKED, "seq_kv": 1000, "seq": 300, "window": (200, 30), "softcap": 9.0}),
    ("v3", "h200", {**PACKED, "seq": 1, "seq_kv": 2000, "head_dim": 64}),
    ("v3", "h200", {**PACKED, "seq_kv": 20, "causal": True, "head_dim_v": 64, "batch": 40}),
    ("v3", "h200", {**PACKED, "seq_kv": 900, "kv_heads": 16, "heads": 48}),
)
ALGOS = ("standard", "v1", "v2", "v3")
PLAN = """
const model = makeModel(data.constants, data.gpus);
const p = model.problemOf(data.problem), gpu = data.gpus[data.gpu];
"""


def entries() -> list[Entry]:
    return [planner.plan(Problem(**o), gpu.load(name), algo) for algo, name, o in PROBLEMS]


@pytest.fixture(scope="module")
def planned() -> list[Entry]:
    return entries()


def documents(planned: list[Entry]) -> list[dict[str, Any]]:
    return [report.document(entry, gpu.load(entry.gpu)) for entry in planned]


def test_the_page_plans_what_the_planner_plans(planned: list[Entry]) -> None:
    check_plans(planned)


def check_plans(planned: list[Entry], **edits: tuple[str, str]) -> None:
    script = f"""return data.map((data) => {{ {PLAN}
      return {list(ALGOS)}.map((algo) => {{
        const e = model.plan(p, gpu, algo), {{ alternatives = [], rejected = [] }} = e;
        return {{ ...e, problem: null, p: null, gpu: null,
          alternatives: alternatives.map((a) => a.t),
          rejected: rejected.map((r) => [r.name, r.why[0]]) }};
      }});
    }});"""
    for entry, found in zip(planned, engine.run(script, documents(planned), **edits), strict=True):
        device = gpu.load(entry.gpu)
        for algo, one in zip(ALGOS, found, strict=True):
            compare(expected(entry.problem, algo, entry), one, device.name)


def expected(problem: Problem, algo: str, entry: Entry) -> Entry | NoPlanError:
    pads = algo == "v3" and problem.dtype != "fp32" and traffic.pads(problem, algo, "fwd")
    if pads and gpu.load(entry.gpu).wgmma:
        return NoPlanError("the page cannot", why="the page does not plan V3 for rows that it pads")
    try:
        return planner._entry(problem, gpu.load(entry.gpu), algo, top=5)
    except NoPlanError as error:
        return error


def compare(entry: Entry | NoPlanError, one: dict[str, Any], device: str) -> None:
    if isinstance(entry, NoPlanError):
        assert entry.why == (one.get("illegal") or one["reason"])[0]
        return
    assert entry.issued
    assert entry.dram
    assert "hbm" in one, one.get("illegal")
    assert one["hbm"] == {
        "inputs": entry.hbm.inputs,
        "outputs": entry.hbm.outputs,
        "s_and_p": entry.hbm.s_and_p,
        "saved": entry.hbm.saved,
        "workspace": entry.hbm.workspace,
        "total": entry.hbm.total,
    }
    assert (one["fits"], one["max_seq"]) == (entry.fits, entry.max_seq)
    assert (one["useful"], one["executed"]) == (entry.useful_flops, entry.executed_flops)
    assert one["issued"]["reads"] == dict(entry.issued.reads)
    assert one["issued"]["writes"] == dict(entry.issued.writes)
    assert one["dram"]["read"] == entry.dram.read
    assert one["dram"]["write"] == entry.dram.write
    for name in ("seconds", "low", "high"):
        assert one["time"][name] == pytest.approx(getattr(entry.time, name), rel=1e-12)
    assert one["time"]["terms"] == pytest.approx(entry.time.terms, rel=1e-12)
    assert one["time"]["bound"] == entry.time.bound
    if entry.tile is None:
        return
    assert_same_tile(entry, one["t"])
    assert (one["grid"], one["threads"]) == (entry.grid, entry.block)
    assert (one["smem"], one["blocks"]) == (entry.smem_bytes, entry.blocks_per_sm)
    assert (one["limiter"], one["splits"]) == (entry.limiter, entry.splits)
    assert one["rejected"] == [list(pair) for pair in entry.rejected]
    for other, t in zip(entry.alternatives, one["alternatives"], strict=True):
        assert_same_tile(other, t)


def assert_same_tile(entry: Entry, t: dict[str, Any]) -> None:
    assert entry.tile
    tile = entry.tile
    assert (t["m"], t["n"], t["stages"], t["warps"]) == (
        tile.block_q, tile.block_kv, tile.stages, tile.warps,
    )  # fmt: skip
    assert (t["step"], t["registers"]) == (tile.keys_per_step, tile.registers)


@pytest.mark.parametrize(
    ("algo", "device", "shape", "options"),
    [
        ("v2", "a100", (96, 64), {}),
        ("v2", "a100", (128, 40), {}),
        ("v2", "t4", (128, 256), {}),
        ("v2", "a100", (64, 256), {"head_dim": 256}),
        ("v1", "a100", (64, 16), {}),
        ("v1", "a100", (512, 128), {}),
        ("v3", "h200", (128, 272), {}),
        ("v3", "h200", (64, 64), {}),
        ("v3", "h200", (192, 256), {}),
        ("v3", "h200", (128, 200), {}),
    ],
)
def test_an_illegal_tile_says_which_limit_it_breaks(
    algo: str, device: str, shape: tuple[int, int], options: dict[str, Any]
) -> None:
    problem, chosen = Problem(**options), gpu.load(device)
    with pytest.raises(NoPlanError) as caught:
        planner.plan(problem, chosen, algo, tile=shape)
    data = report.document(planner.plan(problem, chosen, algo), chosen)
    script = (
        f"{PLAN} return model.plan(p, gpu, '{algo}', {{ask: {{shape: {list(shape)}}}}}).illegal;"
    )
    english, chinese = engine.run(script, data)
    assert english == caught.value.why
    assert any("一" <= letter <= "鿿" for letter in chinese)


def test_the_events_are_the_models(planned: list[Entry]) -> None:
    check_events(planned)


def check_events(planned: list[Entry], **edits: tuple[str, str]) -> None:
    script = f"""return data.map((data) => {{ {PLAN}
      const {{ simulate }} = makeEvents(model), entry = model.plan(p, gpu, data.entry.algo);
      const sim = simulate(entry), all = [];
      for (let i = 0; i < sim.turns; ++i) all.push(...sim.turn(i));
      const parts = ["role", "kind", "what", "query", "key", "bytes", "start", "end", "lane"];
      return {{ read: sim.read[sim.turns], write: sim.write[sim.turns],
        duration: sim.duration, all: all.map((e) => parts.map((part) => e[part])) }};
    }});"""
    planned = [e for e in planned if e.problem.seq < 8192]
    all_found = engine.run(script, documents(planned), **edits)
    for entry, found in zip(planned, all_found, strict=True):
        assert entry.tile
        assert entry.issued
        assert (found["read"], found["write"]) == (entry.issued.read, entry.issued.write)
        said = list(events(entry.problem, entry.variant, entry.tile, entry.splits))
        mine = [Event(*one[:6]) for one in found["all"]]
        assert by_role(mine) == by_role(said)
        check_clocks(found["all"], found["duration"])


BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a level of the model": (check_plans, "model", "t.warps * kv * reread", "t.warps * kv"),
    "a rule of legality": (check_plans, "model", "c.registers <= c.cap", "c.registers < c.cap"),
    "an order of merit": (
        check_plans,
        "model",
        "b.t.blocks - a.t.blocks",
        "a.t.blocks - b.t.blocks",
    ),
    "a slot of the ring": (check_events, "events", "2 * h.t.stages - 1", "2 * h.t.stages - 2"),
    "values before their scores": (check_events, "events", "fill(1);\n      const pv", "const pv"),
    "keys of V laid out anew": (check_plans, "model", "(keys - p.seq_kv)", "0"),
    "what lays out V": (
        check_plans,
        "model",
        "(before.read + before.write) / r.hbm",
        "before.read / r.hbm",
    ),
    "values after the next scores": (check_events, "events", "before && !h.behind", "false"),
    "heads that share V laid out anew": (check_events, "events", "|| role === TRANSPOSER", ""),
    "a scale factor of keys": (check_events, "events", "key < h.p.seq_kv) read", "false) read"),
    "a store of V1": (check_events, "events", 'key < to ? ["m", "l"', 'key <= to ? ["m", "l"'),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_page_is_caught(planned: list[Entry], bug: str) -> None:
    check, module, right, wrong = BUGS[bug]
    with pytest.raises(AssertionError):
        check(planned, **{module: (right, wrong)})


def by_role(all_: list[Event]) -> dict[str, list[Event]]:
    in_order = sorted(all_, key=lambda e: e.role)  # stable
    return {role: list(group) for role, group in groupby(in_order, key=lambda e: e.role)}


def check_clocks(found: list[Any], duration: float) -> None:
    """Nobody does two things at once, nothing is used before it came, all is over at the end."""
    busy: dict[str, float] = {}
    for role, kind, _, _, _, _, start, end, _ in found:
        assert 0 <= start <= end <= duration + 1e-6
        if kind in ("product", "softmax") and role in ("block",):
            assert start >= busy.get(role, 0) - 1e-6
            busy[role] = end


SCORES = ([[90, 80, 70], [95]], [[1, 2], [3], [2, -5, 4]], [[-1e4, 7]], [[0, 0], [0]])


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
@pytest.mark.parametrize("blocks", SCORES)
def test_the_row_ends_at_the_exact_softmax(version: str, blocks: list[list[float]]) -> None:
    flat = np.array([x for block in blocks for x in block], np.float64)
    values = np.arange(1, len(flat) + 1, dtype=np.float64)
    weights = np.exp(flat - flat.max()) / np.exp(flat - flat.max()).sum()
    script = """const steps = onlineSoftmax(data.blocks, data.values, data.version);
      return [resultOf(steps, data.version), exactSoftmax(data.blocks, data.values).o, steps];"""
    data = {"blocks": blocks, "values": values.tolist(), "version": version}
    found, exact, steps = engine.run(script, data)
    assert exact == pytest.approx(weights @ values, rel=1e-14)
    assert found == pytest.approx(exact, rel=1e-14)
    assert len(steps) == len(blocks)
    assert steps[0]["alpha"] is None


def test_a_backward_plan_is_refused() -> None:
    entry = planner.plan(Problem(pass_="bwd"), gpu.load("a100"), "v2")
    with pytest.raises(report.UsageError, match="forward"):
        report.page(entry, gpu.load("a100"))
    whole = planner.plan(Problem(seq=128), gpu.load("a100"), "standard")
    with pytest.raises(report.UsageError, match="no tiles"):
        report.page(replace(whole, tile=None), gpu.load("a100"))

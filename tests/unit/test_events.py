"""The stream of events of a kernel moves the bytes that the model counts, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fasim import gpu, planner
from fasim.entry import Entry
from fasim.model.events import TRANSPOSER, Event, events, units
from fasim.plan import v3_layout
from fasim.problem import Problem

PACKED: dict[str, Any] = {"batch": 16, "heads": 16, "kv_heads": 4, "seq": 40, "dtype": "bf16"}
PROBLEMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("v1", "h200", {"causal": True, "seq": 1024}),
    ("v1", "a100", {"seq": 1000, "seq_kv": 700, "causal": True}),
    ("v1", "a100", {"seq": 300, "window": (100, 20), "bias": "alibi"}),
    ("v1", "a100", {"seq": 333, "bias": "dense", "varlen": False, "causal": True}),
    ("v1", "a100", {"seq": 65, "seq_kv": 0}),
    ("v1", "a100", {"seq": 0, "bias": "alibi"}),
    ("v2", "a100", {"causal": True, "seq": 8192, "heads": 32, "kv_heads": 8}),
    ("v2", "a100", {"seq": 1000, "seq_kv": 700, "causal": True}),
    ("v2", "a100", {"seq": 700, "seq_kv": 1001, "causal": True, "batch": 3, "head_dim_v": 64}),
    ("v2", "h200", {"seq": 1500, "window": (127, 0), "softcap": 30.0, "varlen": True}),
    ("v2", "h200", {"seq": 777, "bias": "dense", "causal": True}),
    ("v2", "l4", {"seq": 777, "bias": "dense_fp32", "window": (90, 7), "dtype": "fp32"}),
    ("v2", "rtx4090", {"seq": 2048, "dtype": "e4m3", "causal": True}),
    ("v2", "t4", {"seq": 513, "head_dim": 40}),
    ("v2", "h200", {"seq": 1, "seq_kv": 8192, "heads": 32, "kv_heads": 8}),
    ("v2", "h200", {"seq": 3, "seq_kv": 5000, "heads": 8, "kv_heads": 2, "causal": True}),
    ("v3", "h200", {"causal": True, "seq": 8192}),
    ("v3", "h100", {"seq": 1000, "seq_kv": 700, "causal": True, "dtype": "bf16"}),
    ("v3", "h100", {"seq": 700, "seq_kv": 1000, "head_dim": 256}),
    ("v3", "h100", {"seq": 900, "window": (200, 30), "bias": "dense", "varlen": True}),
    ("v3", "h200", {"seq": 1025, "causal": True, "bias": "dense_fp32", "softcap": 20.0}),
    ("v3", "h200", {"seq": 640, "window": (100, 0), "bias": "alibi", "head_dim": 64}),
    ("v3", "h100", {"seq": 900, "bias": "alibi", "dtype": "fp16", "head_dim": 64}),
    ("v3", "h200", {**PACKED, "seq_kv": 3000, "causal": True}),
    ("v3", "h100", {**PACKED, "seq_kv": 1000, "seq": 300, "window": (200, 30), "softcap": 9.0}),
    ("v3", "h200", {**PACKED, "seq_kv": 20, "causal": True, "head_dim_v": 64, "batch": 40}),
    ("v3", "h200", {"causal": True, "seq": 8192, "dtype": "e4m3"}),
    ("v3", "h100", {"seq": 300, "seq_kv": 1000, "dtype": "e4m3", "heads": 8, "kv_heads": 2}),
    ("v3", "h200", {"seq": 1000, "seq_kv": 700, "causal": True, "dtype": "e4m3", "head_dim": 64}),
    ("v3", "h200", {"seq": 700, "window": (200, 30), "dtype": "e4m3", "scales": "block"}),
    ("v3", "h200", {"seq": 700, "seq_kv": 128, "causal": True, "dtype": "e4m3", "scales": "block"}),
    ("v3", "h200", {"seq": 520, "bias": "alibi", "softcap": 9.0, "dtype": "e4m3"}),
    ("v3", "h200", {"seq": 520, "dtype": "e4m3", "head_dim": 96, "batch": 2}),
    ("v3", "h200", {"seq": 700, "dtype": "e4m3", "head_dim": 256, "causal": True}),
    ("v3", "h200", {"seq": 330, "dtype": "e4m3", "head_dim": 224, "scales": "block"}),
    ("v3", "h200", {"seq": 200, "seq_kv": 0, "dtype": "e4m3"}),
    ("v3", "h200", {"seq": 0, "seq_kv": 200, "dtype": "e4m3"}),
    ("v3", "h200", {"seq": 520, "bias": "dense_fp32", "dtype": "e4m3", "window": (90, 7)}),
    ("v3", "h200", {"seq": 700, "seq_kv": 300, "dtype": "e4m3", "varlen": True, "batch": 2}),
    ("v3", "h200", {"seq": 300, "scales": "block", "dtype": "e4m3", "varlen": True}),
    ("v3", "h200", {"seq": 0, "seq_kv": 200, "dtype": "e4m3", "varlen": True}),
    ("v3", "h200", {"seq": 200, "seq_kv": 0, "dtype": "e4m3", "varlen": True}),
)


def planned(algo: str, device: str, options: dict[str, Any]) -> Entry:
    return planner.plan(Problem(**options), gpu.load(device), algo)


def test_some_of_them_pack_rows() -> None:
    assert sum(planned(*one).packed for one in PROBLEMS) == 3


def stream(entry: Entry) -> list[Event]:
    assert entry.tile
    return list(events(entry.problem, entry.variant, entry.tile, entry.splits))


def moved(entry: Entry, kind: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for event in stream(entry):
        times = units(entry.problem, entry.variant, event.role)
        total[event.what] += event.bytes * times * (event.kind == kind)
    return {name: size for name, size in total.items() if size}


@pytest.mark.parametrize(("algo", "device", "options"), PROBLEMS)
def test_the_bytes_of_all_events_are_the_issued_traffic(
    algo: str, device: str, options: dict[str, Any]
) -> None:
    entry = planned(algo, device, options)
    assert entry.issued
    assert moved(entry, "load") == {name: b for name, b in entry.issued.reads.items() if b}
    assert moved(entry, "store") == {name: b for name, b in entry.issued.writes.items() if b}


@pytest.mark.parametrize(("algo", "device", "options"), PROBLEMS)
def test_a_tile_is_multiplied_weighed_and_multiplied_once(
    algo: str, device: str, options: dict[str, Any]
) -> None:
    done: dict[str, list[Any]] = {"s": [], "p": [], "pv": []}
    for event in stream(planned(algo, device, options)):
        if event.what in done:
            done[event.what].append((event.role, event.query, event.key))
    assert sorted(done["s"]) == sorted(done["p"]) == sorted(done["pv"])
    assert len(set(done["s"])) == len(done["s"])


def test_v3_runs_ahead_by_its_rings_and_no_further() -> None:
    entry = planned("v3", "h200", {"seq": 4096, "causal": True})
    assert entry.tile
    loaded, used = Counter[str](), Counter[str]()
    layout = v3_layout(entry.problem, entry.tile)
    for event in stream(entry):
        loaded[event.what] += event.kind == "load"
        used[event.what] += event.role == "consumer 0"
        assert loaded["k"] - used["s"] <= entry.tile.stages + layout.more_keys
        assert loaded["v"] - used["pv"] <= entry.tile.stages
        assert used["s"] <= loaded["k"]
        assert used["pv"] <= loaded["v"]


def test_v3_lays_out_v_before_it_multiplies_bytes() -> None:
    entry = planned("v3", "h200", {"seq": 512, "dtype": "e4m3"})
    said = stream(entry)
    before = [event for event in said if event.role == TRANSPOSER]
    assert said[: len(before)] == before
    assert [e.kind for e in before] == ["load", "store"] * (512 // 128)
    assert sum(e.bytes for e in before if e.kind == "load") == 512 * 128
    assert sum(e.bytes for e in before if e.kind == "store") == 512 * 129  # a row of ones
    assert {e.what for e in said[len(before) :] if e.kind == "load"} == {
        "q", "k", "vt", "q_scale", "k_scale", "v_scale",
    }  # fmt: skip

"""Launches as a whole: many of them, in many threads, given up, counted and traced."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import SMEM_BYTES, alarm, arrays, fault, launch, source

from fasim.emulator import program
from fasim.emulator.build import build
from fasim.emulator.program import Fault, Operation, Program, Span
from fasim.errors import UsageError

pytestmark = pytest.mark.emulator


# ---- one after the other, and side by side ------------------------------------------------------


def test_launches_go_on_after_faults() -> None:
    """The faulty threads never finish; their stacks are used again."""
    body = "y[i] = i;\n  __syncthreads();\n  if (x[0] == 1 && i == 40) __trap();\n  y[i + 64] = i;"
    for turn in range(20):
        given = arrays()
        given["x"][0] = turn % 2
        if turn % 2:
            assert fault(body, given=given).rule == "trap"
        else:
            y, _ = launch(body, given=given)
            assert y.tolist() == [*range(64), *range(64), *[0] * 128]


def test_a_kernel_with_other_parameters_is_not_launched() -> None:
    given = arrays()
    with pytest.raises(UsageError, match="tiny takes 2 parameters, and its plan has 3"):
        Program.load(source("y[i] = x[i];"), "tiny").launch(
            {**given, "n": b"0000"}, ["y"], grid=1, block=64
        )


def test_many_programs_are_loaded_at_once(tmp_path: Path) -> None:
    library = build(source("y[blockIdx.x * 64 + i] = x[i];"), "tiny")
    programs = []
    for n in range(64):
        folder = shutil.copytree(library.parent, tmp_path / str(n))
        programs.append(Program("tiny", folder / library.name))
    for loaded in programs:
        given = arrays()
        loaded.launch(given, ["y"], grid=4, block=64, smem_bytes=SMEM_BYTES, workers=2)
        assert given["y"].tolist() == 4 * list(range(64))


MIXED = """tile[i] = x[i] + blockIdx.x;
  __syncthreads();
  float sum = 0;
  for (int n = 0; n < 64; ++n) sum += 1.f / (1 + tile[(i + n) % 64]);
  y[blockIdx.x * 64 + i] = __float_as_uint(sum);"""


@pytest.mark.parametrize("seed", range(3))
def test_workers_change_neither_bits_nor_counts(seed: int) -> None:
    (alone, executed), (shared, same) = (
        launch(MIXED, grid=4, seed=seed, workers=workers) for workers in (1, 2)
    )
    assert alone.tobytes() == shared.tobytes()
    assert executed == same


@pytest.mark.parametrize("seed", range(3))
def test_workers_find_the_same_fault(seed: int) -> None:
    body = "tile[i] = 0;\n  __syncthreads();\n  if (blockIdx.x % 4 == 3 && i == 9) y[1000] = 1;"
    alone, shared = (fault(body, grid=32, seed=seed, workers=workers) for workers in (1, 2))
    assert str(alone) == str(shared)
    assert (alone.block % 4, alone.thread) == (3, 9)
    assert alone.block == 3 or seed, "seed 0 starts the blocks in their order"


def test_the_seed_draws_the_order_of_warps() -> None:
    """The warp that is first takes ticket 0."""
    body = "if (i % 32 == 0) y[8 + warp] = ptx::atom_add_u32(y, 1);"
    orders = [
        tuple(launch(body, block=256, seed=seed, initialised=["y"])[0][8:16]) for seed in range(8)
    ]
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(8))}
    assert len(set(orders)) > 4
    again = launch(body, block=256, seed=3, initialised=["y"])[0][8:16]
    assert tuple(again) == orders[3]


ENDLESS = {
    "loads": "while (y[0] == 0) {\n  }",
    "barriers": "for (;;) __syncthreads();",
    "votes": "while (__any_sync(~0u, 1)) {\n  }",
    "numbers": "for (float sum = 1;;) sum = ptx::ex2(sum);",
}
each_loop = pytest.mark.parametrize("body", ENDLESS.values(), ids=ENDLESS)


@each_loop
def test_a_long_launch_can_be_interrupted(body: str) -> None:
    build(source(body), "tiny")  # so that nothing but the loop is waited for
    with alarm(0.2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        launch(body, initialised=["y"])
    y, _ = launch("y[i] = i;")
    assert y[:64].tolist() == list(range(64))


@each_loop
def test_an_endless_loop_is_stopped(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build(source(body), "tiny")
    monkeypatch.setattr(program, "BUDGET", 10_000)
    with alarm(20, TimeoutError("it was not stopped")):
        assert fault(body, initialised=["y"]).rule == "no end"


@pytest.mark.parametrize("beyond", [{"block": 1025}, {"smem_bytes": 228 << 10}], ids=str)
def test_a_launch_beyond_any_device_is_refused(beyond: dict[str, int]) -> None:
    sizes = {"grid": 1, "block": 32, "smem_bytes": 0, **beyond}
    kernel = Program.load(source("y[i % 32] = 0;"), "tiny")
    with pytest.raises(UsageError):
        kernel.launch(arrays(), ["y"], **sizes)


@pytest.mark.parametrize("threads", [1, 31, 33, 48, 1024])
def test_blocks_of_any_size(threads: int) -> None:
    body = """__shared__ u32 words[1024];
  words[i] = __ballot_sync(~0u, 1);
  __syncthreads();
  if (i < 256) y[i] = words[blockDim.x - 1];"""
    y, executed = launch(body, block=threads)
    last = threads % 32 or 32
    assert set(y[: min(threads, 256)].tolist()) == {(1 << last) - 1}
    assert executed.threads == threads
    assert executed.operations["vote"].count == -(-threads // 32)


# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "index", "wavefronts", "conflicts"),
    [
        ("u32", "i", 1, 0),
        ("u32", "2 * i", 2, 1),
        ("u32", "32 * (i % 8)", 8, 7),
        ("u32", "0", 1, 0),
        ("u32", "i ^ 5", 1, 0),
        ("u8", "i", 1, 0),
        ("u16", "i", 1, 0),
        ("uint2", "i", 2, 0),
        ("uint2", "16 * (i % 8)", 16, 14),
        ("uint4", "i", 4, 0),
        ("uint4", "8 * (i % 8)", 32, 28),
    ],
)
def test_bank_conflicts_of_known_patterns(
    word: str, index: str, wavefronts: int, conflicts: int
) -> None:
    body = f"""for (int n = i; n < 256; n += 32) tile[n] = n;
  __syncthreads();
  const {word} v = reinterpret_cast<const {word}*>(smem_raw)[{index}];
  y[i] = *reinterpret_cast<const u8*>(&v);"""
    _, executed = launch(body, block=32)
    size = {"u8": 1, "u16": 2, "u32": 4, "uint2": 8, "uint4": 16}[word]
    load = executed.operations["shared load"]
    assert load == Operation(1, 32 * size, wavefronts, conflicts)
    assert executed.operations["shared store"] == Operation(8, 1024, 8, 0)


def test_rows_of_matrices_that_share_banks_conflict() -> None:
    body = """for (int n = i; n < 256; n += 32) tile[n] = 0;
  __syncthreads();
  u32 a[4], b[4];
  ptx::ldmatrix_x4(a, ptx::smem_address(tile) + i * 16);
  ptx::ldmatrix_x4(b, ptx::smem_address(tile) + i % 8 * 128 + i / 8 * 16);
  y[i] = a[0] + b[0];"""
    _, executed = launch(body, block=32)
    assert executed.operations["ldmatrix"] == Operation(2, 1024, 4 + 32, 28)


def test_bytes_are_counted_by_array_and_lanes() -> None:
    body = """if (i < 40) y[i] = x[i] + x[0];
  ptx::cp_async<16>(tile + 4 * i, x + 4 * i, i < 16);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();"""
    _, executed = launch(body, block=48)
    assert executed.reads == {"x": 40 * 4 * 2 + 16 * 16}
    assert executed.writes == {"y": 40 * 4}
    assert executed.bytes == 40 * 4 * 3 + 16 * 16
    assert executed.operations["global load"].count == 4
    assert executed.operations["cp.async"].count == 2


def test_instructions_are_counted_by_warps() -> None:
    body = """y[i] = __float_as_uint(ptx::ex2(float(__shfl_sync(~0u, i, 0))));
  __syncwarp();
  __syncthreads();"""
    _, executed = launch(body, grid=1, block=64)
    kinds = ("shuffle", "syncwarp", "barrier", "global store", "ex2")
    assert [executed.operations[kind].count for kind in kinds] == [2, 2, 2, 2, 64]
    assert executed.instructions == 10


# ---- traces -------------------------------------------------------------------------------------


def test_a_trace_tells_what_a_warp_did() -> None:
    body = """ptx::cp_async<4>(tile + i, x + i, true);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  y[i + 64] = tile[i ^ 1];"""
    spans: list[Span] = []
    launch(body, spans=spans)
    text = source(body).split("\n")
    for warp in range(2):
        mine = sorted((span for span in spans if span.warp == warp), key=lambda span: span.first)
        assert [span.kind for span in mine] == ["cp.async", "barrier", "global store"]
        copied, _, stored = mine
        start = 128 * warp
        assert (copied.array, copied.source) == ("x", (start, start + 128))
        assert copied.shared == (start, start + 128)
        assert (stored.array, stored.source) == ("y", (start + 256, start + 384))
        assert copied.count == stored.count == 32
        for span, words in zip(mine, ("cp_async<4>", "__syncthreads", "y[i"), strict=True):
            assert span.line
            assert words in text[span.line - 1]


def test_no_trace_costs_nothing_of_the_counts() -> None:
    spans: list[Span] = []
    assert launch(MIXED, grid=4, spans=spans)[1] == launch(MIXED, grid=4)[1]


def test_a_fault_leaves_no_trace() -> None:
    spans: list[Span] = []
    with pytest.raises(Fault):
        launch("y[i] = x[i];\n  __trap();", spans=spans)
    assert not spans


def test_parameters_by_value_arrive() -> None:
    text = """struct Three { long long a, b, c; };
extern "C" __global__ void k(int* y, const int n, const float f, const Three three) {
  y[0] = n, y[1] = int(f), y[2] = int(three.a + three.b + three.c);
}
"""
    y = np.zeros(3, np.int32)
    three = np.array([1, 20, 300], np.int64).tobytes()
    given = {"y": y, "n": np.int32(7).tobytes(), "f": np.float32(8).tobytes(), "three": three}
    Program.load(text, "k").launch(given, ["y"], grid=1, block=1)
    assert y.tolist() == [7, 8, 321]

"""Each rule on the smallest kernel that breaks it, and on one beside it that does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from thorough import share
from tiny import WORDS, arrays, fault, launch

pytestmark = pytest.mark.emulator

SEEDS = range(share(5, of=2))
COPY = "ptx::cp_async<4>(tile + i, x + i, true);\n  ptx::cp_async_commit_group();"
OTHER = "y[i] = tile[i ^ 1];  //!"  # a neighbour's word
FILL = "tile[i] = 0;\n  __syncthreads();"


@dataclass(frozen=True)
class Example:
    """A body and the rule that it breaks, "" if none; launched with ``blocks`` x ``threads``."""

    name: str
    body: str
    rule: str = ""
    blocks: int = 1
    threads: int = 64
    initialised: tuple[str, ...] = ()
    ordered: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict[str, Any]:
        return {
            "grid": self.blocks,
            "block": self.threads,
            "initialised": self.initialised,
            "ordered": self.ordered,
        }


COPIES = (
    Example("a copy is read before the wait", f"{COPY}\n  y[i] = tile[i];  //!", "copy in flight"),
    Example(
        "a copy is read after a wait for all groups but its own",
        f"{COPY}\n  ptx::cp_async_wait_group<1>();\n  y[i] = tile[i];  //!",
        "copy in flight",
    ),
    Example(
        "a copy is read that no group holds",
        "ptx::cp_async<4>(tile + i, x + i, true);\n  ptx::cp_async_wait_group<0>();\n"
        "  y[i] = tile[i];  //!",
        "copy in flight",
    ),
    Example(
        "a copy is written over before it has landed",
        f"{COPY}\n  tile[i] = 1;  //!\n  ptx::cp_async_wait_group<0>();",
        "copy in flight",
    ),
    Example(
        "two copies to one place are in flight",
        f"{COPY}\n  ptx::cp_async<4>(tile + i, x, true);  //!\n  ptx::cp_async_wait_group<0>();",
        "copy in flight",
    ),
    Example(
        "another thread's copy is read that nobody waited for",
        f"{COPY}\n  __syncthreads();\n  {OTHER}",
        "copy in flight",
    ),
    Example(
        "another thread's copy is read after its wait, with no barrier between",
        f"{COPY}\n  ptx::cp_async_wait_group<0>();\n  __all_sync(~0u, 1);\n  {OTHER}",
        "race",
    ),
    Example("a thread exits with a copy in flight", COPY, "copy in flight"),
    Example(
        "a copy is read after wait and barrier",
        f"{COPY}\n  ptx::cp_async_wait_group<0>();\n  __syncthreads();\n  y[i] = tile[i ^ 33];",
    ),
    Example(
        "the older of two groups is read after a wait for all but one",
        f"{COPY}\n  ptx::cp_async<4>(tile + i + 64, x + i, true);\n"
        "  ptx::cp_async_commit_group();\n  ptx::cp_async_wait_group<1>();\n  y[i] = tile[i];\n"
        "  ptx::cp_async_wait_group<0>();",
    ),
    Example(
        "a copy that is not valid reads nothing, even outside its array",
        "ptx::cp_async<4>(tile + i, x + 10000, false);\n  ptx::cp_async_commit_group();\n"
        "  ptx::cp_async_wait_group<0>();\n  y[i] = tile[i];",
    ),
)

RACES = (
    Example(
        "warps write and read a word of shared memory",
        f"{FILL}\n  tile[i] = 1;\n  y[i] = tile[i ^ 32];",
        "race",
    ),
    Example("warps write one word of shared memory", "tile[i % 32] = i;  //!", "race"),
    Example(
        "lanes of a warp write and read a word of shared memory",
        f"{FILL}\n  tile[i] = 1;\n  y[i] = tile[i ^ 1];",
        "race",
    ),
    Example(
        "a shuffle is taken for a barrier",
        f"tile[i] = 1;\n  __shfl_sync(~0u, 1, 0);\n  {OTHER}",
        "race",
    ),
    Example(
        "a barrier of the warp is taken for one of the block",
        f"{FILL}\n  tile[i] = 1;\n  __syncwarp();\n  y[i] = tile[i ^ 32];",
        "race",
    ),
    Example(
        "a reader is forgotten when the word is written again",
        f"{FILL}\n  y[i] = tile[i ^ 32];\n  tile[i] = 1;",
        "race",
    ),
    Example(
        "lanes write and read a word of global memory",
        "y[i] = 1;\n  __all_sync(~0u, 1);\n  y[i + 64] = y[i ^ 1];  //!",
        "race",
    ),
    Example("lanes write one word of global memory", "y[0] = 1;  //!", "race"),
    Example("blocks write one word", "y[i] = 1;  //!", "race", blocks=2),
    Example(
        "one block reads what another writes",
        "if (blockIdx.x == 0) y[i] = 1;\n  if (blockIdx.x == 1) y[i + 64] = y[i];  //!",
        "race",
        blocks=2,
    ),
    Example(
        "one block writes what another has read",
        "if (blockIdx.x == 0) y[i + 64] = y[i];\n  if (blockIdx.x == 1) y[i] = 1;  //!",
        "race",
        blocks=2,
        initialised=("y",),
    ),
    Example(
        "one block reads what another adds to",
        "if (blockIdx.x == 0) ptx::atom_add_u32(y, 1);\n"
        "  if (blockIdx.x == 1) y[i + 64] = y[0];  //!",
        "race",
        blocks=2,
        initialised=("y",),
    ),
    Example(
        "threads have bytes of their own",
        "smem_raw[i] = u8(i);\n  __syncthreads();\n  smem_raw[i ^ 1] = u8(i);\n"
        "  reinterpret_cast<u8*>(y)[i] = smem_raw[i ^ 1];",
    ),
    Example(
        "threads have halves of a word of their own",
        "u16* half = reinterpret_cast<u16*>(tile);\n  half[i] = u16(i);\n  half[i] += 1;\n"
        "  reinterpret_cast<u16*>(y)[i] = half[i];",
    ),
    Example("lanes meet before they read", "tile[i] = i;\n  __syncwarp();\n  y[i] = tile[i ^ 1];"),
    Example("warps meet", "tile[i] = i;\n  __syncthreads();\n  y[i] = tile[i ^ 33];"),
    Example(
        "blocks and threads add to one word",
        "ptx::red_add_f32(reinterpret_cast<float*>(y), 1.f);\n  ptx::atom_add_u32(y + 1, 1);",
        blocks=2,
        initialised=("y",),
    ),
    Example("blocks read one word", "y[blockIdx.x * 64 + i] = x[0];", blocks=2),
)

ADDRESSES = (
    Example(
        "a word of shared memory begins between words",
        "y[i] = *reinterpret_cast<u32*>(smem_raw + 2);  //!",
        "misaligned access",
    ),
    Example(
        "a word of global memory begins between words",
        "y[i] = *reinterpret_cast<const u32*>(reinterpret_cast<const u16*>(x) + 1);  //!",
        "misaligned access",
    ),
    Example(
        "16 bytes are loaded from a multiple of 8",
        "const uint4 v = *reinterpret_cast<const uint4*>(x + 2);  //!\n  y[i] = v.x;",
        "misaligned access",
    ),
    Example(
        "16 bytes are copied to a multiple of 4",
        "ptx::cp_async<16>(tile + 1, x, true);  //!",
        "misaligned access",
        threads=1,
    ),
    Example(
        "16 bytes are copied from a multiple of 4",
        "ptx::cp_async<16>(tile, x + 1, true);  //!",
        "misaligned access",
        threads=1,
    ),
    Example("shared memory ends", "tile[i + 256] = 0;  //!", "out of bounds"),
    Example(
        "a copy goes beyond shared memory",
        "ptx::cp_async<4>(tile + 256, x, true);  //!",
        "out of bounds",
    ),
    Example(
        "a matrix lies beyond shared memory",
        "u32 r[1];\n  ptx::ldmatrix_x1(r, ptx::smem_address(tile) + 1024);  //!\n  y[i] = r[0];",
        "out of bounds",
    ),
    Example(
        "shared memory is read before its start",
        "y[i] = tile[-int(threadIdx.x) - 1];  //!",
        "out of bounds",
    ),
    Example("an input ends", "y[i] = x[i + 256];  //!", "out of bounds"),
    Example("an output ends", "y[i + 256] = 0;  //!", "out of bounds"),
    Example("an output is written before its start", "y[i - 64] = 0;  //!", "out of bounds"),
    Example(
        "a copy comes from beyond an input",
        "ptx::cp_async<4>(tile + i, x + 256 + i, true);  //!",
        "out of bounds",
    ),
    Example(
        "a pointer leads nowhere",
        "y[i] = *reinterpret_cast<const u32*>(size_t(4096));  //!",
        "out of bounds",
    ),
    Example(
        "a global pointer is taken for a shared one",
        "y[i] = ptx::smem_address(x);  //!",
        "out of bounds",
    ),
    Example(
        "the last bytes of a vector lie beyond the array",
        "const uint2 v = *reinterpret_cast<const uint2*>(x + 254);\n  y[i] = v.y;",
    ),
    Example("an input is written", "const_cast<u32*>(x)[i] = 0;  //!", "write to an input"),
    Example(
        "an index passes the end of a thread's own array",
        "u32 r[4] = {};\n  for (int n = 0; n <= 4; ++n) r[n] = n;  //!\n  y[i] = r[0];",
        "undefined arithmetic",
    ),
    Example(
        "a static array in shared memory",
        "__shared__ u32 words[64];\n  words[i] = i;\n  __syncthreads();\n  y[i] = words[i ^ 63];",
    ),
)

UNWRITTEN = (
    Example("shared memory that nobody wrote", "y[i] = tile[i];  //!", "uninitialised read"),
    Example("an output that nobody wrote", "y[i] = y[i + 64];  //!", "uninitialised read"),
    Example(
        "one byte of a word that nobody wrote",
        "smem_raw[4 * i] = smem_raw[4 * i + 1] = smem_raw[4 * i + 2] = 0;\n  y[i] = tile[i];  //!",
        "uninitialised read",
    ),
    Example(
        "an atomic on an output that nobody wrote",
        "ptx::atom_add_u32(y + i, 1);  //!",
        "uninitialised read",
    ),
    Example(
        "what the last block left in shared memory",
        "if (blockIdx.x == 0) tile[i] = 1;\n  if (blockIdx.x == 1) y[i] = tile[i];  //!",
        "uninitialised read",
        blocks=2,
    ),
    Example("an output that holds values", "y[i] += 1;", initialised=("y",)),
)

HANDOVER = """if (warp == 0) {{
    tile[i] = i;
    {produced}
  }} else {{
    {awaited}
    y[i] = tile[i - 32];
  }}"""

BARRIERS = (
    Example("a barrier of 48 threads", "ptx::bar_sync(1, 48);  //!", "barrier mismatch"),
    Example("a barrier of more than the block", "ptx::bar_sync(1, 96);  //!", "barrier mismatch"),
    Example("a barrier that does not exist", "ptx::bar_sync(16, 64);  //!", "barrier mismatch"),
    Example(
        "warps wait for different numbers",
        "if (warp == 0) ptx::bar_arrive(1, 64);\n  __syncthreads();\n"
        "  if (warp == 1) ptx::bar_sync(1, 32);  //!",
        "barrier mismatch",
    ),
    Example(
        "a consumer waits for its producer",
        HANDOVER.format(produced="ptx::bar_arrive(1, 64);", awaited="ptx::bar_sync(1, 64);"),
    ),
    Example(
        "a consumer arrives where it should wait",
        "tile[i] = 0;\n  __syncthreads();\n  "
        + HANDOVER.format(produced="ptx::bar_arrive(1, 64);", awaited="ptx::bar_arrive(1, 64);"),
        "race",
    ),
    Example(
        "a consumer waits at another barrier",
        HANDOVER.format(produced="ptx::bar_arrive(1, 64);", awaited="ptx::bar_sync(2, 64);"),
        "deadlock",
    ),
    Example(
        "warps wait at different barriers",
        "if (warp == 0) __syncthreads();\n  if (warp == 1) ptx::bar_sync(1, 64);",
        "deadlock",
    ),
    Example("a warp exits before a barrier of all", "if (warp == 0) return;\n  __syncthreads();"),
    Example(
        "a warp waits alone, and another goes on",
        "if (warp == 0) ptx::bar_sync(1, 32);\n  y[i] = i;",
    ),
)

# Blocks take numbers, and add to y[2] in their order: y[0] counts blocks, y[1] turns. The last
# thread asks, the first one adds, and one of the other warp ends the turn.
TURNS = """if (i == 0) tile[0] = ptx::atom_add_u32(y, 1);
  __syncthreads();
  const u32 number = tile[0];
  if (i == 63) while ({asked} != number) {{}}{unless_asked}
  {awaited}
  if (i == 0) ptx::red_add_f32(reinterpret_cast<float*>(y + 2), number + 1.f);{added}
  {finished}
  if (i == 40) {ended};"""
RIGHT_TURNS = {
    "asked": "ptx::ld_acquire_u32(y + 1)",
    "unless_asked": "",
    "awaited": "__syncthreads();",
    "added": "",
    "finished": "__syncthreads();",
    "ended": "ptx::red_release_add_u32(y + 1, 1)",
}


def turns(name: str, rule: str = "", ordered: bool = True, **wrong: str) -> Example:
    body = TURNS.format(**{**RIGHT_TURNS, **wrong})
    return Example(name, body, rule, blocks=4, initialised=("y",), ordered=ordered)


BLOCKS = (
    turns("blocks add in turns"),
    turns(
        "nobody asks for its turn", "unordered addition", asked="number", added="  //!",
    ),
    turns(
        "nobody asks where no order is demanded", ordered=False, asked="number",
    ),
    turns(
        "the others do not wait for the thread that asks", "unordered addition",
        awaited="", added="  //!",
    ),
    turns(
        "a turn ends before the addition is known to be done", "unordered addition",
        finished="", added="  //!",
    ),
    turns(
        "a turn ends without a release", "unordered addition",
        ended="ptx::atom_add_u32(y + 1, 1)", added="  //!",
    ),
    turns(
        "a plain load asks", "race", asked="y[1]", unless_asked="  //!",
    ),
    turns(
        "a plain addition ends the turn", "race", ordered=False, ended="y[1] += 1  //!\n   ",
    ),
    turns(
        "a turn too far", "deadlock", asked="ptx::ld_acquire_u32(y + 1) - 1", unless_asked="  //!",
    ),
    turns("nobody ends a turn", "deadlock", ended="(void)0", unless_asked="  //!"),
    Example(
        "a counter that nobody zeroed",
        "y[i] = ptx::ld_acquire_u32(y + 100);  //!",
        "uninitialised read",
    ),
    Example(
        "a block waits for one that starts after it",
        "if (i == 0) {\n    y[8 + blockIdx.x] = ptx::atom_add_u32(y, 1);\n"
        "    if (y[8 + blockIdx.x] == 0) while (ptx::ld_acquire_u32(y) == 1) {}  //!\n  }",
        "deadlock",
        blocks=2,
        initialised=("y",),
    ),
    Example(
        "a warp waits for another of its block",
        "if (i == 40) while (ptx::ld_acquire_u32(y) == 0) {}\n"
        "  if (i == 0) ptx::red_release_add_u32(y, 1);",
        initialised=("y",),
    ),
    Example(
        "two warps add to one float",
        "if (i % 32 == 0) ptx::red_add_f32(reinterpret_cast<float*>(y), 1.f);  //!",
        "unordered addition",
        initialised=("y",),
        ordered=True,
    ),
    Example(
        "two warps add to one float, a barrier between",
        "float* sum = reinterpret_cast<float*>(y);\n  if (i == 0) ptx::red_add_f32(sum, 1.f);\n"
        "  __syncthreads();\n  if (i == 32) ptx::red_add_f32(sum, 1.f);",
        initialised=("y",),
        ordered=True,
    ),
)  # fmt: skip

LANES = (
    Example(
        "a lane skips a shuffle",
        "if (i != 3) y[i] = __shfl_sync(~0u, i, 0);  //!\n  __syncwarp();",
        "lanes diverge",
    ),
    Example(
        "halves of a warp meet at different barriers",
        "if (i % 32 < 16) {\n    __syncthreads();\n  } else {\n    __syncthreads();\n  }",
        "lanes diverge",
    ),
    Example(
        "a lane is not in its own mask",
        "y[i] = __shfl_sync(0xffff, i, 0);  //!",
        "lanes diverge",
    ),
    Example(
        "a lane reads one that takes no part",
        "if (i % 32 < 16) y[i] = __shfl_sync(0xffff, i, 16);  //!",
        "lanes diverge",
    ),
    Example(
        "a lane reads one that has exited",
        "if (i % 32 == 3) return;\n  y[i] = __shfl_sync(~0u, i, 3);  //!",
        "lanes diverge",
    ),
    Example(
        "a matrix is loaded after a lane has exited",
        "tile[i] = 0;\n  __syncthreads();\n  if (i % 32 == 3) return;\n  u32 r[1];\n"
        "  ptx::ldmatrix_x1(r, ptx::smem_address(tile));  //!\n  y[i] = r[0];",
        "lanes diverge",
    ),
    Example(
        "halves of a warp shuffle apart",
        "if (i % 32 < 16) y[i] = __shfl_sync(0xffff, i, 0);\n"
        "  else y[i] = __shfl_sync(0xffff0000, i, 16);",
    ),
    Example(
        "the last lane of two groups exits",
        "if (i < 8) __syncwarp(0x100ff);\n  else if (i < 16) __syncwarp(0x1ff00);\n"
        "  if (i < 16) __syncwarp(0xffff);",
        threads=17,
    ),
    Example(
        "lanes that exited are not waited for",
        "if (i % 32 == 3) return;\n  y[i] = __ballot_sync(~0u, 1);",
    ),
)

NUMBERS = (
    Example("a sum overflows", "y[i] = int(x[255]) + 0x7fffffff;  //!", "undefined arithmetic"),
    Example("a product overflows", "y[i] = int(x[255]) * 0x1000000;  //!", "undefined arithmetic"),
    Example("a shift is too wide", "y[i] = 1 << int(x[40]);  //!", "undefined arithmetic"),
    Example("the kernel gives up", "if (i == 5) __trap();  //!", "trap"),
    Example("unsigned numbers wrap", "y[i] = x[255] * 0xffffffffu;"),
)

EXAMPLES = (*COPIES, *RACES, *ADDRESSES, *UNWRITTEN, *BARRIERS, *BLOCKS, *LANES, *NUMBERS)
WRONG = [example for example in EXAMPLES if example.rule]
RIGHT = [example for example in EXAMPLES if not example.rule]


@pytest.mark.parametrize("example", WRONG, ids=str)
def test_a_broken_rule_is_named(example: Example) -> None:
    for seed in SEEDS:
        assert fault(example.body, seed=seed, **example.options).rule == example.rule


@pytest.mark.parametrize("example", RIGHT, ids=str)
def test_what_is_allowed_raises_no_alarm(example: Example) -> None:
    for seed in SEEDS:
        launch(example.body, seed=seed, **example.options)


# ---- what a fault says --------------------------------------------------------------------------


def test_a_gap_between_rows_belongs_to_nobody() -> None:
    x = np.zeros((4, 64), np.uint32)[:, :32]
    error = fault("y[i] = x[i];  //!", given={**arrays(), "x": x})
    assert error.rule == "out of bounds"
    assert "between the rows of x" in error.why


def test_a_deadlock_says_who_waits_where() -> None:
    body = "if (warp == 0) __syncthreads();\n  if (warp == 1) ptx::bar_sync(1, 64);"
    why = fault(body).why
    for part in ("barrier 0", "barrier 1", "32 of 64", "warp 0", "warp 1", "__syncthreads();"):
        assert part in why


def test_a_race_names_both_threads_and_both_lines() -> None:
    error = fault(
        "if (i == 3) tile[0] = 1;\n  __all_sync(~0u, 1);\n  if (i == 5) tile[0] = 2;  //!"
    )
    assert error.thread == 5
    assert "thread 3" in error.why
    assert "`if (i == 3) tile[0] = 1;`" in error.why


def test_a_fault_names_block_thread_and_element() -> None:
    error = fault("if (blockIdx.x == 2 && i == 7) y[300] = 1;", grid=4)
    assert (error.block, error.thread) == (2, 7)
    assert "y[300]" in error.why


def test_an_unordered_addition_names_both_blocks_and_both_lines() -> None:
    body = "float* sum = reinterpret_cast<float*>(y);\n  if (i == 0) ptx::red_add_f32(sum, 1.f);"
    error = fault(body, grid=2, initialised=("y",), ordered=True)
    assert (error.block, error.thread) == (1, 0)
    assert "thread 0 of block 0 in line" in error.why


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_blocks_that_take_turns_all_come_to_an_end(workers: int) -> None:
    """However many run side by side; the sum has one value whatever the order of the blocks."""
    body = TURNS.format(**RIGHT_TURNS).replace("number + 1.f", "1.f / (number + 1.f)")
    want = np.float32(0)
    for n in range(40):
        want += np.float32(1) / np.float32(n + 1)
    for seed in SEEDS:
        y, executed = launch(body, grid=40, seed=seed, workers=workers, initialised=("y",))
        assert y.view(np.float32)[2] == want
        assert executed.reads["y"] == 4 * 40, "questions asked again are not counted"


def test_values_arrive() -> None:
    """The examples would pass if nothing ran at all."""
    y, executed = launch("y[blockIdx.x * 64 + i] = x[i] + 1;", grid=4)
    assert y.tolist() == [n % 64 + 1 for n in range(WORDS)]
    assert (executed.blocks, executed.threads) == (4, 256)

"""Bugs that Hopper kernels really have: barriers in shared memory, TMA, products of a warpgroup.

They are planted in the small attention kernel and in kernels of the conformance cases. ``found`` is
the rule that the emulator names, or NUMBERS where every rule is kept and the result is wrong; where
the schedule decides which is broken first, all that may be.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from cases import CASES, Case
from hopper import NOTHING, NUMBERS, Shape, finder, source

from fasim.emulator.program import Fault, Mapped, Program

SEEDS = range(20)
SHAPE = Shape()  # two tiles of queries, three of keys, none of them whole
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Bug:
    """``right`` stands in the kernel exactly once; ``wrong`` takes its place. ``kernel`` is a
    conformance case, or "" for the attention kernel."""

    name: str
    right: str
    wrong: str
    found: str | tuple[str, ...]
    kernel: str = ""

    def __str__(self) -> str:
        return f"{self.kernel or 'attention'}: {self.name}"

    @property
    def finders(self) -> set[str]:
        return {self.found} if isinstance(self.found, str) else set(self.found)

    def planted(self) -> str:
        text = right(self.kernel)
        assert text.count(self.right) == 1, f"{self}: the text to replace is not there once"
        return text.replace(self.right, self.wrong)

    def finder(self, seed: int) -> str:
        return look(self.kernel, self.planted(), seed)


def right(kernel: str) -> str:
    return BY_NAME[kernel].source if kernel else source()


def look(kernel: str, text: str, seed: int) -> str:
    """What finds something in a kernel's text: a rule, the numbers, or nothing."""
    return in_case(BY_NAME[kernel], text, seed) if kernel else finder(text, SHAPE, seed)


def in_case(case: Case, text: str, seed: int) -> str:
    arrays = case.arrays()
    maps = {
        name: Mapped(arrays[name], boxes.map(arrays[name], arrays[name].ctypes.data))
        for name, boxes in case.maps.items()
    }
    try:
        Program.load(text, case.kernel).launch(
            {**arrays, **maps},
            outputs=case.expected,
            initialised=case.initial,
            grid=case.grid,
            block=case.block,
            smem_bytes=case.smem_bytes,
            seed=seed,
        )
    except Fault as fault:
        return fault.rule
    return NUMBERS if case.disagreements(arrays, case.expected, any_nan=True) else NOTHING


LATE = ("copy in flight", "wrong phase")  # the first use of a barrier has no earlier phase
K_WAIT = "        wait(&barriers.full_k[next.stage], next.parity);\n"
FIRST_K_WAIT = "    wait(&barriers.full_k[turn.stage], turn.parity);\n"
FIRST_RELEASE = "    if (leader) ptx::mbarrier_arrive(&barriers.empty_k[turn.stage]);\n"
EARLIER_TILE = "      ptx::wgmma_wait_group<0>();  // of the tile before\n"
V_RELEASE = (
    "      if (leader && key > 0) ptx::mbarrier_arrive(&barriers.empty_v[turn_of(n - 1).stage]);\n"
)
RESCALE = """#pragma unroll
      for (int i = 0; i < 64; ++i) o[i] *= rescale[i / 2 % 2];
"""
Q_RELEASE = "    if (leader) ptx::mbarrier_arrive(&barriers.empty_q);\n"
EPILOGUE = "  ptx::fence_proxy_async();\n  ptx::bar_sync(1 + consumer, 128);\n"
STORED = "    store(q_tile, o_map, o, inverse, consumer, row, head);\n"

BARRIERS = (
    Bug("nobody waits for Q", "    wait(&barriers.full_q, m & 1);\n", "", LATE),
    Bug("nobody waits for the next K", K_WAIT, "", LATE),
    Bug("nobody waits for the first K", FIRST_K_WAIT, "", LATE),
    Bug(
        "nobody waits for V",
        "      wait(&barriers.full_v[now.stage], now.parity);\n",
        "",
        LATE,
    ),
    Bug(
        "one thread of a warpgroup waits for V",
        "      wait(&barriers.full_v[now.stage], now.parity);\n",
        "      if (leader) wait(&barriers.full_v[now.stage], now.parity);\n",
        LATE,
    ),
    Bug(
        "the parity of full is flipped",
        K_WAIT,
        K_WAIT.replace("parity", "parity ^ 1"),
        (*LATE, "deadlock"),
    ),
    Bug(
        "the parity of the first full is flipped",
        FIRST_K_WAIT,
        FIRST_K_WAIT.replace("parity", "parity ^ 1"),
        (*LATE, "deadlock"),
    ),
    Bug(
        "the parity of empty is not flipped",
        "wait(&barriers.empty_k[turn.stage], turn.parity ^ 1);",
        "wait(&barriers.empty_k[turn.stage], turn.parity);",
        "deadlock",
    ),
    Bug(
        "phases never alternate",
        "u32(n / kStages % 2)",
        "0u",
        (*LATE, "arrival mismatch", "stage still read", "deadlock"),
    ),
    Bug(
        "the producer does not wait for an empty K",
        "      wait(&barriers.empty_k[turn.stage], turn.parity ^ 1);\n",
        "",
        ("arrival mismatch", "stage still read", *LATE),
    ),
    Bug(
        "the producer does not wait for an empty V",
        "      wait(&barriers.empty_v[turn.stage], turn.parity ^ 1);\n",
        "",
        ("arrival mismatch", "stage still read", *LATE),
    ),
    Bug(
        "the producer does not wait for an empty Q",
        "    wait(&barriers.empty_q, (m & 1) ^ 1);\n",
        "",
        ("arrival mismatch", "stage still read", "store in flight", *LATE),
    ),
    Bug(
        "a try is taken for a wait",
        "while (!ptx::mbarrier_try_wait(",
        "if (!ptx::mbarrier_try_wait(",
        (*LATE, "arrival mismatch", "stage still read", "store in flight"),
    ),
    Bug(
        "half of the bytes are expected",
        "mbarrier_arrive_expect_tx(full, kTile)",
        "mbarrier_arrive_expect_tx(full, kTile / 2)",
        "transaction mismatch",
    ),
    Bug(
        "too many bytes are expected",
        "mbarrier_arrive_expect_tx(full, kTile)",
        "mbarrier_arrive_expect_tx(full, kTile + 16)",
        "transaction mismatch",
    ),
    Bug(
        "one slab of two is brought",
        "  ptx::cp_async_bulk_tensor_3d(tile + kSlab, map, full, 64, row, head);\n",
        "",
        "transaction mismatch",
    ),
    Bug(
        "empty waits for one warpgroup only",
        "ptx::mbarrier_init(&barriers.empty_k[i], kConsumers);",
        "ptx::mbarrier_init(&barriers.empty_k[i], 1);",
        ("arrival mismatch", "stage still read", "deadlock", *LATE),
    ),
    Bug(
        "empty waits for one warpgroup too many",
        "ptx::mbarrier_init(&barriers.empty_v[i], kConsumers);",
        "ptx::mbarrier_init(&barriers.empty_v[i], kConsumers + 1);",
        "deadlock",
    ),
    Bug("V is never released", V_RELEASE, "", "deadlock"),
    Bug("Q is never released", Q_RELEASE, "", "deadlock"),
    Bug(
        "TMA is not told of the barriers",
        "    ptx::fence_mbarrier_init();\n",
        "",
        "missing mbarrier fence",
    ),
    Bug(
        "barriers are used before they are initialised",
        "  __syncthreads();\n  const int tiles",
        "  const int tiles",
        ("mbarrier not initialised", "race"),
    ),
    Bug(
        "the epilogue's barrier waits for another warp",
        "ptx::bar_sync(1 + consumer, 128);",
        "ptx::bar_sync(1 + consumer, 160);",
        "deadlock",
    ),
)

STAGES = (
    Bug(
        "K is released before it was multiplied",
        "    ptx::wgmma_wait_group<0>();\n" + FIRST_RELEASE,
        FIRST_RELEASE + "    ptx::wgmma_wait_group<0>();\n",
        "stage still read",
    ),
    Bug(
        "V is released before it was multiplied",
        EARLIER_TILE + V_RELEASE,
        V_RELEASE + EARLIER_TILE,
        "stage still read",
    ),
    Bug(
        "the wrong ring's stage is released",
        "arrive(&barriers.empty_k[next.stage]);",
        "arrive(&barriers.empty_v[next.stage]);",
        ("stage still read", "arrival mismatch", "deadlock", *LATE),
    ),
    Bug(
        "another stage is multiplied",
        "ptx::smem_address(v_stage(smem, now.stage))",
        "ptx::smem_address(v_stage(smem, next.stage))",
        (*LATE, "uninitialised read", NUMBERS),
    ),
    Bug(
        "Q's tile is released before O has left it",
        STORED + Q_RELEASE,
        Q_RELEASE + STORED,
        ("stage still read", "store in flight", "race", *LATE),
    ),
    Bug(
        "Q's tile is released while O is being read",
        "    ptx::cp_async_bulk_wait_group_read<0>();\n",
        "",
        "store in flight",
    ),
    Bug(
        "nobody closes the group of stores",
        "    ptx::cp_async_bulk_commit_group();\n",
        "",
        "store in flight",
    ),
)

PROXIES = (
    Bug(
        "no proxy fence before O leaves",
        EPILOGUE,
        EPILOGUE.split("\n")[1] + "\n",
        "missing proxy fence",
    ),
    Bug(
        "the proxy fence comes after the barrier",
        EPILOGUE,
        "\n".join(reversed(EPILOGUE.strip("\n").split("\n"))) + "\n",
        "missing proxy fence",
    ),
    Bug(
        "O leaves before all warps have written it",
        EPILOGUE,
        EPILOGUE.split("\n")[0] + "\n",
        "race",
    ),
)

PRODUCTS = (
    Bug(
        "scores are read before they are there",
        "    ptx::wgmma_wait_group<0>();\n" + FIRST_RELEASE,
        FIRST_RELEASE,
        "accumulator in flight",
    ),
    Bug(
        "the wait leaves one group too many in flight",
        "ptx::wgmma_wait_group<1>();",
        "ptx::wgmma_wait_group<2>();",
        "accumulator in flight",
    ),
    Bug(
        "the scores' group is not closed",
        "(s, left, right, step > 0);\n  }\n  ptx::wgmma_commit_group();\n",
        "(s, left, right, step > 0);\n  }\n",
        "accumulator in flight",
    ),
    Bug(
        "P is overwritten while it is multiplied",
        EARLIER_TILE + V_RELEASE + "      round_weights(p, s);\n",
        "      round_weights(p, s);\n" + EARLIER_TILE + V_RELEASE,
        "operand in flight",
    ),
    Bug(
        "O is rescaled while it is added to",
        EARLIER_TILE + V_RELEASE + "      round_weights(p, s);\n" + RESCALE,
        RESCALE + EARLIER_TILE + V_RELEASE + "      round_weights(p, s);\n",
        "accumulator in flight",
    ),
    Bug(
        "O is read before the last product is there",
        "    ptx::wgmma_wait_group<0>();\n    if (leader) ptx::mbarrier_arrive(&barriers.empty_v",
        "    if (leader) ptx::mbarrier_arrive(&barriers.empty_v",
        ("accumulator in flight", "stage still read"),
    ),
    Bug(
        "one warp waits by itself before it rescales",
        RESCALE,
        "      if (__any_sync(~0u, threadIdx.x / 32 == 5)) ptx::wgmma_wait_group<0>();\n" + RESCALE,
        "warps diverge",
    ),
    Bug(
        "no wgmma.fence after O was rescaled",
        "  ptx::wgmma_fence_registers(o);\n  ptx::wgmma_fence();\n",
        "",
        "missing wgmma fence",
    ),
    Bug(
        "K's offsets are swapped",
        "matrix_descriptor(k + at, 16, 1024, Swizzle::k128)",
        "matrix_descriptor(k + at, 1024, 16, Swizzle::k128)",
        "descriptor mismatch",
    ),
    Bug(
        "V's offsets are swapped",
        "matrix_descriptor(v + step * 2048, kSlab, 1024, Swizzle::k128)",
        "matrix_descriptor(v + step * 2048, 1024, kSlab, Swizzle::k128)",
        NUMBERS,
    ),
    Bug(
        "V's steps are too long",
        "v + step * 2048",
        "v + step * 4096",
        ("operand outside its tile", "out of bounds", "uninitialised read", *LATE),
    ),
    Bug(
        "V's slabs are too far apart",
        "v + step * 2048, kSlab",
        "v + step * 2048, 2 * kSlab",
        ("operand outside its tile", "out of bounds", "uninitialised read", *LATE),
    ),
    Bug(
        "Q's stride is that of 16 rows",
        "matrix_descriptor(q + at, 16, 1024, Swizzle::k128)",
        "matrix_descriptor(q + at, 16, 2048, Swizzle::k128)",
        "operand outside its tile",
    ),
    Bug(
        "V is not transposed",
        "wgmma_m64k16_bf16<1>(o",
        "wgmma_m64k16_bf16<0>(o",
        NUMBERS,
    ),
    Bug(
        "K is read with another swizzle",
        "matrix_descriptor(k + at, 16, 1024, Swizzle::k128)",
        "matrix_descriptor(k + at, 16, 1024, Swizzle::k64)",
        "swizzle mismatch",
    ),
    Bug(
        "Q is read without its swizzle",
        "matrix_descriptor(q + at, 16, 1024, Swizzle::k128)",
        "matrix_descriptor(q + at, 16, 1024, Swizzle::kNone)",
        "swizzle mismatch",
    ),
    Bug(
        "shared memory begins between two swizzles",
        "extern __shared__ __align__(1024)",
        "extern __shared__ __align__(128)",
        "misaligned swizzle",
    ),
    Bug("scores begin with what was there", "left, right, step > 0", "left, right, true", NUMBERS),
    Bug("keys past the last are not masked", ">= keys) s[i]", ">= 1 << 20) s[i]", NUMBERS),
    Bug("O is not swizzled", "((chunk % 8) ^ (r % 8)) * 16", "(chunk % 8) * 16", NUMBERS),
)

REGISTERS = (
    Bug(
        "consumers ask for too much",
        "setmaxnreg_inc<240>();",
        "setmaxnreg_inc<248>();",
        "register pool overdrawn",
    ),
    Bug(
        "the producer keeps its registers",
        "    ptx::setmaxnreg_dec<24>();\n",
        "",
        "register pool overdrawn",
    ),
)

CONFORMANCE = (
    Bug(
        "no wait",
        "    wait(&full, box % 2);\n",
        "",
        ("copy in flight", "uninitialised read"),
        "tma_load_2d_128",
    ),
    Bug(
        "one parity",
        "wait(&full, box % 2);",
        "wait(&full, 0);",
        ("wrong phase", "stage still read", "deadlock"),
        "tma_load_3d_128",
    ),
    Bug(
        "the next box comes while this one is read",
        "    }\n    __syncthreads();\n  }\n",
        "    }\n  }\n",
        ("stage still read", "wrong phase", "copy in flight"),
        "tma_load_4d_64",
    ),
    Bug(
        "a box beyond the end of shared memory",
        "cp_async_bulk_tensor_2d(smem_raw, &map",
        "cp_async_bulk_tensor_2d(smem_raw + 1024, &map",
        "out of bounds",
        "tma_load_2d_64",
    ),
    Bug(
        "a box between two swizzles",
        "extern __shared__ __align__(1024)",
        "extern __shared__ __align__(16)",
        "misaligned swizzle",
        "tma_load_2d_64",
    ),
    Bug(
        "no proxy fence",
        "    ptx::fence_proxy_async();\n",
        "",
        "missing proxy fence",
        "tma_store_2d_128",
    ),
    Bug(
        "no wait for a store",
        "      ptx::cp_async_bulk_wait_group<0>();\n",
        "",
        "store in flight",
        "tma_store_4d_64",
    ),
    Bug(
        "no wait for a reduction's read",
        "      ptx::cp_async_bulk_wait_group_read<0>();\n",
        "",
        "store in flight",
        "tma_reduce",
    ),
    Bug(
        "a store begins before its tensor",
        "smem_raw, c[0], c[1]);",
        "smem_raw, c[0] - 104, c[1]);",
        "store before its tensor",
        "tma_store_2d_128",
    ),
    Bug(
        "boxes begin one element late",
        "&full, c[0], c[1]);",
        "&full, c[0] + 1, c[1]);",
        "misaligned box",
        "tma_load_2d_64",
    ),
    Bug("a store leaves before its load", "    wait(&full, 0);\n", "", "copy in flight", "bulk"),
    Bug(
        "a slot is released before it is read",
        "      y[round * kWords + i] = ring[slot * kWords + (kWords - 1 - i)];\n"
        "      ptx::mbarrier_arrive(&empty[slot]);\n",
        "      ptx::mbarrier_arrive(&empty[slot]);\n"
        "      y[round * kWords + i] = ring[slot * kWords + (kWords - 1 - i)];\n",
        ("stage still read", *LATE),
        "mbarrier_ring",
    ),
    Bug(
        "all lanes produce",
        "const bool leader = ptx::elect_sync();",
        "const bool leader = ptx::elect_sync() || true;",
        ("arrival mismatch", *LATE),
        "mbarrier_ring",
    ),
    Bug(
        "no wait for a product",
        "  ptx::wgmma_wait_group<0>();\n",
        "",
        "accumulator in flight",
        "wgmma_f16_normal",
    ),
    Bug(
        "no wgmma.fence", "  ptx::wgmma_fence();\n", "", "missing wgmma fence", "wgmma_e4m3_normal"
    ),
    Bug(
        "the wrong warps are a warpgroup",
        "wait(&full, 0);\n  const u32 smem",
        "wait(&full, 0);\n  if (threadIdx.x < 32) return;\n  const u32 smem",
        "warps diverge",
        "wgmma_bf16_normal",
    ),
    Bug(
        "too few bytes",
        "ptx::mbarrier_expect_tx(full, rows * kSpan);",
        "ptx::mbarrier_expect_tx(full, rows * kSpan / 2);",
        "transaction mismatch",
        "wgmma_layout_64",
    ),
    Bug("a row too early", "kRow * kSpan;", "(kRow - 1) * kSpan;", NUMBERS, "wgmma_layout_32"),
)

BUGS = (*BARRIERS, *STAGES, *PROXIES, *PRODUCTS, *REGISTERS, *CONFORMANCE)

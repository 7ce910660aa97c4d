"""Rules of mbarriers, TMA and the register pool on the smallest kernels that break them; whole
kernels with planted bugs are in tests/quality."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from tiny import arrays, fault, launch

pytestmark = pytest.mark.emulator

PRELUDE = """using u64 = unsigned long long;
  __shared__ u64 full, other;
  (void)full, (void)other;
  if (i == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  """
WAIT = "while (!ptx::mbarrier_try_wait(&full, 0)) {\n  }"
FETCH = "ptx::cp_async_bulk(tile, x, 256, &full);"
ARRIVE = "ptx::mbarrier_arrive_expect_tx(&full, 256);"
LOAD = f"if (i == 0) {{\n    {ARRIVE}\n    {FETCH}\n  }}"
PUT = "ptx::cp_async_bulk_store(y, tile, 256);  //!"


@dataclass(frozen=True)
class Example:
    """A body after the prelude, and the rule that it breaks, "" if none."""

    name: str
    body: str
    rule: str = ""
    threads: int = 64

    def __str__(self) -> str:
        return self.name


EXAMPLES = (
    Example("a copy is read after the wait", f"{LOAD}\n  {WAIT}\n  y[i] = tile[i];"),
    Example("a copy is read without one", f"{LOAD}\n  y[i] = tile[i];  //!", "copy in flight", 1),
    Example(
        "bytes are expected after the copy was issued",
        f"if (i == 0) {{\n    {FETCH}\n    {ARRIVE}\n  }}\n  {WAIT}\n  y[i] = tile[i];",
    ),
    Example(
        "bytes that no copy brings are counted by hand",
        f"if (i == 0) {{\n    {ARRIVE}\n    ptx::mbarrier_complete_tx(&full, 256);\n  }}\n"
        f"  {WAIT}\n  y[i] = i;",
    ),
    Example("a block ends before its copy has landed", LOAD, "copy in flight"),
    Example(
        "one thread's wait, and a barrier for the rest",
        f"{LOAD}\n  if (i == 0) {{\n  {WAIT}\n  }}\n  __syncthreads();\n  y[i] = tile[i];",
    ),
    Example(
        "one thread's wait is taken for that of all",
        f"{LOAD}\n  if (i == 0) {{\n  {WAIT}\n  }}\n  __all_sync(~0u, 1);\n"
        "  y[i] = i < 32 ? tile[i] : 0;  //!",
        "copy in flight",
    ),
    Example(
        "what TMA brought leaves again without a fence",
        f"{LOAD}\n  {WAIT}\n  if (i == 0) {{\n    {PUT.removesuffix('  //!')}\n"
        "    ptx::cp_async_bulk_commit_group();\n    ptx::cp_async_bulk_wait_group<0>();\n  }",
    ),
    Example(
        "TMA overwrites what a thread wrote without a fence",
        "if (i == 0) {\n    tile[0] = 1;\n    ptx::mbarrier_arrive_expect_tx(&full, 256);\n"
        "    ptx::cp_async_bulk(tile, x, 256, &full);  //!\n  }",
        "missing proxy fence",
    ),
    Example(
        "a write after the fence",
        "if (i == 0) {\n    for (int n = 0; n < 64; ++n) tile[n] = n;\n"
        "    ptx::fence_proxy_async();\n    tile[5] = 1;\n"
        f"    {PUT}\n  }}",
        "missing proxy fence",
    ),
    Example(
        "a thread exits while its store reads",
        "if (i == 0) {\n    for (int n = 0; n < 64; ++n) tile[n] = n;\n"
        f"    ptx::fence_proxy_async();\n    {PUT}\n    ptx::cp_async_bulk_commit_group();\n  }}",
        "store in flight",
    ),
    Example(
        "what a store wrote is read before it is waited for",
        "if (i == 0) {\n    for (int n = 0; n < 64; ++n) tile[n] = n;\n"
        f"    ptx::fence_proxy_async();\n    {PUT.removesuffix('  //!')}\n"
        "    ptx::cp_async_bulk_commit_group();\n    ptx::cp_async_bulk_wait_group_read<0>();\n"
        "    y[64] = y[0];  //!\n  }",
        "store in flight",
    ),
    Example("an mbarrier between words", "ptx::mbarrier_init((u64*)(smem_raw + 4), 1);  //!",
            "misaligned access", 1),
    Example("an mbarrier for nobody", "ptx::mbarrier_init(&other, 0);  //!", "arrival mismatch", 1),
    Example("an mbarrier that is none", "ptx::mbarrier_arrive(&other);  //!",
            "mbarrier not initialised", 1),
    Example("12 bytes of TMA", "ptx::cp_async_bulk(tile, x, 12, &full);  //!", "misaligned access",
            1),
    Example("TMA to a multiple of 4", "ptx::cp_async_bulk(tile + 1, x, 16, &full);  //!",
            "misaligned access", 1),
    Example("TMA from beyond an array", "ptx::cp_async_bulk(tile, x + 240, 128, &full);  //!",
            "out of bounds", 1),
    Example("no map of a tensor", "ptx::cp_async_bulk_tensor_2d(tile, x, &full, 0, 0);  //!",
            "tensor map mismatch", 1),
    Example("more than a phase can wait for",
            "ptx::mbarrier_expect_tx(&full, 1 << 20);  //!", "transaction mismatch", 1),
    Example("registers are asked for that it has", "ptx::setmaxnreg_dec<40>();\n"
            "  ptx::setmaxnreg_inc<24>();  //!", "register pool overdrawn"),
    Example("half a warpgroup multiplies", "float d[4] = {};\n  ptx::wgmma_fence();\n"
            "  ptx::wgmma_m64k16_bf16(d, u64(0), u64(0), true);  //!\n  y[i] = u32(d[0]);",
            "lanes diverge"),
    Example("one warp waits for products by itself",
            "if (warp == 2) ptx::wgmma_wait_group<0>();  //!\n"
            "  ptx::wgmma_wait_group<0>();", "warps diverge", 128),
    Example("one warp waits for other products",
            "if (warp == 1) ptx::wgmma_wait_group<1>();\n"
            "  else ptx::wgmma_wait_group<0>();", "warps diverge", 128),
    Example("one warp executes no fence", "if (warp < 3) ptx::wgmma_fence();  //!\n"
            "  __syncthreads();", "warps diverge", 128),
    Example("one warp closes no group", "if (warp != 1) ptx::wgmma_commit_group();\n"
            "  ptx::wgmma_wait_group<0>();", "warps diverge", 128),
    Example("one warp keeps its registers", "if (warp > 0) ptx::setmaxnreg_dec<40>();",
            "warps diverge", 128),
    Example("two warpgroups go different ways", "if (warp < 4) ptx::wgmma_wait_group<0>();\n"
            "  else ptx::wgmma_fence();", threads=256),
    Example("one lane is elected", "y[i] = ptx::elect_sync();"),
)  # fmt: skip


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.rule], ids=str)
def test_a_broken_rule_is_named(example: Example) -> None:
    for seed in range(4):
        found = fault(PRELUDE + example.body, block=example.threads, seed=seed)
        assert found.rule == example.rule, found


@pytest.mark.parametrize("example", [e for e in EXAMPLES if not e.rule], ids=str)
def test_a_kept_rule_raises_no_alarm(example: Example) -> None:
    for seed in range(8):
        launch(PRELUDE + example.body, block=example.threads, seed=seed)


def test_a_copy_brings_its_bytes() -> None:
    given = arrays()
    y, executed = launch(PRELUDE + f"{LOAD}\n  {WAIT}\n  y[i] = tile[i];", given=given)
    assert np.array_equal(y[:64], given["x"][:64])
    assert executed.reads == {"x": 256}
    assert executed.operations["tma load"].bytes == 256

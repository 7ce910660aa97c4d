"""Blocks per SM: the toolkit's rules on cases worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasim import gpu as gpus
from fasim.model.occupancy import register_cap, residency

KIB = 1024


def one(gpu, threads, registers, smem):
    blocks, limiter = residency(gpus.load(gpu), threads, registers, smem)
    return int(blocks[0]), str(limiter[0])


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "smem", "expected"),
    [
        ("a100-80gb", 128, 248, 64 * KIB, (2, "registers")),  # FA2 d 128, 128x64, 4 warps
        ("a100-80gb", 256, 148, 64 * KIB, (1, "registers")),  # the same with 8 warps
        ("a100-80gb", 128, 96, 80 * KIB, (2, "smem")),
        ("a100-80gb", 128, 96, 81 * KIB, (2, "smem")),  # 82 KiB with the reserve: 2 x 82 = 164
        ("a100-80gb", 128, 96, 81 * KIB + 1, (1, "smem")),
        ("3090", 128, 248, 48 * KIB, (2, "registers")),  # 48 KiB leave room for two
        ("3090", 128, 96, 49 * KIB, (2, "smem")),
        ("3090", 128, 96, 49 * KIB + 1, (1, "smem")),
        ("3090", 128, 24, 0, (12, "warps")),
        ("3090", 32, 16, 0, (16, "blocks")),
        ("h200", 384, 168, 213 * KIB, (1, "registers")),  # a producer and two consumers of V3
        ("h200", 1024, 64, 0, (1, "registers")),
        ("h200", 2048, 16, 0, (0, "warps")),
        ("h200", 128, 256, 0, (0, "registers")),
        ("h200", 128, 64, 227 * KIB + 1, (0, "smem")),
        ("t4", 128, 64, 32 * KIB, (2, "smem")),  # nothing is reserved before Ampere
        ("v100-32gb", 128, 64, 32 * KIB, (3, "smem")),
    ],
)
def test_residency(gpu, threads, registers, smem, expected):
    assert one(gpu, threads, registers, smem) == expected


def test_registers_are_granted_per_warp_and_partition():
    """33 registers x 32 lanes round up to 1280: 12 warps a partition, 48 an SM, in blocks of 8."""
    assert one("h200", 256, 33, 0)[0] == 12 * 4 // 8
    assert one("h200", 256, 40, 0) == one("h200", 256, 33, 0)


def test_a_block_of_two_warps_is_charged_for_four():
    assert one("a100-80gb", 64, 248, 0) == one("a100-80gb", 128, 248, 0)


kernels = st.tuples(
    st.sampled_from(gpus.names()),
    st.sampled_from([32, 64, 128, 256, 384, 512]),
    st.integers(16, 255),
    st.integers(0, 227 * KIB),
)


@given(kernels)
def test_residents_fit(kernel):
    name, threads, registers, smem = kernel
    gpu, (blocks, limiter) = gpus.load(name), one(*kernel)
    assert limiter in ("registers", "smem", "warps", "blocks")
    assert blocks * threads * registers <= gpu.registers_per_sm
    assert blocks * (smem + gpu.smem_reserved) <= gpu.smem_per_sm
    assert blocks * threads <= 32 * gpu.warps_per_sm
    assert blocks <= gpu.blocks_per_sm


@given(kernels)
def test_launch_bounds_leave_the_registers_that_residency_assumed(kernel):
    name, threads, registers, _ = kernel
    blocks, _ = one(*kernel)
    if blocks:
        assert registers <= register_cap(gpus.load(name), threads, blocks)


@given(kernels, st.integers(0, 64), st.integers(0, 32 * KIB))
def test_needing_more_never_lets_more_in(kernel, registers, smem):
    name, threads, r, s = kernel
    assert one(name, threads, r + registers, s + smem)[0] <= one(*kernel)[0]

"""How many blocks of a kernel live on an SM: the CUDA occupancy rules, vectorised.

Source: the rules of the CUDA toolkit's cuda_occupancy.h. Registers are handed out per warp in
granules inside a sub-partition, shared memory per block in granules plus what the system takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fasim.gpu import Gpu
from fasim.model.tiles import Ints, ceil_div, round_up
from fasim.plan import WARP

LIMITERS = np.array(["registers", "smem", "warps", "blocks"])
WARP_GRANULE = 4  # warps of a block, rounded up, when registers are counted


def residency(
    gpu: Gpu, threads: Any, registers: Any, smem: Any
) -> tuple[Ints, npt.NDArray[np.str_]]:
    """Blocks per SM (0: cannot run) and what limits them, for arrays of threads a block, registers
    a thread and shared bytes a block. The largest shared-memory carve-out is taken."""
    threads, registers, smem = np.broadcast_arrays(*map(np.atleast_1d, (threads, registers, smem)))
    warps = ceil_div(threads, WARP)
    limits = np.stack(
        [
            _by_registers(gpu, warps, registers),
            _by_smem(gpu, smem),
            np.where(threads <= gpu.threads_per_block, gpu.warps_per_sm // warps, 0),
            np.full_like(warps, gpu.blocks_per_sm),
        ]
    )
    return limits.min(axis=0), LIMITERS[limits.argmin(axis=0)]


def _by_registers(gpu: Gpu, warps: Ints, registers: Ints) -> Ints:
    demand = round_up(np.maximum(registers, 1) * WARP, gpu.register_granularity)
    per_partition = gpu.registers_per_sm // gpu.sub_partitions // demand
    blocks = per_partition * gpu.sub_partitions // round_up(warps, WARP_GRANULE)
    return np.where(registers <= gpu.registers_per_thread, blocks, 0)


def _by_smem(gpu: Gpu, smem: Ints) -> Ints:
    carveout = max(gpu.smem_carveouts, default=gpu.smem_per_sm)
    demand = np.maximum(round_up(smem + gpu.smem_reserved, gpu.smem_granularity), 1)
    return np.where(smem <= gpu.smem_per_block, carveout // demand, 0)


def register_cap(gpu: Gpu, threads: Any, blocks_per_sm: Any) -> Any:
    """Most registers a thread may use with that many blocks resident (__maxnreg__)."""
    warps = round_up(ceil_div(threads, WARP), WARP_GRANULE) * np.maximum(blocks_per_sm, 1)
    return np.minimum(gpu.registers_per_thread, gpu.registers_per_sm // (WARP * warps) // 8 * 8)

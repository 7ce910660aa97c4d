"""The silicon: one GPU as data, every number with its source.

A GPU is a TOML file (``fasim/gpus/*.toml`` or your own, docs/adding-a-gpu.md). A value nobody has
published is absent there, None here, and listed in ``unknown``; the model then says what it assumes.
Rates are per SM and clock, sizes in bytes, clocks in Hz, bandwidths in bytes per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str  # "h200-sxm": file stem and what the user types
    title: str  # "NVIDIA H200 SXM 141GB"
    aliases: tuple[str, ...] = ()
    compute_capability: tuple[int, int]
    arch: str  # best target of its own: "sm_80", "sm_90a"

    sm_count: int
    base_clock_hz: float | None
    boost_clock_hz: float
    tensor_clock_hz: float | None  # the clock the vendor's dense tensor peak assumes
    load_clock_wgmma_hz: float | None  # measured under sustained wgmma load, power limited
    load_clock_mma_hz: float | None  # the same under mma.sync load
    power_w: float | None

    hbm_bytes: int  # capacity as the driver reports it, else as sold
    hbm_bandwidth: float  # datasheet
    hbm_bandwidth_measured: float | None
    hbm_latency_clocks: float | None
    l2_bytes: int
    l2_bandwidth: float | None  # distinct bytes, whole chip
    l2_latency_clocks: float | None

    smem_per_sm: int
    smem_per_block: int  # opt-in maximum of one block
    smem_granularity: int
    smem_reserved: int  # per block, taken by the system
    smem_carveouts: tuple[int, ...]
    smem_bytes_per_clock: float | None
    smem_latency_clocks: float | None

    registers_per_sm: int
    registers_per_thread: int
    register_granularity: int  # per warp
    sub_partitions: int
    warps_per_sm: int
    blocks_per_sm: int
    barrier_blocks_factor: int
    threads_per_block: int

    tensor_flops: Mapping[str, float | None]  # dense, fp32 accumulate: fp16 bf16 tf32 e4m3; 0 = none
    mma_fraction: float | None  # share of that rate which mma.sync reaches (wgmma parts only)
    mufu_per_clock: float | None
    fp32_flops: float  # an FMA counts 2
    launch_s: float | None  # one kernel launch in a stream

    cp_async: bool
    tma: bool
    wgmma: bool

    sources: Mapping[str, str] = field(default_factory=dict)  # field -> where the value is from
    notes: tuple[str, ...] = ()  # disagreements between sources, caveats

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the values this GPU's file does not give."""
        missing = [name for name in _OPTIONAL if getattr(self, name) is None]
        return (*missing, *(f"tensor_flops.{k}" for k, v in self.tensor_flops.items() if v is None))

    @property
    def sram_bytes(self) -> int:
        """Shared memory of the whole chip: the paper's SRAM."""
        return self.sm_count * self.smem_per_sm

    def tensor_peak(self, dtype: str) -> float | None:
        """Dense FLOP/s of the tensor cores at the vendor's tensor clock; None if unknown."""
        rate = self.tensor_flops.get(dtype)
        return rate and rate * self.sm_count * (self.tensor_clock_hz or self.boost_clock_hz)

    def ridge_point(self, dtype: str) -> float | None:
        """FLOP per HBM byte above which dense work is bound by the tensor cores."""
        peak = self.tensor_peak(dtype)
        return peak and peak / self.hbm_bandwidth


_OPTIONAL = tuple(name for name, kind in Gpu.__annotations__.items() if "| None" in str(kind))[:-1]

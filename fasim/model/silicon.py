"""The rates of a GPU that the time law uses, with an assumption for each that its file lacks."""

from __future__ import annotations

from dataclasses import dataclass

from fasim.gpu import FORMAT, Gpu
from fasim.plan import PACKED, V3
from fasim.problem import Problem

# Assumed where the GPU's file has no value; each is named in the plan that used it.
MUFU_PER_CLOCK = 16.0  # the figure of every architecture that publishes one
SMEM_BYTES_PER_CLOCK = 128.0  # 32 banks of 4 bytes
L2_BYTES_PER_CLOCK = 24.0  # per SM; measured parts lie between 15 (L40) and 37 (A100, H200)
L2_LATENCY_CLOCKS = 300.0  # measured parts: 206 to 280
HBM_SHARE = 0.88  # of the datasheet bandwidth; measured parts: 0.81 to 0.93
HBM_LATENCY_CLOCKS = 700.0  # measured parts: 480 to 690
LAUNCH_S = 2.5e-6  # a launch in a stream, as measured on an H200
MMA_FRACTION = {9: 0.665, 10: 0.25}  # of the wgmma or tcgen05 rate, by compute capability
E4M3_MMA_FRACTION = 0.17  # sm_90 emulates e4m3 mma.sync: 1400 of 8192 FLOP measured

# field of Gpu -> key of a GPU file, and one unit of the key in the field's unit
_KEYS = {spec.field: (key, spec.unit) for keys in FORMAT.values() for key, spec in keys.items()}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Per SM and clock, except where the name says seconds or Hz."""

    clock_hz: float
    sms: int
    matmul_flops: float
    mufu: float
    lanes: float  # instructions of 32 lanes that four schedulers issue, in lanes
    smem_bytes: float
    l2_bytes: float
    l2_latency: float
    hbm_bytes_s: float  # whole chip, bytes per second
    hbm_latency: float  # clocks; looked up for kernels that wait for nothing else, else 0
    launch_s: float
    assumed: tuple[str, ...]


def rates(gpu: Gpu, algo: str, problem: Problem) -> Rates:
    """The rates that one algorithm sees: V1 and V2 multiply with mma.sync, V3 and the library
    behind standard attention with the best instruction the GPU has, fp32 without tensor cores."""
    notes = _Notes(gpu)
    wgmma = gpu.wgmma and algo in (*V3, "standard") and problem.dtype != "fp32"
    clock = _clock(gpu, wgmma, notes)
    l2 = notes.value("l2_bandwidth", L2_BYTES_PER_CLOCK * gpu.sm_count * clock)
    return Rates(
        clock_hz=clock,
        sms=gpu.sm_count,
        matmul_flops=_matmul_rate(gpu, algo, problem.dtype, notes),
        mufu=notes.value("mufu_per_clock", MUFU_PER_CLOCK),
        lanes=32.0 * gpu.sub_partitions,
        smem_bytes=notes.value("smem_bytes_per_clock", SMEM_BYTES_PER_CLOCK),
        l2_bytes=l2 / gpu.sm_count / clock,
        l2_latency=notes.value("l2_latency_clocks", L2_LATENCY_CLOCKS),
        hbm_bytes_s=_hbm_rate(gpu, notes),
        hbm_latency=_hbm_latency(algo, notes),
        launch_s=notes.value("launch_s", LAUNCH_S),
        assumed=tuple(notes.sentences),
    )


class _Notes:
    """Looks values up and writes down what had to be assumed."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.sentences: list[str] = []

    def value(self, name: str, otherwise: float) -> float:
        known = getattr(self.gpu, name)
        if known is not None:
            return float(known)
        return self.assume(name, otherwise)

    def assume(self, name: str, value: float) -> float:
        """Named as the GPU's file would name it and in its unit, ready to be added there."""
        key, unit = _KEYS[name]
        shown = f"{value / unit:.5g}"
        self.sentences.append(f"{key} is not in the file of {self.gpu.name}: {shown} assumed")
        return value


def _clock(gpu: Gpu, wgmma: bool, notes: _Notes) -> float:
    """The clock under sustained load, else the one behind the vendor's tensor peak, else boost."""
    name = "load_clock_wgmma_hz" if wgmma else "load_clock_mma_hz"
    return notes.value(name, gpu.tensor_clock_hz or gpu.boost_clock_hz)


def _hbm_rate(gpu: Gpu, notes: _Notes) -> float:
    return notes.value("hbm_bandwidth_measured", HBM_SHARE * gpu.hbm_bandwidth)


def _hbm_latency(algo: str, notes: _Notes) -> float:
    return notes.value("hbm_latency_clocks", HBM_LATENCY_CLOCKS) if algo in PACKED else 0.0


def _matmul_rate(gpu: Gpu, algo: str, dtype: str, notes: _Notes) -> float:
    if dtype == "fp32":
        return gpu.fp32_flops
    rate = _tensor_rate(gpu, dtype, notes)
    return rate if algo in (*V3, "standard") else rate * _mma_share(gpu, dtype, notes)


def _tensor_rate(gpu: Gpu, dtype: str, notes: _Notes) -> float:
    """0 in the file means that the tensor cores lack the type; the FMA units then do the work."""
    rate = gpu.tensor_flops.get(dtype)
    if rate is None:
        fp16 = gpu.tensor_flops.get("fp16") or gpu.fp32_flops
        rate = notes.assume(f"tensor_flops.{dtype}", fp16 * (2 if dtype == "e4m3" else 1))
    return rate or gpu.fp32_flops


def _mma_share(gpu: Gpu, dtype: str, notes: _Notes) -> float:
    major = gpu.compute_capability[0]
    if major not in MMA_FRACTION:
        return 1.0
    if dtype == "e4m3" and major == 9:
        return E4M3_MMA_FRACTION
    return notes.value("mma_fraction", MMA_FRACTION[major])

"""The GPU runner against a stand-in driver that works in host memory.

The stand-in launches attention written in NumPy on raw addresses and strides, so that packing,
uploads with their gaps, guard zones and the context stack are checked without a GPU.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fasim import properties, reference, tiled
from fasim.errors import CheckFailed, MissingToolError, UsageError
from fasim.plan import Launch, Stage
from fasim.render import Kernel
from fasim.runners import DeviceFault, gpu
from fasim.runners.arrays import DTYPES, FORMATS, pack_arguments

Sketch = Callable[..., Kernel]


class Error(Exception):
    """pycuda.driver.Error."""


class OutOfMemory(Error):
    """pycuda.driver.MemoryError."""


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.raw = (ctypes.c_char * (nbytes + 256))()
        self.start = -(-ctypes.addressof(self.raw) // 256) * 256

    def __int__(self) -> int:
        return self.start


def at(address: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """The array at an address, as a kernel sees it."""
    span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    count = 0 if 0 in shape else span
    item = np.dtype(dtype).itemsize
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (count * item)).from_address(address))
    steps = tuple(step * item for step in strides)
    return np.lib.stride_tricks.as_strided(raw.view(dtype), shape, steps)


@dataclass
class Driver:
    """What fasim.runners.gpu uses of pycuda.driver."""

    kernel: Kernel
    depth: int = 0
    pushes: int = 0
    broken: str = ""
    stray: int = 0  # bytes the kernel writes past the end of o
    limits: list[int] = field(default_factory=list)
    sources: list[bytes] = field(default_factory=list)

    Error = Error
    MemoryError = OutOfMemory

    def __post_init__(self) -> None:
        self.Context = SimpleNamespace(
            pop=self.pop, synchronize=lambda: None, get_device=lambda: self
        )
        self.function_attribute = SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def init(self) -> None: ...
    def Device(self, index: int) -> Driver:
        assert index == 0
        return self

    def retain_primary_context(self) -> Driver:
        return self

    def compute_capability(self) -> tuple[int, int]:
        return (8, 0)

    def push(self) -> None:
        self.depth += 1
        self.pushes += 1

    def pop(self) -> None:
        self.depth -= 1
        if self.broken:
            raise Error(self.broken)

    def mem_get_info(self) -> tuple[int, int]:
        return (7, 10)

    def mem_alloc(self, nbytes: int) -> Memory:
        assert self.depth
        if nbytes > 1 << 30:
            raise OutOfMemory("out of memory")
        return Memory(nbytes)

    def memset_d8(self, address: int, value: int, nbytes: int) -> None:
        ctypes.memset(address, value, nbytes)

    def memcpy_htod(self, address: int, source: Any) -> None:
        assert self.depth
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def memcpy_dtoh(self, target: Any, address: int) -> None:
        assert self.depth
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def module_from_buffer(self, cubin: bytes) -> Driver:
        self.sources.append(cubin)
        return self

    def get_function(self, name: str) -> Driver:
        assert name == self.kernel.stem
        return self

    def set_attribute(self, attribute: int, value: int) -> None:
        self.limits.append(value)

    def prepare(self, formats: list[str]) -> None:
        self.format = "".join(formats)

    def prepared_call(self, grid: Any, block: Any, *values: Any, shared_size: int) -> None:
        assert self.depth
        if self.broken:
            raise Error(self.broken)
        struct.pack(self.format, *values)
        self.compute(list(values))

    def compute(self, values: list[Any]) -> None:
        """Attention on raw memory: pointers, sizes and strides are all there is."""
        spec = self.kernel.plan.kernel
        arguments: dict[str, Any] = {}
        for name, kind in self.kernel.plan.kernel.arguments:
            taken = [values.pop(0) for _ in FORMATS[kind]]
            arguments[name] = taken if kind == "i64x3" else taken[0]
        dtype = DTYPES[spec.dtype]
        heads, kv_heads, seq, seq_kv = (
            arguments[n] for n in ("heads", "kv_heads", "seq_q", "seq_kv")
        )
        q, k, v, o = (
            at(arguments[name], dtype, (1, h, s, d), (*arguments[f"{name}_strides"], 1))
            for name, h, s, d in (
                ("q", heads, seq, spec.head_dim),
                ("k", kv_heads, seq_kv, spec.head_dim),
                ("v", kv_heads, seq_kv, spec.head_dim_v),
                ("o", heads, seq, spec.head_dim_v),
            )
        )
        lse = at(arguments["lse"], np.float32, (1, heads, seq), (heads * seq, seq, 1))
        scale = arguments["scale_log2"] * np.log(2)
        for h in range(heads):
            qh, kh, vh = (x[0, h // (heads // x.shape[1])].astype(np.float32) for x in (q, k, v))
            with np.errstate(all="ignore"):
                o[0, h], lse[0, h] = tiled.v2(qh, kh, vh, scale=scale, causal=spec.mask == "causal")
        if self.stray:
            ctypes.memset(arguments["o"] + o.size * o.itemsize, 0, self.stray)


@dataclass
class DeviceView:
    """An array that says it is on the device."""

    array: Any
    typestr: str = ""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self.array.__array_interface__)
        return {**interface, "typestr": self.typestr or interface["typestr"]}


@pytest.fixture
def driver(sketch: Sketch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(b"code")
    stand_in = Driver(sketch())
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "_driver", lambda: stand_in)
    monkeypatch.setattr(gpu, "compile_kernel", lambda kernel, arch: SimpleNamespace(cubin=cubin))
    gpu._forget()
    yield stand_in
    gpu._forget()
    assert stand_in.depth == 0, "a context was left pushed"


def run(
    driver: Driver, q: Any, k: Any, v: Any, runner: gpu.GpuRunner | None = None
) -> tuple[dict[str, Any], reference.Forward]:
    """Outputs of the runner, and the reference's."""
    plain = [getattr(x, "array", x) for x in (q, k, v)]
    (_, heads, seq, _), (_, kv_heads, seq_kv, _) = (x.shape for x in plain[:2])
    problem = driver.kernel.plan.problem.with_(
        heads=heads, kv_heads=kv_heads, seq=seq, seq_kv=seq_kv
    )
    launch = driver.kernel.plan.launch_for(problem)
    outputs = (runner or gpu.GpuRunner()).run(driver.kernel, {"q": q, "k": k, "v": v}, launch)
    return outputs, reference.attention(*plain, scale=problem.scale, causal=problem.causal)


def draw(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_arguments_are_packed_in_the_kernels_order(sketch: Sketch) -> None:
    kernel = sketch()
    launch = kernel.plan.launch_for(kernel.plan.problem.with_(heads=4, kv_heads=2, seq=3, seq_kv=5))
    pointers = {name: 256 * (i + 1) for i, name in enumerate(("q", "k", "v", "o", "lse"))}
    formats, values = pack_arguments(kernel.plan.kernel.arguments, pointers, launch.scalars)
    raw = struct.pack("".join(formats), *values)
    assert struct.unpack_from("5P4i", raw) == (256, 512, 768, 1024, 1280, 4, 2, 3, 5)
    assert struct.unpack_from("12q", raw, 56) == (
        *(4 * 3 * 16, 3 * 16, 16, 2 * 5 * 16, 5 * 16, 16),
        *(2 * 5 * 16, 5 * 16, 16, 4 * 3 * 16, 3 * 16, 16),
    )
    assert struct.unpack_from("f", raw, 152)[0] == pytest.approx(0.25 * np.log2(np.e))
    assert len(raw) == 156


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("q", "ptr", 0),
        ("q", "ptr", None),
        ("n", "i32", 2**31),
        ("s", "f32", 1e39),
        ("n", "i32", None),
    ],
)
def test_a_value_outside_its_type_is_refused(name: str, kind: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        pack_arguments(((name, kind),), {"q": value}, {name: value})


@pytest.mark.parametrize(
    ("built_for", "device", "wanted"),
    [
        ("sm_80", (8, 0), None),
        ("sm_80", (8, 9), None),
        ("sm_80", (9, 0), "sm_90"),
        ("sm_90a", (9, 0), None),
        ("sm_90", (10, 0), "sm_100"),
        ("sm_80", (12, 0), "sm_120"),
    ],
)
def test_the_target_is_one_the_device_runs(
    built_for: str, device: tuple[int, int], wanted: str | None
) -> None:
    assert gpu.target_arch(built_for, device) == wanted


@pytest.mark.parametrize(
    ("built_for", "device"), [("sm_90a", (10, 0)), ("sm_90", (8, 0)), ("sm_89", (8, 6))]
)
def test_a_kernel_for_another_device_is_refused(built_for: str, device: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=built_for):
        gpu.target_arch(built_for, device)


@pytest.mark.parametrize("layout", properties.LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.usefixtures("driver")
def test_host_arrays_keep_their_strides(
    driver: Driver, sketch: Sketch, layout: str, dtype: str
) -> None:
    driver.kernel = sketch(dtype=dtype)
    arrays = draw((1, 4, 7, 16), (1, 2, 9, 16), (1, 2, 9, 16), dtype=DTYPES[dtype])
    q, k, v = (properties.lay_out(x, layout) for x in arrays)
    got, want = run(driver, q, k, v)
    compact, _ = run(driver, arrays[0], arrays[1], arrays[2])
    assert np.abs(got["o"].astype(np.float64) - want.o).max() < 0.02
    assert all(np.array_equal(got[name], compact[name]) for name in got)


def test_every_second_row_and_broadcast_heads_are_followed(driver: Driver) -> None:
    q, buffer, v = draw((1, 2, 33, 16), (1, 2, 66, 16), (1, 1, 33, 16))
    got, want = run(driver, q, buffer[:, :, ::2], np.broadcast_to(v, (1, 2, 33, 16)))
    np.testing.assert_allclose(got["o"], want.o, atol=1e-6)
    np.testing.assert_allclose(got["lse"], want.lse, atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_layouts_a_kernel_cannot_follow_are_copied(driver: Driver) -> None:
    q, k, v = draw((1, 2, 16, 16), (1, 2, 16, 16), (1, 2, 16, 16))
    got, want = run(driver, np.asfortranarray(q), k[:, :, ::-1], v.swapaxes(2, 3))
    np.testing.assert_allclose(got["o"], want.o, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x: x[:, :, ::-1], "negative strides"),
        (lambda x: x.swapaxes(2, 3), "not contiguous"),
        (lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 1)])[..., :16], "not aligned to 16 bytes"),
    ],
)
def test_copying_a_device_array_is_said(
    driver: Driver, change: Callable[[Any], Any], why: str
) -> None:
    q, k, v = draw(*[(1, 2, 16, 16)] * 3)
    with pytest.warns(UserWarning, match=f"k is copied: .*{why}"):
        got, want = run(driver, q, DeviceView(change(k)), v)
    np.testing.assert_allclose(got["o"], want.o, atol=1e-6)


def test_device_arrays_are_used_in_place_and_outputs_can_stay(driver: Driver) -> None:
    q, k, v = (_aligned(x) for x in draw(*[(1, 2, 16, 16)] * 3))
    launch = driver.kernel.plan.launch_for(driver.kernel.plan.problem.with_(heads=2, seq=16))
    arrays = {"q": DeviceView(q), "k": DeviceView(k), "v": DeviceView(v)}
    call = gpu.launch_on_device(driver.kernel, arrays, launch)
    assert {i.address for i in call.inputs.values()} == {x.ctypes.data for x in (q, k, v)}
    v[...] = 1
    call()
    interface = call.outputs["o"].__cuda_array_interface__
    assert interface["shape"] == (1, 2, 16, 16)
    assert interface["data"][0] == call.outputs["o"].address
    np.testing.assert_allclose(call.outputs["o"].numpy(), 1, atol=1e-6)


def _aligned(x: Any) -> Any:
    raw = np.empty(x.nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    y = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.float16, ml_dtypes.bfloat16])
def test_another_type_is_refused(driver: Driver, dtype: Any) -> None:
    q, k, v = draw(*[(1, 2, 8, 16)] * 3)
    for arrays in ((q.astype(dtype), k, v), (q, k, DeviceView(v.astype(dtype)))):
        with pytest.raises(UsageError, match="this kernel takes fp32"):
            _run_arrays(driver, *arrays)


def _run_arrays(driver: Driver, q: Any, k: Any, v: Any) -> Any:
    launch = driver.kernel.plan.launch_for(driver.kernel.plan.problem.with_(heads=2, seq=8))
    return gpu.GpuRunner().run(driver.kernel, {"q": q, "k": k, "v": v}, launch)


def test_a_wrong_shape_and_a_missing_array_are_refused(driver: Driver) -> None:
    q, k, v = draw(*[(1, 2, 8, 16)] * 3)
    with pytest.raises(UsageError, match="k has shape"):
        _run_arrays(driver, q, k[:, :, :7], v)
    launch = driver.kernel.plan.launch_for(driver.kernel.plan.problem.with_(heads=2, seq=8))
    with pytest.raises(UsageError, match="needs an array v"):
        gpu.GpuRunner().run(driver.kernel, {"q": q, "k": k}, launch)


def test_a_tensor_that_requires_grad_is_refused(driver: Driver) -> None:
    class Tensor:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("requires grad")

    q, k, _ = draw(*[(1, 2, 8, 16)] * 3)
    with pytest.raises(UsageError, match="v cannot be read"):
        _run_arrays(driver, q, k, Tensor())


@pytest.mark.parametrize(("seq", "seq_kv"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_empty_sequences(driver: Driver, seq: int, seq_kv: int) -> None:
    q, k, v = draw((1, 2, seq, 16), (1, 2, seq_kv, 16), (1, 2, seq_kv, 16))
    got, want = run(driver, q, k, v)
    assert got["o"].shape == (1, 2, seq, 16)
    np.testing.assert_allclose(got["o"], want.o, atol=1e-6)
    np.testing.assert_array_equal(np.isneginf(got["lse"]), np.isneginf(want.lse))
    assert bool(driver.sources) == (seq > 0), "an empty grid compiles and launches nothing"


def test_a_grid_too_large_is_refused(driver: Driver) -> None:
    stage = Stage(entry="any", grid=2**31, block=32)
    launch = Launch(stages=(stage,), scalars={}, inputs={}, outputs={})
    with pytest.raises(UsageError, match="2,147,483,648 thread blocks"):
        gpu.GpuRunner().run(driver.kernel, {}, launch)


def test_more_than_48_kib_of_shared_memory_is_asked_for(driver: Driver) -> None:
    run(driver, *draw(*[(1, 2, 8, 16)] * 3))
    assert driver.limits == [64 << 10]


@pytest.mark.parametrize(("guard", "found"), [(True, True), (False, False)])
def test_a_write_past_the_end_is_found(driver: Driver, guard: bool, found: bool) -> None:
    driver.stray = 3
    runner = gpu.GpuRunner(guard)
    q, k, v = draw(*[(1, 2, 8, 16)] * 3)
    if not found:
        run(driver, q, k, v, runner)
        return
    with pytest.raises(CheckFailed, match="wrote outside o") as error:
        run(driver, q, k, v, runner)
    assert error.value.why == "3 bytes after it changed, the nearest 1 away"


def test_a_fault_is_one_error_and_leaves_no_context(driver: Driver) -> None:
    driver.broken = "cuLaunchKernel failed: an illegal memory access was encountered"
    with pytest.raises(DeviceFault, match="illegal memory access") as error:
        run(driver, *draw(*[(1, 2, 8, 16)] * 3))
    assert driver.kernel.stem in error.value.what


def test_out_of_memory_says_how_much(driver: Driver) -> None:
    q = np.broadcast_to(draw((1, 1, 16, 16))[0], (1, 1 << 20, 16, 16))
    with pytest.raises(Exception, match="7 are free"):
        run(driver, q, q, q)


def test_a_module_is_loaded_once(driver: Driver) -> None:
    arrays = draw(*[(1, 2, 8, 16)] * 3)
    run(driver, *arrays)
    run(driver, *arrays)
    assert driver.sources == [b"code"]


def test_without_pycuda_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    gpu._forget()
    assert gpu.available() == "pycuda is not installed"
    with pytest.raises(MissingToolError):
        gpu.GpuRunner()


def test_every_property_holds_on_the_stand_in(driver: Driver) -> None:
    report = properties.verify(driver.kernel, _Batched(), examples=8)
    report.check()
    assert report.cases == 8 * 8


class _Batched(gpu.GpuRunner):
    """The stand-in kernel does one batch."""

    def run(self, kernel: Kernel, arrays: Any, launch: Launch) -> dict[str, Any]:
        batch, heads = arrays["q"].shape[:2]
        one = kernel.plan.problem.with_(
            heads=heads,
            kv_heads=arrays["k"].shape[1],
            seq=arrays["q"].shape[2],
            seq_kv=arrays["k"].shape[2],
            scale=launch.scalars["scale_log2"] / np.log2(np.e),
        )
        parts = [
            super(_Batched, self).run(
                kernel, {n: x[b : b + 1] for n, x in arrays.items()}, kernel.plan.launch_for(one)
            )
            for b in range(batch)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in launch.outputs}

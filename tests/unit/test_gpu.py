"""The GPU files and the loader: what a user gets, and what a wrong file says."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fasim import gpu
from fasim.errors import UsageError

ROOT = Path(__file__).parents[2]

# dense 16-bit TFLOP/s with fp32 accumulation as the vendors print it, fp8 where they print that too
VENDOR_PEAK = {
    "a10": (125, None),
    "a100-pcie-40gb": (312, None),
    "a100-pcie-80gb": (312, None),
    "a100-sxm4-40gb": (312, None),
    "a100-sxm4-80gb": (312, None),
    "b200-sxm-180gb": (2250, 4500),
    "gh200-144gb": (990, 1979),
    "gh200-96gb": (990, 1979),
    "h100-pcie-80gb": (756.5, 1513),
    "h100-sxm5-80gb": (989.4, 1979),
    "h200-sxm5-141gb": (989.4, 1979),
    "l4": (121, 242.5),
    "l40s": (362.05, 733),
    "rtx3090": (71.2, None),
    "rtx4090": (165.2, 330.3),
    "rtx5090": (209.5, 419),
    "t4": (65, None),
    "v100-pcie-16gb": (112, None),
    "v100-sxm2-16gb": (125, None),
    "v100-sxm2-32gb": (125, None),
}
SMEM_PER_BLOCK = {
    (7, 0): 98_304,
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}
# Warps, blocks, blocks x barrier factor, reserved bytes, granularity: cuda_occupancy.h of CUDA 12.9
OCCUPANCY = {
    (7, 0): (64, 32, 64, 0, 256),
    (7, 5): (32, 16, 32, 0, 256),
    (8, 0): (64, 32, 64, 1024, 128),
    (8, 6): (48, 16, 16, 1024, 128),
    (8, 9): (48, 24, 24, 1024, 128),
    (9, 0): (64, 32, 64, 1024, 128),
    (10, 0): (64, 32, 64, 1024, 128),
    (12, 0): (48, 24, 24, 1024, 128),
}
WHOLE = """
title = "Mine"
compute_capability = "9.0"
arch = "sm_90a"

[chip]
sm_count = { value = 100, source = "me" }
boost_clock_mhz = { value = 2000, source = "me" }

[memory]
hbm_mib = { value = 81_920, source = "me" }
hbm_bandwidth_gbs = { value = 3000, source = "me" }

[l2]
l2_mib = { value = 50, source = "me" }

[shared_memory]
smem_per_sm_kib = { value = 228, source = "me" }
smem_per_block_kib = { value = 227, source = "me" }
smem_granularity_bytes = { value = 128, source = "me" }
smem_reserved_bytes = { value = 1024, source = "me" }
smem_carveouts_kib = { value = [100, 228], source = "me" }

[occupancy]
registers_per_sm = { value = 65536, source = "me" }
registers_per_thread = { value = 255, source = "me" }
register_granularity = { value = 256, source = "me" }
sub_partitions = { value = 4, source = "me" }
warps_per_sm = { value = 64, source = "me" }
blocks_per_sm = { value = 32, source = "me" }
barrier_blocks_factor = { value = 2, source = "me" }
threads_per_block = { value = 1024, source = "me" }

[scalar]
fp32_flop_per_clock = { value = 256, source = "me" }

[features]
cp_async = { value = true, source = "me" }
tma = { value = true, source = "me" }
wgmma = { value = true, source = "me" }
"""


@pytest.fixture(params=gpu.names())
def each(request: pytest.FixtureRequest) -> gpu.Gpu:
    return gpu.load(request.param)


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test say what nvidia-smi answers."""
    gpu.detected.cache_clear()
    yield monkeypatch
    gpu.detected.cache_clear()


def answer(smi: pytest.MonkeyPatch, text: str) -> None:
    smi.setattr(gpu, "_nvidia_smi", lambda: text)


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


# The built-in files


def test_there_are_the_21_gpus() -> None:
    assert len(gpu.names()) == 21
    assert set(gpu.names()) == {*VENDOR_PEAK, "h100-nvl-94gb"}


def test_every_value_has_a_source(each: gpu.Gpu) -> None:
    given = {n for n in each.__dataclass_fields__ if getattr(each, n) is not None}
    given -= {"name", "title", "aliases", "compute_capability", "arch", "tensor_flops"}
    given -= {"sources", "notes"}
    given |= {f"tensor_flops.{d}" for d, v in each.tensor_flops.items() if v is not None}
    assert given == set(each.sources)


def test_sources_are_public(each: gpu.Gpu) -> None:
    for text in (*each.sources.values(), *each.notes):
        assert not re.search(r"(^|\s)/|~|\bour\b|\bwe\b", text), text


def test_dense_peak_is_the_vendors(each: gpu.Gpu) -> None:
    for dtype, peak in zip(("fp16", "e4m3"), VENDOR_PEAK.get(each.name, (None, None)), strict=True):
        if peak is not None:
            assert each.tensor_peak(dtype) == pytest.approx(peak * 1e12, rel=0.015)


def test_formats_that_tensor_cores_lack_are_zero_not_unknown(each: gpu.Gpu) -> None:
    assert (each.tensor_flops["bf16"] == 0) == (each.compute_capability < (8, 0))
    assert (each.tensor_flops["e4m3"] == 0) == (each.compute_capability < (8, 9))
    assert each.tensor_peak("e4m3") == 0 or each.compute_capability >= (8, 9)


def test_shared_memory_of_a_block(each: gpu.Gpu) -> None:
    assert each.smem_per_block == SMEM_PER_BLOCK[each.compute_capability]


def test_occupancy_rules(each: gpu.Gpu) -> None:
    barriers = each.blocks_per_sm * each.barrier_blocks_factor
    rules = (each.warps_per_sm, each.blocks_per_sm, barriers)
    assert (*rules, each.smem_reserved, each.smem_granularity) == OCCUPANCY[each.compute_capability]
    assert (each.registers_per_sm, each.registers_per_thread) == (65_536, 255)
    assert (each.register_granularity, each.sub_partitions) == (256, 4)


def test_levels_are_ordered(each: gpu.Gpu) -> None:
    assert each.sram_bytes == each.sm_count * each.smem_per_sm
    assert 2 * 2**20 < each.sram_bytes < 40 * 2**20
    assert each.l2_bytes < each.hbm_bytes / 100
    assert each.hbm_bandwidth < (each.l2_bandwidth or 1e15)
    assert (each.smem_latency_clocks or 0) < (each.l2_latency_clocks or 150)
    assert (each.l2_latency_clocks or 0) < (each.hbm_latency_clocks or 400)
    assert 70 < (each.ridge_point("fp16") or 0) < 450


def test_features_follow_the_architecture(each: gpu.Gpu) -> None:
    assert each.cp_async == (each.compute_capability >= (8, 0))
    assert each.tma == (each.compute_capability >= (9, 0))
    assert each.wgmma == (each.compute_capability == (9, 0)) == (each.arch == "sm_90a")


def test_mma_fraction_is_known_where_mma_is_not_the_fast_path(each: gpu.Gpu) -> None:
    assert each.mma_fraction == {(9, 0): 0.665, (10, 0): 0.25}.get(each.compute_capability)
    assert "mma_fraction" not in each.unknown


def test_the_h200_is_the_measured_one() -> None:
    h200 = gpu.load("h200")
    assert (h200.l2_bytes, h200.hbm_bytes) == (62_914_560, 143_771 * 2**20)
    assert (h200.load_clock_mma_hz, h200.load_clock_wgmma_hz) == (1.81e9, 1.6e9)
    assert (h200.hbm_bandwidth_measured, h200.l2_bandwidth) == (4.2e12, 9e12)
    assert h200.launch_s == pytest.approx(2.5e-6)
    assert h200.unknown == ()


def test_unknown_values_are_named() -> None:
    rtx4090 = gpu.load("4090")
    assert rtx4090.mufu_per_clock is None
    assert {"mufu_per_clock", "tensor_flops.tf32", "l2_bandwidth"} <= set(rtx4090.unknown)
    assert "load_clock_wgmma_hz" not in rtx4090.unknown  # it has no wgmma
    assert "load_clock_wgmma_hz" in gpu.load("h100").unknown
    assert {"base_clock_hz", "power_w"} <= set(gpu.load("gh200").unknown)
    assert "tensor_clock_hz" in gpu.load("h100-nvl").unknown


def test_a_gpu_is_a_value() -> None:
    h100 = gpu.load("h100")
    assert hash(h100) == hash(gpu.load("h100-sxm5-80gb"))
    assert pickle.loads(pickle.dumps(h100)) == h100
    assert h100 != gpu.load("h200")


def test_files_share_one_order_of_sections() -> None:
    for path in (ROOT / "fasim/gpus").glob("**/*.toml"):
        found = re.findall(r"^\[(\w+)\]", path.read_text(), re.M)
        order = list(gpu.FORMAT)
        if path.parent.name == "arch":
            order = ["occupancy", "shared_memory", "tensor", "scalar", "features"]
        assert found == [section for section in order if section in found], path


# Names


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "h100-sxm5-80gb"),
        ("H100 SXM", "h100-sxm5-80gb"),
        ("h200", "h200-sxm5-141gb"),
        ("a100", "a100-sxm4-80gb"),
        ("a100-80gb", "a100-sxm4-80gb"),
        ("A100_40GB", "a100-sxm4-40gb"),
        ("v100", "v100-sxm2-16gb"),
        ("v100-32gb", "v100-sxm2-32gb"),
        ("3090", "rtx3090"),
        ("RTX 4090", "rtx4090"),
        ("GeForce RTX 5090", "rtx5090"),
        ("b200", "b200-sxm-180gb"),
        ("gh200", "gh200-96gb"),
        ("Tesla T4", "t4"),
        ("l40-s", "l40s"),
    ],
)
def test_what_people_type(typed: str, name: str) -> None:
    assert gpu.load(typed).name == name


def test_aliases_resolve_and_are_unique() -> None:
    assert set(gpu.ALIASES) == set(gpu.names())
    spelled = [(gpu._squash(s), n) for n, all_ in gpu.ALIASES.items() for s in (n, *all_)]
    assert len(dict(spelled)) == len(spelled)
    for alias, name in spelled:
        assert gpu.load(alias).name == name
        assert gpu.load(name).aliases == gpu.ALIASES[name]


@pytest.mark.parametrize(
    ("typed", "guess"), [("h1000", "h100"), ("rtx4080", "rtx4090"), ("a100-80bg", "a100-80gb")]
)
def test_a_wrong_name_gets_a_guess(typed: str, guess: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(typed))) as caught:
        gpu.load(typed)
    assert f"did you mean {guess}?" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("typed", ["", "---", "nvidia", "zzzzzz", "\0"])
def test_a_hopeless_name_gets_the_list(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        gpu.load(typed)
    assert "fasim gpus" in caught.value.hint


# This machine's GPU


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("NVIDIA H200, 143771 MiB", "h200-sxm5-141gb"),
        ("NVIDIA H100 80GB HBM3, 81559 MiB", "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe, 81559 MiB", "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB, 40960 MiB", "a100-sxm4-40gb"),
        ("NVIDIA A100 80GB PCIe, 81920 MiB", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB, 40960 MiB", "a100-pcie-40gb"),
        ("Tesla V100-SXM2-32GB, 32510 MiB", "v100-sxm2-32gb"),
        ("Tesla T4, 15360 MiB", "t4"),
        ("NVIDIA L40S, 46068 MiB\nNVIDIA L4, 23034 MiB", "l40s"),
        ("NVIDIA GeForce RTX 4090, 24564 MiB", "rtx4090"),
        ("NVIDIA GH200 480GB, 97871 MiB", "gh200-96gb"),
        ("NVIDIA GH200 480GB, [N/A]", "gh200-96gb"),
        ("NVIDIA B200, 183359 MiB", "b200-sxm-180gb"),
        ("NVIDIA GeForce RTX 4090, 49140 MiB", None),  # a modified board
        ("NVIDIA GeForce RTX 4090 Laptop GPU, 16376 MiB", None),
        ("NVIDIA GeForce GTX 1080, 8192 MiB", None),
        ("NVIDIA A10G, 23028 MiB", None),
        ("No devices were found", None),
        ("", None),
    ],
)
def test_detected(smi: pytest.MonkeyPatch, line: str, name: str | None) -> None:
    answer(smi, line)
    assert gpu.detected() == name
    assert gpu.load("auto").name == (name or gpu.DEFAULT)


def test_detection_survives_no_nvidia_smi(smi: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi.setenv("PATH", str(tmp_path))
    assert gpu.detected() is None


@pytest.mark.parametrize("body", ["exit 9", "echo NVIDIA H200, 143771 MiB; exit 1"])
def test_detection_survives_a_failing_driver(
    smi: pytest.MonkeyPatch, tmp_path: Path, body: str
) -> None:
    _fake_smi(smi, tmp_path, body)
    assert gpu.detected() is None


def test_detection_reads_nvidia_smi(smi: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_smi(smi, tmp_path, 'echo "NVIDIA H200, 143771 MiB"')
    assert gpu.detected() == "h200-sxm5-141gb"


def _fake_smi(smi: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    smi.setenv("PATH", str(folder))


def test_loading_imports_nothing_heavy() -> None:
    code = "import sys; from fasim import gpu; gpu.load('h100'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.decode().split())
    assert not loaded & {"numpy", "torch", "pycuda", "difflib", "subprocess"}


def test_only_the_wanted_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    text = gpu._text

    def spy(path: Path) -> str:
        read.append(path.stem)
        return text(path)

    monkeypatch.setattr(gpu, "_text", spy)
    gpu._built_in.cache_clear()
    gpu.load("4090")
    assert read == ["rtx4090", "sm_89"]


# A file of one's own


def test_a_file_can_stand_alone(tmp_path: Path) -> None:
    mine = gpu.load(write(tmp_path, WHOLE))
    assert (mine.name, mine.title, mine.compute_capability) == ("mine", "Mine", (9, 0))
    assert (mine.boost_clock_hz, mine.hbm_bytes, mine.hbm_bandwidth) == (2e9, 80 * 2**30, 3e12)
    assert mine.smem_carveouts == (102_400, 233_472)
    assert mine.sources["hbm_bandwidth"] == "me"
    assert "tensor_flops.fp16" in mine.unknown
    assert mine.tensor_peak("fp16") is None
    assert mine.ridge_point("fp16") is None


def test_a_file_can_start_from_an_architecture(tmp_path: Path) -> None:
    kept = WHOLE[: WHOLE.index("[shared_memory]")].replace('arch = "sm_90a"', 'based_on = "sm_90"')
    mine = gpu.load(write(tmp_path, kept))
    assert (mine.arch, mine.smem_per_block, mine.mma_fraction) == ("sm_90a", 232_448, 0.665)


def test_a_file_can_start_from_a_gpu(tmp_path: Path) -> None:
    text = 'based_on = "h200"\n[chip]\nload_clock_mma_mhz = { value = 1700, source = "here" }\n'
    mine, h200 = gpu.load(write(tmp_path, text)), gpu.load("h200")
    assert (mine.load_clock_mma_hz, mine.sources["load_clock_mma_hz"]) == (1.7e9, "here")
    assert (mine.title, mine.l2_bytes, mine.notes) == (h200.title, h200.l2_bytes, h200.notes)


def test_a_file_is_read_afresh(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    assert gpu.load(path).sm_count == 100
    write(tmp_path, WHOLE.replace("value = 100", "value = 101"))
    assert gpu.load(Path(path)).sm_count == 101


def test_a_byte_order_mark_and_crlf_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + WHOLE.replace("\n", "\r\n").encode())
    assert gpu.load(path).sm_count == 100


SM = "sm_count = { value = 100, source = "
MALFORMED = {
    "not TOML": (SM, "sm_count = = ", "valid TOML", "line 7", "built-in file"),
    "twice": ("[l2]", "[chip]", "valid TOML", "line 14", "built-in file"),
    "endless number": ("100", "1" * 5000, "valid TOML", "mine.toml", "built-in file"),
    "endless list": ("100", "[" * 9000, "valid TOML", "mine.toml", "built-in file"),
    "unknown key": ("sm_count", "sm_cout", "no 'sm_cout'", "line 7", "sm_count in [chip]"),
    "unrelated key": ("sm_count", "zzz", "no 'zzz'", "line 7", "adding-a-gpu"),
    "wrong unit": ("boost_clock_mhz", "boost_clock_ghz", "no 'boost", "line 8", "boost_clock_mhz"),
    "wrong section": ("hbm_mib", "power_w", "no 'power_w'", "line 11", "power_w in [chip]"),
    "unknown section": ("[l2]", "[l3]", "no 'l3'", "line 14", "the sections are"),
    "misspelled section": ("[memory]", "[memroy]", "no 'memroy'", "line 10", "mean memory?"),
    "section as value": ('"sm_90a"', '"sm_90a"\ntensor = 3', "section", "line 5", "[tensor]"),
    "outside": ("[chip]\n", "", "outside its section", "line 6", "[chip]"),
    "no source": (' = { value = 100, source = "me" }', " = 100", "source", "line 7", "source ="),
    "empty source": ('100, source = "me"', '100, source = " "', "source", "line 7", "source ="),
    "extra": ("100,", "100, unit = 1,", "'unit'", "line 7", "source ="),
    "text": ("100", '"many"', "must be a number", "line 7", "adding-a-gpu"),
    "boolean": ("100", "true", "must be a number, not true", "line 7", "adding-a-gpu"),
    "fraction": ("100", "132.5", "whole number", "line 7", "adding-a-gpu"),
    "zero": ("100", "0", "cannot be", "line 7", "unit"),
    "negative": ("100", "-132", "cannot be", "line 7", "unit"),
    "gigahertz": ("2000", "2.0", "cannot be", "line 8", "unit"),
    "infinite": ("2000", "inf", "cannot be", "line 8", "unit"),
    "not a number": ("2000", "nan", "cannot be", "line 8", "unit"),
    "huge": ("2000", "9" * 400, "cannot be", "line 8", "unit"),
    "number as list": ("[100, 228]", "228", "list", "line 22", "adding-a-gpu"),
    "empty list": ("[100, 228]", "[]", "list", "line 22", "adding-a-gpu"),
    "list of text": ("[100, 228]", '["all"]', "number", "line 22", "adding-a-gpu"),
    "number as boolean": ("true", "1", "true or false", "line 38", "adding-a-gpu"),
    "missing value": (SM + '"me" }\n', "", "[chip] sm_count is missing", "mine.toml", "based_on"),
    "missing title": ('title = "Mine"', "", "title is missing", "mine.toml", "based_on"),
    "empty title": ('"Mine"', '""', "title", "line 2", "text"),
    "capability": ('"9.0"', "9.0", "compute_capability", "line 3", '"9.0"'),
    "target": ('"sm_90a"', '"hopper"', "arch", "line 4", '"sm_90a"'),
    "disagreeing target": ('"sm_90a"', '"sm_80"', "sm_90", "line 4", "adding-a-gpu"),
    "unknown base": ('arch = "sm_90a"', 'based_on = "sm_91"', "sm_91", "line 4", "mean sm_90?"),
    "path as base": ('arch = "sm_90a"', 'based_on = "../x"', "../x", "line 4", "sm_90"),
    "base of a wrong type": ('arch = "sm_90a"', "based_on = 90", "based_on", "line 4", "text"),
    "notes": ("[chip]", "notes = 1\n[chip]", "notes", "line 6", "notes ="),
    "block above SM": ("227", "228", "smem_per_block_kib", "line 19", "adding-a-gpu"),
    "carve-outs": ("[100, 228]", "[100]", "smem_carveouts_kib", "line 22", "adding-a-gpu"),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file(case: tuple[str, str, str, str, str], tmp_path: Path) -> None:
    old, new, what, where, hint = case
    assert WHOLE.count(old) >= 1
    path = write(tmp_path, WHOLE.replace(old, new, 1))
    with pytest.raises(UsageError, match=re.escape(what)) as caught:
        gpu.load(path)
    error = caught.value
    assert path in error.where
    assert where in error.where
    assert hint in error.hint
    assert error.hint
    assert len(str(error)) < 600


def _missing(folder: Path) -> Path:
    return folder / "absent.toml"


def _folder(folder: Path) -> Path:
    (folder / "is.toml").mkdir()
    return folder / "is.toml"


def _binary(folder: Path) -> Path:
    (folder / "bin.toml").write_bytes(b"\xff\xfe\x00")
    return folder / "bin.toml"


def _large(folder: Path) -> Path:
    (folder / "large.toml").write_text("#" * 2**21)
    return folder / "large.toml"


def _empty(folder: Path) -> Path:
    (folder / "empty.toml").touch()
    return folder / "empty.toml"


def _nul(folder: Path) -> Path:
    return folder / "a\0b.toml"


@pytest.mark.parametrize("make", [_missing, _folder, _binary, _large, _empty, _nul])
def test_an_unreadable_file(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    for form in (path, str(path)):
        with pytest.raises(UsageError) as caught:
            gpu.load(form)
        assert str(path) in caught.value.where
        assert caught.value.hint


# The guide


def test_the_guide_explains_every_key() -> None:
    guide = (ROOT / "docs/adding-a-gpu.md").read_text()
    listed = set(re.findall(r"`(\w+)`", guide))
    keys = {key for section in gpu.FORMAT.values() for key in section}
    assert keys <= listed
    assert set(gpu.FORMAT) <= set(re.findall(r"`\[(\w+)\]`", guide))


def test_the_guides_example_loads(tmp_path: Path) -> None:
    guide = (ROOT / "docs/adding-a-gpu.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", guide, re.S)
    assert examples
    for example in examples:
        assert gpu.load(write(tmp_path, example)).title

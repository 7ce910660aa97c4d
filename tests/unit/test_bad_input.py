"""What cannot be done ends in one clear message with a hint, the right exit code, and no trace.

Every case runs the command line in this process, in a folder of its own; nothing may appear in that
folder or on standard output.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fasim
from fasim import settings
from fasim.cli import run
from fasim.plan import KernelSpec, Plan, Tile
from fasim.problem import Problem
from fasim.render import PLAN_BEGIN, PLAN_END, render

PLAN = Plan(
    problem=Problem(causal=True),
    gpu="a100-sxm4-80gb",
    kernel=KernelSpec(
        algo="v2",
        pass_="fwd",
        arch="sm_80",
        dtype="fp16",
        out_dtype="fp16",
        head_dim=128,
        head_dim_v=128,
        mask="causal",
        tile=Tile(block_q=64, block_kv=64),
    ),
    smem_bytes=49152,
)


def changed(*path: str, to: Any) -> str:
    """The plan as JSON with one entry changed, or left out where ``to`` is KeyError."""
    document = PLAN.to_json()
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    if to is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return json.dumps(document)


def kernel(plan: str) -> str:
    """A generated file with another plan in its header."""
    before, _, rest = render(PLAN).source.partition(PLAN_BEGIN)
    return f"{before}{PLAN_BEGIN}\n// {plan}\n{PLAN_END}{rest.partition(PLAN_END)[2]}"


BASE = 'title = "Mine"\nbased_on = "a100-sxm4-80gb"\n'
FILES = {
    "good.json": json.dumps(PLAN.to_json()),
    "good.cu": render(PLAN).source,
    "empty.json": "",
    "text.json": "no plan at all",
    "half.json": json.dumps(PLAN.to_json())[:200],
    "deep.json": '{"a":' * 100_000,
    "other-schema.json": changed("schema", to="fasim.plan/2"),
    "no-schema.json": changed("schema", to=KeyError),
    "comparison.json": json.dumps({"schema": "fasim.compare/1", "entries": []}),
    "no-kernel.json": changed("kernel", to=KeyError),
    "no-tile.json": changed("kernel", "tile", to=KeyError),
    "word-tile.json": changed("kernel", "tile", "block_q", to="64"),
    "list-kernel.json": changed("kernel", to=[]),
    "unknown-field.json": changed("kernel", "colour", to="red"),
    "bad-problem.json": changed("problem", "heads", to=0),
    "unknown-problem.json": changed("problem", "colour", to="red"),
    "no-gpu.json": changed("gpu", to=None),
    "null-smem.json": changed("smem_bytes", to=None),
    "mine.json": changed("gpu", "name", to="mine"),
    "not-generable.json": changed("generable", to=False),
    "no-plan.cu": "__global__ void kernel() {}\n",
    "no-end.cu": render(PLAN).source.replace(PLAN_END, "// "),
    "broken-plan.cu": kernel("{{}"),
    "no-schema.cu": kernel(changed("schema", to="fasim.plan/9")),
    "no-heads.cu": kernel(changed("problem", "heads", to=0)),
    "word-stages.cu": kernel(changed("kernel", "tile", "stages", to="two")),
    "other-algo.cu": kernel(changed("kernel", "algo", to="v9")),
    "path-algo.cu": kernel(changed("kernel", "algo", to="../../etc/passwd")),
    "zero-tile.cu": kernel(changed("kernel", "tile", "block_q", to=0)),
    "ragged-tile.cu": kernel(changed("kernel", "tile", "block_q", to=37)),
    "other-dtype.cu": kernel(changed("kernel", "dtype", to="fp12")),
    "other-head-dim.cu": kernel(changed("kernel", "head_dim", to=100_000)),
    "negative-smem.cu": kernel(changed("smem_bytes", to=-5)),
    "config-broken.json": "{",
    "config-list.json": "[]",
    "config-empty.json": "{}",
    "config-heads.json": '{"num_attention_heads": "many"}',
    "gpu-empty.toml": "",
    "gpu-syntax.toml": "title = ",
    "gpu-no-base.toml": 'title = "Mine"\n',
    "gpu-unknown-base.toml": BASE.replace("a100", "a101"),
    "gpu-no-source.toml": BASE + "[chip]\nsm_count = 108\n",
    "gpu-zero.toml": BASE + '[chip]\nsm_count = { value = 0, source = "me" }\n',
    "gpu-negative.toml": BASE + '[memory]\nhbm_mib = { value = -1, source = "me" }\n',
    "gpu-word.toml": BASE + '[memory]\nhbm_mib = { value = "much", source = "me" }\n',
    "gpu-section.toml": BASE + '[chips]\nsm_count = { value = 8, source = "me" }\n',
    "gpu-key.toml": BASE + '[chip]\nsms = { value = 8, source = "me" }\n',
    "gpu-nan.toml": BASE + '[memory]\nhbm_bandwidth_gbs = { value = nan, source = "me" }\n',
}
BINARY = b"\x7fELF\x02\x01\x01\xff\xfe"

V2 = "--gpu a100 --algo v2"
USAGE = [
    # commands and options that do not exist
    "nope",
    "plan now",
    "plan --sqe 3",
    "plan --seq",
    "gpus a100 h100",
    "doctor all",
    "demo --quick",
    "--verbose",
    # values that cannot be read
    "plan --seq abc",
    "plan --seq -1",
    "plan --seq 1.5",
    "plan --seq 8g",
    "plan --seq 99999999999999",
    "plan --batch 1e3",
    "plan --softcap much",
    "plan --window 4096",
    "plan --window=-2,0",
    "plan --reserve lots",
    "plan --reserve -1GiB",
    "plan --tile 128",
    "plan --tile 0x64",
    "plan --top 0",
    "plan --top many",
    "compare --sweep 512..1024",
    "compare --sweep dtype=fp16",
    "compare --sweep seq=1024..512",
    "compare --sweep seq=a..b",
    "verify --examples 0",
    "verify --seed -1",
    "verify --runner cuda",
    "explain --term colour",
    # problems that make no sense
    "plan --batch 0",
    "plan --heads 0",
    "plan --kv-heads 3",
    "plan --head-dim 0",
    "plan --head-dim 257",
    "plan --head-dim-v 300",
    "plan --dtype fp64",
    "plan --out-dtype fp32",
    "plan --softcap -1",
    "plan --softcap nan",
    "plan --scale 0",
    "plan --scale inf",
    "plan --bias rope",
    "plan --scales block",
    "plan --incoherent",
    "plan --dtype e4m3 --pass bwd",
    "plan --dtype e4m3 --in-dtype fp32",
    "plan --in-dtype bf16",
    "plan --dtype e4m3 --incoherent",
    "plan --dtype e4m3 --in-dtype bf16 --incoherent --head-dim 80",
    "plan --pass sideways",
    "plan --algo v4",
    "compare --sweep head-dim=128..1024 --gpu a100",
    # models and GPUs
    "plan --model llama",
    "plan --model missing.json",
    "plan --model config-broken.json",
    "plan --model config-list.json",
    "plan --model config-empty.json",
    "plan --model config-heads.json",
    "plan --gpu h201",
    "plan --gpu missing.toml",
    "plan --gpu .",
    *(f"plan --gpu {name}" for name in FILES if name.endswith(".toml")),
    "gpus nothing",
    "gpus gpu-zero.toml",
    "gpus --sources",
    # plans and kernels
    "gen missing.json",
    "gen .",
    "gen binary.cu",
    *(
        f"gen {name}"
        for name in FILES
        if name.endswith(".json")
        and "good" not in name
        and "config" not in name
        and name not in ("not-generable.json", "mine.json")
    ),
    *(f"build {name}" for name in FILES if name.endswith(".cu") and "good" not in name),
    "explain no-plan.cu",
    "verify text.json --runner numpy",
    "gen -",
    "gen good.json --seq 100",
    "build good.json --gpu h100",
    "gen good.json --all",
    "gen --check",
    "gen --all --stdout",
    "gen --all -o missing",
    "build good.cu --arch sm_1",
    "build good.cu --arch hopper",
    "bench good.json --head-dim 64",
    "bench good.json --algo v2",
    "explain good.json --seq 5",
    "explain good.json --gpu h201",
    "explain mine.json",
    f"plan {V2} --form ordered",
    f"plan {V2} --pass bwd --form ordered",
    f"plan {V2} --pass bwd --deterministic --form sideways",
    # places that cannot be written
    f"plan {V2} -o .",
    f"plan {V2} -o missing/plan.json",
    "gen good.json -o missing/kernel.cu",
    "gen good.json -o missing/",
    "gen good.json -o good.cu/kernel.cu",
]
NO_PLAN = [
    f"plan {V2} --tile 100000x100000",
    f"plan {V2} --tile 13x7",
    "plan --gpu a100 --algo v3",
    "plan --gpu rtx5090 --algo v3",
    "gen --gpu a100 --algo standard",
    "gen --gpu v100 --algo v2",
    "gen --gpu 4090 --algo v2 --pass bwd --head-dim 256",
    f"gen {V2} --pass bwd --varlen --bias dense",
    f"gen {V2} --pass train",
    f"gen {V2} --varlen --bias dense",
    "gen not-generable.json",
]


@pytest.fixture(autouse=True)
def _desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files above, no settings, nothing on standard input."""
    for setting in settings.ALL:
        monkeypatch.delenv(setting.name, raising=False)
    desk = tmp_path / "desk"
    desk.mkdir()
    for name, text in FILES.items():
        (desk / name).write_text(text)
    (desk / "binary.cu").write_bytes(BINARY)
    monkeypatch.chdir(desk)
    monkeypatch.setenv("FASIM_CACHE_DIR", str(desk / "cache"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


def _snapshot() -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(Path().rglob("*")) if p.is_file()}


def _check_message(code: int, expected: int, out: str, err: str) -> None:
    said = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert code == expected, err
    assert out == ""
    assert "Traceback" not in err
    assert "bug" not in err
    assert said[0].startswith("error: ")
    assert len(said[0]) > len("error: ") + 10
    assert sum(line.startswith("error: ") for line in said) == 1
    assert sum(line.startswith("hint: ") for line in said) == 1
    assert said[-2] == ""


def _fails(arguments: str, expected: int, capsys: pytest.CaptureFixture[str]) -> str:
    before = _snapshot()
    code = run(arguments.split())
    out, err = capsys.readouterr()
    _check_message(code, expected, out, err)
    assert _snapshot() == before
    return err


@pytest.mark.parametrize("arguments", USAGE)
def test_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    _fails(arguments, 2, capsys)


@pytest.mark.parametrize("arguments", NO_PLAN)
def test_no_plan(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    _fails(arguments, 1, capsys)


@pytest.mark.parametrize("arguments", ["verify good.cu", "bench good.cu", "verify good.json"])
def test_no_device(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasim.runners import gpu

    monkeypatch.setenv("CXX", "/nowhere/c++")  # or the emulator would run it

    if gpu.available() is None:
        pytest.skip("this machine has a GPU")
    err = _fails(arguments, 3, capsys)
    assert ("--runner numpy" in err) == ("verify" in arguments)


@pytest.mark.parametrize(
    ("variable", "value", "arguments"),
    [
        ("FASIM_NVCC", "/nowhere/nvcc", "build good.cu"),
        ("FASIM_NVCC", "/bin/false", "build good.cu"),
        ("FASIM_NVCC", "/bin/true", "build good.json"),
    ],
)
def test_no_compiler(
    variable: str,
    value: str,
    arguments: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    _fails(arguments, 3, capsys)


def test_the_environment_may_name_a_gpu_that_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASIM_GPU", "h201")
    _fails("plan", 2, capsys)


def test_there_are_enough_cases() -> None:
    assert len(USAGE) + len(NO_PLAN) >= 60
    assert len({*USAGE, *NO_PLAN}) == len(USAGE) + len(NO_PLAN)


@pytest.mark.parametrize("arguments", ["plan --seq abc", "gen empty.json", "plan --gpu h201"])
def test_a_whole_process(arguments: str) -> None:
    command = [sys.executable, "-m", "fasim", *arguments.split()]
    env = {**os.environ, "PYTHONPATH": str(Path(fasim.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    _check_message(done.returncode, 2, done.stdout, done.stderr)

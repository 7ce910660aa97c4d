"""The command line: help, streams, colour, exit codes, and every command once."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fasim
from fasim import cli, explain, files, gpu, legality, picture, planner, settings
from fasim.cli import run
from fasim.entry import Entry
from fasim.errors import FasimError, MissingToolError
from fasim.model import footprint
from fasim.model.tiles import Tiles
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.runners import emulator
from fasim.screen import Screen
from fasim.toolchain import find_tool

COMMANDS = sorted(cli.cli.commands)
HEAVY = ("numpy", "torch", "pycuda", "hypothesis", "jinja2", "rich", "ml_dtypes")
A100 = ["--gpu", "a100"]
V2 = [*A100, "--algo", "v2"]


@pytest.fixture(autouse=True)
def _desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for setting in settings.ALL:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Any:
    """A command line run in this process: exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        return code, *capsys.readouterr()

    return call


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in {s.name for s in settings.ALL}}
    command = [sys.executable, "-m", "fasim", *arguments]
    root = Path(fasim.__file__).parent.parent
    env |= {"PYTHONPATH": str(root), **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


# ---- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_help_ends_in_examples(shell: Any, command: str, flag: str) -> None:
    code, out, err = shell(command, flag)
    assert (code, err) == (0, "")
    examples = out[out.index("  Examples:\n") :].splitlines()[1:]
    assert examples
    assert all(line.strip().startswith("fasim ") for line in examples)


def test_help_lists_the_commands_in_the_order_of_use(shell: Any) -> None:
    code, out, _ = shell("--help")
    assert code == 0
    places = [out.index(f"  {name} ") for name in ("plan", "compare", "gen", "build", "verify")]
    assert places == sorted(places)
    assert shell()[1] == out


def test_the_version(shell: Any) -> None:
    assert shell("--version") == (0, f"fasim {fasim.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["verify", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from fasim.cli import run; code = run(sys.argv[1:]); "
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(fasim.__file__).parent.parent)},
    )
    assert done.stderr == "[]\n"


# ---- streams, colour, failures ------------------------------------------------------------------


def test_a_suggestion_for_a_mistyped_option(shell: Any) -> None:
    code, out, err = shell("plan", "--sqe", "3")
    assert (code, out) == (2, "")
    assert "--seq" in err.splitlines()[-1]


def test_a_bug_is_one_line_and_a_hint(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("fasim.gpu.load", broken)
    code, out, err = shell("gpus")
    assert (code, out) == (1, "")
    assert err.startswith("error: this is a bug in fasim: ZeroDivisionError: division by zero\n")
    assert "fasim doctor" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [["--debug", "gpus", "nothing"], ["gpus", "nothing", "--debug"]]
)
def test_debug_shows_the_traceback(shell: Any, arguments: list[str]) -> None:
    code, _, err = shell(*arguments)
    assert code == 2
    assert "Traceback" in err
    assert "error: no GPU is called" in err


def test_an_interrupt_is_130(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fasim.gpu.load", interrupted)
    code, out, err = shell("gpus")
    assert (code, out, err) == (130, "", "interrupted\n")


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m fasim gpus --json | head -1; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(Path(fasim.__file__).parent.parent)}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout == "{\n0\n"
    assert done.stderr == ""


def test_no_escape_codes_in_a_pipe() -> None:
    for arguments in (["gpus"], ["gpus", "nothing"]):
        done = process(*arguments)
        assert "\x1b" not in done.stdout + done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "flag", "tty", "colored"),
    [
        ({}, False, True, True),
        ({}, False, False, False),
        ({}, True, True, False),
        ({"NO_COLOR": "1"}, False, True, False),
        ({"NO_COLOR": ""}, False, True, True),
        ({"FORCE_COLOR": "1"}, False, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, True, False),
        ({"FORCE_COLOR": "1"}, True, True, False),
        ({"TERM": "dumb"}, False, True, False),
    ],
)
def test_colour_is_decided_once(
    environment: dict[str, str],
    flag: bool,
    tty: bool,
    colored: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out, err = (Terminal(), Terminal()) if tty else (io.StringIO(), io.StringIO())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    screen = Screen(no_color=flag)
    screen.table(("a", "b"), [("1", "2")])
    screen.error(FasimError("it failed"))
    assert ("\x1b" in out.getvalue()) == colored
    assert ("\x1b" in err.getvalue()) == colored


def test_tables_are_never_cropped(shell: Any) -> None:
    out = shell("gpus", "h200", "--sources")[1]
    assert "…" not in out
    assert not any(line != line.rstrip() for line in out.splitlines())


# ---- gpus, doctor -------------------------------------------------------------------------------


def test_gpus_lists_every_one(shell: Any) -> None:
    from fasim import gpu

    code, out, _ = shell("gpus")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(gpu.names())


def test_gpus_shows_levels_peaks_and_sources(shell: Any) -> None:
    code, out, _ = shell("gpus", "h200", "--sources")
    assert code == 0
    for text in ("140.4 GiB", "4.80 TB/s", "688 clocks", "989 TFLOP/s", "206 FLOP/B", "datasheet"):
        assert text in out


def test_gpus_names_what_is_unknown(shell: Any) -> None:
    out = shell("gpus", "v100")[1]
    unknown = next(line for line in out.splitlines() if line.startswith("unknown"))
    assert "load_clock_mma_hz" in unknown


def test_gpus_as_json(shell: Any) -> None:
    document = json.loads(shell("gpus", "h200", "--json")[1])
    assert document["schema"] == "fasim.gpus/1"
    assert document["gpus"][0]["sram_bytes"] == 132 * 228 * 1024


def test_doctor(shell: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "cache"))
    code, out, _ = shell("doctor")
    assert code == 0
    for name in ("python", "nvcc", "GPU", "cache", "FASIM_CACHE_DIR"):
        assert any(line.startswith(name) for line in out.splitlines())
    document = json.loads(shell("doctor", "--json")[1])
    assert document["schema"] == "fasim.doctor/1"
    assert document["cache"]["path"] == str(tmp_path / "cache")


def test_doctor_clears_kernels_and_nothing_else(
    shell: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (cache / "v2_fwd-0123").mkdir(parents=True)
    (cache / "v2_fwd-0123" / "kernel.cu").write_text("x" * 100)
    (cache / "letters").mkdir()
    (cache / "letters" / "dear.txt").write_text("keep me")
    monkeypatch.setenv("FASIM_CACHE_DIR", str(cache))
    code, _, err = shell("doctor", "--clear-cache")
    assert code == 0
    assert "100 B" in err
    assert [path.name for path in cache.iterdir()] == ["letters"]


def test_doctor_survives_a_broken_nvcc(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASIM_NVCC", "/nowhere/nvcc")
    code, out, _ = shell("doctor")
    assert code == 0
    assert "/nowhere/nvcc" in out


# ---- plan ---------------------------------------------------------------------------------------


def plan_json(shell: Any, *arguments: str) -> dict[str, Any]:
    code, out, err = shell("plan", *arguments, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def test_plan_is_short_and_says_what_matters(shell: Any) -> None:
    code, out, err = shell("plan", *V2, "--causal")
    assert code == 0
    assert len(out.splitlines()) <= 20
    for text in ("of 163 KiB", "blocks of", "limited by", "HBM", "<- bound", "predicted", "legal"):
        assert text in out
    assert all(line.startswith("note: ") for line in err.splitlines())


def test_plan_as_json_is_what_the_planner_found(shell: Any) -> None:
    document = plan_json(shell, *V2, "--heads", "32", "--kv-heads", "8", "-n", "2k", "--causal")
    assert document["schema"] == "fasim.plan/1"
    assert document["problem"]["seq"] == document["problem"]["seq_kv"] == 2048
    expected = planner.plan(
        Problem(heads=32, kv_heads=8, seq=2048, causal=True), gpu.load("a100"), "v2"
    )
    assert document == json.loads(json.dumps(expected.to_json()))
    assert fasim.Plan.from_json(document) == expected.plan


@pytest.mark.parametrize("algo", ["standard", "v1", "v2", "v3"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd", "train"])
def test_every_algorithm_and_pass_is_shown_and_dumped(shell: Any, algo: str, pass_: str) -> None:
    arguments = ["--gpu", "h200", "--algo", algo, "--pass", pass_]
    document = plan_json(shell, *arguments)
    assert document["algo"] == algo
    assert ("fwd" in document) == (pass_ == "train")
    code, out, _ = shell("plan", *arguments)
    assert code == 0
    assert "predicted" in out


def test_plan_writes_the_json_it_prints(shell: Any, tmp_path: Path) -> None:
    code, out, _ = shell("plan", *V2, "--json", "-o", "plan.json")
    assert code == 0
    assert (tmp_path / "plan.json").read_text() == out


def test_top_shows_other_tiles(shell: Any) -> None:
    out = shell("plan", *V2, "--top", "4")[1]
    assert [line[0] for line in out.splitlines()[-4:]] == ["1", "2", "3", "4"]
    assert "1.00x" in out.splitlines()[-4]


def test_a_tile_of_mine_is_judged(shell: Any) -> None:
    out = shell("plan", *V2, "--tile", "64x32")[1]
    assert "64 queries x 32 keys" in out
    assert "the time of the planner's own" in out
    best = plan_json(shell, *V2)["tile"]
    out = shell("plan", *V2, "--tile", f"{best['block_q']}x{best['block_kv']}")[1]
    assert "this is the tile the planner chooses" in out


def test_ascii_draws_the_tiles(shell: Any) -> None:
    out = shell("plan", *V2, "-n", "256", "--causal", "--tile", "64x64", "--ascii")[1]
    assert out.endswith("/...\n#/..\n##/.\n###/\n# whole   / partly masked or ragged   . skipped\n")


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (70, 10)}, {"window": (0, -1)}])
@pytest.mark.parametrize(("seq", "seq_kv"), [(200, 200), (130, 300), (300, 130), (64, 64), (0, 5)])
def test_the_picture_is_the_mask(mask: dict[str, Any], seq: int, seq_kv: int) -> None:
    problem, tile = Problem(seq=seq, seq_kv=seq_kv, **mask), Tile(block_q=32, block_kv=16)
    left, right = problem.reach
    drawn = picture.draw(problem, tile)
    assert len(drawn) == -(-seq // 32)
    for row, line in enumerate(drawn):
        for column, character in enumerate(line):
            seen = [
                (left < 0 or k >= q + seq_kv - seq - left)
                and (right < 0 or k <= q + seq_kv - seq + right)
                for q in range(32 * row, min(32 * row + 32, seq))
                for k in range(16 * column, min(16 * column + 16, seq_kv))
            ]
            whole = len(seen) == 32 * 16 and all(seen)
            assert character == ("#" if whole else "/" if any(seen) else character)
            assert any(seen) or character in "./"
            assert character != "." or not any(seen)


def test_explicit_options_win_over_the_model(shell: Any) -> None:
    problem = plan_json(shell, *V2, "--model", "llama-3-8b", "--heads", "8", "--no-causal")[
        "problem"
    ]
    assert (problem["heads"], problem["kv_heads"], problem["causal"]) == (8, 8, False)
    assert (problem["seq"], problem["dtype"]) == (8192, "bf16")


def test_kv_heads_follow_heads_unless_given(shell: Any) -> None:
    problem = plan_json(shell, *A100, "--heads", "12")["problem"]
    assert problem["kv_heads"] == 12


def test_a_model_says_what_was_derived(shell: Any, tmp_path: Path) -> None:
    config = {"num_attention_heads": 32, "hidden_size": 4096, "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = shell("plan", *V2, "--model", "config.json", "--json")
    assert code == 0
    assert json.loads(out)["problem"]["window"] == [4095, 0]
    assert "note: config.json gives no head_dim: derived 128 = 4096 / 32 heads" in err


def test_the_environment_names_the_gpu(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASIM_GPU", "rtx4090")
    assert plan_json(shell)["gpu"]["name"] == "rtx4090"
    assert plan_json(shell, *A100)["gpu"]["name"] == "a100-sxm4-80gb"


def test_what_is_assumed_is_said(shell: Any) -> None:
    assert "assumed" in shell("plan", *V2)[2]


# ---- compare, explain ---------------------------------------------------------------------------

V100 = ["--gpu", "v100-32gb", "--heads", "16", "-d", "64"]


def compare_json(shell: Any, *arguments: str) -> dict[str, Any]:
    code, out, err = shell("compare", *arguments, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    assert document["schema"] == "fasim.compare/1"
    return document


def test_compare_says_what_fits(shell: Any) -> None:
    entries = compare_json(shell, *V100, "-n", "32768")["entries"]
    assert [entry["algo"] for entry in entries] == ["standard", "v1", "v2", "v3"]
    assert [entry["footprint"]["fits"] for entry in entries[:3]] == [False, True, True]
    assert entries[0]["footprint"]["hbm_bytes"]["s_and_p"] == 2 * 16 * 2 * 2**30
    assert (entries[3]["available"], entries[3]["speedup"]["over_standard"]) == (False, None)
    assert entries[3]["reason"]


def test_compare_with_a_reserve(shell: Any) -> None:
    document = compare_json(shell, *V100, "-n", "4096", "--reserve", "14GiB")
    standard = document["entries"][0]["footprint"]
    assert standard["fits"]
    assert 16_500 < standard["max_seq"] < 17_500
    over = document["entries"][2]["speedup"]
    times = [entry["time"] and entry["time"]["seconds"] for entry in document["entries"]]
    assert over["over_standard"] == pytest.approx(times[0] / times[2])
    assert over["over_previous"] == pytest.approx(times[1] / times[2])


def test_compare_counts_recomputation(shell: Any) -> None:
    document = compare_json(shell, *A100, "--pass", "train")
    assert document["backward_flops"] == 4 * document["recomputed_flops"]
    out = shell("compare", *A100, "--pass", "train")[1]
    assert "(+25 %)" in out
    assert "standard stores 512 MiB for backward (P)" in out
    assert "v2 stores" in out


def test_a_sweep_has_a_point_a_value(shell: Any) -> None:
    document = compare_json(shell, *A100, "--sweep", "seq=512..2k")
    assert [point["seq"] for point in document["points"]] == [512, 1024, 2048]
    assert all(len(point["entries"]) == 4 for point in document["points"])
    out = shell("compare", *A100, "--sweep", "heads=8,71")[1]
    assert any(line.startswith("71 ") for line in out.splitlines())


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("algo", ["v1", "v2", "v3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 40, "seq": 100, "causal": True},
        {"head_dim": 192, "head_dim_v": 64},
        {"head_dim": 64, "window": (100, 0), "softcap": 50.0, "bias": "dense"},
        {"head_dim": 256, "bias": "alibi", "varlen": True},
    ],
)
def test_a_derivation_leaves_nothing_unexplained(
    algo: str, pass_: str, options: dict[str, Any]
) -> None:
    device = gpu.load("h200")
    for dtype in ("fp16", "fp32", "e4m3"):
        try:
            problem = Problem(pass_=pass_, dtype=dtype, **options)
            entry = planner.plan(problem, device, algo)
        except FasimError:
            continue
        terms = explain.derive(entry, device)
        assert [term.name for term in terms] == list(cli.TERMS)
        assert {term.name: term.rest for term in terms if term.rest} == {}
        check_registers(entry, next(term for term in terms if term.name == "registers"))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(("head_dim", "causal"), [(40, False), (96, True), (192, False)])
@pytest.mark.parametrize("algo", ["v1", "v2"])
def test_the_registers_of_every_legal_tile_are_explained(
    algo: str, head_dim: int, causal: bool, dtype: str
) -> None:
    check_legal_tiles(Problem(dtype=dtype, head_dim=head_dim, causal=causal), algo)


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
@pytest.mark.parametrize(("head_dim", "causal"), [(48, False), (96, True), (256, False)])
def test_the_registers_of_every_legal_tile_of_v3_are_explained(
    head_dim: int, causal: bool, dtype: str
) -> None:
    check_legal_tiles(Problem(dtype=dtype, head_dim=head_dim, causal=causal), "v3")


def check_legal_tiles(problem: Problem, algo: str) -> None:
    device = gpu.load("h200")
    tiles = planner.candidates(problem, device, algo, "fwd")
    case = legality.Case.of(problem, device, algo, "fwd", tiles)
    legal = np.flatnonzero(legality.legal(case))
    assert legal.size
    for index in legal[::3]:
        entry = planner.plan(problem, device, algo, tile=tiles.tile(int(index)))
        check_registers(entry, explain.derive(entry, device, "registers")[0])


@pytest.mark.parametrize(
    ("device", "dtype", "algo"),
    [("t4", "fp16", "v1"), ("t4", "fp16", "v2"), ("t4", "fp32", "v2"), ("5090", "e4m3", "v2")],
)
def test_the_registers_of_an_architecture_are_explained(device: str, dtype: str, algo: str) -> None:
    chip = gpu.load(device)
    for head_dim in (64, 128):
        entry = planner.plan(Problem(dtype=dtype, head_dim=head_dim), chip, algo)
        check_registers(entry, explain.derive(entry, chip, "registers")[0])


def check_registers(entry: Entry, term: explain.Term) -> None:
    """The parts are what the model says is needed, and the grant shown is the plan's."""
    assert entry.tile
    tiles = Tiles.of([entry.tile])
    capability = gpu.load(entry.gpu).compute_capability
    needed = footprint.registers(entry.problem, entry.algo, entry.pass_, tiles, capability)[0]
    assert sum(part.value for part in term.parts) == needed == term.total
    granted = re.match(r"granted (\d+):", term.remarks[0])
    assert granted
    assert int(granted[1]) == entry.registers


def test_explain_shows_the_numbers(shell: Any) -> None:
    code, out, _ = shell("explain", *V2, "--tile", "128x64")
    assert code == 2
    code, out, _ = shell("explain", *V2, "--term", "smem")
    assert code == 0
    assert "K and V, 2 slots a stage" in out
    assert "registers" not in out
    whole = shell("explain", *V2)[1]
    assert all(f"\n{term} (" in whole for term in cli.TERMS)


def test_explain_takes_a_plan(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shell("plan", *V2, "--tile", "64x32", "--json")[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, _ = shell("explain", "-", "--term", "choice")
    assert code == 0
    assert "64x32 keeps" in out


def test_explain_takes_a_gpu_of_ones_own(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('title = "Mine"\nbased_on = "a100-sxm4-80gb"\n')
    assert shell("plan", "--gpu", "mine.toml", "--algo", "v2", "-o", "plan.json")[0] == 0
    assert shell("explain", "plan.json")[0] == 2
    code, out, _ = shell("explain", "plan.json", "--gpu", "mine.toml")
    assert (code, out.splitlines()[0]) == (0, "v2 fwd fp16 on Mine (sm_80)")
    assert shell("gen", "plan.json", "--stdout")[0] == 0


# ---- gen, build, verify, demo -------------------------------------------------------------------


def test_gen_writes_a_file_that_knows_its_plan(shell: Any, tmp_path: Path) -> None:
    code, out, _ = shell("gen", *V2, "--causal")
    assert code == 0
    [path] = tmp_path.glob("*.cu")
    assert path.name in out
    assert files.read_kernel(str(path)).stem == path.stem
    assert not files.read_kernel(str(path)).edited
    assert shell("gen", str(path), "--stdout")[1] == path.read_text()


def test_gen_from_a_plan_equals_gen_from_options(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shell("plan", *V2, "--json", "-o", "plan.json")[1]
    expected = shell("gen", *V2, "--stdout")[1]
    assert shell("gen", "plan.json", "--stdout")[1] == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert shell("gen", "-", "--stdout")[1] == expected


def test_gen_into_a_folder_or_a_file(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    assert shell("gen", *V2, "-o", "kernels")[0] == 0
    assert shell("gen", *V2, "-o", "mine.cu")[0] == 0
    [inside] = (tmp_path / "kernels").iterdir()
    assert inside.read_text() == (tmp_path / "mine.cu").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_gen_leaves_the_algorithm_open_to_what_can_be_generated(shell: Any) -> None:
    out = shell("gen", "--gpu", "h200", "--stdout")[1]
    assert out.startswith("// v3_fwd_sm90a_")
    out = shell("gen", "--gpu", "h200", "--pass", "bwd", "--stdout")[1]
    assert out.startswith("// v2_bwd_sm90_")


def test_writing_never_replaces_a_device_or_leaves_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    target = tmp_path / "plan.json"
    target.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FasimError, match="cannot write"):
        files.write(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def missing(tool: str) -> bool:
    try:
        find_tool(tool)
    except MissingToolError:
        return True
    return False


def small_plan(registers: int) -> str:
    """A plan whose kernel compiles fast, held to that many registers."""
    problem = Problem(dtype="fp16", head_dim=32)
    plan = planner.plan(problem, gpu.load("a100"), "v2", tile=(32, 32)).plan
    assert plan is not None
    tile = replace(plan.kernel.tile, registers=registers)
    return json.dumps(replace(plan, kernel=replace(plan.kernel, tile=tile)).to_json())


@pytest.mark.nvcc
def test_build_shows_what_the_compiler_used(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "small.json").write_text(small_plan(registers=255))
    code, out, err = shell("build", "small.json", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["schema"] == "fasim.build/1"
    assert 0 < document["resources"]["registers"] <= document["planned"]["registers"] == 255
    assert not document["cached"]
    code, out, _ = shell("build", "small.json", "--keep", "kept")
    assert code == 0
    assert "(cached)" in out
    assert (tmp_path / "kept" / "kernel.ptx").is_file()
    code, out, err = shell("build", "small.json", "--sass")
    assert (code, "EXIT" in out) == ((3, False) if missing("nvdisasm") else (0, True)), err


@pytest.mark.nvcc
def test_a_broken_promise_is_exit_1(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "small.json").write_text(small_plan(registers=40))
    code, out, err = shell("build", "small.json")
    assert code == 1
    assert "of 40 planned" in out
    assert "uses more than its plan promised" in err


@pytest.mark.nvcc
def test_an_edited_kernel_is_built_as_it_is(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASIM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "small.json").write_text(small_plan(registers=255))
    assert shell("gen", "small.json", "-o", "small.cu")[0] == 0
    with Path("small.cu").open("a") as file:
        file.write('static_assert(false, "edited");\n')
    code, _, err = shell("build", "small.cu")
    assert code == 4
    assert "was edited" in err


def test_verify_with_numpy_never_claims_the_file_ran(shell: Any) -> None:
    arguments = ["verify", *V2, "--tile", "32x32"]
    assert shell(*arguments)[0] == 2
    code, out, err = shell("verify", *V2, "-d", "16", "--runner", "numpy", "--examples", "3")
    assert code == 0
    assert "matches float64" in out
    assert "the file was never run" in err
    code, out, _ = shell(
        "verify", *V2, "-d", "16", "--runner", "numpy", "--examples", "2", "--json"
    )
    document = json.loads(out)
    assert (document["schema"], document["ok"], document["ran_file"]) == (
        "fasim.verify/1",
        True,
        False,
    )


def test_a_failing_property_is_exit_1_with_a_replay_line(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasim.runners.numpy import NumpyRunner

    right = NumpyRunner.run

    def wrong(self: Any, *arguments: Any) -> Any:
        outputs = right(self, *arguments)
        return {**outputs, "o": outputs["o"] * 2}

    monkeypatch.setattr(NumpyRunner, "run", wrong)
    arguments = ["verify", *V2, "-d", "16", "--runner", "numpy", "--examples", "5"]
    code, out, err = shell(*arguments)
    assert code == 1
    assert "FAILED" in out
    replay = err.split('--replay "')[1].split('"')[0]
    assert shell(*arguments, "--replay", replay)[0] == 1


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine with a GPU and an emulator, both NumPy; the list has the runners made."""
    from fasim import properties
    from fasim.emulator.program import Execution
    from fasim.runners import gpu
    from fasim.runners.numpy import NumpyRunner

    made: list[Any] = []

    class Device(NumpyRunner):
        name = "gpu"

        def __init__(self) -> None:
            made.append(self)

    class Emulator(NumpyRunner):
        name = "emulator"

        def __init__(self, schedules: int = 1, seed: int = 0) -> None:
            made.append(self)
            self.schedules, self.next_seed = schedules, seed
            self.last = self.executed = Execution()

        def run(self, kernel: Any, arrays: Any, launch: Any) -> Any:
            outputs = super().run(kernel, arrays, launch)
            self.last = Execution(1, launch.stages[0].grid)
            self.executed += self.last
            return outputs

    monkeypatch.setattr(gpu, "GpuRunner", Device)
    monkeypatch.setattr(gpu, "available", lambda: None)
    monkeypatch.setattr(cli, "_no_nvcc", lambda: "")
    monkeypatch.setattr(emulator, "EmulatorRunner", Emulator)
    monkeypatch.setattr(emulator, "available", lambda: None)
    monkeypatch.setattr(properties, "PROPERTIES", properties.PROPERTIES[:3])
    return made


SMALL = ["verify", *V2, "-d", "16", "--dtype", "fp32", "--examples", "2"]


def test_verify_runs_on_the_gpu_else_in_the_emulator(
    shell: Any, emulated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasim.runners import gpu

    code, out, err = shell(*SMALL)
    assert (code, err, "executed" in out) == (0, "", False)
    monkeypatch.setattr(gpu, "available", lambda: "no device")
    code, out, err = shell(*SMALL)
    assert code == 0
    assert re.search(r"^executed .* blocks, .* instructions, .* of global traffic, ", out, re.M)
    assert "the file ran on the CPU" in err
    assert [runner.name for runner in emulated] == ["gpu", "emulator"]
    monkeypatch.setattr(emulator, "available", lambda: "no compiler")
    code, out, err = shell(*SMALL)
    assert (code, out) == (3, "")
    assert "on a GPU: no device; in the emulator: no compiler" in err


def test_a_gpu_without_nvcc_runs_nothing(
    shell: Any, emulated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_no_nvcc", lambda: "no nvcc")
    assert shell(*SMALL)[0] == 0
    assert [runner.name for runner in emulated] == ["emulator"]


def test_the_emulator_counts_and_tries_schedules(shell: Any, emulated: list[Any]) -> None:
    arguments = [*SMALL, "--runner", "emulator", "--schedules", "3"]
    code, out, _ = shell(*arguments, "--json")
    (runner,) = emulated
    document = json.loads(out)
    assert document["schedules"] == runner.schedules == 3
    assert code == 0
    assert document["executed"]["blocks"] == runner.executed.blocks > 0
    code, _, err = shell(*SMALL, "--runner", "numpy", "--schedules", "3")
    assert code == 2
    assert "--schedules concerns the emulator" in err


@pytest.mark.skipif(bool(emulator.available()), reason=emulator.available() or "")
def test_a_fault_names_rule_and_line_and_replays(shell: Any, tmp_path: Path) -> None:
    shell("gen", *V2, "-d", "16", "--dtype", "fp32", "-o", "right.cu")
    text = (tmp_path / "right.cu").read_text()
    barrier = "ptx::cp_async_wait_group<kSlots - 2>();\n    __syncthreads();"
    (tmp_path / "wrong.cu").write_text(text.replace(barrier, barrier.partition("\n")[0]))
    arguments = ["verify", "wrong.cu", "--runner", "emulator", "--examples", "3"]
    code, _, err = shell(*arguments)
    assert code == 1
    assert re.search(r"failed: \w.* in block 0, thread \d+ .*\n  --> \w+\.cu:\d+ with batch=1", err)
    replay = err.split('--replay "')[1].split('"')[0]
    assert err in shell(*arguments, "--replay", replay)[2]
    assert shell(*arguments, "--schedules", "2", "--json", "--replay", replay)[0] == 1


def test_both_says_which_runner_failed(
    shell: Any, emulated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasim.runners import gpu

    right = gpu.GpuRunner.run

    def wrong(self: Any, *arguments: Any) -> Any:
        outputs = right(self, *arguments)
        return {**outputs, "o": outputs["o"] + 1}

    code, out, _ = shell(*SMALL, "--runner", "both", "--json")
    assert json.loads(out)["ok"] is (code == 0) is True
    monkeypatch.setattr(gpu.GpuRunner, "run", wrong)
    code, out, _ = shell(*SMALL, "--runner", "both", "--json")
    document = json.loads(out)
    assert (code, document["ok"], document["failed"]) == (1, False, ["gpu"])
    assert [report["runner"] for report in document["reports"]] == ["emulator", "gpu"]
    code, out, err = shell(*SMALL, "--runner", "both")
    assert code == 1
    assert "both runners agree" in out
    assert " on gpu: matches_float64 failed" in err


def test_the_emulator_tries_fewer_cases(
    shell: Any, emulated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasim import properties

    counts: list[int] = []

    def verify_all(kernel: Any, runners: Any, examples: int, *rest: Any) -> list[Any]:
        counts.append(examples)
        return []

    monkeypatch.setattr(properties, "verify_all", verify_all)
    for runner in ("gpu", "emulator", "both", "numpy"):
        shell("verify", *V2, "--runner", runner)
    assert counts == [100, 10, 10, 100]


def test_the_demo_ends_in_the_emulator(
    shell: Any, emulated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASIM_NVCC", "/nowhere/nvcc")
    code, out, _ = shell("demo")
    assert code == 0
    assert re.search(r"^verify .* \(the file, on the GPU\)$", out, re.M)
    assert re.search(r"^emulate .* \(the file, on the CPU\)\n {16}.* blocks, ", out, re.M)


def test_the_demo_skips_what_the_machine_lacks(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fasim import properties

    monkeypatch.setattr(properties, "PROPERTIES", properties.PROPERTIES[:1])
    monkeypatch.setenv("FASIM_NVCC", "/nowhere/nvcc")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    code, out, _ = shell("demo")
    assert code == 0
    assert re.search(r"^compile +skipped: .* \(.*\)$", out, re.M)
    assert re.search(r"^emulate +skipped: .* \(.*\)$", out, re.M)


def test_gen_all_writes_and_checks_the_canonical_kernels(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "mine.cu").write_text("mine")
    code, out, _ = shell("gen", "--all", "-o", "kernels")
    assert code == 0
    assert "canonical kernels" in out
    code, out, err = shell("gen", "--all", "--check", "-o", "kernels")
    assert (code, out) == (1, "")
    assert "extra    mine.cu" in err
    (tmp_path / "kernels" / "mine.cu").unlink()
    assert shell("gen", "--all", "--check", "-o", "kernels")[0] == 0


def test_the_demo_checks_the_algorithm() -> None:
    from fasim import demo

    assert "max error" in demo.check_algorithm()


# ---- the Python API -----------------------------------------------------------------------------


def test_five_lines_of_python() -> None:
    problem = fasim.Problem(heads=32, kv_heads=8, seq=8192, causal=True, dtype="bf16")
    planned = fasim.plan(problem, gpu="a100-80gb", algo="v2")
    kernel = fasim.generate(planned)
    assert planned.plan is not None
    assert kernel == fasim.generate(planned.plan)
    assert kernel.stem in kernel.source


def test_generate_says_why_not() -> None:
    planned = fasim.plan(fasim.Problem(out_dtype="fp32", dtype="e4m3"), gpu="h200", algo="v3")
    with pytest.raises(FasimError, match="no v3 kernel"):
        fasim.generate(planned)


def test_import_fasim_is_light() -> None:
    code = f"import sys, fasim; print([m for m in {HEAVY!r} if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(Path(fasim.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env)
    assert done.stdout == b"[]\n"


# ---- report -------------------------------------------------------------------------------------


def test_report_writes_one_page_that_needs_nothing_else(shell: Any, tmp_path: Path) -> None:
    code, out, err = shell("report", *V2, "--causal", "-o", "page.html", "--lang", "zh")
    assert (code, err) == (0, "")
    assert out == "wrote page.html (v2, tiles of 128x64)\n"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<html lang="zh">' in text
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", text)
    assert len(text.encode()) < 400_000
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_report_takes_a_plan_and_measurements(shell: Any, tmp_path: Path) -> None:
    shell("plan", *V2, "-o", "plan.json")
    problem = json.loads((tmp_path / "plan.json").read_text())["problem"]
    measured = {"kernel": "mine", "seconds": 1e-3, "problem": problem}
    (tmp_path / "here.json").write_text(json.dumps(measured))
    code, _, err = shell("report", "plan.json", "--measured", "here.json")
    assert (code, err) == (0, "")
    assert '"name":"mine"' in (tmp_path / "report.html").read_text(encoding="utf-8")


LONG = ["--gpu", "h200", "--algo", "v1", "--heads", "1", "-n", "30000000", "-d", "256"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pass", "bwd", *V2], "forward"),
        ([*A100, "--algo", "standard"], "no tiles"),
        (LONG, "more bytes than the page"),
        ([*V2, "--measured", "plan.json"], "no measurement"),
        ([*V2, "--measured", "text.txt"], "not JSON"),
    ],
)
def test_report_refuses_what_it_cannot_show(
    shell: Any, tmp_path: Path, arguments: list[str], says: str
) -> None:
    shell("plan", *V2, "-o", "plan.json")
    (tmp_path / "text.txt").write_text("no")
    code, out, err = shell("report", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert not (tmp_path / "report.html").exists()

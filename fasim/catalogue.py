"""The canonical kernels: rendered from the catalogue, committed in ``generated/``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fasim import files, planner
from fasim.errors import CheckFailed, UsageError
from fasim.gpu import load
from fasim.plan import Plan
from fasim.problem import Problem
from fasim.render import render

# (algorithm, GPU, problem): each algorithm, pass, type and mask, on the GPUs people have, at head
# dimensions that fill a swizzle, half fill it, or fit nothing; then each option once.
_GEMMA = Problem(
    heads=16, kv_heads=8, seq=8192, head_dim=256, dtype="bf16", window=(4095, 0), softcap=50.0
)
_PACKED = Problem(batch=16, heads=32, kv_heads=8, causal=True, dtype="bf16", varlen=True)
_SERVED = Problem(batch=16, heads=32, kv_heads=8, seq=16, seq_kv=8192, dtype="bf16", causal=True)
_REPEATED = Problem(seq=4096, dtype="bf16", causal=True, pass_="bwd", deterministic=True)
_QUANTISED = Problem(
    heads=32,
    kv_heads=8,
    seq=8192,
    dtype="e4m3",
    in_dtype="bf16",
    causal=True,
    scales="block",
    incoherent=True,
)
_CHOSEN = (
    ("v1", "a100-80gb", Problem(batch=64, seq=1024, head_dim=64)),
    ("v1", "a100-80gb", Problem(heads=32, kv_heads=8, seq=8192, dtype="bf16", causal=True)),
    ("v1", "h200", Problem(batch=64, seq=1024, head_dim=64, dtype="fp32", causal=True)),
    ("v2", "a100-80gb", Problem(batch=64, seq=1024, head_dim=64)),
    ("v2", "a100-80gb", Problem(heads=32, kv_heads=8, seq=8192, dtype="bf16", causal=True)),
    ("v2", "h200", Problem(heads=32, kv_heads=8, seq=8192, dtype="bf16", causal=True)),
    ("v2", "h200", Problem(batch=2, heads=8, seq=4096, head_dim=40)),
    ("v2", "h200", Problem(heads=8, seq=4096, head_dim=256, dtype="bf16")),
    ("v2", "h200", Problem(batch=4, heads=12, seq=4096, head_dim=160, dtype="bf16", causal=True)),
    ("v2", "h200", Problem(seq=4096, head_dim=64, dtype="fp32", causal=True)),
    ("v2", "h200", Problem(seq=1000, head_dim=33, dtype="bf16")),
    ("v2", "h200", Problem(heads=64, kv_heads=8, seq=1, seq_kv=32768, dtype="bf16")),
    ("v2", "a100-80gb", Problem(batch=16, seq=1024, head_dim=64, pass_="bwd")),
    ("v2", "h200", Problem(heads=32, kv_heads=8, seq=8192, dtype="bf16", causal=True, pass_="bwd")),
    ("v2", "h200", Problem(seq=1000, head_dim=33, head_dim_v=48, causal=True, pass_="bwd")),
    ("v2", "h200", _GEMMA.with_(pass_="bwd")),
    ("v2", "h200", _PACKED.with_(head_dim=64, pass_="bwd")),
    ("v2", "a100-80gb", Problem(seq=2048, head_dim=64, dtype="fp32", bias="dense", pass_="bwd")),
    ("v2", "h200", _REPEATED.with_(batch=4, head_dim=64)),
    ("v2", "a100-80gb", _REPEATED.with_(heads=2, kv_heads=1, head_dim=32)),
    ("v1", "a100-80gb", Problem(batch=64, seq=1024, head_dim=64, pass_="bwd")),
    ("v1", "a100-80gb", Problem(batch=16, seq=4096, head_dim=64, window=(255, 255), pass_="bwd")),
    ("v2", "4090", Problem(heads=32, seq=4096, head_dim=128, causal=True)),
    ("v2", "5090", Problem(heads=32, seq=4096, head_dim=96, head_dim_v=64, dtype="bf16")),
    ("v2", "t4", Problem(seq=4096, head_dim=64, causal=True)),
    ("v2", "4090", Problem(heads=32, kv_heads=8, causal=True, dtype="e4m3", scales="head")),
    ("v3", "h200", Problem(batch=64, seq=512, head_dim=64, dtype="bf16", causal=True)),
    ("v3", "h200", Problem(heads=32, kv_heads=8, seq=8192, dtype="bf16", causal=True)),
    ("v3", "h200", Problem(batch=16, heads=32, seq=1024, head_dim=64)),
    ("v3", "h200", Problem(heads=8, seq=4096, head_dim=256, dtype="bf16")),
    (
        *("v3", "h200"),
        Problem(heads=32, kv_heads=8, seq=8192, causal=True, dtype="e4m3", scales="head"),
    ),
    ("v3", "h200", _QUANTISED),
    ("v3", "h200", _GEMMA),
    ("v3", "h200", Problem(seq=4096, head_dim=64, causal=True, bias="alibi")),
    ("v3", "h200", Problem(seq=2048, head_dim=64, dtype="bf16", bias="dense")),
    ("v3", "h200", _PACKED),
    ("v3", "h200", Problem(seq=1000, head_dim=33, dtype="bf16")),
    ("v3", "h200", _SERVED),
    ("v1", "a100-80gb", Problem(seq=4096, head_dim=64, window=(255, 255))),
    ("v2", "h200", _GEMMA),
    ("v2", "a100-80gb", Problem(seq=4096, head_dim=64, causal=True, bias="alibi")),
    ("v2", "h200", Problem(seq=2048, head_dim=64, dtype="bf16", bias="dense")),
    ("v2", "h200", _PACKED),
)

_HINT = "write them again with `fasim gen --all`"


def folder(out: str | None) -> Path:
    """``generated/`` of the checkout fasim runs from, or the folder given."""
    path = Path(out) if out else Path(__file__).parent.parent / "generated"
    if not path.is_dir():
        raise UsageError(
            "there is no folder of canonical kernels",
            where=str(path),
            why="generated/ belongs to a checkout, not to an installed fasim",
            hint="run in a checkout, or name a folder with -o",
        )
    return path


@cache
def plans() -> tuple[Plan, ...]:
    """The planner's choice for each of them."""
    entries = (planner.plan(problem, load(gpu), algo) for algo, gpu, problem in _CHOSEN)
    return tuple(entry.plan for entry in entries if entry.plan)


def kernels() -> Mapping[str, str]:
    """File name to text."""
    found = map(render, plans())
    return {f"{kernel.stem}.cu": kernel.source for kernel in found}


def write(path: Path, *, prune: bool = False) -> tuple[str, ...]:
    """Write every canonical kernel and return the names; ``prune`` removes every other ``.cu``."""
    wanted = kernels()
    for name, text in wanted.items():
        files.write(path / name, text)
    for name in _present(path) - wanted.keys() if prune else ():
        (path / name).unlink()
    return tuple(wanted)


def check(path: Path) -> int:
    """The number of canonical kernels; raises CheckFailed unless the folder holds exactly those."""
    wanted = kernels()
    present = _present(path)
    wrong = [f"missing  {name}" for name in sorted(wanted.keys() - present)]
    wrong += [f"extra    {name}" for name in sorted(present - wanted.keys())]
    both = sorted(present & wanted.keys())
    wrong += [f"stale    {name}" for name in both if _differs(path / name, wanted[name])]
    if wrong:
        what = f"{len(wrong)} of the canonical kernels are not what the templates render"
        raise CheckFailed(what, where=str(path), why="\n  ".join(wrong), hint=_HINT)
    return len(wanted)


def _differs(path: Path, text: str) -> bool:
    return path.read_bytes() != text.encode()


def _present(path: Path) -> set[str]:
    return {file.name for file in path.glob("*.cu")}

"""Time V2 beside FlashAttention-2 on the grid of its paper, forward and backward, and decoding.

    python3 benchmarks/v2_grid.py --compile-only
    python3 benchmarks/v2_grid.py --out results/ [fwd] [bwd] [decode] [odd] [options] [ladder]

16,384 tokens of hidden size 2048 in bf16: head_dim 64, 128 and 256, sequences of 512 to 16,384,
causal or not, the planner's tile for each. Decoding: one query of 64 heads over 8 key heads against
32,768 keys, beside a copy of as many bytes. Odd: head dimensions and a length that fit no tile,
beside their neighbours. Options: each option beside plain attention of the same shape. Ladder: V1
beside unfused attention in PyTorch, and V2 beside V1, at shapes with more heads than SMs. All
candidates of a row take turns in one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from fasim import bench, peers, planner, properties
from fasim.compile import compile_kernel
from fasim.entry import Entry
from fasim.errors import FasimError
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import Kernel, render
from fasim.runners import gpu

GPU, SMS, TOKENS, HIDDEN = "h200", 132, 16384, 2048
HEAD_DIMS, SEQS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
MATMULS = {"fwd": 4, "bwd": 10}  # FLOPs a pair and head_dim: the usual count, S again in backward
TYPES = {
    torch.bfloat16: "<V2",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float8_e4m3fn: "<V1",
}

Planned = tuple[Problem, Entry, Kernel]


class Shared:
    """A torch tensor as its bytes: bf16 is no type of the array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": None,
            "typestr": TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def grid(pass_: str) -> Iterator[Problem]:
    for d, seq, causal in itertools.product(HEAD_DIMS, SEQS, (False, True)):
        sizes = {"batch": TOKENS // seq, "heads": HIDDEN // d, "seq": seq, "head_dim": d}
        yield Problem(**sizes, causal=causal, dtype="bf16", pass_=pass_)


def chosen(options: argparse.Namespace) -> list[Problem]:
    """Of the grid, forward, what --head-dims and --seqs name."""
    dims, seqs = ({*map(int, text.split(","))} for text in (options.head_dims, options.seqs))
    return [p for p in grid("fwd") if p.head_dim in dims and p.seq in seqs]


def decoding(pass_: str) -> Iterator[Problem]:
    for batch in (1, 16):
        sizes = {"batch": batch, "heads": 64, "kv_heads": 8, "seq": 1, "seq_kv": 32768}
        yield Problem(**sizes, dtype="bf16")


def planned(problem: Problem, algo: str = "v2", form: str = "") -> Planned | None:
    try:
        entry = planner.plan(problem, load(GPU), algo, form=form)
        kernel = render(entry.plan) if entry.plan else None
        if kernel is None:
            return None
        compile_kernel(kernel)
    except FasimError as error:
        print(problem.head_dim, problem.pass_, error, file=sys.stderr)
        return None
    return problem, entry, kernel


def row(found: Planned, pass_: str, make: Callable[[Planned], list[bench.Candidate]]) -> Any:
    problem, entry, kernel = found
    timings = bench.interleave(make(found))
    ours, *others = timings
    ratios = {other.name: vars(bench.ratio(ours, other)) for other in others}
    pairs = problem.batch * problem.heads * problem.seq * problem.seq_kv / (1 + problem.causal)
    flops = MATMULS[problem.pass_] * pairs * problem.head_dim
    rates = {timing.name: flops / timing.seconds / 1e12 for timing in timings}
    text = {name: f"{ratio['median']:.3f}" for name, ratio in ratios.items()}
    print(pass_, problem.head_dim, problem.seq, problem.causal, kernel.plan.kernel.tile, text,
          f"{rates['v2']:.0f} TFLOP/s, predicted {entry.time.seconds / ours.seconds - 1:+.0%}",
          flush=True)  # fmt: skip
    return {
        "problem": problem.to_json(),
        "kernel": kernel.stem,
        "sources": bench.sources_sha(kernel),
        "tflops": rates,
        "ratios": ratios,
        "timings": [timing.to_json() for timing in timings],
    }


def forward(found: Planned) -> list[bench.Candidate]:
    problem, entry, kernel = found
    tensors = peers.tensors(problem)
    fa2 = peers.sdpa("fa2", problem, **tensors)
    fa2()
    arrays = {name: Shared(tensor) for name, tensor in tensors.items()}
    call = gpu.launch_on_device(kernel, arrays, kernel.plan.launch_for(problem))
    return [
        bench.Candidate("v2", call, entry.time.seconds),
        bench.Candidate("fa2", fa2, None),
    ]


def backward(found: Planned) -> list[bench.Candidate]:
    """FA2's own backward pass, called as torch's autograd calls it."""
    problem, entry, kernel = found
    q, k, v = peers.tensors(problem).values()
    aten = torch.ops.aten
    done = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, problem.causal)
    o, lse, *state = done
    grad = torch.randn_like(o)

    def fa2() -> object:
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, o, lse, *state[:4], 0.0, problem.causal, *state[4:6]
        )

    fa2()
    given = {"q": q, "k": k, "v": v, "o": o.contiguous(), "do": grad, "lse": lse.contiguous()}
    arrays = {name: Shared(tensor.contiguous()) for name, tensor in given.items()}
    call = gpu.launch_on_device(kernel, arrays, kernel.plan.launch_for(problem))
    return [
        bench.Candidate("v2", call, entry.time.seconds),
        bench.Candidate("fa2", fa2, None),
    ]


def decode(found: Planned) -> list[bench.Candidate]:
    """Beside a copy that moves as many bytes as K and V hold: half read, half written."""
    problem, *_ = found
    candidates = forward(found)
    moved = 2 * problem.batch * problem.kv_heads * problem.seq_kv * problem.head_dim * 2
    half = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    return [*candidates, bench.Candidate("copy", lambda: other.copy_(half), None)]


SECTIONS: dict[str, tuple[Callable[[str], Iterator[Problem]], str, Any]] = {
    "fwd": (grid, "fwd", forward),
    "bwd": (grid, "bwd", backward),
    "decode": (decoding, "fwd", decode),
}


# ---- V2 beside itself ---------------------------------------------------------------------------


def odd_groups() -> Iterator[dict[str, Problem]]:
    """Each odd shape with the neighbours that its throughput is interpolated between."""
    for causal in (False, True):
        for dims in ((64, 80, 96, 128), (128, 160, 256)):
            yield {f"d{d}": sized(d, 4096, causal) for d in dims}
        yield {f"seq {seq}": sized(128, seq, causal) for seq in (4096, 8191, 8192)}


def option_groups() -> Iterator[dict[str, Problem]]:
    for pass_ in ("fwd", "bwd"):
        plain = replace(sized(64, 4096, False), pass_=pass_)
        yield {
            "plain": plain,
            "window 1023,0": replace(plain, window=(1023, 0)),
            "softcap": replace(plain, softcap=30.0),
            "alibi": replace(plain, bias="alibi"),
            "varlen": replace(plain, varlen=True),
        }
        few = replace(plain, batch=1, heads=8, kv_heads=8)  # a bias of all heads would fill 8.6 GB
        yield {"plain, 8 heads": few, "dense bias": replace(few, bias="dense")}


def sized(d: int, seq: int, causal: bool) -> Problem:
    """About 16,384 tokens of about 2,048 features."""
    batch, heads = round(TOKENS / seq), HIDDEN // d
    return Problem(batch=batch, heads=heads, seq=seq, head_dim=d, causal=causal, dtype="bf16")


def beside(group: dict[str, Problem], algo: str = "v2") -> Any:
    """One kernel for each problem of a group, in turns: useful TFLOP/s of each."""
    found = {name: one for name, problem in group.items() if (one := planned(problem, algo))}
    timings = bench.interleave([alone(name, one) for name, one in found.items()])
    rates = {t.name: useful_flops(group[t.name]) / t.seconds / 1e12 for t in timings}
    print({name: f"{rate:.0f}" for name, rate in rates.items()}, flush=True)
    return {
        "problems": {name: problem.to_json() for name, problem in group.items()},
        "kernels": {name: kernel.stem for name, (_, _, kernel) in found.items()},
        "sources": bench.sources_sha(*(kernel for _, _, kernel in found.values())),
        "tflops": rates,
        "timings": [timing.to_json() for timing in timings],
    }


def alone(name: str, found: Planned, arrays: dict[str, Any] | None = None) -> bench.Candidate:
    problem, entry, kernel = found
    launch = kernel.plan.launch_for(problem)
    call = gpu.launch_on_device(kernel, arrays or bench.random_inputs(launch), launch)
    return bench.Candidate(name, call, entry.time.seconds)


def useful_flops(problem: Problem) -> float:
    seen = float(properties.visible_keys(problem).sum()) * problem.batch * problem.heads
    return MATMULS[problem.pass_] * seen * problem.head_dim


GROUPS = {"odd": odd_groups, "options": option_groups}


# ---- V1 beside what came before and after it ----------------------------------------------------


def ladder() -> Iterator[Problem]:
    """At least two heads for every SM, as V1 has a block a head."""
    for d, seq, causal in itertools.product((64, 128), (1024, 2048, 4096), (False, True)):
        heads = HIDDEN // d
        batch = max(TOKENS // seq, math.ceil(2 * SMS / heads))
        yield Problem(batch=batch, heads=heads, seq=seq, head_dim=d, causal=causal, dtype="bf16")


def rungs(problem: Problem) -> Any:
    """V2, V1 and unfused attention in turns; speeds of V1 over unfused and of V2 over V1."""
    found = {algo: one for algo in ("v2", "v1") if (one := planned(problem, algo))}
    tensors = peers.tensors(problem)
    unfused = bench.Candidate("unfused", peers.unfused(problem, **tensors))
    arrays = {name: Shared(tensor) for name, tensor in tensors.items()}
    ours = [alone(name, one, arrays) for name, one in found.items()]
    timings = {t.name: t for t in bench.interleave([*ours, unfused])}
    pairs = {"v1/unfused": ("v1", "unfused"), "v2/v1": ("v2", "v1")}
    ratios = {name: vars(bench.ratio(timings[a], timings[b])) for name, (a, b) in pairs.items()}
    rates = {t.name: useful_flops(problem) / t.seconds / 1e12 for t in timings.values()}
    print("ladder", problem.head_dim, problem.seq, problem.batch * problem.heads, problem.causal,
          {name: f"{ratio['median']:.2f}" for name, ratio in ratios.items()},
          {name: f"{rate:.0f}" for name, rate in rates.items()}, flush=True)  # fmt: skip
    return {
        "problem": problem.to_json(),
        "kernels": {name: kernel.stem for name, (_, _, kernel) in found.items()},
        "sources": bench.sources_sha(*(kernel for _, _, kernel in found.values())),
        "tflops": rates,
        "ratios": ratios,
        "timings": [timing.to_json() for timing in timings.values()],
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def section(name: str, dims: set[int]) -> Iterator[Any]:
    """The rows of a section, one after the other; what is not planned is left out."""
    problems, pass_, make = SECTIONS[name]
    asked = [p for p in problems(pass_) if p.head_dim in dims or name == "decode"]
    return (row(one, name, make) for one in map(planned, asked) if one)


def summary(rows: list[Any]) -> dict[str, Any]:
    """Of each ratio of the rows the geometric mean and the lowest."""
    names = rows[0].get("ratios", {}) if rows else {}
    found = {name: [row["ratios"][name]["median"] for row in rows] for name in names}
    return {n: {"mean": geometric_mean(r), "least": min(r)} for n, r in found.items()}


def compile_all(names: list[str]) -> None:
    """Every kernel of some sections into the cache, on all cores."""
    asked = [(p, "v2") for n in names if n in SECTIONS for p in SECTIONS[n][0](SECTIONS[n][1])]
    groups = (group for name in names if name in GROUPS for group in GROUPS[name]())
    asked += [(problem, "v2") for group in groups for problem in group.values()]
    asked += [(p, algo) for p in ladder() for algo in ("v2", "v1") if "ladder" in names]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda one: planned(*one), asked))


def measure(name: str, dims: set[int]) -> Iterator[Any]:
    if name == "ladder":
        return map(rungs, ladder())
    return map(beside, GROUPS[name]()) if name in GROUPS else section(name, dims)


def main() -> None:
    known = [*SECTIONS, *GROUPS, "ladder"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", default=known, help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    dims = set(map(int, options.head_dims.split(",")))
    compile_all(options.sections)
    for name in () if options.compile_only else options.sections:
        rows: list[Any] = []
        for row_ in measure(name, dims):
            rows.append(row_)
            kept = {"groups": rows} if name in GROUPS else {"summary": summary(rows), "rows": rows}
            text = json.dumps({"device": bench.device(), **kept}, indent=1) + "\n"
            (options.out / f"h200-v2-{name}.json").write_text(text)
        print(name, summary(rows), flush=True)


if __name__ == "__main__":
    main()

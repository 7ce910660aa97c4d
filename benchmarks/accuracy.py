"""How wrong FP8 is: on a GPU the kernels beside FlashAttention-3, without one the NumPy model.

    python3 benchmarks/accuracy.py --out results/       on a device: writes h200-accuracy.json
    python3 benchmarks/accuracy.py --model --docs       the tables of docs/numerics.md

Errors are against float64 on the inputs in bf16. Three parts: every distribution of
``fasim.accuracy``; outliers, the mean over seeds; 256 queries against ever more keys, with V around
1 and |V|. On a device the last also against float64 on the same numbers in e4m3: there it is the
sums that err. The NumPy model is standard attention with P in e4m3 on the values that the
quantising kernel stores (``reference.standard``), of some rows; the tables for `verify` are the
emulator's.
``fa3`` is the fa3-fwd wheel, in bf16 and in e4m3 with a scale factor a head.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasim import accuracy, bench, planner, properties, reference
from fasim.accuracy import Errors
from fasim.gpu import load
from fasim.problem import Problem
from fasim.render import render
from fasim.runners import gpu
from fasim.runners.emulator import EmulatorRunner

Array = NDArray[Any]
Arrays = dict[str, Array]
Attend = Callable[[Problem, Arrays], Array]

DOCS = Path(__file__).resolve().parents[1] / "docs" / "numerics.md"
E4M3 = {"dtype": "e4m3", "in_dtype": "bf16"}
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "tensor": {**E4M3, "scales": "tensor"},
    "head": {**E4M3, "scales": "head"},
    "block": {**E4M3, "scales": "block"},
    "block, rotated": {**E4M3, "scales": "block", "incoherent": True},
}
WIDE = Problem(heads=1, seq=8192, head_dim=128, dtype="bf16")  # of the FlashAttention-3 paper
ROWS = 512  # queries that the model computes, evenly spread
SEEDS = 20
KEYS = tuple(1 << n for n in range(10, 18))
VALUES: dict[str, Callable[[Array], Array]] = {"N(1, 1)": lambda x: x + 1, "abs N(0, 1)": np.abs}


# ---- Ways to compute ----------------------------------------------------------------------------


def model(problem: Problem, arrays: Arrays) -> Array:
    """ROWS queries in NumPy."""
    real = properties.real(arrays, problem)
    q, k, v = (real[name].astype(np.float32) for name in ("q", "k", "v"))
    options, rows = reference.options_of(problem), picked(problem)
    return reference.standard(q, k, v, problem.dtype, out_dtype="bf16", rows=rows, **options).o


def picked(problem: Problem) -> range:
    return range(0, problem.seq, max(1, problem.seq // ROWS))


def device(problem: Problem, arrays: Arrays) -> Array:
    """V3 on the GPU here."""
    plan = planner.plan(problem, load("auto"), "v3").plan
    assert plan, "V3 is made for Hopper"
    return np.asarray(gpu.GpuRunner().run(render(plan), arrays, plan.launch_for())["o"])


def fa3(problem: Problem, arrays: Arrays) -> Array:
    """FlashAttention-3, in bf16 or e4m3."""
    torch, wheel = import_module("torch"), import_module("fa3_fwd_interface")
    tensors, scales = {}, {}
    for name in ("q", "k", "v"):
        x = torch.from_numpy(arrays[name].astype(np.float32)).cuda()
        if problem.dtype == "e4m3":
            scale = x.abs().amax(dim=(2, 3)) / reference.E4M3_MAX
            x, scales[f"{name}_descale"] = x / scale[..., None, None], scale
        kind = torch.float8_e4m3fn if problem.dtype == "e4m3" else torch.bfloat16
        tensors[name] = x.to(kind).transpose(1, 2).contiguous()
    o = wheel.flash_attn_func(*tensors.values(), softmax_scale=problem.scale, **scales)
    o = o[0] if isinstance(o, tuple) else o
    return np.asarray(o.transpose(1, 2).float().cpu())


def exact(problem: Problem, arrays: Arrays, on_device: bool) -> Array:
    """Float64, by torch where there is a device."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    if not on_device:
        return reference.attention(q, k, v, rows=picked(problem), scale=problem.scale).o
    torch = import_module("torch")
    q, k, v = (torch.from_numpy(x.astype(np.float64)).cuda() for x in (q, k, v))
    p = torch.softmax(problem.scale * q @ k.transpose(2, 3), dim=3)
    return np.asarray((p @ v).cpu())


def ways(on_device: bool) -> Iterator[tuple[str, dict[str, Any], Attend]]:
    for name, options in WAYS.items():
        yield name, options, device if on_device else model
    if on_device and find_spec("fa3_fwd_interface"):
        yield "fa3 bf16", WAYS["bf16"], fa3
        yield "fa3 e4m3", WAYS["head"], fa3


# ---- Parts --------------------------------------------------------------------------------------


def errors(problem: Problem, arrays: Arrays, on_device: bool) -> dict[str, Errors]:
    """Of every way to compute, on inputs in bf16."""
    want, found = exact(problem, arrays, on_device), {}
    for name, options, attend in ways(on_device):
        try:
            got = attend(problem.with_(scale=problem.scale, **options), arrays)
        except Exception as error:  # one way that fails must not lose the others
            print(f"{name}: {error}", flush=True)
            continue
        found[name] = Errors.of(got, want)
    return found


def distributions(on_device: bool) -> dict[str, Any]:
    return {
        name: shown(errors(WIDE, accuracy.drawn(name, WIDE), on_device))
        for name in accuracy.DISTRIBUTIONS
    }


def seeds(on_device: bool, count: int) -> dict[str, float]:
    """The mean over seeds of the RMSE on outliers, as in the paper's table 3."""
    each = [
        errors(WIDE, accuracy.drawn("outliers", WIDE, seed), on_device) for seed in range(count)
    ]
    return {name: float(np.mean([one[name].rmse for one in each])) for name in each[0]}


def longer(problem: Problem) -> Iterator[tuple[str, str, Problem, Arrays]]:
    """256 queries against more and more keys, whose values do not cancel: the kind of the values,
    the number of keys, the problem and its inputs in bf16."""
    for (label, change), keys in itertools.product(VALUES.items(), KEYS):
        one = problem.with_(seq=256, seq_kv=keys)
        arrays = accuracy.drawn("normal", one)
        v = change(arrays["v"].astype(np.float32)).astype(arrays["v"].dtype)
        yield label, str(keys), one, {**arrays, "v": v}


def lengths(on_device: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for label, keys, problem, arrays in longer(WIDE):
        found.setdefault(label, {})[keys] = shown(errors(problem, arrays, on_device))
    return found


def sums() -> dict[str, Any]:
    """The same in e4m3 from the start: relative error (Frobenius) and bias, V3's and FA3's."""
    found: dict[str, Any] = {}
    for label, keys, problem, drawn in longer(WIDE.with_(dtype="e4m3", scales="head")):
        arrays = properties.quantised(drawn, "head")
        values = properties.real(arrays)
        want = exact(problem, values, on_device=True)
        got = {"v3": device(problem, arrays)}
        if find_spec("fa3_fwd_interface"):
            got["fa3"] = fa3(problem, values)
        found.setdefault(label, {})[keys] = {n: relative(o, want) for n, o in got.items()}
    return found


def relative(got: Array, want: Array) -> dict[str, float]:
    off = got.astype(np.float64) - want
    error = float(np.linalg.norm(off) / np.linalg.norm(want))
    return {"error": error, "bias": float(off.mean() / want.mean())}


def shown(found: dict[str, Errors]) -> dict[str, Any]:
    return {name: vars(one) for name, one in found.items()}


# ---- Tables -------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def by_inputs(found: dict[str, Any]) -> str:
    names = list(next(iter(found.values())))
    rows = [[kind, *(triple(one[name]) for name in names)] for kind, one in found.items()]
    return table(["inputs", *names], rows)


def triple(one: dict[str, float]) -> str:
    return f"{one['rmse']:.1e}, {one['largest']:.1e}, {one['cosine']:.5f}"


def by_keys(found: dict[str, Any], cell: Callable[[dict[str, float]], str]) -> str:
    names = list(next(iter(found.values()))[str(KEYS[0])])
    rows = [
        [label, f"{int(keys):,}", *(cell(one[name]) for name in names)]
        for label, each in found.items()
        for keys, one in each.items()
    ]
    return table(["values", "keys", *names], rows)


def rmse(one: dict[str, float]) -> str:
    return f"{one['rmse']:.1e}"


def error_and_bias(one: dict[str, float]) -> str:
    return f"{one['error']:.2%}, {one['bias']:+.3%}"


def by_seed(found: dict[str, float]) -> str:
    return table(list(found), [[f"{rmse:.2e}" for rmse in found.values()]])


def emulated() -> dict[str, Any]:
    """What `fasim verify` reports of V3 at head_dim 128, in the emulator."""
    found: dict[str, Any] = {}
    for name, options in WAYS.items():
        if name == "bf16":
            continue
        plan = planner.plan(Problem(**options), load("h200"), "v3").plan
        assert plan
        for one in accuracy.measure(render(plan), EmulatorRunner()):
            row = found.setdefault(one.inputs, {"bf16": vars(one.bf16)})
            row[name] = vars(one.kernel)
    return found


def write_docs(parts: dict[str, str]) -> None:
    """Each table between its marks."""
    text = DOCS.read_text()
    for name, lines in parts.items():
        begin, end = f"<!-- accuracy: {name} -->\n", "<!-- end -->\n"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
        assert len(pattern.findall(text)) == 1, f"docs/numerics.md has no place for {name}"
        text = pattern.sub(begin + "\n" + lines + "\n" + end, text)
    DOCS.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="store_true", help="NumPy, no device")
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/numerics.md")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    on_device = not options.model
    found = {
        "distributions": distributions(on_device),
        "outliers, mean RMSE": seeds(on_device, options.seeds),
        "lengths": lengths(on_device),
    }
    parts = {
        "distributions": by_inputs(found["distributions"]),
        "seeds": by_seed(found["outliers, mean RMSE"]),
        "lengths": by_keys(found["lengths"], rmse),
    }
    print(*parts.values(), sep="\n")
    if options.docs:
        write_docs({**parts, "emulated": by_inputs(emulated())})
    if on_device:
        found["sums"] = sums()
        print(by_keys(found["sums"], error_and_bias))
        sources = bench.sources_sha()
        result = {"device": bench.device(), "sources": sources, "seeds": options.seeds, **found}
        name = options.out / "h200-accuracy.json"
        name.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

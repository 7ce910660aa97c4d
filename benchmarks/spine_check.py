"""Run the generated V1 and V2 forward kernels on a GPU: compile, prove, and time them.

    python3 benchmarks/spine_check.py --out results/            every section
    python3 benchmarks/spine_check.py --out results/ real time  some of them
    compute-sanitizer --tool memcheck --error-exitcode 9 \
        python3 benchmarks/spine_check.py --out results/ sanitizer

Sections: ``compile`` every kernel, all cores at once; ``real`` model shapes against float64;
``cases`` drawn by Hypothesis over a catalogue of kernels; ``time`` beside PyTorch's kernels;
``sanitizer`` a few tiny cases in this very process, for a memory checker around it.

Work is done by child processes, one item after the other, each result written down at once. A child
that dies or hangs costs the item it was on and no other. Exit 1 if anything failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fasim import bench, catalogue, planner, properties
from fasim.compile import Binary, check_promises, compile_kernel
from fasim.errors import CheckFailed, FasimError
from fasim.gpu import load
from fasim.plan import Plan, Tile
from fasim.problem import Problem
from fasim.render import Kernel, render
from fasim.runners import DeviceFault, gpu

Item = dict[str, Any]
Result = dict[str, Any]

GPU = "h200"
ALGOS = ("v1", "v2")
DTYPES = ("fp32", "fp16", "bf16")
MOST_KERNELS = 40
STALL_S = 150  # a child that writes nothing for so long is hung

LLAMA = {"batch": 1, "heads": 32, "kv_heads": 8, "seq": 8192, "head_dim": 128}
GPT2 = {"batch": 64, "heads": 16, "seq": 1024, "head_dim": 64}
DIFFUSION = {"batch": 2, "heads": 8, "seq": 4096, "head_dim": 40}
SHAPES: dict[str, dict[str, int]] = {
    "llama-3-8b": LLAMA,
    "gpt2-medium": GPT2,
    "sd-1.5-self": DIFFUSION,
    "sd-1.5-cross": {**DIFFUSION, "seq_kv": 77},
}
# 16,384 tokens of 2,048 features, the papers' way of sweeping the length.
SWEEP: dict[str, dict[str, int]] = {
    f"d{d}-seq{seq}": {"batch": 16384 // seq, "heads": 2048 // d, "seq": seq, "head_dim": d}
    for d in (64, 128)
    for seq in (1024, 4096, 16384)
}


# ---- Kernels ------------------------------------------------------------------------------------


def kernel_for(problem: Problem, algo: str) -> Kernel:
    """The planner's kernel. Raises FasimError with the reason if there is none."""
    plan = planner.plan(problem, load(GPU), algo).plan
    if plan is None:
        raise CheckFailed(f"no {algo} kernel is generated for this problem")
    return render(plan)


# algo, dtype, head_dim, head_dim_v, causal, tile (None: the planner's)
VARIED: list[tuple[str, str, int, int, bool, Tile | None]] = [
    ("v1", "fp32", 40, 40, True, None),
    ("v1", "fp32", 33, 33, False, Tile(block_q=32, block_kv=64, warps=2, step_kv=32)),
    ("v1", "fp32", 128, 128, False, None),
    ("v1", "fp32", 1, 1, True, Tile(block_q=32, block_kv=64, warps=2, step_kv=32)),
    ("v1", "fp16", 64, 64, True, Tile(block_q=64, block_kv=128, warps=4, step_kv=64)),
    ("v1", "fp16", 80, 80, False, None),
    ("v1", "fp16", 33, 33, True, Tile(block_q=64, block_kv=64, warps=2, step_kv=32)),
    ("v1", "fp16", 256, 256, False, None),
    ("v1", "bf16", 128, 128, True, Tile(block_q=64, block_kv=64, warps=4, step_kv=32)),
    ("v1", "bf16", 40, 40, False, None),
    ("v1", "bf16", 1, 1, False, Tile(block_q=32, block_kv=64, warps=2, step_kv=32)),
    ("v1", "bf16", 64, 128, True, None),
    ("v2", "fp32", 64, 64, False, Tile(block_q=64, block_kv=64, stages=1, warps=4)),
    ("v2", "fp32", 80, 80, True, None),
    ("v2", "fp32", 33, 33, True, Tile(block_q=32, block_kv=32, stages=2, warps=2)),
    ("v2", "fp32", 256, 256, False, None),
    ("v2", "fp32", 1, 1, False, Tile(block_q=16, block_kv=16, stages=2, warps=1)),
    ("v2", "fp16", 128, 128, True, Tile(block_q=128, block_kv=64, stages=2, warps=8)),
    ("v2", "fp16", 40, 40, False, None),
    ("v2", "fp16", 33, 33, False, Tile(block_q=64, block_kv=48, stages=2, warps=4)),
    ("v2", "fp16", 256, 256, True, None),
    ("v2", "fp16", 1, 1, True, Tile(block_q=16, block_kv=32, stages=1, warps=1)),
    ("v2", "fp16", 36, 36, True, Tile(block_q=64, block_kv=80, stages=2, warps=2)),
    ("v2", "bf16", 64, 64, True, None),
    ("v2", "bf16", 80, 80, False, Tile(block_q=64, block_kv=96, stages=1, warps=4)),
    ("v2", "bf16", 128, 64, False, None),
    ("v2", "bf16", 96, 96, True, Tile(block_q=32, block_kv=160, stages=1, warps=2)),
    ("v2", "bf16", 192, 192, False, None),
]


def runs_here(plan: Plan) -> bool:
    """Whether the device can run a kernel built for the plan's architecture."""
    try:
        gpu.target_arch(plan.kernel.arch, load(GPU).compute_capability)
    except FasimError:
        return False
    return True


def proven() -> tuple[list[Plan], list[Result]]:
    """At most 40 plans, no two with the same kernel; and what could not be planned."""
    found = {plan.kernel.stem: plan for plan in catalogue.plans() if runs_here(plan)}
    refused = []
    for algo, dtype, head_dim, head_dim_v, causal, tile in VARIED:
        problem = Problem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal)
        try:
            entry = planner.plan(problem, load(GPU), algo, tile=tile)
            if entry.plan is None:
                raise CheckFailed(entry.reason)
            found.setdefault(entry.plan.kernel.stem, entry.plan)
        except FasimError as error:
            name = f"{algo} {dtype} d{head_dim} {tile or 'chosen tile'}"
            refused.append(failed({"id": f"plan {name}"}, error))
    return list(found.values())[:MOST_KERNELS], refused


def compile_one(plan: Plan) -> Result:
    item, start = {"id": f"compile {plan.kernel.stem}"}, time.monotonic()
    try:
        arch = gpu.target_arch(plan.kernel.arch, load(GPU).compute_capability)
        binary = compile_kernel(render(plan), arch=arch)
    except Exception as error:
        return failed(item, error)
    seconds = time.monotonic() - start
    used = {"resources": asdict(binary.resources), "predicted_registers": plan.registers}
    return {**item, "ok": True, "error": broken_promise(binary, plan), "seconds": seconds, **used}


def broken_promise(binary: Binary, plan: Plan) -> str:
    """What the compiler used beyond the plan: told, and proven or refuted by the runs."""
    try:
        check_promises(binary, plan)
    except CheckFailed as error:
        return error.why
    return ""


def compile_all(plans: Iterable[Plan], cores: int) -> list[Result]:
    different = {plan.kernel.stem: plan for plan in plans}
    with ThreadPoolExecutor(cores) as pool:
        return list(pool.map(compile_one, different.values()))


def shape_plans(items: Iterable[Item]) -> Iterator[Plan]:
    """The plans that the real and timed items will need; those without one fail there."""
    for item, algo in itertools.product(items, ALGOS):
        try:
            yield kernel_for(problem_of(item), algo).plan
        except FasimError:
            continue


def problem_of(item: Item) -> Problem:
    return Problem(dtype=item["dtype"], causal=item["causal"], **item["shape"])


# ---- Items --------------------------------------------------------------------------------------


def real_items() -> list[Item]:
    made = itertools.product(SHAPES.items(), DTYPES, (False, True))
    return [
        {
            "id": f"real {name} {dtype} {'causal' if causal else 'full'}",
            "name": name,
            "shape": shape,
            "dtype": dtype,
            "causal": causal,
        }
        for (name, shape), dtype, causal in made
    ]


def time_items() -> list[Item]:
    made = itertools.product(({**SHAPES, **SWEEP}).items(), (False, True))
    return [
        {
            "id": f"time {name} bf16 {'causal' if causal else 'full'}",
            "name": name,
            "shape": shape,
            "dtype": "bf16",
            "causal": causal,
        }
        for (name, shape), causal in made
        if not (causal and "seq_kv" in shape)
    ]


def case_items(plans: list[Plan], wanted: int, seed: int) -> list[Item]:
    """Every kernel with its share of the cases. Each case is tried on every property."""
    examples = math.ceil(wanted / max(1, len(plans)))
    return [
        {
            "id": f"cases {p.kernel.stem}",
            "plan": p.to_json(),
            "examples": examples,
            "seed": seed + i,
        }
        for i, p in enumerate(plans)
    ]


def failed(item: Item, error: BaseException) -> Result:
    said = error.args[0] if error.args and not isinstance(error, FasimError) else str(error)
    fault = isinstance(error, DeviceFault)
    return {
        "id": item["id"],
        "ok": False,
        "error": f"{type(error).__name__}: {said}",
        "fault": fault,
        "trace": "" if isinstance(error, FasimError) else traceback.format_exc(),
    }


# ---- Hypothesis cases ---------------------------------------------------------------------------


def run_cases(item: Item) -> Result:
    kernel = render(Plan.from_json(item["plan"]))
    start = time.monotonic()
    report = properties.verify(kernel, gpu.GpuRunner(), item["examples"], item["seed"])
    failure = report.failure
    fault = failure is not None and isinstance(failure.error, DeviceFault)
    inputs = max(outcome.cases for outcome in report.outcomes)
    return {
        "id": item["id"],
        "ok": report.ok,
        "fault": fault,
        "inputs": inputs,
        "checks": report.cases,
        "seconds": time.monotonic() - start,
        **report.to_json(),
    }


# ---- Real shapes --------------------------------------------------------------------------------


def run_real(item: Item) -> Result:
    """Both algorithms against float64: every element by torch, sampled rows by NumPy."""
    from fasim import peers

    problem = problem_of(item)
    tensors = peers.tensors(problem, seed=1, device=DEVICE)
    truth = float64_on_device(problem, tensors)
    entries = [real_entry(problem, algo, tensors, truth) for algo in ALGOS]
    ok = all(entry["ok"] for entry in entries)
    fault = any(entry.get("fault") for entry in entries)
    return {
        "id": item["id"],
        "ok": ok,
        "fault": fault,
        "standard_error": truth["standard_error"],
        "problem": problem.to_json(),
        "entries": entries,
    }


def real_entry(problem: Problem, algo: str, tensors: Any, truth: Any) -> Result:
    item = {"id": algo}
    try:
        kernel = kernel_for(problem, algo)
        got = gpu.GpuRunner().run(kernel, tensors, kernel.plan.launch_for(problem))
        return {**item, "kernel": kernel.stem, **judge(problem, got, tensors, truth)}
    except Exception as error:
        return failed(item, error)


def judge(problem: Problem, got: Any, tensors: Any, truth: Any) -> Result:
    """Errors as shares of the tolerance, over all elements and over the sampled rows."""
    import numpy as np
    import torch

    o = torch.from_numpy(np.asarray(got["o"], np.float32)).to(DEVICE)
    lse = torch.from_numpy(got["lse"]).to(DEVICE)
    strict = torch.from_numpy(properties.strict_rows(problem)).to(DEVICE)
    limit = torch.where(strict, properties.STRICT_FP32, truth["o_tolerance"])
    worst_o, error = largest_share(o, truth["o"], limit[None, None, :, None])
    worst_lse, _ = largest_share(lse, truth["lse"], truth["lse_tolerance"])
    sampled = sampled_share(problem, got, tensors, limit.cpu().numpy())
    shares = {"o": worst_o, "lse": worst_lse, "o_sampled_numpy": sampled}
    ok = all(share <= 1 for share in shares.values())
    return {
        "ok": ok,
        "share_of_tolerance": shares,
        "largest_error": error,
        "strict_rows": int(strict.sum()),
        "o_tolerance": truth["o_tolerance"],
    }


def largest_share(got: Any, want: Any, limit: Any) -> tuple[float, float]:
    """Largest error as a share of its limit, and the error itself; NaN where none is due is inf."""
    import torch

    share, error = 0.0, 0.0
    limits = torch.as_tensor(limit, dtype=torch.float64, device=want.device).expand(want.shape)
    for b in range(want.shape[0]):
        wrong = (got[b].double() - want[b]).abs()
        wrong = torch.where(got[b].double() == want[b], 0.0, wrong)  # -inf is -inf
        wrong = torch.nan_to_num(wrong, nan=math.inf, posinf=math.inf)
        if wrong.numel():
            share = max(share, float((wrong / limits[b]).max()))
            error = max(error, float(wrong.max()))
    return share, error


def float64_on_device(problem: Problem, tensors: Any) -> Any:
    """o and lse in float64, tolerances, and the error of standard attention in the same precision,
    a few heads at a time."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    rounding = torch.empty_like(lse)
    standard_error, step = 0.0, max(1, 2**27 // max(1, problem.seq * problem.seq_kv))
    for b, kv, first in itertools.product(
        range(problem.batch), range(problem.kv_heads), range(0, problem.group, step)
    ):
        heads = slice(
            kv * problem.group + first, kv * problem.group + min(first + step, problem.group)
        )
        part = (q[b, heads], k[b, kv], v[b, kv])
        o[b, heads], lse[b, heads] = exact(problem, *(x.double() for x in part))
        error = (standard(problem, *part).double() - o[b, heads]).abs().max()
        standard_error = max(standard_error, float(error))
        norm_q, norm_k = (x.double().norm(dim=-1) for x in part[:2])
        size = problem.scale * norm_q * norm_k.max()
        rounding[b, heads] = 2.0**-24 * (2 + math.sqrt(problem.head_dim)) * (1 + size)
    size = torch.where(lse.isfinite(), lse.abs(), 0.0).clamp(min=1.0)
    tolerance = properties.yardstick(problem.dtype, standard_error, float(o.abs().max()))
    return {
        "o": o,
        "lse": lse,
        "standard_error": standard_error,
        "o_tolerance": tolerance,
        "lse_tolerance": 2e-6 * size + rounding,
    }


def scores(problem: Problem, q: Any, k: Any) -> Any:
    """Masked scores of some heads (heads, seq, seq_kv), in q's precision."""
    import torch

    s = torch.matmul(q, k.T) * problem.scale
    if problem.causal:
        ones = torch.ones(problem.seq, problem.seq_kv, dtype=torch.bool, device=q.device)
        s.masked_fill_(ones.triu(problem.seq_kv - problem.seq + 1), -math.inf)
    return s


def exact(problem: Problem, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    import torch

    s = scores(problem, q, k)
    lse = torch.logsumexp(s, dim=-1)
    s -= torch.where(lse.isfinite(), lse, 0.0)[..., None]
    return torch.matmul(s.exp_(), v), lse


def standard(problem: Problem, q: Any, k: Any, v: Any) -> Any:
    """S in fp32, P normalised and rounded, o accumulated in fp32 and rounded."""
    import torch

    p = torch.softmax(scores(problem, q.float(), k.float()), dim=-1)
    return torch.matmul(torch.nan_to_num_(p, nan=0.0).to(v.dtype), v)


def sampled_share(problem: Problem, got: Any, tensors: Any, limit: Any) -> float:
    """Sixteen rows of four heads against fasim.reference."""
    import numpy as np

    from fasim import reference

    rng, worst = np.random.default_rng(2), 0.0
    for _ in range(4):
        b, h = int(rng.integers(problem.batch)), int(rng.integers(problem.heads))
        kv = h // problem.group
        drawn = rng.integers(0, problem.seq, 14)
        rows = np.unique(np.concatenate([[0, problem.seq - 1], drawn]))
        one = {n: x[b : b + 1, (h if n == "q" else kv) :][:, :1] for n, x in tensors.items()}
        options = reference.options_of(problem)
        want = reference.attention(*host(one).values(), rows=rows, **options).o[0, 0]
        wrong = np.abs(got["o"][b, h, rows].astype(np.float64) - want) / limit[rows, None]
        worst = max(worst, float(np.nan_to_num(wrong, nan=np.inf).max()))
    return worst


def host(tensors: Any) -> dict[str, Any]:
    """torch tensors as NumPy arrays, bf16 as ml_dtypes has it."""
    import ml_dtypes
    import torch

    arrays = {}
    for name, x in tensors.items():
        flat = x.detach().cpu().contiguous()
        arrays[name] = (
            flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            if flat.dtype == torch.bfloat16
            else flat.numpy()
        )
    return arrays


# ---- Timing -------------------------------------------------------------------------------------


def run_time(item: Item) -> Result:
    """V1, V2 and PyTorch's kernels on one shape, in turns."""
    from fasim import peers

    problem = problem_of(item)
    tensors = peers.tensors(problem, seed=3, device=DEVICE)
    candidates, missing, kernels = [], [], []
    for algo in ALGOS:
        try:
            kernel, predicted = kernel_for(problem, algo), predicted_s(problem, algo)
            launch = kernel.plan.launch_for(problem)
            call = gpu.launch_on_device(kernel, tensors, launch)
            candidates.append(bench.Candidate(algo, call, predicted))
            kernels.append(kernel)
        except FasimError as error:
            missing.append({"name": algo, "reason": str(error)})
    for peer in peers.peers(problem, **tensors):
        if peer.launch is None:
            missing.append({"name": peer.name, "reason": peer.reason})
        else:
            candidates.append(bench.Candidate(peer.name, peer.launch))
    timings = bench.interleave(candidates, timer=gpu.time_launches)
    flops = 4 * problem.batch * problem.heads * pairs(problem) * problem.head_dim
    ok = all(m["name"] not in ALGOS for m in missing)
    return {
        "id": item["id"],
        "ok": ok,
        "problem": problem.to_json(),
        "missing": missing,
        "kernels": [kernel.stem for kernel in kernels],
        "useful_flops": flops,
        "sources": bench.sources_sha(*kernels),
        "timings": [t.to_json() for t in timings],
        "ratios": ratios(timings),
    }


def predicted_s(problem: Problem, algo: str) -> float:
    return float(planner.plan(problem, load(GPU), algo).time.seconds)


def pairs(problem: Problem) -> int:
    return int(properties.visible_keys(problem).sum())


def ratios(timings: tuple[bench.Timing, ...]) -> dict[str, Any]:
    """Speed of V2 over every other candidate, with the spread over the rounds."""
    named = {timing.name: timing for timing in timings}
    others = [timing for timing in timings if timing.name != "v2"] if "v2" in named else []
    return {f"v2/{other.name}": vars(bench.ratio(named["v2"], other)) for other in others}


# ---- Sanitizer ----------------------------------------------------------------------------------


def sanitizer_items() -> list[tuple[Plan, properties.Case]]:
    """Tiny cases on both algorithms: tails in both lengths, unaligned rows, shared heads."""
    case = properties.Case(heads=2, kv_heads=1, seq=70, seq_kv=130, seed=5)
    short = properties.Case(batch=2, heads=2, kv_heads=2, seq=5, seq_kv=3, seed=6)
    empty = properties.Case(heads=1, kv_heads=1, seq=3, seq_kv=0)
    found = []
    for algo, (dtype, d), causal in itertools.product(
        ALGOS, (("fp32", 40), ("fp16", 33), ("bf16", 64)), (False, True)
    ):
        plan = kernel_for(Problem(dtype=dtype, head_dim=d, causal=causal), algo).plan
        found += [(plan, case), (plan, short), (plan, empty)]
    return found


def run_sanitizer(cores: int) -> list[Result]:
    """Without guard zones, so that the checker sees every byte outside an array."""
    items = sanitizer_items()
    done = compile_all((plan for plan, _ in items), cores)
    runner = gpu.GpuRunner(guard=False)
    matches = next(p for p in properties.PROPERTIES if p.name == "matches_float64")
    for plan, case in items:
        item = {"id": f"sanitizer {plan.kernel.stem} {case}"}
        try:
            share = matches.check(properties.Trial(render(plan), runner, case))
            done.append({**item, "ok": True, "share_of_tolerance": share})
        except Exception as error:
            done.append(failed(item, error))
    return done


# ---- Children -----------------------------------------------------------------------------------

RUN: dict[str, Callable[[Item], Result]] = {
    "real": run_real,
    "cases": run_cases,
    "time": run_time,
}
DEVICE = "cuda"


def work(section: str, todo: Path, results: Path) -> int:
    """A child: item after item; after a fault the device is lost to this process."""
    with results.open("a") as out:
        for item in json.loads(todo.read_text()):
            start = time.monotonic()
            empty_torch_cache()
            try:
                result = RUN[section](item)
            except Exception as error:
                result = failed(item, error)
            result["wall_s"] = round(time.monotonic() - start, 2)
            out.write(json.dumps(result) + "\n")
            out.flush()
            if result.get("fault"):
                return 3
    return 0


def empty_torch_cache() -> None:
    """Give memory that torch keeps for reuse to whoever comes next."""
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def supervise(section: str, items: list[Item], deadline: float) -> list[Result]:
    """Run items in a child, and in another one after it dies or hangs."""
    done: list[Result] = []
    while items:
        before = len(done)
        if time.monotonic() > deadline:
            return done + [failed(item, TimeoutError("no time was left")) for item in items]
        new, ended = run_child(section, items, deadline)
        done += new
        names = {result["id"] for result in done}
        items = [item for item in items if item["id"] not in names]
        if items and (ended or len(done) == before):
            done.append(failed(items.pop(0), ChildProcessError(ended or "it did nothing")))
    return done


def run_child(section: str, items: list[Item], deadline: float) -> tuple[list[Result], str]:
    """Results of one child, and how it ended if not by itself (a fault is by itself)."""
    with tempfile.TemporaryDirectory() as folder:
        todo, results, log = (Path(folder) / name for name in ("todo", "results", "log"))
        todo.write_text(json.dumps(items))
        results.touch()
        command = [sys.executable, __file__, "--child", section, str(todo), str(results)]
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
        with log.open("w") as stream:
            child = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)
            ended = watch(child, results, deadline)
        whole = results.read_text().split("\n")[:-1]  # the last may be half a line
        new = [json.loads(line) for line in whole]
        tail = log.read_text()[-1500:]
    return new, f"{ended}\n{tail}" if ended else ""


def watch(child: subprocess.Popen[bytes], results: Path, deadline: float) -> str:
    """Wait for a child; "" if it ended as it should, else what happened."""
    size, since = 0, time.monotonic()
    while child.poll() is None:
        time.sleep(0.2)
        if results.stat().st_size != size:
            size, since = results.stat().st_size, time.monotonic()
        late = time.monotonic() > deadline
        if late or time.monotonic() - since > STALL_S:
            child.kill()
            child.wait()
            return "no time was left" if late else f"nothing came for {STALL_S} s"
    return "" if child.returncode in (0, 3) else f"the child ended with {child.returncode}"


def spread(section: str, items: list[Item], workers: int, deadline: float) -> list[Result]:
    """Items dealt to several children at once."""
    hands = [items[i::workers] for i in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(lambda hand: supervise(section, hand, deadline), hands)
        return [result for part in parts for result in part]


# ---- Command line -------------------------------------------------------------------------------


def main() -> int:
    options = arguments()
    if options.child:
        section, todo, results = options.child
        return work(section, Path(todo), Path(results))
    options.out.mkdir(parents=True, exist_ok=True)
    if options.sections == ["sanitizer"]:
        return finish(options, {"sanitizer": run_sanitizer(options.cores)})
    return finish(options, run_sections(options))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = ("compile", "real", "cases", "time", "sanitizer")
    parser.add_argument(
        "sections",
        nargs="*",
        default=["compile", "real", "cases", "time"],
        metavar="SECTION",
        help=f"any of {', '.join(known)}",
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--workers", type=int, default=6, help="processes that draw cases")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only items whose name holds this")
    parser.add_argument("--limit-s", type=float, default=560, help="stop starting work after this")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.sections) - set(known)
    if unknown or ("sanitizer" in options.sections and len(options.sections) > 1):
        parser.error(f"sections are {', '.join(known)}; sanitizer stands alone")
    return options


def run_sections(options: argparse.Namespace) -> dict[str, list[Result]]:
    """Compile what the sections need, then run them, the most important first."""
    deadline = time.monotonic() + options.limit_s
    plans, refused = proven()
    chosen: dict[str, list[Item]] = {}
    makers = {
        "real": real_items,
        "cases": lambda: case_items(plans, options.cases, options.seed),
        "time": time_items,
    }
    for name in makers:
        if name in options.sections:
            chosen[name] = [item for item in makers[name]() if options.only in item["id"]]
    needed = [Plan.from_json(item["plan"]) for item in chosen.get("cases", [])]
    needed += shape_plans(chosen.get("real", []) + chosen.get("time", []))
    if "compile" in options.sections:
        needed += [*plans, *(plan for plan, _ in sanitizer_items())]
    say(f"compiling {len({plan.kernel.stem for plan in needed})} kernels")
    done = {"compile": refused + compile_all(needed, options.cores)}
    say(f"compiled, {sum(not result['ok'] for result in done['compile'])} failures")
    write(options, "compile", done["compile"])
    for name, items in chosen.items():
        say(f"{name}: {len(items)} items")
        workers = options.workers if name == "cases" else 1
        done[name] = spread(name, items, min(workers, max(1, len(items))), deadline)
        write(options, name, done[name])
    return done


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def write(options: argparse.Namespace, section: str, results: list[Result]) -> None:
    """One document a section, with where and of what it was measured."""
    try:
        where = bench.device()
    except FasimError as error:
        where = {"error": str(error)}
    kernels = [render(plan) for plan in catalogue.plans()]
    document = {
        "schema": "fasim.spine/1",
        "section": section,
        "date": time.strftime("%Y-%m-%d"),
        "device": where,
        "sources": bench.sources_sha(*kernels),
        "ok": all(result["ok"] for result in results),
        "results": results,
    }
    if section == "cases":
        document["histogram"] = dict(sorted(histogram(results).items()))
        document["empty_bins"] = list(properties.empty_bins(histogram(results)))
    (options.out / f"spine-{section}.json").write_text(json.dumps(document, indent=1) + "\n")


def histogram(results: list[Result]) -> Counter[str]:
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.get("histogram", {}))
    return total


def finish(options: argparse.Namespace, done: dict[str, list[Result]]) -> int:
    """Write everything, print failures, then a short table."""
    for name, results in done.items():
        write(options, name, results)
    for result in itertools.chain(*done.values()):
        if not result["ok"]:
            print(f"FAILED {result['id']}: {why(result)}"[:700])
    for row in table(done):
        print(row)
    complete = cases_complete(options, done.get("cases"))
    good = complete and all(result["ok"] for result in itertools.chain(*done.values()))
    print("ok" if good else "FAILED")
    return 0 if good else 1


def why(result: Result) -> str:
    if result.get("failure"):
        return json.dumps(result["failure"])
    wrong = [entry for entry in result.get("entries", []) if not entry["ok"]]
    return json.dumps(wrong) if wrong else str(result.get("error") or result.get("missing"))


def cases_complete(options: argparse.Namespace, results: list[Result] | None) -> bool:
    if results is None or options.only:
        return True
    empty = properties.empty_bins(histogram(results))
    if empty:
        print(f"EMPTY BINS: {', '.join(empty)}")
    inputs = sum(result.get("inputs", 0) for result in results)
    if inputs < options.cases:
        print(f"ONLY {inputs} of {options.cases} cases")
    return not empty and inputs >= options.cases


def table(done: dict[str, list[Result]]) -> Iterator[str]:
    """Every number a person looks for, the sums last."""
    for result in done.get("real", []):
        yield from real_rows(result)
    for result in done.get("time", []):
        yield from time_rows(result)
    if done.get("cases"):
        total = {key: sum(r.get(key, 0) for r in done["cases"]) for key in ("inputs", "checks")}
        yield f"cases: {total['inputs']} inputs, {total['checks']} checks"
    more = [result for result in done.get("compile", []) if result["ok"] and result["error"]]
    yield from (f"{result['id']}: {result['error']}".replace("\n", ",") for result in more[:5])
    yield f"compile: {len(more)} kernels use more than their plan promised"
    for name, results in done.items():
        yield f"{name}: {sum(result['ok'] for result in results)} of {len(results)} ok"


def real_rows(result: Result) -> Iterator[str]:
    for entry in result.get("entries", []):
        shares = entry.get("share_of_tolerance", {})
        words = " ".join(f"{name} {100 * share:.0f}%" for name, share in shares.items())
        error = entry.get("largest_error", math.nan)
        yield f"{result['id']:38} {entry['id']} error {error:.1e} of tolerance: {words}"


def time_rows(result: Result) -> Iterator[str]:
    for timing in result.get("timings", []):
        tflops = result["useful_flops"] / timing["seconds"] / 1e12
        predicted = timing["predicted_s"]
        model = f" model {predicted * 1e6:.0f} us" if predicted else ""
        clock = timing["clocks"].get("sm_mhz", math.nan)
        yield (
            f"{result['id']:34} {timing['name']:8} {timing['seconds'] * 1e6:9.1f} us "
            f"{tflops:6.1f} TFLOP/s +-{100 * timing['spread']:.0f}% {clock:.0f} MHz{model}"
        )


if __name__ == "__main__":
    sys.exit(main())

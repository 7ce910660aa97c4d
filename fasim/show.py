"""Answers as text: what each command prints, every number with its unit (fasim.units)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasim import picture, units
from fasim.screen import Screen

if TYPE_CHECKING:
    from fasim import comparison as comparison_
    from fasim.accuracy import Accuracy, Errors
    from fasim.bench import Measurement
    from fasim.compile import Binary
    from fasim.entry import Entry
    from fasim.explain import Term
    from fasim.gpu import Gpu
    from fasim.model.timeline import Times
    from fasim.plan import KernelSpec
    from fasim.problem import Problem
    from fasim.properties import Outcome, Report
    from fasim.render import Kernel
    from fasim.timeline import Timeline

# ---- GPUs ---------------------------------------------------------------------------------------

DTYPES = ("fp16", "bf16", "tf32", "e4m3")


def gpus(screen: Screen, found: Sequence[Gpu], here: str | None) -> None:
    """A table of GPUs; the one of this machine is marked."""
    header = ("name", "arch", "SMs", "HBM", "bandwidth", "L2", "SRAM", "fp16", "e4m3", "")
    screen.table(header, [(*_gpu_row(gpu), "<- here" if gpu.name == here else "") for gpu in found])


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    return (
        gpu.name,
        gpu.arch,
        str(gpu.sm_count),
        units.capacity(gpu.hbm_bytes),
        units.scaled(gpu.hbm_bandwidth, "B/s"),
        units.capacity(gpu.l2_bytes),
        units.capacity(gpu.sram_bytes),
        _peak(gpu, "fp16"),
        _peak(gpu, "e4m3"),
    )


def _peak(gpu: Gpu, dtype: str) -> str:
    peak = gpu.tensor_peak(dtype)
    return units.tflops(peak) if peak else ("unknown" if peak is None else "-")


def gpu(screen: Screen, gpu: Gpu, sources: bool) -> None:
    """One GPU: its levels, peaks, ridge points, and what nobody has published."""
    also = f", also {', '.join(gpu.aliases)}" if gpu.aliases else ""
    major, minor = gpu.compute_capability
    screen.line(f"{gpu.title} ({gpu.name}{also})")
    screen.line(f"compute capability {major}.{minor}, {gpu.arch}, {gpu.sm_count} SMs")
    screen.line()
    screen.table(("level", "capacity", "bandwidth", "latency"), _levels(gpu))
    screen.line()
    screen.table(("type", "dense peak", "ridge point"), [_peak_row(gpu, d) for d in DTYPES])
    screen.line()
    screen.facts(_gpu_facts(gpu))
    for note in gpu.notes:
        screen.facts([("note", note)])
    if sources:
        screen.line()
        screen.facts(sorted((f"{name:<24}", source) for name, source in gpu.sources.items()))


def _levels(gpu: Gpu) -> Iterator[tuple[str, ...]]:
    clocks = gpu.sm_count * gpu.boost_clock_hz
    smem = gpu.smem_bytes_per_clock and gpu.smem_bytes_per_clock * clocks
    per_sm = f"{gpu.sm_count} x {units.capacity(gpu.smem_per_sm)}"
    registers = f"{gpu.sm_count} x {units.capacity(4 * gpu.registers_per_sm)}"
    yield (
        "HBM",
        units.capacity(gpu.hbm_bytes),
        _rate(gpu.hbm_bandwidth),
        _clocks(gpu.hbm_latency_clocks),
    )
    yield (
        "L2",
        units.capacity(gpu.l2_bytes),
        _rate(gpu.l2_bandwidth),
        _clocks(gpu.l2_latency_clocks),
    )
    yield "shared memory", per_sm, _rate(smem), _clocks(gpu.smem_latency_clocks)
    yield "registers", registers, "", ""


def _rate(rate: float | None) -> str:
    return "unknown" if rate is None else units.scaled(rate, "B/s")


def _clocks(clocks: float | None) -> str:
    return "unknown" if clocks is None else f"{units.digits(clocks)} clocks"


def _peak_row(gpu: Gpu, dtype: str) -> tuple[str, str, str]:
    ridge = gpu.ridge_point(dtype)
    return dtype, _peak(gpu, dtype), f"{units.digits(ridge)} FLOP/B" if ridge else "-"


def _gpu_facts(gpu: Gpu) -> Iterator[tuple[str, str]]:
    fp32 = gpu.fp32_flops * gpu.sm_count * gpu.boost_clock_hz
    measured = gpu.hbm_bandwidth_measured
    yield "total SRAM", f"{units.capacity(gpu.sram_bytes)} of shared memory"
    yield "one block", f"{units.capacity(gpu.smem_per_block)} of shared memory at most"
    yield "clock", f"{units.scaled(gpu.boost_clock_hz, 'Hz')} boost"
    yield "fp32", f"{units.tflops(fp32)} without tensor cores"
    if measured:
        yield "HBM measured", units.scaled(measured, "B/s")
    yield "unknown", ", ".join(gpu.unknown) or "nothing"


def gpus_document(found: Sequence[Gpu], here: str | None) -> dict[str, Any]:
    """Every value of GPUs, in the units of fasim.gpu.Gpu."""
    return {"schema": "fasim.gpus/1", "detected": here, "gpus": [_gpu_json(gpu) for gpu in found]}


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    derived = {
        "unknown": list(gpu.unknown),
        "sram_bytes": gpu.sram_bytes,
        "tensor_peak": {dtype: gpu.tensor_peak(dtype) for dtype in DTYPES},
        "ridge_point": {dtype: gpu.ridge_point(dtype) for dtype in DTYPES},
    }
    return asdict(gpu) | derived


# ---- this machine -------------------------------------------------------------------------------


def doctor(screen: Screen, examined: Mapping[str, Any]) -> None:
    """What this machine offers, one line each."""
    screen.facts(_doctor_facts(examined))


def _doctor_facts(examined: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "fasim", f"{examined['fasim']} on {examined['platform']}"
    yield "python", "{version}  {path}".format(**examined["python"])
    yield "nvcc", _nvcc_fact(examined["nvcc"])
    yield "host compiler", examined["host_compiler"] or "none: nvcc needs one (install g++)"
    for name, version in examined["packages"].items():
        yield name, version or "not installed"
    yield "GPU", _gpu_fact(examined["gpu"])
    yield "cache", _cache_fact(examined["cache"])
    for setting in examined["environment"]:
        value = setting["value"] or "not set"
        yield setting["name"], f"{value}  ({setting['origin']}: {setting['meaning']})"


def _nvcc_fact(nvcc: Mapping[str, Any]) -> str:
    if not nvcc["found"]:
        return f"none: {nvcc['reason']} ({nvcc['hint']})"
    targets = sorted(nvcc["targets"], key=lambda arch: int(arch[3:].rstrip("af")))
    span = f"{targets[0]} to {targets[-1]}" if targets else "targets unknown"
    return f"{nvcc['version']}  {nvcc['path']}  (from {nvcc['from']}; {span})"


def _gpu_fact(gpu: Mapping[str, Any]) -> str:
    if gpu["runs_kernels"]:
        return f"{gpu['name']} ({gpu['known_as'] or 'not in `fasim gpus`'}), runs kernels"
    return f"{gpu['known_as'] or 'none'}, runs no kernels: {gpu['reason']}"


def _cache_fact(cache: Mapping[str, Any]) -> str:
    return f"{cache['path']}  ({cache['kernels']} kernels, {units.capacity(cache['bytes'])})"


# ---- kernels ------------------------------------------------------------------------------------


def generated(screen: Screen, kernel: Kernel, path: Path) -> None:
    """Where a kernel was written."""
    lines = kernel.source.count("\n")
    screen.line(f"wrote {path} ({lines} lines, kernel {kernel.stem})")


def build(screen: Screen, kernel: Kernel, binary: Binary) -> None:
    """What the compiler used, against what the plan promised."""
    used = binary.resources
    screen.facts(
        [
            ("kernel", kernel.stem),
            ("registers", f"{used.registers} of {kernel.plan.registers} planned a thread"),
            ("spills", f"{used.spill_stores} B stored, {used.spill_loads} B loaded"),
            ("shared memory", f"{_shared(kernel)} dynamic, {used.smem_static} B static"),
            ("stack", f"{used.stack} B"),
            ("cubin", f"{binary.cubin}{' (cached)' if binary.cached else ''}"),
        ]
    )


def _shared(kernel: Kernel) -> str:
    return units.capacity(kernel.plan.smem_bytes)


def resources(kernel: Kernel, binary: Binary) -> str:
    """The same in one line."""
    used = binary.resources
    spilled = used.spill_stores + used.spill_loads
    return (
        f"{used.registers} registers of {kernel.plan.registers} planned, {spilled} B of spills,"
        f" {_shared(kernel)} of shared memory"
    )


def build_document(kernel: Kernel, binary: Binary) -> dict[str, Any]:
    """The same as JSON."""
    planned = {"registers": kernel.plan.registers, "smem_bytes": kernel.plan.smem_bytes}
    return {
        "schema": "fasim.build/1",
        "kernel": kernel.stem,
        "edited": kernel.edited,
        "command": list(binary.command),
        "cached": binary.cached,
        "cubin": str(binary.cubin),
        "planned": planned,
        "resources": asdict(binary.resources),
    }


def verifications(screen: Screen, reports: Sequence[Report]) -> None:
    """Report by report."""
    for place, report in enumerate(reports):
        if place:
            screen.line()
        verification(screen, report)


def verification(screen: Screen, report: Report) -> None:
    """One line a property, what was executed, then what a reader must know."""
    screen.line(f"{report.stem} on {report.runner}, seed {report.seed}")
    screen.line()
    screen.table(("property", "result", "cases", "worst error"), map(_outcome, report.outcomes))
    for outcome in report.outcomes:
        if outcome.skipped:
            screen.line(f"{_words(outcome)} skipped: {outcome.skipped}")
    if report.executed and report.executed.launches:
        screen.line()
        screen.facts([("executed", executed(report))])
    if report.note:
        screen.note(report.note)


def _outcome(outcome: Outcome) -> tuple[str, str, str, str]:
    if outcome.skipped:
        return _words(outcome), "skipped", "", ""
    result = "FAILED" if outcome.failure else "ok"
    worst = f"{units.percent(outcome.worst)} of tolerance" if outcome.worst else ""
    return _words(outcome), result, str(outcome.cases), worst


def _words(outcome: Outcome) -> str:
    return outcome.name.replace("_", " ")


def executed(report: Report) -> str:
    """What a runner that counts has run, in one line; each launch had a schedule of its own."""
    counted = report.executed
    assert counted is not None, "only the emulator counts"
    return (
        f"{units.grouped(counted.blocks)} blocks,"
        f" {units.scaled(counted.instructions, '')} instructions,"
        f" {units.traffic(counted.bytes)} of global traffic,"
        f" {units.plural(counted.launches, 'schedule')}"
    )


def accuracy(screen: Screen, spec: KernelSpec, found: Sequence[Accuracy]) -> None:
    """A line for each kind of input: errors of the kernel, and of bf16."""
    if not found:
        return
    made = f"{spec.in_dtype} inputs" if spec.quantises else "inputs before they were quantised"
    screen.line()
    screen.line(f"errors against float64 on the {made}")
    header = ("inputs", "RMSE", "largest", "cosine", "bf16: RMSE", "largest", "cosine", "rms of O")
    screen.table(header, map(_accuracy, found))


def _accuracy(one: Accuracy) -> tuple[str, ...]:
    numbers = [_errors(errors) for errors in (one.kernel, one.bf16)]
    return (one.inputs, *numbers[0], *numbers[1], f"{one.rms:.2g}")


def _errors(errors: Errors) -> tuple[str, str, str]:
    return f"{errors.rmse:.1e}", f"{errors.largest:.1e}", f"{errors.cosine:.6f}"


def verification_document(
    reports: Sequence[Report], found: Sequence[Accuracy] | None = None
) -> dict[str, Any]:
    """One report as JSON; of several, each by its runner and whether all are ok. What was found of
    the accuracy in e4m3 stands beside."""
    each = [report.to_json() for report in reports]
    errors = {} if found is None else {"accuracy": [one.to_json() for one in found]}
    if len(each) == 1:
        return {**each[0], **errors}
    failed = [report.runner for report in reports if not report.ok]
    head = {"schema": each[0]["schema"], "kernel": each[0]["kernel"], "runner": "both"}
    return {**head, "ok": not failed, "failed": failed, "reports": each, **errors}


def verdict(report: Report) -> str:
    """The same in a few words."""
    tried = [outcome for outcome in report.outcomes if not outcome.skipped]
    worst = max((outcome.worst for outcome in tried), default=0.0)
    return (
        f"{len(tried)} properties on {report.cases} cases hold,"
        f" worst error {units.percent(worst)} of its tolerance"
    )


def measurement(screen: Screen, measured: Measurement) -> None:
    """Measured beside predicted."""
    screen.line(f"{measured.kernel} on {measured.device['name']}")
    screen.line(shape(measured.problem))
    screen.line()
    screen.facts(_measured_facts(measured))


def _measured_facts(measured: Measurement) -> Iterator[tuple[str, str]]:
    from fasim.model import flops

    seconds, guess = measured.seconds, measured.predicted_s
    useful = flops.useful(measured.problem, measured.problem.pass_)
    yield "measured", f"{units.seconds(seconds)} median, spread {units.percent(measured.spread)}"
    yield "rate", f"{units.tflops(useful / seconds)} of useful work"
    if guess is None:
        yield "predicted", "nothing: this GPU or tile is not one that fasim models"
    else:
        yield "predicted", f"{units.seconds(guess)}, {units.factor(guess / seconds)} the measured"
    for peer in measured.peers:
        took, times = units.seconds(peer.seconds), units.factor(peer.seconds / seconds)
        yield f"beside {peer.name}", f"{took}, {times} the kernel's"
    for name, reason in measured.missing.items():
        yield f"no {name}", reason


LANE_WIDTH = 100  # columns


def timeline(screen: Screen, taken: Timeline) -> None:
    """Lanes of text, the model's below, and what the consumers' time went to."""
    from fasim import timeline as lanes

    where = taken.device.get("name", "in the emulator: notes are counted, not timed")
    screen.line(f"{taken.kernel}, block 0, {where}")
    screen.line(shape(taken.problem))
    if taken.cost:
        screen.line(f"the build that notes takes {units.factor(taken.cost)} the kernel's time")
    for title, spans, unit in (
        ("noted", taken.spans, taken.unit),
        ("model: every pipe at its rate", taken.model, "clocks"),
    ):
        if spans:
            step, shares = lanes.a_step(spans), lanes.shares(spans)
            screen.line(f"\n{title}, {step:.0f} {unit} a step, the first {lanes.SHOWN}")
            screen.facts(lanes.drawn(spans, LANE_WIDTH).items())
            screen.line(", ".join(f"{what} {units.percent(x)}" for what, x in shares.items()))
    screen.line(f"\n{lanes.LEGEND}")


# ---- plans --------------------------------------------------------------------------------------

LEVELS = {
    "hbm": "HBM",
    "l2": "L2 to SMs",
    "smem": "shared memory",
    "tensor": "matmul",
    "mufu": "softmax",
    "launch": "launch",
}


def shape(problem: Problem) -> str:
    """A problem in one line: ``batch 1, 16 heads, seq 4096, head_dim 128, causal``."""
    p = problem
    heads = f"{p.heads} head{'s' if p.heads != 1 else ''}"
    heads += f" ({p.kv_heads} of K and V)" if p.group > 1 else ""
    keys = f" x {p.seq_kv}" if p.seq_kv != p.seq else ""
    dims = f" (V {p.head_dim_v})" if p.head_dim_v != p.head_dim else ""
    mask = {"full": "", "causal": ", causal"}.get(p.mask, f", window {p.reach[0]},{p.reach[1]}")
    made = f", from {p.in_dtype}{', rotated' * p.incoherent}" if p.quantises else ""
    return f"batch {p.batch}, {heads}, seq {p.seq}{keys}, head_dim {p.head_dim}{dims}{mask}{made}"


def headline(entry: Entry, gpu: Gpu) -> str:
    """What is planned, where: ``v2 fwd fp16 on NVIDIA A100 SXM4 80GB (sm_80)``."""
    return f"{entry.algo} {entry.pass_} {entry.problem.dtype} on {gpu.title} ({entry.arch})"


def plan(screen: Screen, entry: Entry, gpu: Gpu) -> None:
    """The short answer: tile, limits, levels, time, memory."""
    screen.line(headline(entry, gpu))
    screen.line(shape(entry.problem))
    for part in (entry.fwd, entry.bwd) if entry.fwd and entry.bwd else (entry,):
        assert part is not None  # both were asked for above
        screen.line()
        screen.facts(_tile_facts(part, gpu))
        screen.line()
        screen.table((part.pass_, "work", "rate", "time", ""), _level_rows(part, gpu))
    screen.line()
    screen.facts(_summary(entry, gpu))
    for sentence in entry.assumed:
        screen.note(sentence)


def choice(entry: Entry) -> str:
    """The tile in words: ``128 queries x 64 keys, 2 stages, 4 warps``."""
    tile = entry.tile
    if tile is None:
        return "unfused launches, no tile"
    rows = "packed rows" if entry.packed else "queries"
    words = [f"{tile.block_q} {rows} x {tile.block_kv} keys"]
    if entry.splits:
        words = [f"{tile.block_q} packed rows x {tile.block_kv} keys, {tile.keys_per_step} a warp"]
    elif tile.keys_per_step != tile.block_kv:
        words.append(f"scored {tile.keys_per_step} at a time")
    return ", ".join([*words, units.plural(tile.stages, "stage"), units.plural(tile.warps, "warp")])


def _tile_facts(entry: Entry, gpu: Gpu) -> Iterator[tuple[str, str]]:
    yield "tile", choice(entry)
    if entry.tile is None:
        return
    blocks = f"{units.grouped(entry.grid)} blocks of {entry.block} threads"
    yield "launch", f"{blocks}, {entry.blocks_per_sm} on an SM (limited by {entry.limiter})"
    if entry.splits:
        parts = units.plural(entry.splits, "part")
        yield "splits", f"the keys in {parts}, then a kernel that combines them"
    if entry.dq != "atomic":
        yield "dQ", _FORMS[entry.dq]
    yield "shared memory", units.used(entry.smem_bytes, gpu.smem_per_block)
    yield "registers", f"{entry.registers} of {gpu.registers_per_thread} a thread"


_FORMS = {
    "ordered": "added to in turns, in the order of the keys: the same bits in every run",
    "second_pass": "made by a kernel of its own: the same bits in every run",
}


def _level_rows(entry: Entry, gpu: Gpu) -> Iterator[tuple[str, ...]]:
    """Work, the rate of its pipe, and so the seconds; the longest is marked with a word."""
    for name, label in LEVELS.items():
        time_s = entry.time.terms[name]
        amount, unit = _work(entry, gpu, name)
        yield (
            label,
            units.scaled(amount, unit) if amount else "",
            units.scaled(amount / time_s, f"{unit}/s") if amount and time_s else "",
            units.seconds(time_s) if time_s else "-",
            "<- bound" if name == entry.time.bound else "",
        )


def _work(entry: Entry, gpu: Gpu, level: str) -> tuple[float, str]:
    """What one level has to do."""
    from fasim import work

    if level == "hbm" and entry.dram:
        return entry.dram.total, "B"
    if level == "l2" and entry.issued:
        return entry.issued.total, "B"
    if level == "smem":
        return work.smem_bytes(entry, gpu), "B"
    if level == "mufu":
        return work.exponentials(entry), "exp"
    return (entry.executed_flops, "FLOP") if level == "tensor" else (0, "")


def _summary(entry: Entry, gpu: Gpu) -> Iterator[tuple[str, str]]:
    yield "predicted", predicted(entry.time)
    memory = f"{units.capacity(entry.hbm.total)} of {units.capacity(gpu.hbm_bytes)}"
    yield "memory", f"{memory}; the longest seq that fits is {units.grouped(entry.max_seq)}"
    if entry.tile:
        from fasim import work

        legal, tried = work.legal_tiles(entry, gpu)
        yield "chosen from", f"{legal} legal of {tried} tiles; `fasim explain` says why it won"
    if not entry.generable:
        yield "no kernel", entry.reason


def predicted(times: Times) -> str:
    """The predicted time with its bracket and what binds it."""
    bracket = f"{units.seconds(times.low)} to {units.seconds(times.high)}"
    return f"{units.seconds(times.seconds)} ({bracket}), bound by {LEVELS[times.bound]}"


def alternatives(screen: Screen, entry: Entry) -> None:
    """The best tiles, the chosen one first."""
    rows = [_ranked(place, e, entry) for place, e in enumerate((entry, *entry.alternatives), 1)]
    screen.line()
    header = ("", "tile", "stages", "warps", "shared", "registers", "blocks/SM", "time", "")
    screen.table(header, rows)


def _ranked(place: int, entry: Entry, best: Entry) -> tuple[str, ...]:
    tile = entry.tile
    assert tile is not None  # only tiles have alternatives
    return (
        str(place),
        str(tile),
        str(tile.stages),
        str(tile.warps),
        units.capacity(entry.smem_bytes),
        str(entry.registers),
        str(entry.blocks_per_sm),
        units.seconds(entry.time.seconds),
        units.factor(entry.time.seconds / best.time.seconds),
    )


def judged(screen: Screen, mine: Entry, best: Entry) -> None:
    """A tile somebody asked for, beside the planner's own."""
    if mine.tile == best.tile:
        return screen.facts([("judgement", "this is the tile the planner chooses")])
    ratio = units.factor(mine.time.seconds / best.time.seconds)
    own = f"{best.tile} takes {units.seconds(best.time.seconds)}"
    screen.facts([("judgement", f"{ratio} the time of the planner's own: {own}")])


def tiles(screen: Screen, entry: Entry) -> None:
    """The score matrix of one head, a character a tile."""
    part = entry.fwd or entry
    if part.tile is None:
        return screen.note("standard attention has no tiles to draw")
    rows, columns = picture.scale(part.problem, part.tile)
    grouped = f"; a character is {rows} x {columns} tiles" if rows * columns > 1 else ""
    screen.line()
    screen.line(f"queries down, keys across, {part.tile} a tile{grouped}")
    for line in picture.draw(part.problem, part.tile):
        screen.line(line)
    screen.line(picture.LEGEND)


# ---- comparisons --------------------------------------------------------------------------------


def comparison(screen: Screen, report: comparison_.Report) -> None:
    """The table of the four algorithms, or of their times along a sweep."""
    if report.option is None:
        _one_comparison(screen, report.gpu, report.points[0])
    else:
        _swept(screen, report)
    screen.line()
    screen.facts(_comparison_facts(report))
    for reason in _reasons(report.points):
        screen.note(reason)


def _one_comparison(screen: Screen, gpu: Gpu, compared: comparison_.Comparison) -> None:
    screen.line(f"{compared.problem.dtype} {compared.problem.pass_} on {gpu.title}")
    screen.line(shape(compared.problem))
    screen.line()
    header = ("", "memory", "fits", "longest seq", "HBM traffic", "FLOPs", "time")
    rows = (_compared(compared, place) for place in range(len(compared.entries)))
    screen.table((*header, "over previous", "over standard"), rows)


def _compared(compared: comparison_.Comparison, place: int) -> tuple[str, ...]:
    entry, speedup = compared.entries[place], compared.speedup(place)
    if not entry.available:
        return (entry.algo, *["-"] * 8)
    return (
        entry.algo,
        units.capacity(entry.hbm.total),
        "yes" if entry.fits else "no",
        units.grouped(entry.max_seq),
        units.traffic(entry.dram.total) if entry.dram else "-",
        units.scaled(entry.executed_flops, "FLOP"),
        units.seconds(entry.time.seconds),
        *(_speedup(speedup[name]) for name in ("over_previous", "over_standard")),
    )


def _speedup(ratio: float | None) -> str:
    return "-" if ratio is None else units.factor(ratio)


def _swept(screen: Screen, report: comparison_.Report) -> None:
    problem = report.points[0].problem
    screen.line(f"{problem.dtype} {problem.pass_} on {report.gpu.title}")
    screen.line(f"{shape(problem)}; only {report.option} changes")
    screen.line()
    algos = [entry.algo for entry in report.points[0].entries]
    points = zip(report.values, report.points, strict=True)
    rows = [(units.grouped(value), *_times(point)) for value, point in points]
    screen.table((str(report.option), *algos, "fastest"), rows)


def _times(compared: comparison_.Comparison) -> Iterator[str]:
    for entry in compared.entries:
        fits = units.seconds(entry.time.seconds) if entry.available and entry.fits else "no memory"
        yield fits if entry.available else "-"
    yield compared.fastest.algo if compared.fastest else "-"


def _comparison_facts(report: comparison_.Report) -> Iterator[tuple[str, str]]:
    crossover = "none: flash attention wins at every length"
    if report.crossover is not None:
        crossover = f"up to seq {units.grouped(report.crossover)} flash attention brings nothing"
    yield "crossover", crossover
    if report.option is not None:
        return
    share = report.recomputed_flops / report.backward_flops if report.backward_flops else 0
    recomputed = units.scaled(report.recomputed_flops, "FLOP")
    yield "recomputation", f"{recomputed} more in backward (+{units.percent(share)})"
    if report.points[0].problem.pass_ != "train":
        return
    for entry in report.points[0].entries:
        if entry.available:
            what = "P" if entry.algo == "standard" else "O and LSE"
            yield f"{entry.algo} stores", f"{units.capacity(entry.hbm.saved)} for backward ({what})"


def _reasons(points: Sequence[comparison_.Comparison]) -> list[str]:
    """Why something is missing from the table, each sentence once."""
    missing = [e for point in points for e in point.entries if not e.available]
    return list(dict.fromkeys(f"{entry.algo}: {entry.reason}" for entry in missing))


# ---- derivations --------------------------------------------------------------------------------


def derivation(screen: Screen, entry: Entry, gpu: Gpu, terms: Sequence[Term]) -> None:
    """Every term: its parts, the total, remarks."""
    screen.line(headline(entry, gpu))
    screen.line(shape(entry.problem))
    for term in terms:
        screen.line()
        screen.line(f"{term.name} ({term.of})")
        rows = [(f"  {part.name}", part.how, term.show(part.value)) for part in term.parts]
        if rows:
            screen.table(("", "", ""), [*rows, ("  total", "", term.show(term.total))])
        for remark in term.remarks:
            screen.line(f"  {remark}")

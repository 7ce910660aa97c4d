"""The only chooser: candidates -> legality -> ranking by predicted time -> an Entry that explains.

The model computes, this module decides: which tiles are tried, which of the legal ones wins, which
algorithms a GPU can run, and what fasim can generate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from fasim.candidates import candidates, judged, paper_tile, rounded_paper_tile
from fasim.entry import Entry
from fasim.errors import NoPlanError, UsageError
from fasim.gpu import Gpu
from fasim.legality import RULES, Case, broken, sentence
from fasim.model import flops, footprint, timeline, traffic
from fasim.model.footprint import HbmBytes
from fasim.model.silicon import rates
from fasim.model.tiles import Ints, Tiles, round_up
from fasim.model.timeline import Times
from fasim.model.traffic import Bytes
from fasim.plan import (
    FORMS,
    PACKINGS,
    POINTERS,
    TMA_BYTES,
    V3,
    V3_DTYPES,
    KernelSpec,
    Plan,
    Tile,
    padded_tensors,
    ungroupable,
    unpackable,
)
from fasim.problem import Problem

ALGOS = ("standard", "v1", "v2", "v3")
# Beyond this the exact counts would overflow; such a problem runs for weeks.
MOST_BYTES = 2**62
MIN_CAPABILITY = (7, 5)  # of the templates, forward
MIN_CAPABILITY_BACKWARD = (8, 0)
CROSSOVER_RANGE = (64, 65536)
# V3 packs the rows of a group where queries are few: beyond so many whole tiles are nearly full.
PACKED_QUERIES = 1024
SPLIT_ROWS = 256  # of one K/V head: with more of them every row block would read all keys again


# ---- what runs where ----------------------------------------------------------------------------


def unavailable(problem: Problem, gpu: Gpu, algo: str) -> str:
    """Why ``algo`` cannot run the problem on ``gpu``; empty if it can."""
    rules = (  # what stops every algorithm first
        (_lacks(gpu, problem.dtype), f"{gpu.name} has no {problem.dtype} tensor cores"),
        (_most_bytes(problem) >= MOST_BYTES, "it would move more than 4 EiB: beyond this model"),
        (algo == "v3" and not gpu.wgmma, "wgmma and TMA exist only on sm_90a"),
        (algo == "v3" and problem.dtype == "fp32", "wgmma has no fp32"),
        (algo == "v1" and problem.dtype == "e4m3", "only V2 and V3 compute in e4m3"),
        (algo == "v2" and problem.quantises, f"only V3 makes e4m3 of {problem.in_dtype} itself"),
    )
    return next((reason for applies, reason in rules if applies), "")


def _lacks(gpu: Gpu, dtype: str) -> bool:
    return dtype != "fp32" and gpu.tensor_flops.get(dtype, 0) == 0


def _most_bytes(problem: Problem) -> int:
    """A bound on issued bytes and executed FLOPs of any candidate."""
    p = problem
    pairs = (p.seq + 1024) * (p.seq_kv + 1024)
    return p.batch * p.heads * pairs * 2 * (4 * p.head_dim + 4 * p.head_dim_v + 32)


def missing(problem: Problem, gpu: Gpu, algo: str, pass_: str) -> str:
    """What fasim lacks to generate the kernel; empty if it can."""
    capability = ".".join(map(str, gpu.compute_capability))
    rules = (
        (algo == "standard", "standard has no kernel of its own: it is three unfused torch calls"),
        (algo == "v3" and _v3(problem, pass_) != "", _v3(problem, pass_)),
        (
            pass_ != "fwd" and (algo, pass_) not in POINTERS,
            f"the {algo} backward kernel is planned, not generated yet",
        ),
        (pass_ == "train", "a backward and a forward kernel are two files"),
        (problem.dtype == "e4m3" and _e4m3(problem, algo) != "", _e4m3(problem, algo)),
        (gpu.compute_capability < MIN_CAPABILITY, _too_old(gpu, capability)),
        (
            pass_ == "bwd" and gpu.compute_capability < MIN_CAPABILITY_BACKWARD,
            f"backward kernels start at compute capability 8.0, {gpu.name} has {capability}",
        ),
        (problem.varlen and problem.dense, "a dense bias of packed sequences has no layout yet"),
    )
    return next((reason for applies, reason in rules if applies), "")


def _v3(problem: Problem, pass_: str) -> str:
    """Why no V3 kernel is generated for the problem; empty if one is."""
    asked = {
        f"the {pass_} pass": pass_ != "fwd",
        problem.dtype: problem.dtype not in V3_DTYPES,
        f"{problem.out_dtype} output": problem.out_dtype == "fp32" != problem.dtype,
    }
    names = " and ".join(name for name, wanted in asked.items() if wanted)
    return f"v3 with {names} is planned, not generated yet" if names else ""


def _e4m3(problem: Problem, algo: str) -> str:
    """Why no e4m3 kernel is generated for the problem; empty if nothing of it stops that."""
    rules = (
        (problem.scales == "block" and algo != "v3", "only V3 has scale factors of blocks"),
        (
            problem.bias == "dense" and problem.in_dtype == "e4m3",
            "a dense bias in e4m3 is too coarse: --bias dense_fp32 is exact",
        ),
    )
    return next((reason for applies, reason in rules if applies), "")


def _too_old(gpu: Gpu, capability: str) -> str:
    volta = gpu.compute_capability < (7, 5)
    why = "; its fp16 mma is m8n8k4, and CUDA 13 dropped sm_70" if volta else ""
    return f"the kernels start at compute capability 7.5, {gpu.name} has {capability}{why}"


def kernel_arch(gpu: Gpu, algo: str) -> str:
    """The compile target: V3 needs the architecture-specific one, V1 and V2 the plain one."""
    return gpu.arch if algo in (*V3, "standard") else "sm_{}{}".format(*gpu.compute_capability)


# ---- one pass of one algorithm ------------------------------------------------------------------


class _Ranking:
    """The judged tiles of one pass, the legal ones in order of merit."""

    def __init__(self, problem: Problem, gpu: Gpu, algo: str, pass_: str, tiles: Tiles) -> None:
        self.problem, self.gpu, self.algo, self.pass_ = problem, gpu, algo, pass_
        self.all = Case.of(problem, gpu, algo, pass_, tiles)
        self.broken = broken(self.all)
        self.legal = self.all.take(self.broken == self._unbroken)
        if len(self.legal):
            self._rank()

    @property
    def _unbroken(self) -> int:
        return len(RULES[self.algo, self.pass_])

    def _rank(self) -> None:
        """Fastest first; ties: more blocks on an SM, fewer issued bytes, less shared memory, the
        smaller tile."""
        problem, algo, pass_, case = self.problem, self.algo, self.pass_, self.legal
        times = timeline.predict(problem, self.gpu, algo, pass_, case.tiles, case.blocks_per_sm)
        moved = traffic.issued(problem, algo, pass_, case.tiles).total
        area = case.tiles.block_q * case.tiles.block_kv
        self.order = np.lexsort((area, case.smem, moved, -case.blocks_per_sm, times.seconds))
        self.seconds = float(times.seconds.min())

    def reason(self) -> str:
        """Why no tile is legal: the sentence of the tile that came furthest."""
        place = int(self.broken.max())
        return sentence(self.all, int(self.broken.argmax()), place)

    def neighbours(self, best: Tile) -> tuple[tuple[str, str], ...]:
        """Rejected tiles one choice away from the best, nearest first."""
        found = set()
        for index in np.flatnonzero(self.broken < self._unbroken):
            tile = self.all.tiles.tile(int(index))
            if (distance := _distance(tile, best)) is not None:
                why = sentence(self.all, int(index), int(self.broken[index]))
                found.add((distance, describe(tile, best), why))
        return tuple((tile, why) for _, tile, why in sorted(found)[:6])


def _distance(tile: Tile, best: Tile) -> int | None:
    """How far one changed choice is away; None if more than one differs."""
    changes = [
        abs(tile.block_kv - best.block_kv),
        abs(tile.block_q - best.block_q),
        16 * abs(tile.stages - best.stages),
        16 * ((tile.p_in, tile.sharing) != (best.p_in, best.sharing)),
        16 * abs(tile.warps - best.warps) * (tile.block_q == best.block_q),
    ]
    differing = [change for change in changes if change]
    return differing[0] if len(differing) == 1 else None


def describe(tile: Tile, beside: Tile | None = None) -> str:
    """A tile in words, with the choices in which it differs from another: ``128x64, 2 stages``."""
    other = beside or Tile(block_q=0, block_kv=0)
    words = [str(tile)]
    if tile.warps != other.warps:
        words.append(f"{tile.warps} warps")
    if tile.stages != other.stages:
        words.append(f"{tile.stages} stage{'s' * (tile.stages > 1)}")
    if tile.p_in != other.p_in:
        words.append(f"P in {tile.p_in}")
    if tile.frees != other.frees:
        words.append(f"{tile.sharing} warps share keys")
    return ", ".join(words)


def _flash_entry(
    problem: Problem,
    gpu: Gpu,
    algo: str,
    pass_: str,
    reserve: int,
    tile: Tile | tuple[int, int] | None,
    top: int,
    form: str,
) -> Entry:
    """The best tile of one pass, as an Entry. Raises NoPlanError when none is legal."""
    rankings = [
        _Ranking(problem, gpu, variant, pass_, tiles)
        for variant, tiles in _tried(problem, gpu, algo, pass_, tile, form)
    ]
    legal = [ranking for ranking in rankings if len(ranking.legal)]
    if not legal:
        raise _illegal(problem, gpu, algo, pass_, tile, rankings[0])
    ranking = min(legal, key=lambda ranking: ranking.seconds)
    shown = _distinct(ranking, max(top, 1))
    base = _base(problem, gpu, algo, pass_, reserve, ranking.algo)
    entries = _entries(ranking, base, shown)
    best = entries[0]
    assert best.tile is not None  # every flash entry has one
    rejected = ranking.neighbours(best.tile) if not tile else ()
    best = replace(best, alternatives=tuple(entries[1:]), rejected=rejected)
    others = [other for other in legal if other is not ranking]
    more = (
        *_split_reasons(best, gpu, others),
        *_form_reasons(best, others),
        *_packing_reasons(best, others),
    )
    return replace(best, reasons=(*_reasons(best), *more))


def _tried(
    problem: Problem,
    gpu: Gpu,
    algo: str,
    pass_: str,
    tile: Tile | tuple[int, int] | None,
    form: str,
) -> Iterable[tuple[str, Tiles]]:
    """The variants of an algorithm and the tiles of each. V2 also splits keys where rows are few;
    a whole tile that is to be judged is of one variant: where warps share its keys, of that. Where
    V2's backward is to repeat bit for bit, the forms that do, or the one asked for; V3 packs rows
    where queries are few, or as asked."""
    variants = [algo]
    if (algo, pass_) == ("v3", "fwd"):
        variants = ["v3_packed"] if form == "packed" or _may_pack(problem) else []
        variants = [*["v3"] * (form != "packed"), *variants * (form != "unpacked")]
    if (algo, pass_) == ("v2", "bwd") and problem.deterministic:
        variants = [f"v2_{name}" for name in FORMS if form in ("", name)]
    if (algo, pass_) == ("v2", "fwd") and _may_split(problem, gpu, bool(tile)):
        variants.append("v2_split")
        if isinstance(tile, Tile):
            variants = variants[tile.keys_per_step < tile.block_kv :][:1]
    for name in variants:
        yield name, judged(tile, name, pass_) if tile else candidates(problem, gpu, name, pass_)


def _may_split(problem: Problem, gpu: Gpu, any_rows: bool) -> bool:
    few = any_rows or problem.group * problem.seq <= SPLIT_ROWS
    plain = problem.mask in ("full", "causal") and problem.bias == "none"
    made = gpu.cp_async and problem.dtype != "e4m3"
    return few and plain and not problem.softcap and not problem.varlen and made


def _may_pack(problem: Problem) -> bool:
    few = problem.group > 1 and problem.seq <= PACKED_QUERIES
    return few and not (unpackable(problem) or ungroupable(problem))


def _packing_reasons(best: Entry, others: Sequence[_Ranking]) -> Iterable[str]:
    """What packing the rows of a group brings V3, or why it is not done where queries are few."""
    p, tile = best.problem, best.tile
    if (best.algo, best.pass_) != ("v3", "fwd") or tile is None or p.group == 1:
        return
    if best.packed:
        packed, alone = (math.ceil(n * p.seq / tile.block_q) for n in (p.group, 1))
        count = f"{packed} tile{'s' * (packed > 1)}"
        yield f"{p.group} heads packed fill {count} of rows, instead of {p.group * alone}"
    elif p.seq <= PACKED_QUERIES and (why := unpackable(p) or ungroupable(p)):
        yield f"rows of a group are not packed: {why}"
    how = "without packing" if best.packed else "with packed"
    for other in others:
        yield f"{how} rows it would take {other.seconds / best.time.seconds:.2f} times as long"


def _split_reasons(best: Entry, gpu: Gpu, others: Sequence[_Ranking]) -> Iterable[str]:
    """What splitting the keys brings, where that is the choice."""
    if not best.splits:
        return
    slots = gpu.sm_count * best.blocks_per_sm
    yield f"keys in {best.splits} parts make {best.grid} blocks; {slots} run at once"
    for other in others:
        loss = other.seconds / best.time.seconds
        yield f"without splitting the keys it would take {loss:.1f} times as long"


def _form_reasons(best: Entry, others: Sequence[_Ranking]) -> Iterable[str]:
    """How every run comes to give the same bits, and what the other form would cost."""
    if best.dq == "atomic":
        return
    yield _FORM_REASONS[best.dq]
    for other in others:
        loss = other.seconds / best.time.seconds
        yield f"{_FORM_NAMES[other.algo.removeprefix('v2_')]} would take {loss:.2f} times as long"


_FORM_NAMES = {"ordered": "ordered additions", "second_pass": "a second pass for dQ"}
_FORM_REASONS = {
    "ordered": "blocks add to a tile of dQ in turns, in the order of their keys",
    "second_pass": "dQ has a kernel of its own, which makes S and dP again and adds in registers",
}


def _distinct(ranking: _Ranking, count: int) -> list[int]:
    """Places of the best tile of each block_q x block_kv, the first ``count``."""
    seen: dict[tuple[int, int], int] = {}
    tiles = ranking.legal.tiles
    for index in ranking.order:
        seen.setdefault((int(tiles.block_q[index]), int(tiles.block_kv[index])), int(index))
        if len(seen) == count:
            break
    return list(seen.values())


def _illegal(
    problem: Problem,
    gpu: Gpu,
    algo: str,
    pass_: str,
    tile: Tile | tuple[int, int] | None,
    ranking: _Ranking,
) -> NoPlanError:
    name = _shape_name(tile) if tile else "no tile"
    return NoPlanError(
        f"{name} is {'not ' if tile else ''}legal for {algo} {pass_} on {gpu.name}"
        f" at head_dim {problem.head_dim}",
        why=ranking.reason(),
        hint="leave --tile out to see what is legal" if tile else "try another --algo or --dtype",
    )


def _shape_name(tile: Tile | tuple[int, int]) -> str:
    return str(tile) if isinstance(tile, Tile) else "{}x{}".format(*tile)


def _base(
    problem: Problem, gpu: Gpu, algo: str, pass_: str, reserve: int, variant: str = ""
) -> Entry:
    """What holds for every tile of an algorithm."""
    variant = variant or algo
    hbm = footprint.hbm(problem, variant, pass_)
    gap = missing(problem, gpu, algo, pass_)
    return Entry(
        problem=problem,
        gpu=gpu.name,
        algo=algo,
        pass_=pass_,
        arch=kernel_arch(gpu, algo),
        hbm=hbm,
        fits=hbm.total <= footprint.budget(gpu, reserve),
        max_seq=footprint.max_seq(problem, variant, pass_, gpu, reserve),
        dq=_dq_of(variant),
        useful_flops=flops.useful(problem, pass_),
        generable=not gap,
        reason=gap,
        assumed=(*rates(gpu, algo, problem).assumed, *_uncharged(problem, algo, pass_)),
    )


def _uncharged(problem: Problem, algo: str, pass_: str) -> Iterable[str]:
    """What the problem asks for and time, traffic and memory leave out, a sentence each."""
    if problem.softcap > 0 and pass_ != "fwd" and algo == "standard":
        yield "softcap is charged forward only: backward is that without it"
    if problem.varlen:
        yield "varlen: every sequence is charged as the longest"
    if problem.deterministic and pass_ != "fwd" and algo == "v3":
        yield "deterministic: v3 is charged with additions to dQ in any order"


def _entries(ranking: _Ranking, base: Entry, chosen: Sequence[int]) -> list[Entry]:
    """Full entries for some of the legal tiles."""
    problem, gpu, algo, pass_ = ranking.problem, ranking.gpu, ranking.algo, ranking.pass_
    case = ranking.legal.take(np.array(chosen))
    tiles, blocks = case.tiles, case.blocks_per_sm
    times = timeline.predict(problem, gpu, algo, pass_, tiles, blocks)
    asked = traffic.issued(problem, algo, pass_, tiles)
    dram = traffic.dram(problem, gpu, algo, pass_, tiles, blocks)
    executed = flops.executed(problem, algo, pass_, tiles)
    grid = case.grid
    return [
        replace(
            base,
            tile=tiles.tile(i),
            plan=_plan(case, i) if base.generable else None,
            splits=int(tiles.splits[i]) if algo == "v2_split" else 0,
            packed=algo == "v3_packed",
            hbm=_with_parts(base.hbm, case, i),
            grid=int(grid[i]),
            block=int(case.threads[i]),
            smem_bytes=int(case.smem[i]),
            registers=int(tiles.registers[i]),
            blocks_per_sm=int(blocks[i]),
            limiter=str(case.limiter[i]),
            issued=asked.at(i),
            dram=dram.at(i),
            paper=_paper(problem, algo, pass_, tiles.block_kv, i),
            executed_flops=int(executed[i]),
            time=times.at(i),
        )
        for i in range(len(case))
    ]


def _with_parts(hbm: HbmBytes, case: Case, index: int) -> HbmBytes:
    if case.algo != "v2_split":
        return hbm
    parts = footprint.parts_bytes(case.problem, case.tiles.splits)
    return replace(hbm, workspace=int(parts[index]))


def _paper(problem: Problem, algo: str, pass_: str, block_kv: Ints, index: int) -> int | None:
    return int(traffic.paper(problem, pass_, int(block_kv[index]))) if algo == "v1" else None


def _dq_of(variant: str) -> str:
    form = variant.removeprefix("v2_")
    return form if form in FORMS else "atomic"


def _plan(case: Case, index: int) -> Plan:
    problem, splits, dq = case.problem, case.algo == "v2_split", _dq_of(case.algo)
    kernel = KernelSpec(
        algo=case.algo.partition("_")[0],
        pass_=case.pass_,
        arch=kernel_arch(case.gpu, case.algo),
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        tile=case.tiles.tile(index),
        mask=problem.mask,
        softcap=problem.softcap > 0,
        bias=problem.bias,
        varlen=problem.varlen,
        pack_gqa=splits or case.algo == "v3_packed",
        scales=problem.scales if problem.dtype == "e4m3" else "none",
        in_dtype=problem.in_dtype if problem.quantises else "",
        incoherent=problem.incoherent,
        splits=splits,
        deterministic=dq != "atomic",
        dq=dq,
    )
    return Plan(
        problem=problem,
        gpu=case.gpu.name,
        kernel=kernel,
        smem_bytes=int(case.smem[index]),
        slots=case.gpu.sm_count * int(case.blocks_per_sm[index]) * kernel.asks_slots,
        l2_bytes=case.gpu.l2_bytes * kernel.longest_first,
    )


def _reasons(best: Entry) -> Iterable[str]:
    """Why this tile, a sentence each."""
    assert best.tile is not None  # every flash entry has one
    blocks = f"{best.blocks_per_sm} block{'s' * (best.blocks_per_sm > 1)}"
    yield (
        f"{best.tile} keeps {blocks} of {best.block} threads on an SM, limited by {best.limiter}"
    )
    yield f"{best.time.bound} is the largest term: {best.time.terms[best.time.bound] * 1e6:.1f} us"
    for other in best.alternatives[:1]:
        loss = other.time.seconds / best.time.seconds - 1
        yield f"the next best, {other.tile}, is {loss:.1%} slower"
    for tile, why in best.rejected[:1]:
        yield f"{tile} is not legal: {why}"
    if traffic.pads(best.problem, best.algo, best.pass_):
        yield _padding_reason(best.problem)


def _padding_reason(problem: Problem) -> str:
    """What V3 copies, and why."""
    names = {"q": "Q", "k": "K", "v": "V", "o": "O"}
    padded = ", ".join(names[name] for name in padded_tensors(problem))
    moved = traffic.padding(problem).total / 1e6
    return (
        f"TMA takes rows of whole {TMA_BYTES} bytes: {padded} go through padded copies,"
        f" {moved:.1f} MB, by kernels before and after; V2 takes them as they are"
    )


def _standard_entry(problem: Problem, gpu: Gpu, pass_: str, reserve: int) -> Entry:
    """Three unfused launches, five backward: no tile of our own."""
    none = Tiles.of([Tile(block_q=1, block_kv=1)])
    times = timeline.predict(problem, gpu, "standard", pass_, none, none.blocks_per_sm).at(0)
    asked = traffic.issued(problem, "standard", pass_, none).at(0)
    dram = traffic.dram(problem, gpu, "standard", pass_, none, none.blocks_per_sm).at(0)
    scores = asked.writes["s" if pass_ == "fwd" else "ds"]
    return replace(
        _base(problem, gpu, "standard", pass_, reserve),
        issued=asked,
        dram=dram,
        executed_flops=int(flops.executed(problem, "standard", pass_, none)[0]),
        time=times,
        reasons=(f"every pass over S or P moves {scores / 2**20:.1f} MiB",),
    )


# ---- passes, algorithms -------------------------------------------------------------------------


def _entry(
    problem: Problem,
    gpu: Gpu,
    algo: str,
    reserve: int = 0,
    tile: Tile | tuple[int, int] | None = None,
    top: int = 1,
    form: str = "",
) -> Entry:
    """The entry of one algorithm. Raises NoPlanError when it cannot run or no tile is legal."""
    if reason := unavailable(problem, gpu, algo):
        raise NoPlanError(
            f"{algo} cannot run this on {gpu.name}",
            why=reason,
            hint="`fasim compare` shows what can",
        )
    if problem.pass_ == "train":
        return _train_entry(problem, gpu, algo, reserve, tile, top)
    if algo == "standard":
        return _standard_entry(problem, gpu, problem.pass_, reserve)
    return _flash_entry(problem, gpu, algo, problem.pass_, reserve, tile, top, form)


def _train_entry(
    problem: Problem,
    gpu: Gpu,
    algo: str,
    reserve: int,
    tile: Tile | tuple[int, int] | None,
    top: int,
) -> Entry:
    """Forward and backward, planned apart; memory at the peak of both. A tile asked for is the
    forward's."""
    forward = replace(problem, pass_="fwd")
    fwd = _entry(forward, gpu, algo, reserve, tile, top)
    bwd = _entry(replace(problem, pass_="bwd"), gpu, algo, reserve, None, top)
    return replace(
        _base(problem, gpu, algo, "train", reserve),
        issued=_add_bytes(fwd.issued, bwd.issued),
        dram=_add_bytes(fwd.dram, bwd.dram),
        paper=fwd.paper and bwd.paper and fwd.paper + bwd.paper,
        executed_flops=fwd.executed_flops + bwd.executed_flops,
        time=_add_times(fwd.time, bwd.time),
        fwd=fwd,
        bwd=bwd,
    )


def _add_bytes(a: Bytes | None, b: Bytes | None) -> Bytes:
    assert a, "available entries carry their bytes"
    assert b, "available entries carry their bytes"
    return Bytes(a.read + b.read, a.write + b.write)


def _add_times(a: Times, b: Times) -> Times:
    terms = {name: a.terms[name] + b.terms[name] for name in timeline.TERMS}
    bound = max(timeline.TERMS, key=lambda name: terms[name])
    return Times(a.seconds + b.seconds, a.low + b.low, a.high + b.high, bound, terms)


def _unavailable_entry(problem: Problem, gpu: Gpu, algo: str, reserve: int, why: str) -> Entry:
    base = _base(problem, gpu, algo, problem.pass_, reserve)
    return replace(base, available=False, generable=False, reason=why, assumed=())


def plan(
    problem: Problem,
    gpu: Gpu,
    algo: str = "auto",
    tile: Tile | tuple[int, int] | None = None,
    reserve: int = 0,
    top: int = 5,
    form: str = "",
) -> Entry:
    """The best kernel for a problem on a GPU.

    ``algo`` auto takes the fastest algorithm that can run and fits. ``tile`` judges one tile: a
    shape (block_q, block_kv), completed as well as possible, or a whole Tile; it is never changed.
    ``reserve`` are HBM bytes to leave free; ``top`` counts the tiles shown, the best included.
    ``form`` is one of plan.FORMS, for a backward pass of V2 that repeats bit for bit, or of
    plan.PACKINGS, for V3 forward; left out, the faster one is taken.
    Raises NoPlanError, with the reason, when nothing can run, is legal, or fits.
    """
    if algo == "auto":
        algo = _fastest(problem, gpu, reserve, tile)
    if form in PACKINGS and (algo, problem.pass_) != ("v3", "fwd"):
        raise UsageError(
            f"{form} is a form of V3's forward pass",
            hint="add --algo v3, or leave --form out",
        )
    backward = problem.deterministic and problem.pass_ == "bwd" and algo == "v2"
    if form and form not in PACKINGS and not backward:
        raise UsageError(
            f"{form} is a form of V2's deterministic backward pass",
            hint="add --algo v2 --pass bwd --deterministic",
        )
    if algo == "standard" and tile:
        raise NoPlanError("standard attention has no tile to judge", hint="add --algo v1 or v2")
    entry = _entry(problem, gpu, algo, reserve, tile, top, form)
    if not entry.fits:
        raise _does_not_fit(entry, gpu, reserve)
    return entry


def _fastest(problem: Problem, gpu: Gpu, reserve: int, tile: Tile | tuple[int, int] | None) -> str:
    """The fastest algorithm that can run the problem, and the tile if one is given."""
    entries = [e for e in compare(problem, gpu, reserve) if not (tile and e.algo == "standard")]
    running = [entry for entry in entries if entry.available]
    fitting = [entry for entry in running if entry.fits]
    if not running:
        # V1 and V3 may lack more than V2 does: what stops V2 stops all.
        why = next(entry.reason for entry in entries if entry.algo == "v2")
        hint = "try another --dtype or --gpu; `fasim compare` shows what stops each algorithm"
        raise NoPlanError(f"nothing runs this on {gpu.name}", why=why, hint=hint)
    if not fitting:
        raise _does_not_fit(min(running, key=lambda entry: entry.hbm.total), gpu, reserve)
    return min(fitting, key=lambda entry: float(entry.time.seconds)).algo


def _does_not_fit(entry: Entry, gpu: Gpu, reserve: int) -> NoPlanError:
    free = footprint.budget(gpu, reserve)
    if reserve and free <= 0:
        return NoPlanError(
            f"--reserve {_gib(reserve)} leaves no memory on {gpu.name}",
            why=f"it has {_gib(gpu.hbm_bytes)}, {_gib(free + reserve)} without the driver's share",
            hint="reserve less: --reserve is what other things need of this card",
        )
    return NoPlanError(
        f"{entry.algo} does not fit on {gpu.name}",
        why=f"it needs {_gib(entry.hbm.total)} of HBM, {_gib(max(free, 0))} are free",
        hint=f"the longest seq that fits is {entry.max_seq}; `fasim compare` shows the others",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def compare(problem: Problem, gpu: Gpu, reserve: int = 0) -> list[Entry]:
    """One entry per algorithm, always four: those that cannot run carry their reason."""
    return [_compared(problem, gpu, algo, reserve) for algo in ALGOS]


def _compared(problem: Problem, gpu: Gpu, algo: str, reserve: int) -> Entry:
    try:
        return _entry(problem, gpu, algo, reserve)
    except NoPlanError as error:
        return _unavailable_entry(problem, gpu, algo, reserve, error.why)


def crossover(problem: Problem, gpu: Gpu) -> int | None:
    """The longest seq up to which flash brings nothing: standard attention is as fast as the best
    flash algorithm there, and slower beyond. None if flash wins from the shortest on."""
    low, high = CROSSOVER_RANGE
    lengths = [low << i for i in range((high // low).bit_length())]
    slower = [length for length in lengths if _standard_wins(problem, gpu, length)]
    if not slower:
        return None
    low = slower[-1]
    high = min(2 * low, high)
    while high - low > max(16, low // 64):
        middle = int(round_up((low + high) // 2, 16))
        low, high = (middle, high) if _standard_wins(problem, gpu, middle) else (low, middle)
    return low


def _standard_wins(problem: Problem, gpu: Gpu, seq: int) -> bool:
    seq_kv = seq if problem.seq_kv == problem.seq else problem.seq_kv
    entries = compare(replace(problem, seq=seq, seq_kv=seq_kv), gpu)
    standard, *flash = (entry.time.seconds if entry.available else np.inf for entry in entries)
    return bool(standard < np.inf and standard <= min(flash))


__all__ = [
    "ALGOS",
    "Entry",
    "candidates",
    "compare",
    "crossover",
    "describe",
    "kernel_arch",
    "missing",
    "paper_tile",
    "plan",
    "rounded_paper_tile",
    "unavailable",
]

"""The derivation of a plan, term by term, with its numbers.

The model computes; this file only shows how. Each derivation ends in the model's own number, and
``Term.rest`` is what the shown parts leave unexplained: 0, and a test keeps it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fasim import units
from fasim.entry import Entry
from fasim.gpu import Gpu
from fasim.legality import CONSUMER_REGISTERS
from fasim.model import footprint
from fasim.model.footprint import (
    BARRIER_BYTES,
    E4M3_BASE,
    FRAGMENTS,
    ROUNDED_SUMS,
    V3_BASE,
    WANTED_BASE,
    WANTED_PER_ACCUMULATOR,
    WGMMA_SLACK,
    compulsory,
)
from fasim.model.occupancy import register_cap, residency
from fasim.model.tiles import Tiles, padded, round_up
from fasim.model.visits import (
    PackedVisits,
    Visits,
    grouped_visits,
    packed_visits,
    tile_visits,
    visible_pairs,
)
from fasim.plan import (
    SLAB_BYTES,
    V3,
    V3_BLOCKS,
    V3_TAIL_BYTES,
    WARP,
    WARPGROUP,
    Tile,
    keeps_q,
    slabs,
    v3_layout,
    v3_value_rows,
    weight_tiles,
)
from fasim.problem import Problem

Show = Callable[[float], str]


@dataclass(frozen=True)
class Part:
    """One summand: its name, how it comes about, and its value."""

    name: str
    how: str
    value: float


_OF = {
    "choice": "why this tile",
    "smem": "bytes of shared memory in a block",
    "registers": "registers that a thread needs",
    "occupancy": "blocks on an SM",
    "memory": "bytes of HBM at the peak",
    "traffic": "bytes named by loads and stores",
    "flops": "floating-point operations",
    "time": "seconds of every pipe",
}


@dataclass(frozen=True)
class Term:
    """A sum of parts, the total the model has for it, and remarks (limits, consequences)."""

    name: str
    parts: tuple[Part, ...] = ()
    total: float = 0
    show: Show = str
    remarks: tuple[str, ...] = field(default=())

    @property
    def of(self) -> str:
        """What it is a sum of."""
        return _OF[self.name]

    @property
    def rest(self) -> float:
        """What the parts do not explain."""
        return self.total - sum(part.value for part in self.parts) if self.parts else 0


def derive(entry: Entry, gpu: Gpu, term: str | None = None) -> list[Term]:
    """Every term of a plan, or the one named; a training step has those of both passes."""
    if entry.fwd and entry.bwd:
        return [*derive(entry.fwd, gpu, term), *derive(entry.bwd, gpu, term)]
    chosen = {term: TERMS[term]} if term else TERMS
    return [make(_Case(entry, gpu)) for make in chosen.values()]


@dataclass(frozen=True)
class _Case:
    """A plan under derivation, in the letters of the model: M, N, D, D_v, e."""

    entry: Entry
    gpu: Gpu

    @property
    def problem(self) -> Problem:
        return self.entry.problem

    @property
    def tile(self) -> Tile:
        assert self.entry.tile is not None  # callers ask only where there is one
        return self.entry.tile

    @property
    def dims(self) -> tuple[int, int, int]:
        p = self.problem
        return padded(p.head_dim, p.dtype), padded(p.head_dim_v, p.dtype), p.element_bytes

    @property
    def tiles(self) -> Tiles:
        return Tiles.of([self.tile])

    @property
    def rows_per_warp(self) -> int:
        return self.tile.block_q // (1 if self.entry.splits else self.tile.warps)

    @property
    def accumulators(self) -> int:
        """fp32 accumulators of a thread of an mma.sync forward kernel: O and S."""
        return self.rows_per_warp * (self.dims[1] + self.tile.keys_per_step) // 32

    @property
    def small(self) -> bool:
        """Whether a block has so few warps that each copies more."""
        return self.tile.warps < 4


def _product(name: str, *factors: int) -> Part:
    return Part(name, " x ".join(map(str, factors)), math.prod(factors))


def _smem(case: _Case) -> Term:
    """Bytes of shared memory in one block."""
    if case.entry.tile is None:
        return Term(
            "smem",
            remarks=("unfused kernels choose their own tiles",),
        )
    limit, used = case.gpu.smem_per_block, case.entry.smem_bytes
    remarks = (
        f"limit {units.used(used, limit)} of one block on {case.gpu.name}",
        *_larger(case),
    )
    parts = _SMEM[case.entry.variant, case.entry.pass_](case)
    return Term("smem", tuple(parts), used, units.capacity, remarks)


def _larger(case: _Case) -> Iterator[str]:
    """What the next K/V tiles would need."""
    limit = case.gpu.smem_per_block
    for step in (16, 32, 64):
        keys = case.tile.block_kv + step
        size = _smem_of(case, keys)
        verdict = "fits" if size <= limit else "does not fit"
        yield f"block_kv {keys} would need {units.capacity(size)}: {verdict}"
        if size > limit:
            return


def _smem_of(case: _Case, block_kv: int) -> int:
    from dataclasses import replace

    tiles = Tiles.of([replace(case.tile, block_kv=block_kv)])
    return int(footprint.smem_bytes(case.problem, case.entry.variant, case.entry.pass_, tiles)[0])


def _v1_smem(case: _Case) -> Iterator[Part]:
    d, dv, e = case.dims
    yield _q_tile(case)
    yield _product("K and V", case.tile.block_kv, d + dv, e)


def _v2_smem(case: _Case) -> Iterator[Part]:
    d, dv, e = case.dims
    yield _q_tile(case)
    slots = (2, case.tile.stages, case.tile.block_kv, max(d, dv), e)
    yield _product("K and V, 2 slots a stage", *slots)


def _v3_smem(case: _Case) -> Iterator[Part]:
    p, tile = case.problem, case.tile
    d = slabs(p.head_dim, p.dtype)
    count, parts, more_keys = v3_layout(p, tile)
    yield _product("tiles of Q, in slabs of 128 bytes", count, tile.block_q, d, SLAB_BYTES)
    yield _product("O on its way out", tile.block_q, slabs(p.head_dim_v) // parts, SLAB_BYTES)
    yield _product("stages of K", tile.stages + more_keys, tile.block_kv, d, SLAB_BYTES)
    yield _product("stages of V", tile.stages, v3_value_rows(p, tile), SLAB_BYTES)
    yield _product("barriers, factors of rows, alignment", V3_TAIL_BYTES)


def _q_tile(case: _Case) -> Part:
    d, dv, e = case.dims
    row = max(d * e, dv * case.problem.out_bytes)
    name = "Q tile" if case.entry.splits else "Q tile, O leaves through it"
    return _product(name, case.tile.block_q, row)


def _v1_bwd_smem(case: _Case) -> Iterator[Part]:
    d, dv, e = case.dims
    tile = case.tile
    yield _product("K and V", tile.block_kv, d + dv, e)
    yield _product("Q and dO", tile.block_q, d + dv, e)
    weights = "dS" if tile.sharing == 1 else "dS, P"
    yield _product(weights, tile.sharing, tile.block_q, tile.block_kv, e)
    yield _product("their L and D", tile.block_q, 8)


def _v2_bwd_smem(case: _Case) -> Iterator[Part]:
    d, dv, e = case.dims
    tile = case.tile
    yield _product("K and V", tile.block_kv, d + dv, e)
    yield _product("stages of Q and dO", tile.stages, tile.block_q, d + dv, e)
    weights = {1: "two of dS", 2: "two of dS, two of P"}.get(tile.sharing, "two of dS, one of P")
    if tile.sharing > 1 or case.entry.dq != "second_pass":
        yield _product(weights, weight_tiles(tile.sharing), tile.block_q, tile.block_kv, e)
    yield _product("their L and D", tile.stages, tile.block_q, 8)


def _v3_bwd_smem(case: _Case) -> Iterator[Part]:
    d, dv, e = case.dims
    tile = case.tile
    yield _product("K and V", tile.block_kv, d + dv, e)
    yield _product("stages of Q and dO", tile.stages, tile.block_q, d + dv, e)
    yield _product("dS", tile.block_q, tile.block_kv, e)
    yield _product("dQ in fp32", tile.block_q, d, 4)
    yield _product("barriers, alignment", BARRIER_BYTES)


_SMEM: dict[tuple[str, str], Callable[[_Case], Iterator[Part]]] = {
    ("v1", "fwd"): _v1_smem,
    ("v2", "fwd"): _v2_smem,
    ("v2_split", "fwd"): _v2_smem,
    **{(name, "fwd"): _v3_smem for name in V3},
    ("v1", "bwd"): _v1_bwd_smem,
    **{(name, "bwd"): _v2_bwd_smem for name in ("v2", "v2_ordered", "v2_second_pass")},
    ("v3", "bwd"): _v3_bwd_smem,
}


def _memory(case: _Case) -> Term:
    """HBM alive at the peak."""
    hbm, budget = case.entry.hbm, footprint.budget(case.gpu)
    named = {
        "inputs": hbm.inputs,
        "outputs": hbm.outputs,
        "S and P": hbm.s_and_p,
        "saved for backward": hbm.saved,
        "workspace": hbm.workspace,
    }
    parts = tuple(Part(name, "", size) for name, size in named.items() if size)
    remarks = (
        f"{units.capacity(budget)} of {units.capacity(case.gpu.hbm_bytes)} are left by the driver",
        f"the longest seq that fits is {units.grouped(case.entry.max_seq)}",
    )
    return Term("memory", parts, hbm.total, units.capacity, remarks)


def _traffic(case: _Case) -> Term:
    """Bytes named by loads and stores, tensor by tensor."""
    moved, dram = case.entry.issued, case.entry.dram
    assert moved is not None  # an entry that runs
    assert dram is not None  # has its bytes
    parts = [Part(f"read {name}", "", size) for name, size in moved.reads.items() if size]
    parts += [Part(f"write {name}", "", size) for name, size in moved.writes.items() if size]
    least = compulsory(case.problem)
    remarks = [
        f"{units.traffic(dram.total)} of it reach HBM, the L2 serves the rest",
        f"Q, K, V and O once are {units.traffic(least)}: no forward pass moves less",
        *_walk(case),
    ]
    return Term(
        "traffic",
        tuple(parts),
        moved.total,
        units.traffic,
        tuple(remarks),
    )


def _walk(case: _Case) -> Iterator[str]:
    if case.entry.tile is None:
        return
    tiles = case.tiles
    split, packed = case.entry.splits > 0, case.entry.packed
    seen: Visits | PackedVisits = tile_visits(
        case.problem, case.entry.variant, case.entry.pass_, tiles
    )
    if split or packed:
        seen = (packed_visits if split else grouped_visits)(case.problem, tiles)
    whole = int(seen.q_tiles[0] * seen.kv_tiles[0])
    grid = f"{int(seen.q_tiles[0])} x {int(seen.kv_tiles[0])}"
    head = "a K/V head, the rows of its group packed," if split or packed else "a head"
    yield f"{head} has {grid} tiles and visits {int(seen.steps[0])} of {whole}"


def _flops(case: _Case) -> Term:
    """What the mathematics needs, and what whole tiles add."""
    useful, executed = case.entry.useful_flops, case.entry.executed_flops
    pairs, p = visible_pairs(case.problem), case.problem
    parts = (
        Part(
            "useful",
            f"{p.batch} x {p.heads} heads, {units.grouped(pairs)} visible pairs each",
            useful,
        ),
        Part("masked, padded or recomputed", "", executed - useful),
    )
    return Term(
        "flops",
        parts,
        executed,
        lambda value: units.scaled(value, "FLOP"),
    )


def _choice(case: _Case) -> Term:
    """Why this tile, and what became of others; the reasons name the first of each kind."""
    slower = [_slower(other, case.entry) for other in case.entry.alternatives[1:]]
    lost = [f"not legal: {tile}, {reason}" for tile, reason in case.entry.rejected[1:]]
    return Term("choice", remarks=(*case.entry.reasons, *slower, *lost))


def _slower(other: Entry, best: Entry) -> str:
    ratio = units.factor(other.time.seconds / best.time.seconds)
    return f"slower: {other.tile}, {units.seconds(other.time.seconds)}, {ratio} the time"


def _registers(case: _Case) -> Term:
    """Registers a thread needs, part by part, then what it is granted and why."""
    entry = case.entry
    if entry.tile is None:
        return Term("registers", remarks=("unfused kernels choose their own tiles",))
    asked = case.problem, entry.variant, entry.pass_
    capability = case.gpu.compute_capability
    more = footprint.arch_registers(*asked, case.tiles, capability).items()
    kept = (Part(name, "", int(value[0])) for name, value in more if value[0])
    parts = (*_REGISTERS[asked[1:]](case), *kept)
    needed = int(footprint.registers(*asked, case.tiles, capability)[0])
    return Term("registers", parts, needed, _whole, tuple(_grant(case, needed)))


def _grant(case: _Case, needed: int) -> Iterator[str]:
    """What the compiler may use: what the kernel wants, held to what the residency leaves."""
    entry, gpu = case.entry, case.gpu
    if entry.pass_ == "bwd" and entry.algo != "v3":
        granted = entry.registers
        yield f"granted {granted}: all there is room for, as the kernel wants more than it needs"
        yield f"the compiler is held to it: __maxnreg__({granted})"
        return
    if entry.algo == "v3":
        yield f"granted {entry.registers}: {_ceiling(case)}"
        return
    wanted, cap = _wanted(case), int(register_cap(gpu, entry.block, entry.blocks_per_sm))
    granted = min(int(round_up(max(needed, wanted), 8)), cap)
    blocks = f"{entry.blocks_per_sm} block{'s' * (entry.blocks_per_sm > 1)}"
    yield f"granted {granted}: {_grant_reason(needed, wanted, cap)}"
    yield f"wanted {wanted}: {_wanted_how(case)}"
    yield (
        f"cap {cap}: {gpu.registers_per_sm}"
        f" / ({_whole_schedulers(entry.block)} threads x {blocks}), down to a multiple of 8,"
        f" at most {gpu.registers_per_thread}"
    )
    yield f"the compiler is held to it: __maxnreg__({granted})"


def _whole_schedulers(threads: int) -> int:
    """Threads as registers are dealt out: a warp for each of the four schedulers at a time."""
    return -(-threads // 128) * 128


def _ceiling(case: _Case) -> str:
    """The limit of a kernel whose registers are no matter of residency."""
    groups = case.tile.warps // WARPGROUP
    if case.entry.algo != "v3":
        return f"{case.gpu.registers_per_thread} a thread"
    granted = CONSUMER_REGISTERS[groups]
    if groups == 1:
        return f"{granted} for the consumer warpgroup of each of {V3_BLOCKS[1]} blocks"
    return f"{granted} for each of {groups} consumer warpgroups"


def _grant_reason(needed: int, wanted: int, cap: int) -> str:
    if wanted > cap:
        return "the cap, below what the compiler would take"
    return "what the compiler would take, and has room for" if wanted > needed else "what it needs"


def _wanted(case: _Case) -> int:
    return int(WANTED_BASE + WANTED_PER_ACCUMULATOR * case.accumulators)


def _wanted_how(case: _Case) -> str:
    return f"{WANTED_BASE} + {WANTED_PER_ACCUMULATOR} x {case.accumulators} accumulators"


def _whole(value: float) -> str:
    return str(round(value))


def _mma_fwd_registers(case: _Case) -> Iterator[Part]:
    rows, (_, dv, _), keys = case.rows_per_warp, case.dims, case.tile.keys_per_step
    o = rows * dv // 32
    yield Part("O, fp32", f"{rows} rows x {dv} / 32 lanes", o)
    yield Part("S, then P", f"{rows} rows x {keys} keys / 32 lanes", case.accumulators - o)
    yield Part("Q, K and V fragments", "", FRAGMENTS)
    yield Part("addresses, m, l, loops", "", footprint.BASE_REGISTERS)
    yield from (part for part in _special_registers(case) if part.value)


def _special_registers(case: _Case) -> Iterator[Part]:
    """What masks, long rows, deep rings and small blocks add; most kernels have none."""
    problem, tile, keys = case.problem, case.tile, case.tile.keys_per_step
    scores = case.rows_per_warp * keys // 32
    every, many = footprint.SCORES_PER_LIMIT, max(scores - footprint.MANY_SCORES, 0)
    yield Part("causal limits", f"{scores} / {every}", scores // every * problem.causal)
    longest = max(problem.head_dim, problem.head_dim_v)
    wide = footprint.WIDE_REGISTERS * (longest > 128 or (longest > 64 and scores > 64))
    yield Part("long rows", f"head dimension {longest}, {scores} scores", wide)
    yield Part("small block", "fewer than 4 warps", footprint.SMALL_BLOCK_REGISTERS * case.small)
    fp32 = problem.dtype == "fp32"
    yield Part("fp32 fragments", "", footprint.FP32_REGISTERS * fp32)
    how = f"{many} / {footprint.SCORES_PER_LOAD}"
    yield Part("loads of many scores", how, many // footprint.SCORES_PER_LOAD)
    for name, kept in footprint.option_registers(problem).items():
        yield Part(name, "", kept)
    ring = footprint.RING_REGISTERS * (tile.stages > 1)
    yield Part("places in the ring", f"{tile.stages} stages", ring)


def _v2_fwd_registers(case: _Case) -> Iterator[Part]:
    yield from _mma_fwd_registers(case)
    if crowd := int(footprint.lazy_registers(case.problem, case.tiles)[0]):
        yield Part("weights beside their scores", f"more than {footprint.MOST_HELD} values", crowd)
    if remade := int(footprint.remade_registers(case.problem, case.tiles)[0]):
        yield Part("of these made anew", f"up to {footprint.FEW_SCORES} scores", -remade)


def _split_registers(case: _Case) -> Iterator[Part]:
    """V2's parts, and those of packed rows."""
    yield from _mma_fwd_registers(case)
    more = footprint.SPLIT_REGISTERS[case.problem.dtype]
    yield Part("limits of packed rows, places of warps", "", more)


def _v1_fwd_registers(case: _Case) -> Iterator[Part]:
    """V2's parts, and what V1 takes beside them to merge its O with the one in HBM."""
    parts = list(_mma_fwd_registers(case))
    yield from parts
    how, taken = _v1_taken(case)
    if more := max(taken - round(sum(part.value for part in parts)), 0):
        yield Part("merging O", f"V1 takes {how} in all", more)
    most = footprint.v1_most(case.problem)
    if beyond := max(case.accumulators - most, 0):
        how = f"{case.accumulators} - {most}"
        yield Part("accumulators past all room", how, beyond)


def _v1_taken(case: _Case) -> tuple[str, int]:
    most, each = footprint.MOST_REGISTERS, footprint.V1_PER_ACCUMULATOR[case.problem.dtype]
    if case.accumulators >= footprint.V1_SMALL:
        return f"all {most}", most
    base = footprint.v1_base(case.problem)
    taken = min(int(round_up(int(base + each * case.accumulators), 8)), most)
    return f"{base} + {each} x {case.accumulators}, or {taken},", taken


def _v3_fwd_registers(case: _Case) -> Iterator[Part]:
    d, dv, e = case.dims
    keys = case.tile.block_kv
    scaled = case.problem.dtype == "e4m3"
    yield _scores_or_sums(case) if scaled else Part("S, fp32", f"{keys} keys / 2", keys // 2)
    yield Part("O, fp32", f"{dv} / 2", dv // 2)
    if scaled:
        yield Part("sums of rounded weights", "", ROUNDED_SUMS)
    yield Part("P", f"{keys} keys x {e} / 8", keys * e // 8)
    if keeps_q(case.problem, case.tile):
        yield Part("Q, kept", f"{d} / 4", d // 4)
    options = footprint.v3_option_registers(case.problem, case.tiles).items()
    yield from (Part(name, "", int(kept[0])) for name, kept in options if kept[0])
    yield Part("the rest", "", E4M3_BASE if scaled else V3_BASE)


def _v3_packed_registers(case: _Case) -> Iterator[Part]:
    yield from _v3_fwd_registers(case)
    if kept := int(footprint.packed_registers(case.tiles)[0]):
        yield Part("packed rows", f"more than {footprint.V3_PACKED_KEYS} keys", kept)


def _scores_or_sums(case: _Case) -> Part:
    """In e4m3 the same registers hold a tile's scores and then the sums of its P V."""
    keys, sums = case.tile.block_kv, int(footprint.tile_sums(case.problem, case.tiles)[0])
    columns = f"{2 * sums} columns of P V / 2"
    count = max(keys // 2, sums)
    return Part("S, then sums of a tile, fp32", f"max({keys} keys / 2, {columns})", count)


def _bwd_registers(case: _Case) -> Iterator[Part]:
    d, dv, _ = case.dims
    m, n, threads = case.tile.block_q, case.tile.block_kv, case.tile.threads
    total = (n * (d + dv) + max(2 * m * n, m * d)) // threads
    how = f"({n} x {d + dv} + max(2 x {m} x {n}, {m} x {d})) / {threads} threads"
    yield Part("dK, dV; S, dP or dQ", how, total)
    yield Part("the rest", "", WGMMA_SLACK)


def _v2_bwd_registers(case: _Case) -> Iterator[Part]:
    keys, step = (int(n[0]) for n in (case.tiles.bwd_keys, case.tiles.query_step))
    part = int(case.tiles.query_part[0])
    columns = int(footprint.gradient_columns(case.problem, case.tiles)[0])
    gradients = keys * columns // WARP
    yield Part("dK, dV", f"{keys} keys a warp x {columns} / {WARP}", gradients)
    scores = keys * (step + part) // WARP
    yield Part("S, dP", f"{keys} keys x ({step} + {part}) queries / {WARP}", scores)
    options = footprint.backward_option_registers(case.problem)
    for name, kept in options.items():
        yield Part(name, "", kept)
    needed = int(footprint.registers(case.problem, case.entry.variant, "bwd", case.tiles)[0])
    yield Part("the rest", "", needed - gradients - scores - sum(options.values()))


_REGISTERS: dict[tuple[str, str], Callable[[_Case], Iterator[Part]]] = {
    ("v1", "fwd"): _v1_fwd_registers,
    ("v2", "fwd"): _v2_fwd_registers,
    ("v2_split", "fwd"): _split_registers,
    ("v3", "fwd"): _v3_fwd_registers,
    ("v3_packed", "fwd"): _v3_packed_registers,
    **{(name, "bwd"): _v2_bwd_registers for name in ("v1", "v2", "v2_ordered", "v2_second_pass")},
    ("v3", "bwd"): _bwd_registers,
}


def _occupancy(case: _Case) -> Term:
    """What each resource alone would allow."""
    entry, gpu = case.entry, case.gpu
    if entry.tile is None:
        return Term(
            "occupancy",
            remarks=("the libraries' kernels are not modelled this far",),
        )
    threads, registers, smem = entry.block, entry.registers, entry.smem_bytes
    registers = min(registers, gpu.registers_per_sm // threads) if entry.algo == "v3" else registers
    carveout = units.capacity(max(gpu.smem_carveouts, default=gpu.smem_per_sm))
    each = units.capacity(smem + gpu.smem_reserved)
    remarks = (
        f"{_blocks(gpu, threads, registers, 0)} by registers:"
        f" {gpu.registers_per_sm} / ({threads} threads x {registers})",
        f"{_blocks(gpu, threads, 1, smem)} by shared memory: {carveout} / {each}",
        f"{_blocks(gpu, threads, 1, 0)} by warps: {gpu.warps_per_sm} / {threads // 32}",
        f"so an SM holds {entry.blocks_per_sm}, limited by {entry.limiter}",
    )
    return Term("occupancy", remarks=remarks)


def _blocks(gpu: Gpu, threads: int, registers: int, smem: int) -> int:
    return int(residency(gpu, threads, registers, smem)[0][0])


def _time(case: _Case) -> Term:
    """Seconds every pipe would need alone, and how they overlap."""
    times, entry = case.entry.time, case.entry
    remarks = [f"{name:<8} alone {units.seconds(time_s)}" for name, time_s in times.terms.items()]
    remarks += [
        f"{units.seconds(times.low)} if everything overlapped,"
        f" {units.seconds(times.high)} if nothing did",
        f"{units.seconds(times.seconds)} is likely; {times.bound} is the longest pipe",
        f"{units.tflops(entry.useful_flops / times.seconds)} of useful work",
        *entry.assumed,
    ]
    return Term("time", remarks=tuple(remarks))


TERMS: dict[str, Callable[[_Case], Term]] = {
    "choice": _choice,
    "smem": _smem,
    "registers": _registers,
    "occupancy": _occupancy,
    "memory": _memory,
    "traffic": _traffic,
    "flops": _flops,
    "time": _time,
}

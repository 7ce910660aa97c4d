"""Bytes that move, of two kinds: issued, and DRAM.

*Issued* counts every byte that a global load, store or reduction names, tails clipped to the
tensors: exact whole numbers, the sum over all blocks. *DRAM* is an estimate of what is left for HBM
after the L2 cache has served what it still holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fasim.gpu import Gpu
from fasim.model.footprint import Tensors, parts_bytes
from fasim.model.tiles import Ints, Tiles, ceil_div, padded
from fasim.model.visits import Visits, grouped_visits, packed_visits, tile_visits, visits
from fasim.plan import (
    ABREAST,
    PADDED,
    PADDED_BYTES,
    SCALE_INPUTS,
    WARPGROUP_ROWS,
    lays_out,
    padded_tensors,
    quantisers,
    row_blocks,
    scale_shapes,
    transposed_shape,
    transposers,
    transposes,
    value_slabs,
    widened,
)
from fasim.problem import Problem

# Share of the L2 that a working set may fill and still be found there again.
L2_SHARE = 0.7
# Extra K/V fetches of blocks that drift apart while they walk the same keys.
DRIFT = 0.1


@dataclass(frozen=True)
class Bytes:
    """Bytes read and written, in all and (issued only) by tensor; whole numbers or arrays."""

    read: Any
    write: Any
    reads: Mapping[str, Any] = field(default_factory=dict)
    writes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def by_tensor(cls, reads: Mapping[str, Any], writes: Mapping[str, Any]) -> Bytes:
        return cls(sum(reads.values()), sum(writes.values()), reads, writes)

    @property
    def total(self) -> Any:
        return self.read + self.write

    def at(self, index: int) -> Bytes:
        """One entry of the arrays, as Python integers."""
        return Bytes(
            _pick(self.read, index),
            _pick(self.write, index),
            {name: _pick(b, index) for name, b in self.reads.items()},
            {name: _pick(b, index) for name, b in self.writes.items()},
        )


def _pick(value: Any, index: int) -> int:
    return int(value[index]) if isinstance(value, np.ndarray) else int(value)


def issued(problem: Problem, algo: str, pass_: str, tiles: Tiles) -> Bytes:
    """Bytes named by the kernels of one pass; arrays as long as ``tiles`` except for standard."""
    if algo == "standard":
        return _standard(problem, pass_)
    if algo == "v2_split":
        return _v2_split(problem, tiles)
    if algo == "v3_packed":
        return _v3_packed(problem, tiles)
    seen = tile_visits(problem, algo, pass_, tiles)
    moved = _ISSUED[algo, pass_](problem, seen, tiles)
    if transposes(algo, problem.dtype):
        moved = _with_transposed(problem, seen, tiles.block_kv, moved)
    if pads(problem, algo, pass_):
        moved = _with_padded(problem, moved)
    reads = _option_reads if pass_ == "fwd" else _option_reads_bwd
    return Bytes.by_tensor(_sum(moved.reads, reads(problem, algo, tiles)), moved.writes)


def _option_reads_bwd(problem: Problem, algo: str, tiles: Tiles) -> dict[str, Any]:
    """The same backward. Every thread reads the slope of each tile of queries that it walks, or
    that it makes dQ of by itself, and its sequence's ends in each kernel that it is in; a dense
    bias is read where tiles meet."""
    p, heads = problem, problem.batch * problem.heads
    seen = visits(problem, tiles.block_q, tiles.block_kv)
    turned = visits(problem, tiles.block_kv, tiles.block_q)
    again = algo == "v2_second_pass"
    reads: dict[str, Any] = {}
    if p.bias == "alibi":
        reads["slopes"] = 4 * heads * (seen.steps + again * turned.q_tiles) * tiles.threads
    if p.dense:
        reads["bias"] = heads * (seen.pairs + again * turned.pairs) * p.bias_bytes
    if p.varlen:
        last: dict[str, Any] = {"v1": 0, "v2_second_pass": turned.q_tiles}
        per_kv_head = np.minimum(seen.kv_tiles, 1) if algo == "v1" else seen.kv_tiles
        blocks = (
            heads * (seen.q_tiles + last.get(algo, seen.q_tiles))
            + p.batch * p.kv_heads * per_kv_head
        )
        reads |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), 8 * blocks * tiles.threads)
    return reads


def _option_reads(problem: Problem, algo: str, tiles: Tiles) -> dict[str, Any]:
    """What only some kernels read forward. Every thread (V3: that computes) reads its head's slope
    and scale factors and (V3: one that loads) its sequence's ends; a dense bias is read once
    wherever a q tile (V2: a warp's rows) meets the keys it visits.
    """
    p, heads = problem, problem.batch * problem.heads
    seen = tile_visits(p, algo, "fwd", tiles, tiles.step_kv)
    per_head = np.minimum(seen.q_tiles, 1) if algo == "v1" else seen.q_tiles
    threads = heads * per_head * tiles.threads
    reads: dict[str, Any] = {}
    if p.bias == "alibi":
        reads["slopes"] = 4 * threads
    if p.dense:
        rows = tiles.rows_apart(algo, p)
        reads["bias"] = heads * visits(problem, rows, tiles.step_kv).pairs * p.bias_bytes
    if p.varlen:
        readers = heads * seen.q_tiles if algo == "v3" else threads
        of_q, of_k = _asking_aside(problem, algo)
        reads |= {"cu_seqlens_q": 8 * (readers + of_q), "cu_seqlens_k": 8 * (readers + of_k)}
    if p.dtype == "e4m3":
        readers = heads * seen.q_tiles if algo == "v3" else threads
        reads |= dict.fromkeys(SCALE_INPUTS, 4 * readers)
    if p.scales == "block":  # that of Q for each warpgroup
        groups = tiles.block_q // WARPGROUP_ROWS
        reads |= {"q_scale": 4 * heads * seen.q_tiles * groups}
        reads |= dict.fromkeys(SCALE_INPUTS[1:], 4 * heads * seen.steps)
    return reads


def _standard(problem: Problem, pass_: str) -> Bytes:
    """Unfused launches, scale and mask inside the softmax: 4 passes over S or P, backward 7."""
    t = Tensors.of(problem)
    bias = {"bias": t.bias} if t.bias else {}
    forward = Bytes.by_tensor(
        {"q": t.q, "k": t.k, "v": t.v, "s": t.scores, "p": t.scores, **bias},
        {"s": t.scores, "p": t.scores, "o": t.o},
    )
    backward = Bytes.by_tensor(
        {"q": t.q, "k": t.k, "v": t.v, "do": 2 * t.o}
        | {"p": 2 * t.scores, "dp": t.scores, "ds": 2 * t.scores},
        {"dq": t.q, "dk": t.k, "dv": t.v, "dp": t.scores, "ds": t.scores},
    )
    return {"fwd": forward, "bwd": backward}[pass_]


def _v1_fwd(problem: Problem, seen: Visits, tiles: Tiles) -> Bytes:
    """Outer loop over K/V blocks, each loaded once a query head; inner over the q blocks that see
    it. O, m and l come back from HBM except in a q block's first step; its last writes O and LSE.
    """
    p, e, heads = problem, problem.element_bytes, problem.batch * problem.heads
    rows = seen.rows + seen.blind_rows  # a q block that sees no key is still visited once
    again = heads * (rows - p.seq)
    keys = heads * p.seq_kv * (seen.q_tiles > 0)
    return Bytes.by_tensor(
        {
            "q": heads * rows * p.head_dim * e,
            "k": keys * p.head_dim * e,
            "v": keys * p.head_dim_v * e,
            "o_acc": again * p.head_dim_v * 4,
            "m": again * 4,
            "l": again * 4,
        },
        {
            "o_acc": again * p.head_dim_v * 4,
            "m": again * 4,
            "l": again * 4,
            "o": heads * p.seq * p.head_dim_v * p.out_bytes,
            "lse": heads * p.seq * 4,
        },
    )


def _v2_fwd(problem: Problem, seen: Visits, tiles: Tiles) -> Bytes:
    """Every q tile reads Q once, the K/V tiles it visits, and writes O and LSE once."""
    p, e, heads = problem, problem.element_bytes, problem.batch * problem.heads
    return Bytes.by_tensor(
        {
            "q": heads * p.seq * p.head_dim * e,
            "k": heads * seen.keys * p.head_dim * e,
            "v": heads * seen.keys * p.head_dim_v * e,
        },
        {"o": heads * p.seq * p.head_dim_v * p.out_bytes, "lse": heads * p.seq * 4},
    )


def _v3_fwd(problem: Problem, seen: Visits, tiles: Tiles) -> Bytes:
    """As V2, on rows that TMA takes."""
    return _v2_fwd(widened(problem), seen, tiles)


def _with_transposed(problem: Problem, seen: Visits, block_kv: Ints, moved: Bytes) -> Bytes:
    """V3 in e4m3: a kernel before lays out V anew, of which whole slabs of keys are read."""
    p, slabs, (*_, rows, width) = problem, value_slabs(problem), transposed_shape(problem)
    ragged = seen.kv_tiles * block_kv - p.seq_kv
    last = (seen.steps * block_kv - seen.keys) // np.maximum(ragged, 1)  # visits of the last tile
    walked = seen.keys + last * (slabs * width - p.seq_kv)
    main = {**moved.reads, "vt": p.batch * p.heads * rows * walked}
    del main["v"]
    if p.quantises:
        main = {{"q": "q8", "k": "k8"}.get(name, name): count for name, count in main.items()}
    before = laid_out(p)
    return Bytes.by_tensor(_sum(before.reads, main), _sum(before.writes, moved.writes))


def _sum(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in (*first, *second)}


def laid_out(problem: Problem) -> Bytes:
    """What the kernels that lay out V anew move, or that quantise all inputs."""
    if not lays_out(problem):
        return Bytes(0, 0)
    p, (*_, rows, width) = problem, transposed_shape(problem)
    vt = {"vt": p.batch * p.kv_heads * value_slabs(p) * rows * width}
    v = p.batch * p.kv_heads * p.seq_kv * p.head_dim_v * p.in_bytes
    if not p.quantises:
        return Bytes.by_tensor({"v": v}, vt)
    t, made, passes = Tensors.of(p), Tensors.of(widened(p)), 1 if p.scales == "block" else 2
    given = {"q": t.q * p.in_bytes, "k": t.k * p.in_bytes, "v": v}
    read, write = _scale_factors(p)
    reads = {name: passes * count for name, count in given.items()} | read
    return Bytes.by_tensor(reads, {"q8": made.q, "k8": made.k, **vt, **write})


def _scale_factors(problem: Problem) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes read and written to find scale factors: those that several blocks of rows share come
    from the largest number of each, and every thread that quantises reads one."""
    threads, blocks = quantisers(problem), row_blocks(problem)
    if problem.scales == "block":
        of_q, of_k, _ = blocks
        return {}, {name: 4 * n for name, n in zip(SCALE_INPUTS, (of_q, of_k, of_k), strict=True)}
    write = {name: 4 * math.prod(shape) for name, shape in scale_shapes(problem).items()}
    read = {name: 4 * threads * n for name, n in zip(SCALE_INPUTS, blocks, strict=True)}
    most = {"most": 4 * sum(blocks)}
    return {**read, **most}, {**write, **most}


def pads(problem: Problem, algo: str, pass_: str) -> tuple[str, ...]:
    """Tensors that kernels of their own copy to, or O from, rows that TMA takes."""
    return padded_tensors(problem) if (algo, pass_) == ("v3", "fwd") else ()


def padding(problem: Problem) -> Bytes:
    """What the kernels move that pad rows and cut those of O: every row once."""
    names = padded_tensors(problem)
    narrow, wide = (vars(Tensors.of(p)) for p in (problem, widened(problem)))
    given = [name for name in names if name != "o"]
    copied = ["o"] if "o" in names else []
    reads = {n: narrow[n] for n in given} | {f"{n}{PADDED}": wide[n] for n in copied}
    writes = {f"{n}{PADDED}": wide[n] for n in given} | {n: narrow[n] for n in copied}
    return Bytes.by_tensor(reads, writes)


def _padders(problem: Problem) -> tuple[int, int]:
    """Threads that copy rows of Q and O, and of K and V: one for 16 bytes."""
    names, wide = padded_tensors(problem), vars(Tensors.of(widened(problem)))
    bytes_ = (sum(wide[n] for n in names if n in tensors) for tensors in ("qo", "kv"))
    of_q, of_k = (size // PADDED_BYTES for size in bytes_)
    return of_q, of_k


def _asking_aside(problem: Problem, algo: str) -> tuple[int, int]:
    """Threads of the kernels around the main one that ask where sequences of queries end, and those
    of keys."""
    of_q, of_k = _padders(problem) if pads(problem, algo, "fwd") else (0, 0)
    if not transposes(algo, problem.dtype):
        return of_q, of_k
    if not problem.quantises:
        slabs = problem.batch * problem.kv_heads * value_slabs(problem)
        return of_q, of_k + transposers(problem.head_dim_v) * slabs
    queries, keys, values = row_blocks(problem)
    times = quantisers(problem) * (1 if problem.scales == "block" else 2)
    return of_q + times * queries, of_k + times * (keys + values)


def _with_padded(problem: Problem, main: Bytes) -> Bytes:
    """V3 on rows that were padded before, and are cut after."""
    names, aside = padded_tensors(problem), padding(problem)
    both = []
    for moved, more in ((main.reads, aside.reads), (main.writes, aside.writes)):
        renamed = {f"{n}{PADDED}" if n in names else n: b for n, b in moved.items()}
        both.append(renamed | {n: renamed.get(n, 0) + b for n, b in more.items()})
    return Bytes.by_tensor(*both)


def aside(problem: Problem, algo: str, pass_: str) -> Bytes:
    """What moves before and after the main kernel of a forward pass."""
    parts = []
    if transposes(algo, problem.dtype):
        parts.append(laid_out(problem))
    if pads(problem, algo, pass_):
        parts.append(padding(problem))
    return Bytes(sum(part.read for part in parts), sum(part.write for part in parts))


def _v2_split(problem: Problem, tiles: Tiles) -> Bytes:
    """Every split of a q tile reads its Q and leaves a part of each row, the keys are read once a
    q tile, whoever reads them; the kernel that combines reads the maxima twice."""
    p, e, seen = problem, problem.element_bytes, packed_visits(problem, tiles)
    heads, rows = p.batch * p.kv_heads, p.batch * p.heads * p.seq
    parts = rows * tiles.splits
    written = {"o_part": parts * p.head_dim_v * 4, "m_part": parts * 4, "l_part": parts * 4}
    return Bytes.by_tensor(
        {
            "q": parts * p.head_dim * e,
            "k": heads * seen.keys * p.head_dim * e,
            "v": heads * seen.keys * p.head_dim_v * e,
            **written,
            "m_part": 2 * parts * 4,
        },
        {**written, "o": rows * p.head_dim_v * p.out_bytes, "lse": rows * 4},
    )


def _v3_packed(problem: Problem, tiles: Tiles) -> Bytes:
    """As V2, but the keys that a tile of packed rows visits are read for all heads of its group."""
    moved = _v2_fwd(problem, grouped_visits(problem, tiles), tiles)
    reads = {n: b // (problem.group if n in "kv" else 1) for n, b in moved.reads.items()}
    return Bytes.by_tensor(reads, moved.writes)


def _v1_bwd(problem: Problem, seen: Visits, tiles: Tiles) -> Bytes:
    """As V2, with the loop over K/V blocks outside, in one block a K/V head: each step updates the
    fp32 dQ of a q block in HBM, a whole tile, which the first step only writes and the last turns
    into the result."""
    heads = problem.batch * problem.heads
    tile = heads * tiles.block_q * padded(problem.head_dim) * 4
    again = tile * (seen.steps - seen.q_tiles + seen.blind)
    moved = _v2_bwd(problem, seen, tiles)
    updated = {"dq_acc": again}
    return Bytes.by_tensor({**moved.reads, **updated}, {**moved.writes, **updated})


def _v2_bwd(problem: Problem, seen: Visits, tiles: Tiles) -> Bytes:
    """D = rowsum(dO * O) first; then a block per K/V tile reads Q, dO, LSE and D of every q tile
    that sees it, of all heads that share it, and adds to dQ in fp32, whole tiles; last dQ is
    rounded. dK and dV are written once."""
    p, e, heads = problem, problem.element_bytes, problem.batch * problem.heads
    rows, all_rows, t = heads * seen.rows, heads * p.seq, Tensors.of(problem)
    tile = heads * tiles.block_q * padded(p.head_dim, p.dtype) * 4  # of dQ, in every head
    reads = {
        "q": rows * p.head_dim * e,
        "o": all_rows * p.head_dim_v * e,
        "do": (rows + all_rows) * p.head_dim_v * e,
        "lse": rows * 4,
        "delta": rows * 4,
        "dq_acc": tile * seen.q_tiles,
        "k": t.k,
        "v": t.v,
    }
    writes = {
        "delta": all_rows * 4,
        "dq_acc": tile * (seen.steps + seen.q_tiles),  # added to, after being zeroed
        "dq": all_rows * p.head_dim * e,
        "dk": t.k,
        "dv": t.v,
    }
    return Bytes.by_tensor(reads, writes)


def _v2_ordered(problem: Problem, seen: Visits, tiles: Tiles) -> Bytes:
    """As V2, and every step asks a tile's counter and moves it; the counters, and that of the
    blocks which started, begin at 0."""
    heads, any_rows = problem.batch * problem.heads, problem.seq > 0
    moved = _v2_bwd(problem, seen, tiles)
    blocks = problem.batch * problem.kv_heads * seen.kv_tiles
    taken, counters = heads * seen.steps, heads * seen.q_tiles + 1
    return Bytes.by_tensor(
        {**moved.reads, "turns": 4 * taken},
        {**moved.writes, "turns": 4 * (taken + (counters + blocks) * any_rows)},
    )


def _second_pass(problem: Problem, seen: Visits, tiles: Tiles) -> Bytes:
    """V2's main kernel without dQ; then a block per q tile, as long as a K/V tile elsewhere, reads
    Q, dO, LSE and D of its rows once, all warps that share rows for themselves, and the K/V tiles
    that they see."""
    p, e, heads = problem, problem.element_bytes, problem.batch * problem.heads
    moved = _v2_bwd(p, seen, tiles)
    keys = heads * visits(p, tiles.block_kv, tiles.block_q).keys
    rows = heads * p.seq
    more = {
        "q": rows * p.head_dim * e,
        "do": rows * p.head_dim_v * e,
        "lse": rows * 4 * tiles.sharing,
        "delta": rows * 4 * tiles.sharing,
        "k": keys * p.head_dim * e,
        "v": keys * p.head_dim_v * e,
    }
    reads = {name: moved.reads[name] + more.get(name, 0) for name in (*more, "o")}
    return Bytes.by_tensor(reads, {n: b for n, b in moved.writes.items() if n != "dq_acc"})


def _v3_bwd(problem: Problem, seen: Visits, tiles: Tiles) -> Bytes:
    """As V2, but a block for every query head, and dQ without the padding of tiles."""
    p, e, heads = problem, problem.element_bytes, problem.batch * problem.heads
    rows, all_rows = heads * seen.rows, heads * p.seq
    reads = {
        "q": rows * p.head_dim * e,
        "o": all_rows * p.head_dim_v * e,
        "do": (rows + all_rows) * p.head_dim_v * e,
        "lse": rows * 4,
        "delta": rows * 4,
        "dq_acc": all_rows * p.head_dim * 4,
    }
    writes = {
        "delta": all_rows * 4,
        "dq_acc": (rows + all_rows) * p.head_dim * 4,  # added to, after being zeroed
        "dq": all_rows * p.head_dim * e,
    }
    return _with_kv_gradients(problem, reads, writes)


def _with_kv_gradients(problem: Problem, reads: dict[str, Any], writes: dict[str, Any]) -> Bytes:
    """K and V read, dK and dV written once a query head; a last pass sums the groups."""
    t = Tensors.of(problem)
    group = problem.group
    reads |= {"k": t.k * group, "v": t.v * group}
    if group == 1:
        return Bytes.by_tensor(reads, writes | {"dk": t.k, "dv": t.v})
    reads |= {"dk": t.k * group, "dv": t.v * group}
    return Bytes.by_tensor(reads, writes | {"dk": t.k * (group + 1), "dv": t.v * (group + 1)})


_ISSUED: dict[tuple[str, str], Callable[[Problem, Visits, Tiles], Bytes]] = {
    ("v1", "fwd"): _v1_fwd,
    ("v2", "fwd"): _v2_fwd,
    ("v1", "bwd"): _v1_bwd,
    ("v2", "bwd"): _v2_bwd,
    ("v2_ordered", "bwd"): _v2_ordered,
    ("v2_second_pass", "bwd"): _second_pass,
    ("v3", "fwd"): _v3_fwd,
    ("v3", "bwd"): _v3_bwd,
}


def paper(problem: Problem, pass_: str, block_kv: Ints | int) -> Any:
    """Total bytes of FlashAttention-1 by its own algorithm (Dao et al. 2022, algorithms 1 and 4):
    every outer step reads Q, reads and writes O (or dQ) in the input's type, m and l in fp32."""
    p, e = problem, problem.element_bytes
    steps, both = ceil_div(p.seq_kv, block_kv), p.head_dim + 2 * p.head_dim_v
    forward = p.seq_kv * (p.head_dim + p.head_dim_v) * e + steps * p.seq * (e * both + 16)
    kv = 2 * p.seq_kv * (p.head_dim + p.head_dim_v) * e
    backward = kv + steps * p.seq * (e * (both + 2 * p.head_dim) + 8)
    chosen = {"fwd": forward, "bwd": backward, "train": forward + backward}[pass_]
    return p.batch * p.heads * chosen


def dram(
    problem: Problem, gpu: Gpu, algo: str, pass_: str, tiles: Tiles, blocks_per_sm: Ints
) -> Bytes:
    """Estimated HBM bytes of one pass when the caches start cold."""
    asked = issued(problem, algo, pass_, tiles)
    if algo == "standard":
        return _standard_dram(problem, gpu, pass_, asked)
    if algo == "v2_split":
        return _split_dram(problem, gpu, tiles, asked)
    resident = gpu.sm_count * np.maximum(blocks_per_sm, 1)
    if algo == "v2_second_pass":
        return _second_pass_dram(problem, gpu, tiles, asked, resident)
    if algo == "v1":
        return _v1_dram(problem, gpu, pass_, asked, resident)
    abreast = min(ABREAST, problem.batch * problem.kv_heads) if algo == "v2_ordered" else 1
    before = aside(problem, algo, pass_)
    seen = widened(problem) if before.total else problem
    if algo == "v3_packed":  # the rows of a K/V head are walked by blocks of their own
        seen = replace(problem, heads=problem.kv_heads, seq=problem.group * problem.seq)
    walked = _walk_dram(seen, gpu, pass_, tiles, asked, resident, abreast)
    read, write = walked.read + before.read, walked.write + before.write
    return Bytes(np.minimum(read, asked.read), np.minimum(write, asked.write))


def _standard_dram(problem: Problem, gpu: Gpu, pass_: str, asked: Bytes) -> Bytes:
    """S and P go to HBM unless one of them fits in the L2."""
    scores = Tensors.of(problem).scores
    if scores > L2_SHARE * gpu.l2_bytes:
        return Bytes(asked.read, asked.write)
    hit_read, hit_write = {"fwd": (2, 2), "bwd": (4, 2)}[pass_]
    return Bytes(asked.read - hit_read * scores, asked.write - hit_write * scores)


def _split_dram(problem: Problem, gpu: Gpu, tiles: Tiles, asked: Bytes) -> Bytes:
    """The q tiles of a split walk its keys side by side, so those come once. The parts stay in the
    L2 until they are combined, where they fit."""
    least, parts = _least(problem, "fwd", asked), parts_bytes(problem, tiles.splits)
    spilled = np.where(parts <= L2_SHARE * gpu.l2_bytes, 0, parts)
    return Bytes(least.read + spilled, least.write + spilled)


def _v1_dram(problem: Problem, gpu: Gpu, pass_: str, asked: Bytes, resident: Ints) -> Bytes:
    """A head at work keeps Q and its fp32 accumulators alive over all its steps."""
    p, e = problem, problem.element_bytes
    row = e * p.head_dim + 4 * (p.head_dim_v + 2)
    if pass_ == "bwd":
        row = e * (p.head_dim + 2 * p.head_dim_v) + 4 * (p.head_dim + 1)
    alive = np.minimum(resident, p.batch * p.heads) * p.seq * row
    fits = alive <= L2_SHARE * gpu.l2_bytes
    least = _least(problem, pass_, asked)
    return Bytes(
        np.where(fits, np.minimum(least.read, asked.read), asked.read),
        np.where(fits, np.minimum(least.write, asked.write), asked.write),
    )


def _second_pass_dram(
    problem: Problem, gpu: Gpu, tiles: Tiles, asked: Bytes, resident: Ints
) -> Bytes:
    """A backward walk without dQ, then one over K and V, as forward, that reads Q, dO, LSE and D
    and writes dQ. What they read of a dense bias is in both."""
    p, t = problem, Tensors.of(problem)
    rows = replace(tiles, block_q=tiles.block_kv)
    keys = _walk_dram(p, gpu, "fwd", rows, asked, resident)
    queries = _walk_dram(p, gpu, "bwd", tiles, asked, resident)
    dq = p.batch * p.heads * p.seq * p.head_dim * 4
    read = keys.read + queries.read - asked.reads.get("bias", 0) - dq + t.o + 2 * t.lse
    write = queries.write - dq + t.q
    return Bytes(np.minimum(read, asked.read), np.minimum(write, asked.write))


def _walk_dram(
    problem: Problem,
    gpu: Gpu,
    pass_: str,
    tiles: Tiles,
    asked: Bytes,
    resident: Ints,
    abreast: int = 1,
) -> Bytes:
    """Blocks of one head walk the same tensors together: K and V forward, Q and dO backward.

    While the walked tensors of all heads at work fit in the L2 each byte comes from HBM once;
    beyond that, once for every convoy of blocks that walks along. At least ``abreast`` heads are at
    work."""
    p, e = problem, problem.element_bytes
    forward = pass_ == "fwd"
    per_head = ceil_div(p.seq, tiles.block_q) if forward else ceil_div(p.seq_kv, tiles.block_kv)
    per_walk = np.maximum(per_head * (p.group if forward else 1), 1)
    heads = np.maximum(ceil_div(resident, per_walk), abreast)
    row = (p.head_dim + p.head_dim_v) * e
    row_bwd = row + 8 + 4 * padded(p.head_dim, p.dtype)
    alive = heads * (p.seq_kv * row if forward else p.seq * row_bwd)
    convoy = (
        np.clip(resident // heads, 1, per_walk) if abreast > 1 else np.minimum(resident, per_walk)
    )
    passes = np.where(alive <= L2_SHARE * gpu.l2_bytes, 1, ceil_div(per_walk, convoy))
    extra = np.where(passes > 1, passes * (1 + DRIFT) - 1, 0.0)
    least = _least(problem, pass_, asked)
    t = Tensors.of(problem)
    walked = t.kv if forward else t.q + t.o
    read = (least.read + walked * extra).astype(np.int64)
    return Bytes(np.minimum(read, asked.read), np.minimum(least.write, asked.write))


def _least(problem: Problem, pass_: str, asked: Bytes) -> Bytes:
    """Every input read once, every result written once; backward also its fp32 dQ. No element of a
    dense bias is asked for twice."""
    t = Tensors.of(problem)
    bias = asked.reads.get("bias", 0)
    if pass_ == "fwd":
        return Bytes(t.q + t.kv + bias, t.o + t.lse)
    dq = problem.batch * problem.heads * problem.seq * problem.head_dim * 4
    return Bytes(t.q + t.kv + 2 * t.o + t.lse + dq + bias, t.q + t.kv + dq)

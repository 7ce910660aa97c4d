"""Seconds: step -> block -> waves or makespan -> launch.

Three answers a tile: what is likely, ``low`` if every pipe overlapped perfectly, ``high`` if none
did. All constants stand at the top of their module; each is one number for a whole kernel family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fasim.gpu import Gpu
from fasim.model import traffic
from fasim.model.footprint import Tensors
from fasim.model.silicon import Rates, rates
from fasim.model.steps import Step, query_step, step
from fasim.model.tiles import Ints, Reals, Tiles, ceil_div
from fasim.model.visits import grouped_visits, packed_visits, tile_visits, visits
from fasim.plan import (
    ABREAST,
    LAZY_DTYPES,
    WARPGROUP,
    crowded,
    keeps_q,
    starts_longest,
    transposes,
)
from fasim.problem import Problem

Law = Callable[[Any], Any]  # clocks of a step, by the blocks resident on its SM

TERMS = ("tensor", "mufu", "smem", "l2", "hbm", "launch")

# ---- mma.sync kernels (V1, V2), forward ----
# Shares of matmul and operand reads, and of softmax, that show however many blocks fill each
# other's waits. A lone block shows the third share of all of them besides, n blocks an n-th each.
PIPES_SHOW, SOFTMAX_SHOWS, LONE_SHOWS = 0.46, 0.95, 0.26
FP32_PIPES_SHOW = 0.7  # fused multiply-adds take the issue slots that the reads need
# V2 in 16 bits: no maximum, no rescaling, unrolled copies leave less in the way of the products.
LAZY_PIPES_SHOW, LAZY_SOFTMAX_SHOWS, LAZY_LONE_SHOWS = 0.40, 0.60, 0.32
# ---- and backward: share of the shorter of matmul and operand reads that shows; share of the
# softmax that very many independent blocks of an SM would hide; n hide 1 - 1/n of it ----
READS_SHOW = 0.1
HIDDEN = 0.1
# V2's backward has one barrier a step, and its warps drift between two: of all but the longest pipe
# this share shows where a scheduler has one warp, an n-th of it where it has n; clocks of a step's
# barrier, more where warps of over 128 keys meet. The share was chosen so that an A100 comes to
# FlashAttention-2's published rates; the clocks were fitted to eight problems on an H200, and the
# A100 stays within 12 %.
V2_BACKWARD_SHOWS, V2_BACKWARD_SYNC = 0.5, 1500.0
# Where a slot of Q and dO is given back within a step: clocks of the second barrier. Fitted to four
# problems at head_dim 256 on an H200.
V2_BACKWARD_FREES = 450.0
# Taking turns: trips to the L2 a step, that of an acquire and those of a fence and a release.
TURN_TRIPS = 3
# Barriers, pipeline ramps and row reductions of one step of one block.
SYNC_CLOCKS = {"fwd": 250.0, "bwd": 2000.0}
# A block's life outside its steps: its start, first loads, last stores.
MMA_BLOCK_CLOCKS = {"fwd": 5000.0, "bwd": 6000.0}
# ---- wgmma kernels (V3): a warpgroup's softmax runs under the other's matmul ----
# Clocks that a step shows of the shorter of the two where it is as long as the other, less in
# proportion where it is shorter, and more beyond 128 keys; share that two warpgroups show of what
# their softmax exceeds half of their matmul by, as one has to wait for the other then. Clocks of a
# tile of queries besides its steps: in 16 bits, in e4m3; of one whose Q takes the place of the
# last, of one in e4m3 whose O leaves in parts; of each step that masks. Fitted to eight tiles at
# 16,384 keys on an H200, and to 512; those of e4m3 to 36 times. Of blocks that share an SM each
# hides the others': n show an n-th of it all.
WGMMA_SHOWN_CLOCKS, WGMMA_WAITS = 700.0, 0.4
KEPT_SHOWN_CLOCKS = 560.0  # where registers keep Q: 3 % less of a step at head_dim 128
WGMMA_TILE_CLOCKS, E4M3_TILE_CLOCKS = 2200.0, 2500.0
ONE_Q_CLOCKS, O_IN_PARTS_CLOCKS = 2200.0, 4500.0
MASKED_STEP_CLOCKS, E4M3_MASKED_CLOCKS = 1000.0, 500.0
RING_CLOCKS = 600.0  # of them that a third stage spares, as the next tile's keys come earlier
WGMMA_SHOWS, WGMMA_SYNC_CLOCKS = 0.2, 60.0  # backward: share of the shorter, a step's barriers
WGMMA_BLOCK_CLOCKS = 2000.0  # backward
# Tiles that the ragged end of a masked launch costs: head by head, and where the longest tiles of
# several heads come first. The second was fitted to V3; three rows of V2 would have it between 0
# and 0.2.
MASKED_TAIL, SORTED_TAIL = 0.5, 0.1
# ---- standard attention: share of the peak that a library's batched matmul reaches ----
LIBRARY_MATMUL = 0.75
# How many SMs' worth of HBM bandwidth one SM can draw when the others are idle.
SOLO_DRAW = 2.0


@dataclass(frozen=True)
class Times:
    """Seconds of one launch or pass: likely, perfect overlap, none; what binds; seconds by pipe."""

    seconds: Any
    low: Any
    high: Any
    bound: Any
    terms: Mapping[str, Any]

    @classmethod
    def of(cls, seconds: Reals, low: Reals, high: Reals, terms: Mapping[str, Reals]) -> Times:
        stacked = np.stack([terms[name] for name in TERMS])
        bound = np.array(TERMS)[stacked.argmax(axis=0)]
        return cls(seconds, np.minimum(low, seconds), np.maximum(high, seconds), bound, terms)

    def at(self, index: int) -> Times:
        """One entry of the arrays, as Python numbers."""
        terms = {name: float(value[index]) for name, value in self.terms.items()}
        seconds, low, high = (float(x[index]) for x in (self.seconds, self.low, self.high))
        return Times(seconds, low, high, str(self.bound[index]), terms)


def predict(
    problem: Problem, gpu: Gpu, algo: str, pass_: str, tiles: Tiles, blocks_per_sm: Ints
) -> Times:
    """Seconds of one pass, arrays as long as ``tiles`` (standard attention has no use for them)."""
    speed = rates(gpu, algo, problem)
    if algo == "standard":
        return _standard(problem, gpu, pass_, tiles, speed)
    tiles = tiles.resident(np.maximum(blocks_per_sm, 1))
    kind = _VARIANTS.get(algo, _Flash)
    return kind(problem, gpu, algo, pass_, tiles, speed).times()


class _Flash:
    """One flash pass over many tiles."""

    def __init__(
        self, problem: Problem, gpu: Gpu, algo: str, pass_: str, tiles: Tiles, speed: Rates
    ) -> None:
        self.problem, self.tiles, self.speed = problem, tiles, speed
        self.algo, self.pass_, self.background = algo, pass_, gpu.cp_async
        self.step = step(problem, speed, algo, pass_, tiles)
        self.seen, self.heads = self._seen()
        self.shared = problem.group if pass_ == "bwd" and algo != "v3" else 1  # heads of a block
        self.issued = traffic.issued(problem, algo, pass_, tiles)
        self.dram = traffic.dram(problem, gpu, algo, pass_, tiles, tiles.blocks_per_sm)

    def _seen(self) -> tuple[Any, int]:
        """Visits of a head, and how many heads there are."""
        seen = tile_visits(self.problem, self.algo, self.pass_, self.tiles)
        return seen, self.problem.batch * self.problem.heads

    def times(self) -> Times:
        aside = self._aside_s()
        hbm = self._hbm_s()
        clocks = [self._clocks(law) for law in (self._likely, self._perfect, self._none)]
        likely, low, high = (c / self.speed.clock_hz for c in clocks)
        main = np.maximum(hbm - aside, 0)
        launch = self._launches() * self.speed.launch_s + aside
        return Times.of(
            launch + np.maximum(likely, main),
            launch + np.maximum(low, main),
            launch + high + main,
            self._terms(hbm),
        )

    def _hbm_s(self) -> Reals:
        return np.asarray(self.dram.total / self.speed.hbm_bytes_s)

    def _launches(self) -> int:
        """A backward prepares D before its main kernel; V2 and V3 round dQ after it. V3 lays out V
        before, in e4m3, or quantises everything; scale factors that blocks share take two launches
        more. It pads rows before, and cuts those of O after."""
        if self.pass_ == "bwd":
            return 2 if self.algo == "v1" else 3
        padded = traffic.pads(self.problem, self.algo, self.pass_)
        copies = bool(set(padded) - {"o"}) + ("o" in padded)
        if transposes(self.algo, self.problem.dtype):
            shared = self.problem.quantises and self.problem.scales != "block"
            return (4 if shared else 2) + copies
        return 1 + copies

    def _aside_s(self) -> float:
        """Seconds of what stands before and after the main kernel, bound by HBM."""
        if self.pass_ == "fwd":
            moved = traffic.aside(self.problem, self.algo, self.pass_).total
            return float(moved / self.speed.hbm_bytes_s)
        t = Tensors.of(self.problem)
        rounding = t.q + 2 * _fp32_q(self.problem) if self.algo != "v1" else 0
        return (2 * t.o + rounding) / self.speed.hbm_bytes_s

    def _terms(self, hbm: Reals) -> dict[str, Reals]:
        s, per_clock = self.step, self.heads / (self.speed.sms * self.speed.clock_hz)
        steps = self.seen.steps * per_clock
        l2_s = self.issued.total / (self.speed.l2_bytes * self.speed.sms * self.speed.clock_hz)
        launch = np.full(len(self.tiles), self._launches() * self.speed.launch_s)
        pipes = {"tensor": steps * s.tensor, "mufu": steps * s.softmax, "smem": steps * s.smem}
        return pipes | {"l2": np.maximum(l2_s, steps * s.l2), "hbm": hbm, "launch": launch}

    # ---- step: clocks of an SM a step, with ``resident`` blocks on it ----

    def _likely(self, resident: Any) -> Any:
        s = self.step
        if self.algo == "v3":
            longest = np.maximum(np.maximum(s.tensor, s.softmax), s.smem)
            waits = WGMMA_WAITS * np.maximum(0, s.softmax - s.tensor / 2)
            waits = waits * ((self.tiles.warps == 2 * WARPGROUP) & (self.pass_ == "fwd"))
            shorter, longer = np.minimum(s.tensor, s.softmax), np.maximum(s.tensor, s.softmax)
            wide = np.maximum(1.0, self.tiles.block_kv / 128)
            kept = keeps_q(self.problem, self.tiles)
            clocks = np.where(kept, KEPT_SHOWN_CLOCKS, WGMMA_SHOWN_CLOCKS)
            shown = clocks * wide * shorter / np.maximum(longer, 1) + waits
            if self.pass_ == "bwd":
                shown = WGMMA_SHOWS * shorter + WGMMA_SYNC_CLOCKS
            return np.maximum(longest + shown / self.tiles.blocks_per_sm, s.l2)
        independent = self._independent(resident)
        sync = SYNC_CLOCKS[self.pass_]
        if self.pass_ == "bwd" and self.algo.startswith("v2"):
            rest = V2_BACKWARD_SHOWS * (s.serial - s.longest_on_chip)
            rest /= self._warps_a_scheduler(resident)
            meeting = V2_BACKWARD_SYNC * np.maximum(1.0, self.tiles.block_kv / 128)
            meeting = meeting + V2_BACKWARD_FREES * self.tiles.frees
            waits = (meeting + self._turn_clocks() + self._exposed()) / independent
            return np.maximum(s.longest_on_chip + rest + waits, s.l2)
        if self.pass_ == "bwd":
            shown = 1 - HIDDEN * (1 - 1 / independent)
            waits = (sync + self._exposed()) / independent
            return np.maximum(_matmul(s) + shown * s.softmax + waits, s.l2)
        pipes, softmax, alone = self._shows()
        shown = pipes * (s.tensor + s.smem) + softmax * s.softmax
        lone = (alone * s.serial + self._exposed()) / independent
        return np.maximum(shown + lone + sync, s.longest)

    def _turn_clocks(self) -> float:
        """Clocks of a step that a warp waits for its block's turn, and another to end it."""
        return 0.0

    def _shows(self) -> tuple[float, float, float]:
        """Shares of products and reads, and of softmax, that show; of all in a lone block."""
        if self.problem.dtype == "fp32":
            return FP32_PIPES_SHOW, SOFTMAX_SHOWS, LONE_SHOWS
        if self.algo == "v2" and self.problem.dtype in LAZY_DTYPES:
            return LAZY_PIPES_SHOW, LAZY_SOFTMAX_SHOWS, LAZY_LONE_SHOWS
        return PIPES_SHOW, SOFTMAX_SHOWS, LONE_SHOWS

    def _perfect(self, resident: Any) -> Any:
        return self.step.longest + 0 * resident

    def _none(self, resident: Any) -> Any:
        sync = WGMMA_SYNC_CLOCKS if self.algo == "v3" else SYNC_CLOCKS[self.pass_]
        return self.step.serial + self.step.l2 + sync + 0 * resident

    def _independent(self, resident: Any) -> Any:
        """Blocks that fill each other's waits on a scheduler: a block needs a warp on each."""
        return np.maximum(1.0, np.minimum(resident, resident * self.tiles.warps / 4))

    def _warps_a_scheduler(self, resident: Any) -> Any:
        """Warps that fill each other's waits on one of the four schedulers of an SM."""
        return np.maximum(1.0, resident * self.tiles.warps / 4)

    def _exposed(self) -> Any:
        """Clocks a block waits for K and V, which come ``stages - 1`` steps and part of one ahead:
        K while PV runs, V while S and the softmax run. V1 waits for all it copies."""
        s, half = self.step, self.step.tensor / 2
        if self.algo == "v1":
            return np.zeros(len(self.tiles))
        arrival = self.speed.l2_latency + self.step.fill_bytes / 2 / self.speed.l2_bytes
        ahead = (self.tiles.stages - 1) * s.serial if self.background else -half
        for_k = np.maximum(0, arrival - ahead - half)
        return for_k + np.maximum(0, arrival - ahead - half - s.softmax * self.background)

    # ---- block and launch ----

    def _clocks(self, law: Law) -> Reals:
        """Clocks of the main kernel when a step costs what ``law`` says."""
        if self.algo == "v1":
            return self._one_block_a_head(law)
        blocks = (
            self.heads
            // self.shared
            * (self.seen.q_tiles if self.pass_ == "fwd" else self.seen.kv_tiles)
        )
        uniform = self.problem.mask == "full"
        return self._waves(law, blocks) if uniform else self._makespan(law, blocks)

    def _waves(self, law: Law, blocks: Ints) -> Reals:
        """Equal blocks: whole waves, and a last one that may leave SMs with fewer blocks."""
        full = self.tiles.blocks_per_sm
        waves, rest = np.divmod(blocks, self.speed.sms * full)
        last = ceil_div(rest, self.speed.sms)
        whole = np.where(waves > 0, waves * full * self._block(law, full), 0.0)
        return whole + np.where(last > 0, last * self._block(law, np.maximum(last, 1)), 0.0)

    def _makespan(self, law: Law, blocks: Ints) -> Reals:
        """Unequal blocks, the longest first: the mean load of an SM and part of a mean block for
        the ragged end, but never less than the longest block alone."""
        resident = np.clip(ceil_div(blocks, self.speed.sms), 1, self.tiles.blocks_per_sm)
        mean = self._block(law, resident)
        most = self.seen.longest if self.pass_ == "fwd" else self.seen.widest
        longest = self._block(law, np.ones_like(resident), most * self.shared)
        share = SORTED_TAIL if self._sorted else MASKED_TAIL
        tail = np.where(blocks > self.speed.sms, share * resident * mean, 0.0)
        load = np.maximum(blocks / self.speed.sms, 1.0) * mean + tail
        return np.where(blocks > 0, np.maximum(load, longest), 0.0)

    @property
    def _sorted(self) -> bool:
        """Whether the longest tiles of several heads come first."""
        return self.algo == "v3" or starts_longest(self.algo, self.pass_, self.problem.mask)

    def _block(self, law: Law, resident: Any, steps: Any = None) -> Any:
        """Clocks of an SM a block: its steps (the mean unless given) and its life around them."""
        per_block = self.seen.q_tiles if self.pass_ == "fwd" else self.seen.kv_tiles
        if steps is None:
            steps = self.seen.steps * self.shared / np.maximum(per_block, 1)
        if (self.algo, self.pass_) == ("v3", "fwd"):
            return steps * law(resident) + self._tile_clocks()
        life = WGMMA_BLOCK_CLOCKS if self.algo == "v3" else MMA_BLOCK_CLOCKS[self.pass_]
        ends = (life + self.step.serial / 2) / self._independent(resident)
        return steps * law(resident) + ends + self._ends_bytes() / self.speed.l2_bytes

    def _tile_clocks(self) -> Reals:
        """V3: what a tile of queries takes besides its steps; the next one's begin meanwhile."""
        e4m3 = self.problem.dtype == "e4m3"
        late = O_IN_PARTS_CLOCKS if e4m3 else ONE_Q_CLOCKS
        uniform = self.problem.mask == "full"
        masked = ceil_div(self._queries, self.tiles.block_kv) * (not uniform)
        clocks = (
            (E4M3_TILE_CLOCKS if e4m3 else WGMMA_TILE_CLOCKS)
            + late * crowded(self.problem, self.tiles)
            + (E4M3_MASKED_CLOCKS if e4m3 else MASKED_STEP_CLOCKS) * masked
        )
        drift = (self.tiles.warps > 2 * WARPGROUP) | (not e4m3)  # two in e4m3 stay together
        ahead = RING_CLOCKS * ((self.tiles.stages > 2) & drift)
        return np.asarray((clocks - ahead) / self.tiles.blocks_per_sm)

    @property
    def _queries(self) -> Ints:
        """Of a tile."""
        return self.tiles.block_q

    def _ends_bytes(self) -> Ints:
        """What a block loads before its first step and stores after its last."""
        p = self.problem
        both = p.head_dim * p.element_bytes + p.head_dim_v * p.out_bytes
        if self.pass_ == "fwd":
            return self.tiles.block_q * both
        return self.tiles.block_kv * 2 * both

    def _one_block_a_head(self, law: Law) -> Reals:
        """V1: nothing overlaps inside a block; its copies add to its steps."""
        s, seen, speed = self.step, self.seen, self.speed
        full, blocks = self.tiles.blocks_per_sm, self.heads // self.shared
        waves, rest = np.divmod(blocks, speed.sms * full)
        last = ceil_div(rest, speed.sms)
        turns = waves * full * self._head(law, full)
        turns = turns + np.where(last > 0, last * self._head(law, np.maximum(last, 1)), 0.0)
        active = np.minimum(1.0, blocks / speed.sms)
        l2 = self.issued.total / (speed.l2_bytes * speed.sms * active)
        drawn = np.minimum(1.0, SOLO_DRAW * active)
        hbm = self.dram.total / (speed.hbm_bytes_s * drawn) * speed.clock_hz
        busy = (seen.q_tiles > 0) & (s.tensor > 0)
        return np.where(busy, turns + np.maximum(l2, hbm), 0.0)

    def _head(self, law: Law, resident: Any) -> Any:
        """Clocks of an SM a head, besides the bytes: every step waits for loads and for stores."""
        steps, blind = self.shared * self.seen.steps, self.seen.blind * (self.pass_ == "fwd")
        latency = 2 * self.speed.l2_latency / self._independent(resident)
        return steps * law(resident) + (steps + blind) * latency + MMA_BLOCK_CLOCKS[self.pass_]


class _FewQueries(_Flash):
    """Rows of a group packed: what may bind are the keys' bytes and how many are on the way."""

    def _blocks(self) -> Ints:
        return np.asarray(self.heads * self.seen.q_tiles * self.tiles.splits)

    def _hbm_s(self) -> Reals:
        """Bytes over bandwidth, and the latency once each time all that fits on the way, a ring
        less the slot in use for each resident block, has arrived."""
        slots = np.minimum(self._blocks(), self.speed.sms * self.tiles.blocks_per_sm)
        on_the_way = slots * (self.tiles.stages - 0.5) * self.step.fill_bytes
        trips = self.dram.total / np.maximum(on_the_way, 1)
        waits = trips * self.speed.hbm_latency / self.speed.clock_hz
        return np.asarray(super()._hbm_s() + waits)


class _Split(_FewQueries):
    """V2 with split keys."""

    def _seen(self) -> tuple[Any, int]:
        return packed_visits(self.problem, self.tiles), self.problem.batch * self.problem.kv_heads

    def _launches(self) -> int:
        """The kernel and the one that combines its parts."""
        return 2

    def _aside_s(self) -> float:
        return 0.0

    def _clocks(self, law: Law) -> Reals:
        return self._waves(law, self._blocks())

    def _block(self, law: Law, resident: Any, steps: Any = None) -> Any:
        """Of a block with the longest share of the tiles."""
        return super()._block(law, resident, ceil_div(self.seen.longest, self.tiles.splits))


class _Packed(_FewQueries):
    """V3 whose tiles pack the rows of a group: V3's laws, for fewer and fuller tiles."""

    def __init__(
        self, problem: Problem, gpu: Gpu, algo: str, pass_: str, tiles: Tiles, speed: Rates
    ) -> None:
        super().__init__(problem, gpu, algo, pass_, tiles, speed)
        self.algo = "v3"

    def _seen(self) -> tuple[Any, int]:
        return grouped_visits(self.problem, self.tiles), self.problem.batch * self.problem.kv_heads

    @property
    def _queries(self) -> Ints:
        return np.maximum(self.tiles.block_q // self.problem.group, 1)


class _Ordered(_Flash):
    """V2 backward whose blocks add to dQ in turns."""

    def _turn_clocks(self) -> float:
        return TURN_TRIPS * self.speed.l2_latency

    def _clocks(self, law: Law) -> Reals:
        """At the start each block of a head waits until the one before it is a step ahead; later
        ones start as far apart as those whose places they take."""
        heads = self.heads // self.shared
        resident = np.minimum(heads * self.seen.kv_tiles, self.speed.sms * self.tiles.blocks_per_sm)
        convoy = np.minimum(ceil_div(resident, min(heads, ABREAST)), self.seen.kv_tiles)
        full = np.clip(ceil_div(resident, self.speed.sms), 1, self.tiles.blocks_per_sm)
        filling = np.maximum(convoy - 1, 0) * full * law(full)
        return np.asarray(super()._clocks(law) + filling)


class _Queries(_Flash):
    """The kernel that makes dQ alone: V2's backward laws, a block per block_kv queries."""

    def __init__(self, problem: Problem, gpu: Gpu, pass_: str, tiles: Tiles, speed: Rates) -> None:
        super().__init__(problem, gpu, "v2", pass_, tiles, speed)
        self.step, self.shared = query_step(problem, speed, tiles), 1
        turned = visits(problem, tiles.block_kv, tiles.block_q)
        self.seen = replace(turned, q_tiles=turned.kv_tiles, kv_tiles=turned.q_tiles)


class _SecondPass(_Flash):
    """V2 backward whose dQ has a kernel of its own."""

    def __init__(
        self, problem: Problem, gpu: Gpu, algo: str, pass_: str, tiles: Tiles, speed: Rates
    ) -> None:
        super().__init__(problem, gpu, algo, pass_, tiles, speed)
        self.queries = _Queries(problem, gpu, pass_, tiles, speed)

    def _aside_s(self) -> float:
        """The kernel before the main one; the one after it is no matter of HBM."""
        return 2 * Tensors.of(self.problem).o / self.speed.hbm_bytes_s

    def _clocks(self, law: Law) -> Reals:
        same: Law = getattr(self.queries, law.__name__)
        return super()._clocks(law) + self.queries._clocks(same)

    def _terms(self, hbm: Reals) -> dict[str, Reals]:
        terms, more = super()._terms(hbm), self.queries._terms(hbm)
        return terms | {pipe: terms[pipe] + more[pipe] for pipe in ("tensor", "mufu", "smem")}


_VARIANTS: dict[str, type[_Flash]] = {
    "v2_split": _Split,
    "v2_ordered": _Ordered,
    "v2_second_pass": _SecondPass,
    "v3_packed": _Packed,
}


def _matmul(s: Step) -> Any:
    """Matmul and the reads of its operands in one warp's stream."""
    return np.maximum(s.tensor, s.smem) + READS_SHOW * np.minimum(s.tensor, s.smem)


def _fp32_q(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.seq * problem.head_dim * 4


# ---- standard attention -------------------------------------------------------------------------


def _standard(problem: Problem, gpu: Gpu, pass_: str, tiles: Tiles, speed: Rates) -> Times:
    """Unfused launches one after the other, each bound by its matmul or by its bytes."""
    launches = _standard_launches(problem, pass_)
    scores = Tensors.of(problem).scores
    in_l2 = scores <= traffic.L2_SHARE * gpu.l2_bytes
    score_rate = speed.l2_bytes * speed.sms * speed.clock_hz if in_l2 else speed.hbm_bytes_s
    peak = speed.matmul_flops * speed.sms * speed.clock_hz
    matmul = [flops / peak for flops, _, _ in launches]
    memory = [
        passes * scores / score_rate + rest / speed.hbm_bytes_s for _, passes, rest in launches
    ]
    start = len(launches) * speed.launch_s
    likely = sum(max(m / LIBRARY_MATMUL, b) for m, b in zip(matmul, memory, strict=True))
    terms = _standard_terms(problem, speed, pass_, sum(matmul), sum(memory), in_l2) | {
        "launch": start
    }
    ones = np.ones(len(tiles))
    return Times.of(
        ones * (start + likely),
        ones * (start + max(sum(matmul), sum(memory))),
        ones * (start + sum(matmul) / LIBRARY_MATMUL + sum(memory)),
        {name: ones * terms[name] for name in TERMS},
    )


def _standard_terms(
    problem: Problem, speed: Rates, pass_: str, matmul: float, memory: float, in_l2: bool
) -> dict[str, float]:
    heads = problem.batch * problem.heads
    exponentials = heads * problem.seq * problem.seq_kv * (pass_ == "fwd")
    mufu = exponentials / (speed.mufu * speed.sms * speed.clock_hz)
    levels = {"l2": memory, "hbm": 0.0} if in_l2 else {"l2": 0.0, "hbm": memory}
    return {"tensor": matmul, "mufu": mufu, "smem": 0.0, **levels}


def _standard_launches(problem: Problem, pass_: str) -> list[tuple[int, int, int]]:
    """(FLOPs, passes over a score matrix, other bytes) of every launch."""
    t, pairs = Tensors.of(problem), problem.batch * problem.heads * problem.seq * problem.seq_kv
    over_d, over_dv = 2 * pairs * problem.head_dim, 2 * pairs * problem.head_dim_v
    forward = [(over_d, 1, t.q + t.k), (0, 2, t.bias), (over_dv, 1, t.v + t.o)]
    backward = [
        (over_dv, 1, t.o + t.v),  # dV = P' dO
        (over_dv, 1, t.o + t.v),  # dP = dO V'
        (0, 3, 0),  # dS from P and dP
        (over_d, 1, t.k + t.q),  # dQ = dS K
        (over_d, 1, t.q + t.k),  # dK = dS' Q
    ]
    return {"fwd": forward, "bwd": backward}[pass_]

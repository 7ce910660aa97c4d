"""The bugs of Hopper kernels, planted in the text of generated V3 kernels; and a few of its own.

``found`` is the rule that the emulator names, or the property that fails where every rule is kept;
where the schedule decides which is broken first, all that may be. One block works on all tiles of
queries, so that its rings and barriers go round many times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fasim import planner, properties
from fasim.emulator.program import Fault
from fasim.errors import CheckFailed
from fasim.gpu import load
from fasim.plan import Tile
from fasim.problem import Problem
from fasim.properties import Case, Trial
from fasim.render import Kernel, parse, render
from fasim.runners.emulator import EmulatorRunner

NOTHING = "nothing"
SEEDS = range(20)
RIGHT = "matches_float64"
WRITTEN = "outputs_are_fully_written"
COUNTED = "bytes_moved_are_bytes_predicted"
WORK = "matrix_instructions_do_the_flops_predicted"
PACKED = "packed_sequences_are_those_one_by_one"

TILE = Tile(block_q=128, block_kv=32, warps=8, stages=2)  # two consumers keep Q in registers
THREE = Tile(block_q=192, block_kv=32, warps=12, stages=2)  # three do not
BF16: dict[str, Any] = {"head_dim": 80, "dtype": "bf16"}  # two slabs, the second in part
KERNELS = {
    "causal": Problem(**BF16, causal=True),
    "three": Problem(**BF16, causal=True),
    "wide": Problem(head_dim=256, dtype="bf16", causal=True),  # no registers for Q
    "fp16": Problem(**{**BF16, "dtype": "fp16"}),
    "window": Problem(**BF16, window=(40, 9)),
    "alibi": Problem(**BF16, causal=True, bias="alibi"),
    "dense": Problem(**BF16, bias="dense"),
    "varlen": Problem(**BF16, causal=True, varlen=True),
    "packed": Problem(**BF16, causal=True),
    "again": Problem(**BF16, causal=True),
    "again three": Problem(**BF16, causal=True),
    "again packed": Problem(**BF16, causal=True),
    "again varlen": Problem(**BF16, causal=True, varlen=True),
    "again wide": Problem(**{**BF16, "head_dim": 33}),  # rows of K are copied to wider ones
}
PLAIN = Case(heads=2, kv_heads=1, seq=200, seq_kv=150, values="below")  # 4 tiles of 5 or less
WINDOW = replace(PLAIN, left=40, right=9)
SEQUENCES = replace(PLAIN, batch=4, seq=400)
FOURS = replace(PLAIN, heads=8, kv_heads=2, seq=75)  # 300 packed rows of each
FEW_KEYS = replace(PLAIN, seq=700, seq_kv=20)  # no more tiles of them than stages
FALLING = replace(PLAIN, values="falling")  # as the keys are walked, weights grow large
GROUPS = replace(PLAIN, batch=2, heads=4, kv_heads=2, layout="padded")
LATE = ("copy in flight", "wrong phase")  # the first use of a barrier has no earlier phase
EARLY = ("stage still read", "arrival mismatch", *LATE)


@dataclass(frozen=True)
class Bug:
    """``right`` stands in the kernel exactly once; ``wrong`` takes its place."""

    name: str
    right: str
    wrong: str
    found: str | tuple[str, ...]
    kernel: str = "causal"
    case: Case = PLAIN

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    @property
    def finders(self) -> set[str]:
        return {self.found} if isinstance(self.found, str) else set(self.found)

    def planted(self) -> Kernel:
        source = kernel_of(self.kernel).source
        assert source.count(self.right) == 1, f"{self}: the text to replace is not there once"
        return parse(source.replace(self.right, self.wrong))

    def finder(self, kernel: Kernel, seed: int) -> str:
        return finder(kernel, replace(self.case, seed=seed))


@cache
def kernel_of(name: str) -> Kernel:
    form = "packed" if name.endswith("packed") else ""
    tile = THREE if name.endswith("three") else TILE
    plan = planner.plan(KERNELS[name], load("h200"), "v3", tile=tile, form=form).plan
    assert plan
    kernel = render(replace(plan, slots=1))
    return always_again(kernel) if name.startswith("again") else kernel


LARGEST = "constexpr float kLargestSum = 16384.f;"


def always_again(kernel: Kernel) -> Kernel:
    """Every weight counts as too large: the scores of each tile are computed again, those of the
    last keys too, from which on references hold."""
    assert kernel.source.count(LARGEST) == 1
    return parse(kernel.source.replace(LARGEST, LARGEST.replace("16384", "0")))


def finder(kernel: Kernel, case: Case) -> str:
    """What finds something in a launch: a rule, a property, or nothing."""
    names = (PACKED,) if kernel.plan.kernel.varlen else (WRITTEN, RIGHT, COUNTED, WORK)
    by_name = {p.name: p for p in properties.PROPERTIES}
    trial = Trial(kernel, EmulatorRunner(workers=1), case)
    for name in names:
        try:
            by_name[name].check(trial)
        except Fault as fault:
            return fault.rule
        except CheckFailed:
            return name
    return NOTHING


K_WAIT = " wait_for(shared.full_k, n);"
V_WAIT = " wait_for(shared.full_v, n);"
EMPTY_K = (
    "    wait(&shared.empty_k[at.slot], at.parity ^ 1);  // passes at once the first time round\n"
)
EMPTY_V = "    wait(&shared.empty_v[at.slot], at.parity ^ 1);\n"
EMPTY_Q = "    wait(&shared.empty_q[at.slot], at.parity ^ 1);\n"
TURN = "    ptx::bar_sync(kTurnBarrier + warpgroup, 256);\n"
V_RELEASE = "    if (leads) ptx::mbarrier_arrive(&shared.empty_v[n % kStages]);\n"
SUMMED = "    note(kSummed, n);\n"
O_WAIT = "    finish_products<0>(o);  // here all warps wait, whether their rows move or not\n"
FOLLOW = SUMMED + "    follow(row, o, late, scale_log2);\n"
LEAVES = SUMMED + "    store();\n"
K_RELEASE = "    if (leads) ptx::mbarrier_arrive(&shared.empty_k[n % kKeyStages]);\n"
Q_RELEASE = "  if (lane == 0) ptx::mbarrier_arrive(&shared.empty_q[slot]);\n"
LAST_RELEASE = (
    "      if (tile == last_tile) ptx::mbarrier_arrive(&shared.empty_q[(round - 1) % kQStages]);\n"
)
READ = (
    "    if (leads) ptx::cp_async_bulk_wait_group_read<0>();"
    "  // what lay here before has been read\n"
)
STORE_BARRIER = "    ptx::bar_sync(kConsumerBarrier + consumer, 128);\n"
EPILOGUE = "    ptx::fence_proxy_async();\n" + STORE_BARRIER
FENCED = """__device__ __forceinline__ void start_values(Accumulator& o, const Weights& p, u64 v) {
  ptx::wgmma_fence();
"""
SCORE = "(flat(s), q[step], right, step > 0);\n  }\n  ptx::wgmma_commit_group();\n"
Q_AT, K_AT = "further(q, slab * 64 * 128 + column)", "further(k, slab * kBlockKV * 128 + column)"

BARRIERS = (
    Bug(
        "nobody waits for Q",
        "    wait(&shared.full_q[at.slot], at.parity);\n",
        "",
        (*LATE, "race", "uninitialised read"),
    ),
    Bug("nobody waits for K", K_WAIT, "", LATE),
    Bug("nobody waits for V", V_WAIT, "", LATE),
    Bug(
        "one thread of a warpgroup waits for V",
        V_WAIT,
        V_WAIT.replace("wait", "if (leads) wait", 1),
        LATE,
    ),
    Bug(
        "the parity of full is flipped",
        "  wait(&full[at.slot], at.parity);",
        "  wait(&full[at.slot], at.parity ^ 1);",
        (*LATE, "deadlock"),
    ),
    Bug("the parity of empty is not flipped", EMPTY_K, EMPTY_K.replace(" ^ 1", ""), "deadlock"),
    Bug("phases never alternate", ", n / kSlots % 2}", ", 0u}", (*EARLY, "deadlock", "race")),
    Bug("the loader does not wait for an empty K", EMPTY_K, "", EARLY),
    Bug("the loader does not wait for an empty V", EMPTY_V, "", EARLY),
    Bug(
        "the loader does not wait for an empty Q",
        EMPTY_Q,
        "",
        (*EARLY, "race"),
        case=replace(PLAIN, seq=700, seq_kv=20),
    ),
    Bug(
        "a try is taken for a wait",
        "while (!ptx::mbarrier_try_wait(",
        "if (!ptx::mbarrier_try_wait(",
        (*EARLY, "race", "uninitialised read"),
    ),
    Bug(
        "half of the bytes are expected",
        "&shared.full_v[at.slot], sizeof(shared.v[0]));",
        "&shared.full_v[at.slot], sizeof(shared.v[0]) / 2);",
        "transaction mismatch",
    ),
    Bug(
        "too many bytes are expected",
        "&shared.full_k[at.slot], sizeof(shared.k[0]));",
        "&shared.full_k[at.slot], sizeof(shared.k[0]) + 16);",
        "transaction mismatch",
    ),
    Bug(
        "one slab of two is brought",
        "for (int i = 0; i < kTileSlabs; ++i) {\n    ptx::cp",
        "for (int i = 0; i < 1; ++i) {\n    ptx::cp",
        "transaction mismatch",
    ),
    Bug(
        "empty waits for one warpgroup only",
        "ptx::mbarrier_init(&shared.empty_k[i], kConsumers);",
        "ptx::mbarrier_init(&shared.empty_k[i], 1);",
        (*EARLY, "deadlock"),
    ),
    Bug(
        "Q waits for one warpgroup only",
        "ptx::mbarrier_init(&shared.empty_q[i], kConsumers);",
        "ptx::mbarrier_init(&shared.empty_q[i], 1);",
        (*EARLY, "deadlock"),
        "wide",
        FEW_KEYS,
    ),
    Bug(
        "Q waits for one warp of a warpgroup",
        "ptx::mbarrier_init(&shared.empty_q[i], 4 * kConsumers);",
        "ptx::mbarrier_init(&shared.empty_q[i], kConsumers);",
        (*EARLY, "deadlock"),
    ),
    Bug(
        "a warp gives Q back before its lanes have read",
        "  __syncwarp();  // all lanes have read\n",
        "",
        "stage still read",
        "causal",
        FEW_KEYS,
    ),
    Bug(
        "a warp gives tiles back before its lanes have read them again",
        "  __syncwarp();  // all lanes have read Q and K again: a vote would not order that\n",
        "",
        "stage still read",
        "again three",
        FEW_KEYS,
    ),
    Bug(
        "Q's columns are taken twice",
        "row, 2 * step + lane / 16));",
        "row, 2 * step));",
        (RIGHT, *LATE),
    ),
    Bug(
        "empty waits for one warpgroup too many",
        "ptx::mbarrier_init(&shared.empty_v[i], kConsumers);",
        "ptx::mbarrier_init(&shared.empty_v[i], kConsumers + 1);",
        "deadlock",
    ),
    Bug("K is never released", K_RELEASE, "", "deadlock"),
    Bug("V is never released", V_RELEASE, "", "deadlock"),
    Bug("the last V is never released", V_RELEASE + LEAVES, LEAVES, "deadlock", "wide"),
    Bug(
        "the last V of a tile of queries never comes",
        "    loader.load_v(tiles.begin, kv_head, keys);\n",
        "",
        "deadlock",
        "wide",
    ),
    Bug("Q is never released", Q_RELEASE, "", "deadlock"),
    Bug("Q is never released by three", LAST_RELEASE, "", "deadlock", "three"),
    Bug(
        "TMA is not told of the barriers",
        "  ptx::fence_mbarrier_init();\n",
        "",
        "missing mbarrier fence",
    ),
    Bug(
        "barriers are used before they are initialised",
        "init_barriers(shared);\n  __syncthreads();\n",
        "init_barriers(shared);\n",
        ("mbarrier not initialised", "race"),
    ),
    Bug(
        "nobody says that there is no more",
        "      ptx::mbarrier_arrive(&shared.full_q[at.slot]);\n",
        "",
        "deadlock",
    ),
    Bug(
        "nobody has the first turn",
        "  if (warpgroup == kConsumers - 1) pass_turn();",
        "  if (false) pass_turn();",
        "deadlock",
    ),
    Bug(
        "a consumer keeps its turn",
        "    start_values_of(n);\n    pass_turn();\n",
        "    start_values_of(n);\n",
        "deadlock",
    ),
)

STAGES = (
    Bug(
        "K is released before its scores are there",
        "    finish_products<1>(s);\n",
        "    if (leads) ptx::mbarrier_arrive(&shared.empty_k[(n + 1) % kKeyStages]);\n"
        "    finish_products<1>(s);\n",
        (*EARLY, "deadlock"),
    ),
    Bug(
        "V is released before it was multiplied",
        O_WAIT + V_RELEASE,
        V_RELEASE + O_WAIT,
        "stage still read",
    ),
    Bug(
        "the wrong ring's stage is released",
        V_RELEASE,
        V_RELEASE.replace("empty_v", "empty_k"),
        (*EARLY, "deadlock"),
    ),
    Bug(
        "another stage is multiplied",
        "descriptor_of(shared.v[n % kStages])",
        "descriptor_of(shared.v[(n + 1) % kStages])",
        (*LATE, "uninitialised read", RIGHT),
    ),
    Bug("O's tile is written while it is being read", READ, "", "store in flight"),
    Bug(
        "nobody closes the group of stores",
        "      ptx::cp_async_bulk_commit_group();\n",
        "",
        "store in flight",
    ),
    Bug(
        "the block ends while O is being read",
        "  if (leads) ptx::cp_async_bulk_wait_group_read<0>();\n",
        "",
        "store in flight",
    ),
)

PROXIES = (
    Bug("no proxy fence before O leaves", EPILOGUE, STORE_BARRIER, "missing proxy fence"),
    Bug(
        "the proxy fence comes after the barrier",
        EPILOGUE,
        STORE_BARRIER + "    ptx::fence_proxy_async();\n",
        "missing proxy fence",
    ),
    Bug(
        "O leaves before all warps have written it",
        EPILOGUE,
        "    ptx::fence_proxy_async();\n",
        "race",
    ),
)

PRODUCTS = (
    Bug(
        "scores are read before they are there",
        "    finish_products<1>(s);\n",
        "",
        "accumulator in flight",
    ),
    Bug(
        "the wait leaves one group too many in flight",
        "finish_products<1>(s)",
        "finish_products<2>(s)",
        "accumulator in flight",
    ),
    Bug(
        "the scores' group is not closed",
        SCORE,
        SCORE.split("  ptx::wgmma_commit")[0],
        "accumulator in flight",
    ),
    Bug(
        "P is overwritten while it is multiplied",
        O_WAIT + V_RELEASE + FOLLOW + "    round_weights(p, s);\n",
        "    round_weights(p, s);\n" + O_WAIT + V_RELEASE + FOLLOW,
        "operand in flight",
    ),
    Bug(
        "O is read before the last product is there",
        "    end();\n    finish_products<0>(o);\n",
        "    end();\n",
        "accumulator in flight",
    ),
    Bug(
        "O is rescaled while it is added to",
        O_WAIT + V_RELEASE + FOLLOW,
        FOLLOW + O_WAIT + V_RELEASE,
        "accumulator in flight",
        case=FALLING,
    ),
    Bug(
        "a warp whose rows move waits for products by itself",
        O_WAIT,
        "    if (!row.settled) finish_products<0>(o);\n" + O_WAIT,
        "warps diverge",
        case=FALLING,
    ),
    Bug(
        "no wgmma.fence before PV",
        FENCED,
        FENCED.replace("  ptx::wgmma_fence();\n", ""),
        "missing wgmma fence",
    ),
    Bug(
        "offsets are swapped",
        "sizeof(tile.slab[0]), kGroupBytes, Swizzle::k128",
        "kGroupBytes, sizeof(tile.slab[0]), Swizzle::k128",
        ("descriptor mismatch", "operand outside its tile", "uninitialised read", *LATE),
    ),
    Bug(
        "V's steps are too long",
        "further(v, step * 16 * 128)",
        "further(v, step * 32 * 128)",
        ("operand outside its tile", "out of bounds", "uninitialised read", RIGHT, *LATE),
    ),
    Bug(
        "Q's slabs are as far apart as K's",
        Q_AT,
        Q_AT.replace("64 *", "kBlockKV *"),
        (RIGHT, *LATE),
        "three",
    ),
    Bug(
        "K's slabs are as far apart as Q's",
        K_AT,
        K_AT.replace("kBlockKV", "64"),
        ("operand outside its tile", "out of bounds", "uninitialised read", RIGHT, *LATE),
    ),
    Bug(
        "V is not transposed",
        "wgmma_m64k16_bf16<1>(flat(o)",
        "wgmma_m64k16_bf16<0>(flat(o)",
        (RIGHT, "descriptor mismatch", "operand outside its tile", "out of bounds", *LATE),
    ),
    Bug(
        "tiles are read with another swizzle",
        "kGroupBytes, Swizzle::k128",
        "kGroupBytes, Swizzle::k64",
        "swizzle mismatch",
    ),
    Bug(
        "shared memory begins between two swizzles",
        "extern __shared__ __align__(1024)",
        "extern __shared__ __align__(128)",
        "misaligned swizzle",
    ),
    Bug(
        "scores begin with what was there",
        "q[step], right, step > 0",
        "q[step], right, true",
        RIGHT,
    ),
    Bug("they do in three", "left, right, step > 0", "left, right, true", RIGHT, "three"),
    Bug(
        "a tile in the mask counts as whole",
        "return tile < tiles.end;",
        "return tile <= tiles.end;",
        RIGHT,
    ),
    Bug(
        "O is not swizzled",
        "(chunk % 8 ^ row % 8) * 16",
        "chunk % 8 * 16",
        ("uninitialised read", RIGHT),
    ),
)

REGISTERS = (
    Bug(
        "consumers ask for too much",
        "setmaxnreg_inc<kRegisters>();",
        "setmaxnreg_inc<kRegisters + 8>();",
        "register pool overdrawn",
    ),
    Bug(
        "the loader keeps its registers",
        "    ptx::setmaxnreg_dec<kLoaderRegisters>();\n",
        "",
        "register pool overdrawn",
    ),
)

SOFTMAX = (
    Bug(
        "large weights are kept",
        "fmaxf(sum[0], sum[1]) > kLargestSum)",
        "false)",
        RIGHT,
        "fp16",
        FALLING,
    ),
    Bug(
        "a sum is not moved with its maximum",
        "    row.sum[half] *= factor;\n",
        "",
        RIGHT,
        case=FALLING,
    ),
    Bug(
        "O is not moved with its maximum",
        "o[0][i / 4][i % 4] *= factor[i / 2 % 2];",
        "(void)factor;",
        RIGHT,
        case=FALLING,
    ),
    Bug(
        "a fresh tile moves the O of the one before",
        "  if (late.fresh) return;\n",
        "",
        ("race", "uninitialised read", RIGHT),
    ),
    Bug(
        "a fresh tile's factors overwrite 1 / l",
        "if (late.fresh || threadIdx.x",
        "if (threadIdx.x",
        ("race", RIGHT),
    ),
    Bug(
        "a factor is read before it is there",
        "  __syncwarp();  // one lane of a quad wrote its factors\n",
        "",
        ("race", "uninitialised read"),
        case=FALLING,
    ),
    Bug(
        "a factor is overwritten before it is read",
        "  __syncwarp();  // ... and is to write there again\n",
        "",
        "race",
        case=FALLING,
    ),
    Bug(
        "O does not follow",
        FOLLOW,
        SUMMED,
        RIGHT,
        case=FALLING,
    ),
    Bug(
        "scores computed again are not masked",
        "      finish(few, column);\n",
        "",
        RIGHT,
        "window",
        replace(WINDOW, values="large"),
    ),
    Bug(
        "the next tile's rows go on with the last one's",
        "span_of(work)));\n    reset(row);\n",
        "span_of(work)));\n",
        RIGHT,
    ),
    Bug(
        "O goes on from the last tile's",
        "      store();\n      zero(o);\n",
        "      store();\n",
        RIGHT,
    ),
)

GIVES_V = "if (leads && passed) ptx::mbarrier_arrive(&shared.empty_v[(n - 1) % kStages]);\n"
FEW = replace(PLAIN, seq=60, seq_kv=900)  # the first consumer has no rows
PASSED_BY = (
    Bug(
        "K that is passed by is not given back",
        "      if (leads) ptx::mbarrier_arrive(&shared.empty_k[n % kKeyStages]);\n      if",
        "      if",
        "deadlock",
        "wide",
        FEW,
    ),
    Bug(
        "V that is passed by is not given back",
        f"      {GIVES_V}      pass",
        "      pass",
        "deadlock",
        "wide",
        FEW,
    ),
    Bug(
        "the last V that is passed by is not given back",
        f"    {GIVES_V}    for",
        "    for",
        "deadlock",
        "wide",
        replace(PLAIN, seq=400, seq_kv=400),
    ),
    Bug(
        "what is passed by takes no turn",
        "      pass_turn();\n      passed = true;\n",
        "      passed = true;\n",
        "deadlock",
        "wide",
        FEW,
    ),
    Bug(
        "a tile too many is passed by",
        "max(uniform(seen().end) - 1, last_tile)",
        "max(uniform(seen().end) - 2, last_tile)",
        (RIGHT, WORK),
        "wide",
    ),
    Bug(
        "rows before the first query are stored",
        "query >= 0 && query < seq_q",
        "query < seq_q",
        "store before its tensor",
        case=FEW,
    ),
    Bug(
        "rows before the first query have a log-sum-exp",
        "  if (work.first_query + 64 * consumer < 0) return 0;\n",
        "",
        ("out of bounds", RIGHT),
        case=FEW,
    ),
)

SCHEDULE = (
    Bug(
        "the last tile of keys is left out",
        "tile >= tiles.begin; --tile) {",
        "tile > tiles.begin; --tile) {",
        ("deadlock", "stage still read"),
    ),
    Bug(
        "every round goes forward",
        "(round % 2 ? blocks - 1 - int(blockIdx.x) : int(blockIdx.x))",
        "(round % 2 ? 0 : int(blockIdx.x)) + round",
        (WRITTEN, RIGHT),
    ),
    Bug(
        "works are forgotten too early",
        "constexpr int kWorks = 4;",
        "constexpr int kWorks = 1;",
        ("race", RIGHT, WRITTEN, "static_assert"),
    ),
    Bug(
        "tiles that see nothing visit one that is there",
        "const int beyond = span.seq_kv / kBlockKV + 1;",
        "const int beyond = 0;",
        COUNTED,
        case=replace(PLAIN, seq=300, seq_kv=40),
    ),
)

OPTIONS = (
    Bug(
        "the window's first tile counts as whole",
        " && tile >= tiles.begin",
        "",
        RIGHT,
        "window",
        WINDOW,
    ),
    Bug(
        "tiles before the window are visited",
        "const int begin = first_visible(first_query, span) / kBlockKV;",
        "const int begin = 0;",
        (COUNTED, WORK),
        "window",
        WINDOW,
    ),
    Bug(
        "the next head goes on with the last one's slope",
        "slope_log2 = work.head < 0 ? 0.f : slopes[work.head] * kLog2e;",
        "slope_log2 = slopes[0] * kLog2e;",
        (RIGHT, COUNTED),
        "alibi",
    ),
    Bug(
        "scores computed again have no bias",
        "    finish_scores(s, terms, warp_query, key,",
        "    if (column == 0) finish_scores(s, terms, warp_query, key,",
        RIGHT,
        "alibi",
        FALLING,
    ),
    Bug(
        "a maximum is not looked for",
        "row.settled = !__any_sync(~0u, moves);",
        "row.settled = !late.fresh;",
        RIGHT,
        "dense",
        replace(FALLING, bias="usual"),
    ),
    Bug(
        "packed rows begin at the end's first",
        "return {kEnd - tokens, first_token + tokens};",
        "return {0, first_token + tokens};",
        ("out of bounds", PACKED),
        "varlen",
        SEQUENCES,
    ),
    Bug(
        "packed rows end one late",
        "return {kEnd - tokens, first_token + tokens};",
        "return {kEnd - tokens - 1, first_token + tokens + 1};",
        (PACKED, "store in flight", "out of bounds"),
        "varlen",
        SEQUENCES,
    ),
    Bug(
        "tiles beyond a packed sequence are worked on",
        "work.head >= 0 && work.first_query >= work.sequence.seq_q",
        "false",
        (PACKED, RIGHT, COUNTED),
        "varlen",
        SEQUENCES,
    ),
)

GROUPED = (
    Bug(
        "a row is taken for its query",
        "((row - span.seq_q) >> span.group_log2)",
        "(row - span.seq_q)",
        (RIGHT, COUNTED),
        "packed",
        FOURS,
    ),
    Bug(
        "heads of the log-sum-exp are as far apart as there are rows",
        "i64(head) * (span.seq_q >> span.group_log2)",
        "i64(head) * span.seq_q",
        (WRITTEN, RIGHT, "out of bounds"),
        "packed",
        FOURS,
    ),
    Bug(
        "each tile's box begins at its row",
        "(work.first_query + 64 * i) >> group_log2",
        "work.first_query + 64 * i",
        (RIGHT, COUNTED),
        "packed",
        FOURS,
    ),
    Bug(
        "O is stored at its row",
        "query >> group_log2,\n                                           work.head",
        "query,\n                                           work.head",
        (WRITTEN, RIGHT, COUNTED),
        "packed",
        FOURS,
    ),
    Bug(
        "a head of K and V is divided as if it were one of Q",
        "const int kv_head = work.head;",
        "const int kv_head = work.head >> group_log2;",
        (RIGHT, COUNTED),
        "packed",
        FOURS,
    ),
    Bug(
        "tiles are those of one head",
        "Grid grid = {batch, kv_heads, seq_q << group_log2, heads_together}",
        "Grid grid = {batch, kv_heads, seq_q, heads_together}",
        (WRITTEN, RIGHT),
        "packed",
        FOURS,
    ),
)

AGAIN = (
    Bug(
        "rows past the last are read again",
        "return row < count ? reinterpret_cast<const u32*>(at) + first_pair : nullptr;",
        "return reinterpret_cast<const u32*>(at) + first_pair;",
        "out of bounds",
        "again",
        GROUPS,
    ),
    Bug(
        "each tile's scores are those of its first keys again",
        "tile * kBlockKV + column);",
        "tile * kBlockKV);",
        RIGHT,
        "again",
        GROUPS,
    ),
    Bug(
        "all lanes of a quad read the same columns again",
        "reinterpret_cast<const u32*>(at) + first_pair :",
        "reinterpret_cast<const u32*>(at) :",
        RIGHT,
        "again",
        GROUPS,
    ),
    Bug(
        "the last columns are not read again",
        "step < (kHeadDim + 7) / 8",
        "step < kHeadDim / 16",
        RIGHT,
        "again",
        GROUPS,
    ),
    Bug(
        "K is read again as if its rows were packed",
        "* strides.batch + head, strides.seq, span.seq_kv",
        "* strides.batch + head, kHeadDim, span.seq_kv",
        ("out of bounds", RIGHT),
        "again",
        GROUPS,
    ),
    Bug(
        "K is read again from the queries' head",
        "work.head / group * strides.head",
        "work.head * strides.head",
        ("out of bounds", RIGHT),
        "again",
        GROUPS,
    ),
    Bug(
        "K is read again from the first of the batch",
        "k + work.batch * strides.batch",
        "k + 0 * strides.batch",
        RIGHT,
        "again",
        GROUPS,
    ),
    Bug(
        "K is read again from the first sequence",
        "k + work.sequence.k * strides.seq",
        "k + 0 * strides.seq",
        PACKED,
        "again varlen",
        replace(GROUPS, batch=4),
    ),
    Bug(
        "wider rows of K are read again as if they were not",
        "key_rows(k_padded, k_padded_strides, work",
        "key_rows(k_padded, k_strides, work",
        ("out of bounds", "misaligned access", RIGHT),
        "again wide",
        GROUPS,
    ),
    Bug(
        "the work before is scored again",
        "const Work& work = shared.works[(round - 1) % kWorks];\n      const Span span",
        "const Work& work = shared.works[(round - 2) % kWorks];\n      const Span span",
        ("out of bounds", "uninitialised read", "race", RIGHT),
        "again",
        GROUPS,
    ),
    Bug(
        "Q is read again from the tile's first rows",
        "row = query + thread / 32 * kWarpRows + lane / 4;",
        "row = query + lane / 4;",
        RIGHT,
        "again",
        GROUPS,
    ),
    Bug(
        "Q is read again from the first of the batch",
        "q + work.batch * strides.batch",
        "q + 0 * strides.batch",
        RIGHT,
        "again",
        GROUPS,
    ),
    Bug(
        "packed rows are read again as if heads were neighbours",
        "head * head_stride;",
        "head * stride;",
        ("out of bounds", RIGHT),
        "again packed",
        FOURS,
    ),
)

BUGS = (
    *(*BARRIERS, *STAGES, *PROXIES, *PRODUCTS, *REGISTERS, *SOFTMAX, *SCHEDULE, *OPTIONS),
    *(*GROUPED, *AGAIN, *PASSED_BY),
)

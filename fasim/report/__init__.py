"""One HTML page that shows the tiles of a plan moving: self-contained, offline, in two languages.

The page holds the problem, the plan, the GPUs' rates and the model's constants; its code computes
the rest with the model's own equations (model.js, events.js), so that its controls can plan anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module, resources
from typing import Any

from fasim import gpu
from fasim.entry import Entry
from fasim.errors import UsageError
from fasim.gpu import Gpu
from fasim.model import silicon
from fasim.plan import MOST_COLUMNS, columns_under_way, transposed_rows, widened
from fasim.problem import MAX_HEAD_DIM, Problem

SCHEMA = "fasim.report/1"
LANGUAGES = ("en", "zh")
VARIANTS = ("standard", "v1", "v2", "v2_split", "v3", "v3_packed")
MOST_BYTES = 1 << 53  # the page counts in doubles

CONSTANTS: tuple[tuple[str, str], ...] = (
    ("problem", "DTYPE_BYTES"),
    ("planner", "SPLIT_ROWS PACKED_QUERIES"),
    ("legality", "MAX_GRID CONSUMER_REGISTERS PRODUCT_REGISTERS ROWS_PER_WARP SPLIT_FP32_COLUMNS"),
    (
        "candidates",
        "WARPS KEYS FP32_KEYS E4M3_KEYS V1_KEYS V1_STEPS SPLIT_WARPS SPLIT_KEYS SPLIT_STAGES"
        " V3_STAGES",
    ),
    (
        "plan",
        "WARP LAZY_DTYPES SCALE_INPUTS WARPGROUP WARPGROUP_ROWS V3_BLOCKS LOADER_THREADS SLAB_BYTES"
        " KEPT_BASE KEPT_OPTION MOST_KEPT"
        " HOPPER_SMEM V3_TAIL_BYTES MOST_SPLITS ENDS_TILES SCALE_BLOCK ONES MOST_ROWS"
        " TRANSPOSED_BYTES",
    ),
    (
        "model.footprint",
        "BASE_REGISTERS FRAGMENTS RING_REGISTERS V1_BASE V1_PER_ACCUMULATOR V1_SMALL V1_MOST"
        " V1_MOST_WITH_OPTIONS MOST_REGISTERS SMALL_BLOCK_REGISTERS WIDE_REGISTERS SCORES_PER_LIMIT"
        " FEW_SCORES MMA_ROWS"
        " FP32_REGISTERS MANY_SCORES SCORES_PER_LOAD MOST_LAZY_SCORES MOST_HELD LAZY_REGISTERS"
        " OPTION_REGISTERS WANTED_BASE WANTED_PER_ACCUMULATOR SPLIT_REGISTERS COPIED_REGISTERS"
        " FEW_KEYS SUMS_REGISTERS SUMS_PER_KEY AMPERE BLACKWELL V3_BASE E4M3_BASE ROUNDED_SUMS"
        " DRIVER_BYTES MAX_SEQ"
        " V3_OPTION_REGISTERS E4M3_OPTION_REGISTERS V3_FP32_BIAS_KEYS V3_FP32_BIAS_PER_KEY"
        " V3_CAPPED_BIAS_KEYS V3_CAPPED_BIAS_PER_KEY V3_PACKED_KEYS V3_PACKED_REGISTERS",
    ),
    ("model.occupancy", "WARP_GRANULE"),
    ("model.traffic", "L2_SHARE DRIFT"),
    (
        "model.steps",
        "SOFTMAX_INSTRUCTIONS SOFTCAP_INSTRUCTIONS SOFTCAP_MUFU ALIBI_INSTRUCTIONS"
        " DENSE_INSTRUCTIONS LAZY_SAVES ISSUE_SHOWS E4M3_SOFTMAX E4M3_COLUMN E4M3_SHOWS"
        " FP32_REREAD LINE_BYTES SECTOR_BYTES CROSSING_LINES CROSSING_SECTORS",
    ),
    (
        "model.timeline",
        "TERMS PIPES_SHOW SOFTMAX_SHOWS LONE_SHOWS FP32_PIPES_SHOW LAZY_PIPES_SHOW"
        " LAZY_SOFTMAX_SHOWS LAZY_LONE_SHOWS SYNC_CLOCKS MMA_BLOCK_CLOCKS WGMMA_SHOWN_CLOCKS"
        " WGMMA_WAITS WGMMA_SYNC_CLOCKS WGMMA_TILE_CLOCKS E4M3_TILE_CLOCKS ONE_Q_CLOCKS"
        " O_IN_PARTS_CLOCKS MASKED_STEP_CLOCKS E4M3_MASKED_CLOCKS RING_CLOCKS"
        " KEPT_SHOWN_CLOCKS MASKED_TAIL SORTED_TAIL LIBRARY_MATMUL SOLO_DRAW",
    ),
)
# By the head dimension of V, 0 to the most that there is: V3 in e4m3.
TABLES: dict[str, Callable[[int], int]] = {
    "TRANSPOSED_ROWS": transposed_rows,
    **{f"UNDER_WAY_{n}": partial(columns_under_way, warps=n) for n in MOST_COLUMNS},
}
_GPU_FIELDS = (
    *("title", "compute_capability", "arch", "sm_count", "hbm_bytes", "l2_bytes", "cp_async"),
    *("smem_per_sm", "smem_per_block", "smem_granularity", "smem_reserved", "smem_carveouts"),
    *("registers_per_sm", "registers_per_thread", "register_granularity", "sub_partitions"),
    *("warps_per_sm", "blocks_per_sm", "threads_per_block", "wgmma"),
)


def page(
    entry: Entry,
    device: Gpu,
    *,
    reserve: int = 0,
    measured: Iterable[Mapping[str, Any]] = (),
    language: str = "en",
) -> str:
    """The page of a forward plan as text. Raises UsageError for what it cannot show."""
    _check(entry)
    data = document(entry, device, reserve=reserve, measured=measured, language=language)
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    names = ("words", "model", "events", "softmax", "view")
    code = "\n".join(_file(f"{name}.js") for name in names)
    parts = {"language": language, "style": _file("style.css"), "data": text, "code": code}
    html = _file("template.html")
    for name, part in parts.items():
        html = html.replace(f"{{{{ {name} }}}}", part)
    return html


def document(
    entry: Entry,
    device: Gpu,
    *,
    reserve: int = 0,
    measured: Iterable[Mapping[str, Any]] = (),
    language: str = "en",
) -> dict[str, Any]:
    """What the page is made from; ``entry`` carries the numbers that its code must come to."""
    return {
        "schema": SCHEMA,
        "language": language,
        "problem": entry.problem.to_json(),
        "gpu": device.name,
        "reserve": reserve,
        "entry": entry.to_json(),
        "gpus": _gpus(device, entry.problem),
        "constants": constants(),
        "measured": [point for one in measured for point in _measured(one, entry)],
    }


def constants() -> dict[str, Any]:
    """The model's numbers, by their names there."""
    numbers = {
        name: getattr(import_module(f"fasim.{module}"), name)
        for module, names in CONSTANTS
        for name in names.split()
    }
    columns = range(MAX_HEAD_DIM + 1)
    return numbers | {name: [of(n) for n in columns] for name, of in TABLES.items()}


def _check(entry: Entry) -> None:
    if entry.pass_ != "fwd":
        raise UsageError(
            f"the page shows the forward pass, not {entry.pass_}",
            hint="leave --pass out; `fasim explain --pass bwd` derives the backward pass",
        )
    if entry.tile is None:
        raise UsageError(
            f"{entry.algo} has no tiles to show",
            hint="add --algo v1, v2 or v3: the page compares them with standard attention",
        )
    if entry.algo == "v3" and widened(entry.problem) != entry.problem:
        raise UsageError(
            "the page does not plan V3 for rows that it pads",
            why="launches of their own copy them, which the page does not draw",
            hint="`fasim plan` and `fasim explain` do; the page shows head_dim in multiples of"
            " 8, in e4m3 of 16",
        )
    assert entry.issued, "available entries carry their bytes"
    if entry.issued.total > MOST_BYTES:
        raise UsageError(
            "this moves more bytes than the page can count",
            why=f"it moves {entry.issued.total}, and the page counts up to 2^53",
            hint="show a shorter --seq: every tile of queries does the same",
        )


def _gpus(device: Gpu, asked: Problem) -> dict[str, Any]:
    known = [gpu.load(name) for name in gpu.names()]
    return {one.name: _gpu(one, asked) for one in (*known, device)}


def _gpu(one: Gpu, asked: Problem) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in _GPU_FIELDS}
    rates = {name: _rates(one, name, asked) for name in VARIANTS}
    return {"name": one.name, "tensor_flops": dict(one.tensor_flops), **fields, "rates": rates}


def _rates(one: Gpu, variant: str, asked: Problem) -> dict[str, Any]:
    found = asdict(silicon.rates(one, variant, asked))
    del found["assumed"]
    return found


def _measured(one: Mapping[str, Any], entry: Entry) -> list[dict[str, Any]]:
    """The points of a `fasim bench --json`: the kernel and those it was timed beside."""
    try:
        same = Problem.from_json(one["problem"]) == entry.problem
        timed = [(one["kernel"], one["seconds"])]
        timed += [(peer["name"], peer["seconds"]) for peer in one.get("peers", ())]
        return [{"name": str(n), "seconds": float(s), "same": same} for n, s in timed]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            "this is no measurement",
            why=f"{type(error).__name__}: {error}",
            hint="give what `fasim bench --json` prints",
        ) from error


def _file(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


__all__ = ["LANGUAGES", "constants", "document", "page"]

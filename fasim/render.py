"""Plan to source text: templates become one standalone CUDA file, and a file tells its plan.

Rendering is deterministic: equal plans give equal bytes. Directives look like CUDA (``//% if``,
``$(value)``), so a template is itself readable, highlightable CUDA. While rendering, every literal
piece of text carries an invisible mark of the template line it came from; the marks become
``Kernel.origins``, which lets a compiler error point at the template.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from fasim.errors import UsageError
from fasim.plan import (
    ABREAST,
    LOADER_THREADS,
    SCALE_BLOCK,
    SCALE_INPUTS,
    SIGNS,
    SLAB_BYTES,
    V3_BLOCKS,
    WARPGROUP,
    KernelSpec,
    Plan,
    Tile,
    V3Layout,
    columns_at_once,
    padded,
    slabs,
    transposed_rows,
    v3_layout,
    v3_value_rows,
    value_box_rows,
    weight_tiles,
)
from fasim.problem import DTYPE_BYTES

Origin = tuple[str, int]

CTYPES = {"fp32": "float", "fp16": "u16", "bf16": "u16", "e4m3": "unsigned char"}
PTX_TYPES = {"fp16": "f16", "bf16": "bf16", "e4m3": "e4m3"}
ARGUMENT_TYPES = {"i32": "int", "f32": "float", "i64x3": "Strides"}
TEMPLATES = {
    **{("v1", "fwd"): "v1_fwd", ("v2", "fwd"): "v2_fwd", ("v2_split", "fwd"): "v2_split"},
    **dict.fromkeys((("v3", "fwd"), ("v3_packed", "fwd")), "v3_fwd"),
    **dict.fromkeys((("v2", "bwd"), ("v2_ordered", "bwd"), ("v2_second_pass", "bwd")), "v2_bwd"),
    ("v1", "bwd"): "v1_bwd",
}
SM_REGISTERS, MOST_AT_START = 65536, 248  # of an SM; of a thread, when a block starts
PLAN_BEGIN, PLAN_END = "// ---- plan", "// ---- the rest of the file has sha256 "


@dataclass(frozen=True)
class Kernel:
    """A generated file: its stem (also the kernel's symbol), text and plan.

    ``origins[i]`` is the template and line that wrote line i + 1, or None. ``edited`` is true when
    the text after the header is not what the header's hash says.
    """

    stem: str
    source: str
    plan: Plan
    origins: tuple[Origin | None, ...] = ()
    edited: bool = False

    @property
    def body(self) -> str:
        """The text after the header: what the compiler's result depends on."""
        return self.source.partition(PLAN_END)[2].partition("\n")[2] or self.source


def render(plan: Plan) -> Kernel:
    """The standalone ``.cu`` of a plan."""
    body, origins = _render_body(plan)
    templates = sorted({origin[0] for origin in origins if origin})
    header = _render_header(plan, templates, _sha(body))
    lines = (None,) * header.count("\n") + origins
    return Kernel(plan.kernel.stem, header + body, plan, lines)


def render_text(template: str, **values: object) -> str:
    """CUDA of a template that no plan belongs to, such as a test's.

    It may use ``values`` and include any file of ``templates/`` that asks for nothing else.
    """
    return _rendered(_environment().from_string(template), values)[0]


def parse(source: str, where: str = "") -> Kernel:
    """The kernel of a generated, perhaps edited, file. Raises UsageError if it is not one."""
    found = re.search(rf"^{PLAN_BEGIN}\n((?://.*\n)*?){PLAN_END}(\w+)\n", source, re.MULTILINE)
    if not found:
        raise UsageError(
            "this file carries no plan",
            where=where,
            why=f"a generated kernel has a header with a line {PLAN_BEGIN!r}",
            hint="make one with `fasim gen`",
        )
    plan = Plan.from_json(_json(found[1].replace("//", " "), where))
    edited = _sha(source[found.end() :]) != found[2]
    kernel = Kernel(plan.kernel.stem, source, plan, edited=edited)
    return kernel if edited else replace(kernel, origins=render(plan).origins)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            "the plan in this file's header is not JSON",
            where=where,
            why=str(error),
            hint="generate the file again with `fasim gen`",
        ) from error


def _render_body(plan: Plan) -> tuple[str, tuple[Origin | None, ...]]:
    """Text after the header. It depends on the kernel alone, not on the problem planned for."""
    kernel = plan.kernel
    template = _environment().get_template(f"kernels/{TEMPLATES[kernel.variant, kernel.pass_]}.cu")
    values = {"plan": plan, "kernel": kernel, "tile": kernel.tile, "abreast": ABREAST}
    return _rendered(template, values)


def _rendered(
    template: jinja2.Template, values: Mapping[str, object]
) -> tuple[str, tuple[Origin | None, ...]]:
    """Text, and where each of its lines came from."""
    marked = template.render(values)
    lines = [_unmark(line) for line in marked.split("\n")]
    while not lines[-1][0]:
        lines.pop()
    lines = list(_apart(lines))
    return "".join(f"{text}\n" for text, _ in lines), tuple(origin for _, origin in lines)


def _apart(lines: list[tuple[str, Origin | None]]) -> Iterator[tuple[str, Origin | None]]:
    """A blank line wherever the text of one template file ends and another's begins."""
    last, blank = None, True
    for text, origin in lines:
        if last and origin and origin[0] != last and text and not blank:
            yield "", None
        yield text, origin
        last, blank = origin[0] if origin else last, not text


def _render_header(plan: Plan, templates: list[str], body_sha: str) -> str:
    template = _environment().get_template("parts/header.cu")
    text = template.render(
        plan=plan,
        kernel=plan.kernel,
        launch=plan.launch_for(),
        templates={name: _sha((template_root() / name).read_text())[:8] for name in templates},
    )
    lines = [_unmark(line)[0] for line in text.strip().split("\n")]
    lines += [PLAN_BEGIN, *_plan_lines(plan), PLAN_END + body_sha]
    return "".join(f"{line}\n" for line in lines)


def _plan_lines(plan: Plan) -> list[str]:
    text = json.dumps(plan.to_json(), sort_keys=True)
    return [f"// {line}" for line in textwrap.wrap(text, 97, break_on_hyphens=False)]


def memory_map(plan: Plan) -> list[tuple[str, int, int]]:
    """(name, first byte, bytes) of every tile in a block's shared memory."""
    if plan.kernel.algo == "v3":
        return _places(_v3_tiles(plan))
    size = DTYPE_BYTES[plan.kernel.dtype]
    tiles = {name: n * size for name, n in _tiles(plan.kernel).items()}
    if plan.kernel.pass_ == "bwd":
        slots = range(plan.kernel.tile.stages)
        tiles |= {f"L and D, slot {i}": 2 * plan.kernel.tile.block_q * 4 for i in slots}
    return _places(tiles)


def _places(tiles: Mapping[str, int]) -> list[tuple[str, int, int]]:
    ends = list(accumulate(tiles.values()))
    return [(name, end - n, n) for (name, n), end in zip(tiles.items(), ends, strict=True)]


def _v3_tiles(plan: Plan) -> dict[str, int]:
    """Bytes of every tile in shared memory, in their order, and of what lies behind them."""
    kernel, tile = plan.kernel, plan.kernel.tile
    d = SLAB_BYTES * slabs(kernel.head_dim, kernel.dtype)
    of_o = SLAB_BYTES * slabs(kernel.head_dim_v)  # in 16 bits
    of_v = SLAB_BYTES * v3_value_rows(kernel, tile)
    count, parts, more_keys = v3_layout(kernel, tile)
    rows = {f"Q, slot {i}": tile.block_q * d for i in range(count)}
    rows["O on its way out" if parts == 1 else f"1/{parts} of O on its way out"] = (
        tile.block_q * of_o // parts
    )
    rows |= {f"K, slot {i}": tile.block_kv * d for i in range(tile.stages + more_keys)}
    rows |= {f"V, slot {i}": of_v for i in range(tile.stages)}
    return rows | {"barriers, factors of rows, works": plan.smem_bytes - sum(rows.values())}


def _tiles(kernel: KernelSpec) -> dict[str, int]:
    """Elements of every tile in shared memory, in their order."""
    tile = kernel.tile
    width, width_v = (padded(n, kernel.dtype) for n in (kernel.head_dim, kernel.head_dim_v))
    widest = max(width, width_v)
    if kernel.pass_ == "bwd":
        keys = {"K, and dK at the end": width, "V, and dV at the end": width_v}
        queries = {
            f"{name}, slot {i}": w for i in range(tile.stages) for name, w in _walked(kernel)
        }
        shared = dict.fromkeys(_shared_weights(kernel), tile.block_q * tile.block_kv)
        rows = {name: tile.block_kv * w for name, w in keys.items()}
        return rows | {name: tile.block_q * w for name, w in queries.items()} | shared
    first = "Q, and the warps' parts at the end" if kernel.splits else "Q, and O at the end"
    o_width = width_v * DTYPE_BYTES[kernel.out_dtype] // DTYPE_BYTES[kernel.dtype]
    rows = {first: tile.block_q * max(width, o_width)}
    if kernel.algo == "v1":
        return rows | {"K": tile.block_kv * width, "V": tile.block_kv * width_v}
    return rows | {
        f"K and V, ring slot {i}": tile.block_kv * widest for i in range(2 * tile.stages)
    }


def _shared_weights(kernel: KernelSpec) -> tuple[str, ...]:
    """Tiles of dS and P that the warps of a backward pass leave for each other."""
    if kernel.algo == "v1":
        return ("dS", "P")[: kernel.tile.sharing]
    if kernel.dq == "second_pass" and kernel.tile.p_in == "registers":
        return ()
    slots = ("dS, slot 0", "dS, slot 1", "P, slot 0", "P, slot 1")
    return slots[: weight_tiles(kernel.tile.sharing)]


def _walked(kernel: KernelSpec) -> tuple[tuple[str, int], ...]:
    """What a backward pass walks along, and the width of its rows."""
    widths = (padded(n, kernel.dtype) for n in (kernel.head_dim, kernel.head_dim_v))
    return tuple(zip(("Q", "dO"), widths, strict=True))


def template_root() -> Path:
    """``templates/`` beside the package in a checkout, inside it when installed."""
    package = Path(__file__).parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"


def parameters(kernel: KernelSpec) -> str:
    """The kernel's parameter list as CUDA, in the order of ``kernel.arguments``."""
    names = [_parameter(kernel, name, kind) for name, kind in kernel.arguments]
    return " " * 4 + _filled(names, indent=4, reserve=len(") {"))


def call(kernel: KernelSpec, before: str = "    kernel<<<grid, kThreads, kSmemBytes>>>(") -> str:
    """The arguments of a call whose variables bear the parameters' names, in a line that begins
    with ``before``."""
    names = [_word(kernel, name) for name, _ in kernel.arguments]
    beside, below = (_filled(names, column, reserve=len(");")) for column in (len(before), 8))
    below = f"\n{' ' * 8}{below}"
    return below if below.count("\n") < beside.count("\n") else beside


def _word(kernel: KernelSpec, name: str) -> str:
    """An argument's name in C++, where ``do`` is taken; in V3 o is that of the accumulator."""
    taken = ("do", "o") if kernel.algo == "v3" else ("do",)
    return name.replace("o", "O") if name in taken else name


def _parameter(kernel: KernelSpec, name: str, kind: str) -> str:
    if kind == "map":
        return f"const __grid_constant__ TensorMap {name}"
    if kind != "ptr":
        return f"const {ARGUMENT_TYPES[kind]} {name}"
    return f"{_pointed(kernel, name)}* __restrict__ {_word(kernel, name)}"


def _pointed(kernel: KernelSpec, name: str) -> str:
    """The type that a pointer argument points to."""
    if kernel.quantises and name in _QUANTISED_TYPES:
        return _QUANTISED_TYPES[name]
    if name in _INPUT_TYPES:
        return f"const {_INPUT_TYPES[name]}"
    if kernel.pass_ == "fwd":
        kinds = {"o": "Output", "o_padded": "Output"}
        kinds |= dict.fromkeys(("vt", "q_padded", "k_padded", "v_padded"), "Element")
        return kinds.get(name, "float")
    return _BACKWARD_TYPES.get(name, "float")


_INPUT_TYPES = {
    **dict.fromkeys(("q", "k", "v"), "Element"),
    **{"slopes": "float", "bias": "Bias", "cu_seqlens_q": "int", "cu_seqlens_k": "int"},
    **dict.fromkeys(SCALE_INPUTS, "float"),
}
_QUANTISED_TYPES = {
    **dict.fromkeys(("q", "k", "v"), "const Input"),
    **dict.fromkeys(("q8", "k8"), "Element"),
    **dict.fromkeys(SCALE_INPUTS, "float"),
}
_BACKWARD_TYPES = {
    **dict.fromkeys(("o", "do"), "const Element"),
    **dict.fromkeys(("dq", "dk", "dv"), "Element"),
    **{"lse": "const float", "turns": "u32"},
}


# ---- What an option puts in place of what every other kernel has --------------------------------


def hooked(kernel: KernelSpec) -> bool:
    """Whether scores pass through device/score.cuh on their way from Q K^T to the mask."""
    return kernel.softcap or kernel.bias != "none"


def unscaled(kernel: KernelSpec) -> bool:
    """Whether softmax takes scores as they are multiplied, before their block's scale factor."""
    return kernel.scales == "block" and not hooked(kernel)


def softmax_factor(kernel: KernelSpec) -> str:
    """What turns the scores that softmax sees into units of log2."""
    return "1.f" if hooked(kernel) else _score_factor(kernel)


def score_terms(kernel: KernelSpec) -> str:
    """The initialiser of ScoreTerms. A block of a backward pass or of V3 serves several heads, each
    with its bias."""
    factors = [name for name in kernel.factors if name != "scale"]
    one_head = kernel.pass_ == "fwd" and kernel.algo != "v3"
    bias = ["bias" if one_head else "head_bias", "bias_strides.seq"]
    slope = "slope_log2" if kernel.algo == "v3" else "slopes[head] * kLog2e"
    terms = {"none": [], "alibi": [slope]}.get(kernel.bias, bias)
    return ", ".join([_score_factor(kernel), *factors[1:], *terms])


def _score_factor(kernel: KernelSpec) -> str:
    """What Q K^T is multiplied by first: with the scale factors of Q and K where there are any."""
    return "score_factor" if kernel.scaled else kernel.factors[0]


def scale_of(kernel: KernelSpec, heads: str, head: str) -> str:
    """The place of a head's scale factor."""
    return "0" if kernel.scales == "tensor" else f"batch * {heads} + {head}"


def mma(kernel: KernelSpec) -> str:
    """The function that multiplies two fragments."""
    if kernel.turing:
        return "mma_m16n8k16_f16"
    return f"ptx::mma_m16n8k{kernel.mma_depth}_{PTX_TYPES[kernel.dtype]}"


def cvt(kernel: KernelSpec, dtype: str) -> str:
    """The function that rounds two floats to a word."""
    return "cvt_f16x2" if kernel.turing else f"ptx::cvt_{PTX_TYPES[dtype]}x2"


def matrix_instructions(kernel: KernelSpec) -> tuple[str, ...]:
    """The wrappers that a kernel with matrix instructions needs: products, and conversions of the
    weights and of the output."""
    product = f"mma_m16n8k{kernel.mma_depth}_{PTX_TYPES[kernel.dtype]}"
    if kernel.turing:
        return product, "cvt_f16"
    kinds = dict.fromkeys(d for d in (kernel.dtype, kernel.out_dtype) if d != "fp32")
    return product, *(f"cvt_{PTX_TYPES[kind]}x2" for kind in kinds)


def v3_instructions(kernel: KernelSpec) -> tuple[str, ...]:
    """The wrappers that V3 needs for its types, of scores computed again and of conversions, and
    for as many dimensions as its tensor maps have."""
    kinds = dict.fromkeys((kernel.dtype, kernel.out_dtype, kernel.in_dtype or kernel.dtype))
    rounding = tuple(f"cvt_{PTX_TYPES[kind]}x2" for kind in kinds)
    if kernel.scaled:
        widened = kernel.in_dtype == "fp16" != kernel.bias_dtype  # a bias brings its own
        rounding += ("cvt_f32_f16",) if widened else ()
    four = not kernel.varlen or kernel.scaled  # of packed tensors only V transposed
    five = kernel.varlen or kernel.pack_gqa
    boxes = ("cp_async_bulk_tensor_4d",) * four + ("cp_async_bulk_tensor_5d",) * five
    rounding = (*boxes, *rounding)
    if kernel.bias_dtype:
        return rounding
    if kernel.scaled:
        return ("ldmatrix_x4", "ldmatrix_x2", "mma_m16n8k32_e4m3", *rounding)
    kept = ("ldmatrix_x4",) * kernel.keeps_q
    again = ("ldmatrix_x2", "ldmatrix_x1") * kernel.tiles_stay
    return (*kept, *again, f"mma_m16n8k8_{PTX_TYPES[kernel.dtype]}", *rounding)


def map_of(kernel: KernelSpec, tensor: str) -> str:
    """The parameter with the map of what V3 moves for Q, K, V or O."""
    return f"{kernel.mapped[tensor]}_map"


def padded_copies(kernel: KernelSpec) -> Iterator[tuple[str, str, str, str]]:
    """Of each input that V3 pads: its name, columns, heads, and the rows of each (the longest)."""
    rows = {"q": longest_q(kernel), "k": longest_k(kernel), "v": longest_k(kernel)}
    for name in (name for name in kernel.padded_tensors if name in rows):
        columns = "kHeadDimV" if name == "v" else "kHeadDim"
        yield name, columns, "heads" if name == "q" else "kv_heads", rows[name]


def row_of(kernel: KernelSpec, number: str, tensor: str) -> str:
    """A tensor's row of that number, packed where sequences are."""
    if not kernel.varlen:
        return number
    of_q = ("heads", "longest_q", "cu_seqlens_q")
    of_k = ("kv_heads", "longest_k", "cu_seqlens_k")
    return f"packed_row({number}, {', '.join(of_q if tensor in 'qo' else of_k)})"


def signs(kernel: KernelSpec) -> str:
    """The signs of a rotation's columns, 32 a word, the first in the lowest bit."""
    words = range(0, max(kernel.head_dim, 32) // 8, 4)
    return ", ".join(f"0x{int.from_bytes(SIGNS[i : i + 4], 'little'):08x}u" for i in words)


def unit(kernel: KernelSpec) -> str:
    """What a Hadamard transform must be multiplied by, if there is one, to change no length."""
    return f"{1 / math.sqrt(kernel.head_dim):.9g}f" if kernel.incoherent else "1.f"


def quantising(kernel: KernelSpec) -> tuple[tuple[str, str], ...]:
    """The kernels that make e4m3, and the variables with their grids where a file runs itself."""
    stages = ("largest", "parts"), ("scales", "factors"), ("quantise", "parts")
    return stages[2 if kernel.scales == "block" else 0 :] if kernel.quantises else ()


def products_of_registers(kernel: KernelSpec) -> tuple[int, ...]:
    """Columns of V3's products whose left operand registers hold: P V, and S where Q is kept."""
    scores = (kernel.tile.block_kv,) if kernel.keeps_q else ()
    return tuple(dict.fromkeys((*scores, *value_columns(kernel))))


def value_columns(kernel: KernelSpec) -> tuple[int, ...]:
    """Columns of V3's products P V: all, but for e4m3, whose sums have fewer registers."""
    if not kernel.transposes:
        return (padded(kernel.head_dim_v),)
    rows = transposed_rows(kernel.head_dim_v)
    most = columns_at_once(kernel.head_dim_v, kernel.tile.warps)
    return tuple(dict.fromkeys((most, rows % most or most)))


def score_call(kernel: KernelSpec, key: str) -> str:
    """The arguments of finish_scores: where the scores lie matters to a bias only."""
    ends = ["span.seq_q", "span.seq_kv"] if kernel.algo == "v3" else ["seq_q", "seq_kv"]
    places = [] if kernel.bias == "none" else ["warp_query", key, *ends]
    return ", ".join(["s", "terms", *places])


def score_columns_call(kernel: KernelSpec) -> str:
    """The same backward, where scores stand on their side."""
    places = [] if kernel.bias == "none" else ["warp_key", "query + step", "span"]
    return ", ".join(["s", "terms", *places])


def span_terms(kernel: KernelSpec) -> str:
    """The initialiser of Span."""
    window = ["window_left", "window_right"] if kernel.mask == "window" else []
    lengths = ["seq_q", "seq_kv"]
    if kernel.variant == "v3_packed":  # seq_q counts rows
        lengths = ["seq_q << group_log2", "seq_kv", "group_log2"]
    return ", ".join([*lengths, *window])


def grid_rows(kernel: KernelSpec) -> str:
    """Heads whose rows V3 cuts into tiles, and the rows of each."""
    if kernel.variant == "v3_packed":
        return "kv_heads, seq_q << group_log2"
    return f"heads, {longest_q(kernel)}"


def longest_q(kernel: KernelSpec) -> str:
    """The length that a grid of query blocks is made for."""
    return "longest_q" if kernel.varlen else "seq_q"


def longest_k(kernel: KernelSpec) -> str:
    """The length that a grid of key blocks is made for."""
    return "longest_k" if kernel.varlen else "seq_kv"


def dq_tile(kernel: KernelSpec, tile: str) -> str:
    """Which tile of the fp32 dQ is a head's ``tile``. The tiles of a packed sequence begin at one
    that is its own: a sequence of n tokens has at most n / kBlockQ + 1 of them."""
    packed = f"(sequence.q / kBlockQ + batch + {tile}) * heads + head"
    return packed if kernel.varlen else f"(batch * heads + head) * q_blocks + {tile}"


def head_rows(kernel: KernelSpec) -> str:
    """Rows before those of a head in m, l, LSE and V1's O."""
    return "i64(head) * total_q + sequence.q" if kernel.varlen else "(batch * heads + head) * seq_q"


def warp_sees(kernel: KernelSpec) -> str:
    """Whether a row of the warp sees a key of a tile; fp32 has no registers to skip the others."""
    window = kernel.mask == "window"
    sees = "key < warp_keys && key + kBlockKV > warp_first" if window else "key < warp_keys"
    return f"sizeof(Element) == 4 || ({sees})" if kernel.dtype == "fp32" else sees


def layout(kernel: KernelSpec) -> V3Layout:
    """Of V3's shared memory."""
    return v3_layout(kernel, kernel.tile)


def loader_registers(tile: Tile) -> int:
    """Of a thread that loads: what those that compute leave of all that the block starts with."""
    groups = tile.warps // WARPGROUP
    of_block = SM_REGISTERS // V3_BLOCKS[groups]
    at_start = min(MOST_AT_START, of_block // (groups + 1) // LOADER_THREADS // 8 * 8)
    return max(24, min(56, at_start * (groups + 1) - tile.registers * groups))


def arch_flags(kernel: KernelSpec) -> str:
    """How nvcc builds a whole program for an architecture: what is made for one alone has no PTX
    for others."""
    if kernel.arch.endswith("a"):
        return f"-gencode arch=compute_{kernel.arch[3:]},code={kernel.arch}"
    return f"-arch={kernel.arch}"


def last_tile(kernel: KernelSpec) -> str:
    """The number of the last K/V tile that a block visits."""
    return f"{'first_tile + ' * (kernel.mask == 'window')}kv_tiles - 1"


def _filled(items: list[str], indent: int, reserve: int) -> str:
    """Items joined by commas, in lines as full as 100 columns allow, as clang-format would."""
    lines, column = [""], indent
    for item in items:
        if column + len(item) > 100 - (reserve if item is items[-1] else len(",")):
            lines, column = [*lines, ""], indent
        lines[-1] += f"{item}, "
        column += len(f"{item}, ")
    return f"\n{' ' * indent}".join(line.rstrip() for line in lines).rstrip(",")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_root()),
        extensions=[_Marks],
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        line_statement_prefix="//%",
        line_comment_prefix="//#",
        variable_start_string="$(",
        variable_end_string=")",
        block_start_string="/*%",
        block_end_string="%*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
    )
    helpers = {"parameters": parameters, "call": call, "memory_map": memory_map, "padded": padded}
    options = (
        *(hooked, unscaled, softmax_factor, span_terms),
        *(score_terms, score_call, score_columns_call),
        *(longest_q, longest_k, grid_rows, dq_tile, head_rows, last_tile, warp_sees),
        *(mma, cvt, matrix_instructions, scale_of),
        *(
            layout,
            loader_registers,
            arch_flags,
            v3_instructions,
            value_columns,
            products_of_registers,
        ),
        *(value_box_rows, map_of, padded_copies, row_of, weight_tiles),
        *(signs, unit, quantising),
    )
    helpers |= {option.__name__: option for option in options}
    environment.globals.update(helpers, ctype=CTYPES.__getitem__, ptx_type=PTX_TYPES.__getitem__)
    environment.globals["SCALE_BLOCK"] = SCALE_BLOCK
    environment.globals["V3_BLOCKS"] = V3_BLOCKS
    return environment


_OPEN, _CLOSE = "\ue000", "\ue001"  # private use: never in a template
_MARK = re.compile(f"{_OPEN}(.*?):(\\d+){_CLOSE}")


class _Marks(Extension):
    """Prefixes every line of every literal token with its template and line number."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            yield self._marked(token, stream.name or "?") if token.type == "data" else token

    @staticmethod
    def _marked(token: Token, name: str) -> Token:
        lines = enumerate(token.value.split("\n"), start=token.lineno)
        text = "\n".join(f"{_OPEN}{name}:{number}{_CLOSE}{line}" for number, line in lines)
        return Token(token.lineno, token.type, text)


def _unmark(line: str) -> tuple[str, Origin | None]:
    marks = _MARK.findall(line)
    origin = (marks[-1][0], int(marks[-1][1])) if marks else None
    return _MARK.sub("", line).rstrip(), origin


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

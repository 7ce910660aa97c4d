"""The options that describe a problem and a GPU: the same in every command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from fasim import settings, units
from fasim.errors import UsageError
from fasim.problem import BIASES, DTYPE_BYTES, PASSES, SCALES, Problem
from fasim.screen import Screen

if TYPE_CHECKING:
    from fasim.entry import Entry
    from fasim.gpu import Gpu

ALGOS = ("auto", "standard", "v1", "v2", "v3")
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """An option value that a function of fasim.units reads."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except UsageError as error:
            error.where = error.where or (max(param.opts, key=len) if param else "")
            raise


COUNT = Parsed("count", units.parse_count)
SIZE = Parsed("size", units.parse_size)
TILE = Parsed("MxN", units.parse_tile)
WINDOW = Parsed("left,right", units.parse_window)
SWEEP = Parsed("name=values", units.parse_sweep)


class ProblemOption(click.Option):
    """An option that describes the problem; help lists these apart."""


def _option(*names: str, text: str, default: str = "", **settings_: Any) -> _Decorator:
    """An option of Problem. Not given is None, so that a preset shows through."""
    text = f"{text}  [default: {default}]" if default else text
    return click.option(*names, cls=ProblemOption, help=text, default=None, **settings_)


_IN_DTYPES = click.Choice(list(DTYPE_BYTES))
_OUT_DTYPES = click.Choice(["fp32", "fp16", "bf16"])

_PROBLEM = (
    _option("-b", "--batch", type=COUNT, text="Sequences.", default="1"),
    _option("--heads", type=COUNT, text="Query heads.", default="16"),
    _option("--kv-heads", type=COUNT, text="Key and value heads.", default="heads"),
    _option("-n", "--seq", type=COUNT, text="Queries a sequence; 8k is 8192.", default="4096"),
    _option("--seq-kv", type=COUNT, text="Keys a sequence.", default="seq"),
    _option("-d", "--head-dim", type=COUNT, text="Elements a head, 1 to 256.", default="128"),
    _option("--head-dim-v", type=COUNT, text="The same of V and O.", default="head-dim"),
    _option("--dtype", type=click.Choice(list(DTYPE_BYTES)), text="Inputs.", default="fp16"),
    _option("--in-dtype", type=_IN_DTYPES, text="Inputs before e4m3.", default="dtype"),
    _option("--out-dtype", type=_OUT_DTYPES, text="Result.", default="dtype; bf16 for e4m3"),
    _option("--causal/--no-causal", text="Hide later keys; aligned bottom-right."),
    _option("--window", type=WINDOW, text="Keys visible beside the aligned one; -1 is open."),
    _option("--softcap", type=float, text="Scores become X tanh(score / X); 0 is off."),
    _option("--bias", type=click.Choice(BIASES), text="Added to scores.", default="none"),
    _option("--scale", type=float, text="Factor of q k.", default="1 / sqrt(head-dim)"),
    _option("--varlen", is_flag=True, text="Packed sequences of different lengths."),
    _option("--deterministic", is_flag=True, text="The same bits in every run."),
    _option("--scales", type=click.Choice(SCALES), text="e4m3: what shares a scale factor."),
    _option("--incoherent", is_flag=True, text="e4m3: rotate Q and K first."),
    _option("--pass", "pass_", type=click.Choice(PASSES), text="What runs.", default="fwd"),
)


def _gpu_names(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    from fasim import gpu

    return [CompletionItem(name) for name in gpu.names() if name.startswith(typed)]


_TARGET = (
    click.option(
        "--model",
        cls=ProblemOption,
        metavar="NAME|FILE",
        help="gpt2-medium, llama-3-8b, mistral-7b, sd-1.5, sd-1.5-mid, sd-1.5-deep, or a Hugging"
        " Face config.json; options given beside it win.",
    ),
    click.option(
        "--algo",
        cls=ProblemOption,
        type=click.Choice(ALGOS),
        default="auto",
        help="Algorithm.  [default: auto]",
    ),
    click.option(
        "--gpu",
        "gpu_name",
        cls=ProblemOption,
        metavar="NAME|FILE|auto",
        default="auto",
        envvar=settings.GPU.name,
        shell_complete=_gpu_names,
        help="See `fasim gpus`; auto is the one here, else h100.  [default: auto]",
    ),
    click.option(
        "--reserve",
        cls=ProblemOption,
        type=SIZE,
        default=0,
        help="Device memory that something else needs, like 14GiB.",
    ),
)
PROBLEM_NAMES = tuple(Problem.__dataclass_fields__)
_OTHERS = ("model", "gpu_name", "algo", "reserve")


@dataclass(frozen=True)
class Asked:
    """What the options of one command line ask for; nothing is loaded before it is needed."""

    screen: Screen
    given: frozenset[str]  # names of those on the command line
    explicit: dict[str, Any]
    model: str | None
    gpu_name: str
    algo: str
    reserve: int

    @functools.cached_property
    def problem(self) -> Problem:
        """The model's options under the explicit ones."""
        return Problem(**{**self._preset(), **self.explicit})

    def _preset(self) -> dict[str, Any]:
        if self.model is None:
            return {}
        from fasim import presets

        preset = presets.load(self.model)
        for note in preset.notes:
            self.screen.note(note)
        return dict(preset.options)

    @functools.cached_property
    def gpu(self) -> Gpu:
        from fasim import gpu

        found = gpu.load(self.gpu_name)
        if self.gpu_name == "auto" and gpu.detected() is None:
            self.screen.note(f"no GPU here: planning for {found.name}, choose with --gpu")
        return found

    def refuse(self, beside: str, *, unless: Collection[str] = ()) -> None:
        """Raise UsageError if there are options beside a plan, which says it all already."""
        if extra := sorted(self.given - set(unless)):
            name = extra[0].removesuffix("_name").rstrip("_").replace("_", "-")
            raise UsageError(
                f"--{name} and a plan contradict each other",
                where=beside,
                why="a plan already says what its problem is",
                hint="drop the options, or drop the plan and plan anew",
            )

    def entry(self, **options: Any) -> Entry:
        """The plan asked for."""
        problem, gpu = self.problem, self.gpu
        from fasim import planner

        return planner.plan(problem, gpu, self.algo, reserve=self.reserve, **options)

    def generable(self) -> Entry:
        """The plan asked for; where the algorithm is left open, the fastest that can be generated.

        With none, the entry that says why.
        """
        problem, gpu = self.problem, self.gpu
        from fasim import planner

        if self.algo != "auto":
            return self.entry()
        entries = planner.compare(problem, gpu, reserve=self.reserve)
        ready = [entry for entry in entries if entry.generable and entry.fits]
        return min(ready, key=lambda entry: entry.time.seconds) if ready else self.entry()


def problem_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command every problem option; it receives them as ``asked``."""

    @functools.wraps(function)
    def command(screen: Screen, **values: Any) -> Any:
        given = frozenset(filter(_on_command_line, (*PROBLEM_NAMES, *_OTHERS)))
        options = {name: values.pop(name) for name in PROBLEM_NAMES}
        explicit = {name: value for name, value in options.items() if value is not None}
        target = {name: values.pop(name) for name in _OTHERS}
        return function(screen, asked=Asked(screen, given, explicit, **target), **values)

    decorated: Callable[..., Any] = command
    for option in reversed((*_PROBLEM, *_TARGET)):
        decorated = option(decorated)
    return decorated


def _on_command_line(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


__all__ = [
    "ALGOS",
    "COUNT",
    "PROBLEM_NAMES",
    "SIZE",
    "SWEEP",
    "TILE",
    "WINDOW",
    "Asked",
    "ProblemOption",
]

"""The command line: each command reads its options, asks one module, and shows the answer.

Results go to standard output, everything else to standard error. Whatever is slow to import is
imported inside the command that needs it, so that ``--help`` is immediate.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import fasim
from fasim import show, units
from fasim.errors import FasimError, MissingToolError, UsageError
from fasim.options import PROBLEM_NAMES, SWEEP, TILE, Asked, ProblemOption, problem_options
from fasim.plan import FORMS, PACKINGS
from fasim.screen import Screen, dumped

if TYPE_CHECKING:
    from fasim.entry import Entry
    from fasim.gpu import Gpu
    from fasim.problem import Problem
    from fasim.render import Kernel
    from fasim.runners import Runner, Tracing

TOP = 5  # tiles in a plan's JSON
EXAMPLES, EMULATED = 100, 10  # cases a property, on a device and in the emulator
TERMS = ("choice", "smem", "registers", "occupancy", "memory", "traffic", "flops", "time")


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; every failure has been shown."""
    screen = Screen()
    try:
        _invoke(arguments, screen)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, click.Abort):
        screen.remark("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        return _fail(screen, error)
    return 0


def _invoke(arguments: list[str], screen: Screen) -> None:
    if "_FASIM_COMPLETE" in os.environ:
        cli.main(arguments, prog_name="fasim")
    with cli.make_context("fasim", list(arguments), obj=screen) as context:
        cli.invoke(context)


def _fail(screen: Screen, error: Exception) -> int:
    if screen.debug:
        traceback.print_exception(error)
    failure = _failure(error)
    screen.error(failure)
    return failure.exit_code


def _failure(error: Exception) -> FasimError:
    if isinstance(error, FasimError):
        return error
    if isinstance(error, click.ClickException):
        return _usage(error)
    return FasimError(
        f"this is a bug in fasim: {type(error).__name__}: {error}",
        hint="run it again with --debug, and report that with the output of `fasim doctor --json`",
    )


def _usage(error: click.ClickException) -> UsageError:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "fasim"
    close = getattr(error, "possibilities", None)
    hint = f"did you mean {' or '.join(sorted(close))}?" if close else f"see `{command} --help`"
    what = error.message if close else error.format_message()
    return UsageError(what.rstrip("."), hint=hint)


class Command(click.Command):
    """A command whose help lists its own options first, then those of the problem."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        problem = [p for p in options if isinstance(p, ProblemOption)]
        own = sorted((p for p in options if p not in problem), key=lambda p: p.is_eager)
        for title, group in (("Options", own), ("Problem", problem)):
            records = [record for p in group if (record := p.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Commands(click.Group):
    """Commands in the order in which one uses them."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that every command takes, before or after its name."""
    flag: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    for name, field, text in (
        ("--no-color", "no_color", "Plain text, also on a terminal."),
        ("--debug", "debug", "Show the traceback of a failure."),
    ):
        function = click.option(name, help=text, callback=_switch(field), **flag)(function)
    return function


def _switch(field: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def switch(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        setattr(ctx.obj, field, value or getattr(ctx.obj, field))

    return switch


def command(*examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Register a function as the command of its name; the examples end its help."""

    def register(function: Callable[..., Any]) -> click.Command:
        name = function.__name__.rstrip("_")
        add = cli.command(name, epilog=_examples(*examples), context_settings=_SETTINGS)
        return add(_common(click.pass_obj(function)))

    return register


_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
_PLAN = click.argument("plan", required=False, metavar="[PLAN]")


@click.group(
    cls=Commands,
    context_settings=_SETTINGS,
    invoke_without_command=True,
    epilog=_examples(
        "fasim demo",
        "fasim plan --gpu a100-80gb --model llama-3-8b",
        "fasim compare --gpu v100-32gb --seq 32768 --head-dim 64",
        "fasim gen --gpu a100-80gb --algo v2 --causal",
        "fasim gen --help",
    ),
)
@click.version_option(fasim.__version__, prog_name="fasim", message="%(prog)s %(version)s")
@_common
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Plan, generate, prove and measure exact-attention CUDA kernels."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command(
    "fasim plan --gpu a100-80gb --causal -n 8192",
    "fasim plan --gpu h200 --model llama-3-8b --algo v2 --top 3",
    "fasim plan --gpu rtx4090 -d 80 --tile 128x64",
    "fasim plan --gpu a100-80gb -n 1k --causal --ascii",
    "fasim plan --gpu a100-80gb --algo v2 --json | fasim gen -",
)
@problem_options
@click.option("--top", type=click.IntRange(1, 100), metavar="K", help="Show the K best tiles.")
@click.option("--tile", type=TILE, help="Judge this tile (queries x keys) instead of choosing.")
@click.option(
    "--form",
    type=click.Choice((*FORMS, *PACKINGS)),
    help="Instead of choosing, with --deterministic --pass bwd: how dQ is summed; with --algo v3:"
    " whether a tile packs the rows of all heads that share keys.",
)
@click.option("--ascii", "drawn", is_flag=True, help="Draw the tiles of the score matrix.")
@_JSON
@click.option("-o", "--out", metavar="FILE", help="Also write the plan as JSON to FILE.")
def plan(
    screen: Screen,
    asked: Asked,
    top: int | None,
    tile: tuple[int, int] | None,
    form: str | None,
    drawn: bool,
    as_json: bool,
    out: str | None,
) -> None:
    """Choose tiles; show limits, traffic and time."""
    entry = asked.entry(tile=tile, top=top or TOP, form=form or "")
    if out:
        _write(Path(out), entry.to_json())
    if as_json:
        return screen.document(entry.to_json())
    show.plan(screen, entry, asked.gpu)
    if tile:
        show.judged(screen, entry, asked.entry())
    if top:
        show.alternatives(screen, entry)
    if drawn:
        show.tiles(screen, entry)


@command(
    "fasim compare --gpu v100-32gb --seq 32768 --head-dim 64",
    "fasim compare --gpu a100-80gb -b 64 -n 1024 -d 64 --pass train",
    "fasim compare --gpu h200 --causal --sweep seq=512..65536",
)
@problem_options
@click.option("--sweep", type=SWEEP, help="One option over values: seq=512..65536, heads=8,16.")
@_JSON
def compare(
    screen: Screen, asked: Asked, sweep: tuple[str, tuple[int, ...]] | None, as_json: bool
) -> None:
    """Compare standard attention, V1, V2 and V3.

    Memory, whether it fits, the longest sequence that fits, traffic, FLOPs and time."""
    problem, gpu = asked.problem, asked.gpu
    from fasim import comparison

    compared = comparison.compare(problem, gpu, sweep, asked.reserve)
    if as_json:
        return screen.document(compared.to_json())
    show.comparison(screen, compared)


@command(
    "fasim explain --gpu a100-80gb --algo v2 --causal",
    "fasim explain plan.json --term smem",
    "fasim plan --gpu a100-80gb --algo v2 --json | fasim explain -",
)
@_PLAN
@problem_options
@click.option("--term", type=click.Choice(TERMS), help="Only this part of the derivation.")
def explain(screen: Screen, asked: Asked, plan: str | None, term: str | None) -> None:
    """Derive a plan term by term, with its numbers.

    PLAN is a plan.json, a generated .cu, or - for standard input; without it the options plan.
    """
    entry, gpu = _planned(asked, plan)
    from fasim import explain as derivation

    show.derivation(screen, entry, gpu, derivation.derive(entry, gpu, term))


@command(
    "fasim gen --gpu a100-80gb --algo v2 --causal",
    "fasim gen plan.json -o kernels/",
    "fasim gen --model gpt2-medium --gpu a100-80gb --stdout",
    "fasim gen --all --check",
)
@_PLAN
@problem_options
@click.option("--stdout", is_flag=True, help="Print the file instead of writing it.")
@click.option("-o", "--out", metavar="FILE|DIR", help="Where to write.  [default: ./NAME.cu]")
@click.option("--all", "catalogue", is_flag=True, help="Every kernel of generated/.")
@click.option("--check", is_flag=True, help="With --all: compare, write nothing.")
def gen(
    screen: Screen,
    asked: Asked,
    plan: str | None,
    stdout: bool,
    out: str | None,
    catalogue: bool,
    check: bool,
) -> None:
    """Generate the CUDA file of a plan.

    PLAN is a plan.json, a generated .cu, or - for standard input; without it the options plan.
    """
    if catalogue or check:
        if not catalogue or plan or stdout or asked.given:
            raise UsageError(
                "--all and --check concern the canonical kernels, nothing else",
                hint="`fasim gen --all` writes generated/, `fasim gen --all --check` compares it",
            )
        return _catalogue(screen, out, check)
    from fasim import files

    kernel = _kernel(asked, plan)
    if stdout:
        return screen.text(kernel.source)
    path = files.target(out, f"{kernel.stem}.cu")
    files.write(path, kernel.source)
    show.generated(screen, kernel, path)


def _catalogue(screen: Screen, out: str | None, check: bool) -> None:
    """``gen --all``: the canonical kernels of a checkout, written or compared."""
    from fasim import catalogue

    folder = catalogue.folder(out)
    if check:
        screen.line(f"{catalogue.check(folder)} canonical kernels are what the templates render")
    else:
        names = catalogue.write(folder, prune=out is None)  # a folder of the user's is not ours
        screen.line(f"wrote {len(names)} canonical kernels to {folder}")


def _planned(asked: Asked, plan: str | None) -> tuple[Entry, Gpu]:
    """The full entry of the plan argument, else of the options."""
    if plan is None:
        return asked.entry(), asked.gpu
    asked.refuse(plan, unless={"gpu_name"})  # a GPU of one's own is known by its file only
    from fasim import files, gpu, planner

    found = files.read_plan(plan)
    device = asked.gpu if asked.given else gpu.load(found.gpu)
    kernel = found.kernel
    entry = planner.plan(found.problem, device, kernel.algo, tile=kernel.tile, form=kernel.form)
    return entry, device


def _kernel(asked: Asked, plan: str | None) -> Kernel:
    """The kernel of the plan argument, else of the options."""
    if plan is None:
        return fasim.generate(asked.generable())
    asked.refuse(plan)
    from fasim import files

    return files.read_kernel(plan)


@command(
    "fasim build v2_fwd_sm80_fp16_d128_causal_0123abcd.cu",
    "fasim build --gpu a100-80gb --algo v2 --causal --keep build/",
    "fasim build plan.json --arch sm_86",
)
@_PLAN
@problem_options
@click.option("--arch", metavar="sm_NN", help="Compile for this target.  [default: the plan's]")
@click.option("--keep", metavar="DIR", help="Copy source, PTX, cubin and log there.")
@click.option("--sass", is_flag=True, help="Print the machine code.")
@_JSON
def build(
    screen: Screen,
    asked: Asked,
    plan: str | None,
    arch: str | None,
    keep: str | None,
    sass: bool,
    as_json: bool,
) -> None:
    """Compile a kernel and check it against its plan.

    Registers, spills and shared memory must be what the plan promised.

    PLAN is a plan.json, a generated .cu, or - for standard input; without it the options plan.
    """
    from fasim import compile as compiler

    kernel = _kernel(asked, plan)
    _note_edited(screen, kernel)
    binary = compiler.compile_kernel(kernel, arch=arch, keep=Path(keep) if keep else None)
    if as_json:
        screen.document(show.build_document(kernel, binary))
    elif sass:
        screen.text(compiler.sass(binary))
    else:
        show.build(screen, kernel, binary)
    compiler.check_promises(binary, kernel.plan)


def _note_edited(screen: Screen, kernel: Kernel) -> None:
    if kernel.edited:
        screen.note(f"{kernel.stem} was edited after it was generated: its hash moved")


@command(
    "fasim verify --gpu a100-80gb --algo v2 --causal",
    "fasim verify v2_fwd_sm80_fp16_d128_causal_0123abcd.cu --examples 1000",
    "fasim verify kernel.cu --runner emulator --schedules 4",
    "fasim verify plan.json --runner numpy",
)
@_PLAN
@problem_options
@click.option(
    "--runner",
    type=click.Choice(["auto", "gpu", "emulator", "both", "numpy"]),
    default="auto",
    show_default=True,
    help="gpu and emulator run the file, auto on the GPU if there is one; numpy runs the plan's"
    " tiles in NumPy and says nothing of the file.",
)
@click.option(
    "--examples",
    type=click.IntRange(1),
    help=f"Cases a property.  [default: {EXAMPLES}; in the emulator {EMULATED}]",
)
@click.option(
    "--schedules",
    type=click.IntRange(1),
    help="Orders of the warps that the emulator tries in every run.  [default: 1]",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Of the cases, and so of the emulator's schedules.",
)
@click.option("--replay", metavar="LINE", help="Run one failing case again.")
@click.option(
    "--trace", metavar="FILE", help="Also write what the warps of one launch did, as JSON."
)
@_JSON
def verify(
    screen: Screen,
    asked: Asked,
    plan: str | None,
    runner: str,
    examples: int | None,
    schedules: int | None,
    seed: int,
    replay: str | None,
    trace: str | None,
    as_json: bool,
) -> None:
    """Check properties of a kernel on random problems.

    A failure is shown as the smallest failing input, with a line that replays it. Of a kernel in
    e4m3 errors against float64 follow, on inputs of several kinds, beside those of bf16.

    PLAN is a plan.json, a generated .cu, or - for standard input; without it the options plan.
    """
    from fasim import accuracy, properties

    kernel = _kernel(asked, plan)
    runners = _runners(runner, schedules)
    tracer = _tracer(runners) if trace else None
    _note_edited(screen, kernel)
    emulated = any(one.name == "emulator" for one in runners)
    count = examples or (EMULATED if emulated else EXAMPLES)
    reports = properties.verify_all(kernel, runners, count, seed, replay)
    found = None if replay or accuracy.unmeasured(kernel) else accuracy.measure(kernel, runners[0])
    if as_json:
        screen.document(show.verification_document(reports, found))
    else:
        show.verifications(screen, reports)
        show.accuracy(screen, kernel.plan.kernel, found or ())
    if tracer and trace:
        _write(Path(trace), properties.traced(kernel, tracer, replay))
    for report in reports:
        report.check()


def _tracer(runners: list[Runner]) -> Tracing:
    from fasim.runners.emulator import EmulatorRunner

    for runner in runners:
        if isinstance(runner, EmulatorRunner):
            return runner
    raise UsageError("only the emulator traces", hint="add --runner emulator")


def _write(path: Path, document: dict[str, Any]) -> None:
    from fasim import files

    files.write(path, dumped(document))


def _runners(name: str, schedules: int | None) -> list[Runner]:
    """The runners a name stands for, first the one that says most about a mistake."""
    name = _automatic() if name == "auto" else name
    if schedules and name not in ("emulator", "both"):
        raise UsageError(
            "--schedules concerns the emulator",
            why=f"the {name} runner has no schedules to choose",
            hint="add --runner emulator",
        )
    return [_runner(one, schedules or 1) for one in _RUNNERS.get(name, (name,))]


_RUNNERS = {"both": ("emulator", "gpu")}


def _automatic() -> str:
    """The runner that can execute a file here. Raises MissingToolError if none can."""
    from fasim.runners import emulator, gpu

    no_gpu, no_emulator = gpu.available() or _no_nvcc(), emulator.available()
    if no_gpu and no_emulator:
        raise MissingToolError(
            "nothing here can execute the kernel",
            why=f"on a GPU: {no_gpu}; in the emulator: {no_emulator}",
            hint="install a C++ compiler (g++ or clang++, or `pip install ziglang` and set"
            ' CXX="python -m ziglang c++"), or check the plan\'s tiles, not the file, with'
            " --runner numpy",
        )
    return "emulator" if no_gpu else "gpu"


def _no_nvcc() -> str:
    from fasim.toolchain import find_nvcc

    try:
        find_nvcc()
    except MissingToolError as error:
        return error.what
    return ""


def _runner(name: str, schedules: int) -> Runner:
    from fasim.runners.emulator import EmulatorRunner
    from fasim.runners.gpu import GpuRunner
    from fasim.runners.numpy import NumpyRunner

    if name == "emulator":
        return EmulatorRunner(schedules=schedules)
    return GpuRunner() if name == "gpu" else NumpyRunner()


@command(
    "fasim bench --algo v2 --causal -b 4 -n 8192",
    "fasim bench v2_fwd_sm80_fp16_d128_causal_0123abcd.cu -b 1 -n 16k",
    "fasim bench --algo v3 -n 4096 --timeline",
)
@_PLAN
@problem_options
@click.option(
    "--timeline", is_flag=True, help="Show when V3's warpgroups did what, beside the model."
)
@click.option(
    "--runner",
    type=click.Choice(["gpu", "emulator"]),
    default="gpu",
    show_default=True,
    help="With --timeline: the emulator knows the order, and no time.",
)
@_JSON
def bench(
    screen: Screen, asked: Asked, plan: str | None, timeline: bool, runner: str, as_json: bool
) -> None:
    """Time a kernel on the GPU here, beside its prediction.

    With --timeline show instead what the warpgroups of its first block did, from a build that notes
    it.

    PLAN is a plan.json, a generated .cu, or - for standard input. Problem options beside it change
    the shape it is timed on; without it they plan.
    """
    from fasim import bench as timing
    from fasim import files

    if plan:
        asked.refuse(plan, unless=PROBLEM_NAMES)
    kernel = files.read_kernel(plan) if plan else _kernel(asked, None)
    problem = kernel.plan.problem.with_(**asked.explicit)
    if timeline:
        return _timeline(screen, kernel, problem, runner, as_json)
    if runner != "gpu":
        raise UsageError(
            "only a GPU times a kernel",
            why="the emulator does not model time",
            hint="add --timeline for the order of things, or leave --runner out",
        )
    measured = timing.measure(kernel, problem)
    if as_json:
        return screen.document(measured.to_json())
    show.measurement(screen, measured)


def _timeline(screen: Screen, kernel: Kernel, problem: Problem, name: str, as_json: bool) -> None:
    """``bench --timeline``."""
    from fasim import bench as timing
    from fasim import gpu, timeline
    from fasim.runners.emulator import EmulatorRunner
    from fasim.runners.gpu import GpuRunner

    if name == "emulator":
        known = gpu.load(kernel.plan.gpu)
        taken = timeline.take(kernel, problem, EmulatorRunner(), known, {})
    else:
        timing.check_device()
        taken = timeline.take(kernel, problem, GpuRunner(), gpu.load("auto"), timing.device())
    if as_json:
        return screen.document(taken.to_json())
    show.timeline(screen, taken)


@command(
    "fasim report --gpu h200 --algo v3 --causal -n 8192 -o page.html --open",
    "fasim report v2_fwd_sm80_fp16_d128_causal_0123abcd.cu --lang zh",
    "fasim bench --algo v2 --json >here.json && fasim report --algo v2 --measured here.json",
)
@_PLAN
@problem_options
@click.option(
    "-o", "--out", metavar="FILE", default="report.html", show_default=True, help="Where to write."
)
@click.option("--open", "opened", is_flag=True, help="Show it in the browser.")
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True)
@click.option(
    "--measured", multiple=True, metavar="FILE", help="A point of `fasim bench --json`; repeatable."
)
def report(
    screen: Screen,
    asked: Asked,
    plan: str | None,
    out: str,
    opened: bool,
    lang: str,
    measured: tuple[str, ...],
) -> None:
    """Write a page that shows the tiles of a plan moving.

    One HTML file without network: score matrix, memory levels, online softmax, warps, roofline,
    memory and time by length; its controls plan anew. Forward plans.

    PLAN is a plan.json, a generated .cu, or - for standard input; without it the options plan.
    """
    entry, gpu = _planned(asked, plan)
    from fasim import files
    from fasim import report as pages

    points = [files.read_json(path) for path in measured]
    page = pages.page(entry, gpu, reserve=asked.reserve, measured=points, language=lang)
    path = files.target(out, "report.html")
    files.write(path, page)
    screen.line(f"wrote {path} ({entry.algo}, tiles of {entry.tile})")
    if opened:
        click.launch(str(path))


@command(
    "fasim gpus",
    "fasim gpus h200 --sources",
    "fasim gpus my.toml --json",
)
@click.argument("name", required=False)
@click.option("--sources", is_flag=True, help="Say where every value is from.")
@_JSON
def gpus(screen: Screen, name: str | None, sources: bool, as_json: bool) -> None:
    """List the known GPUs, or show one.

    NAME is a GPU or a .toml file: capacity, bandwidth and latency of every level, peaks."""
    from fasim import gpu

    found = [gpu.load(one) for one in ([name] if name else gpu.names())]
    if as_json:
        return screen.document(show.gpus_document(found, gpu.detected()))
    if name:
        return show.gpu(screen, found[0], sources)
    if sources:
        raise UsageError("--sources needs a GPU", hint="for example `fasim gpus h200 --sources`")
    show.gpus(screen, found, gpu.detected())


@command("fasim doctor", "fasim doctor --json", "fasim doctor --clear-cache")
@click.option("--clear-cache", is_flag=True, help="Remove every compiled kernel.")
@_JSON
def doctor(screen: Screen, clear_cache: bool, as_json: bool) -> None:
    """Show what this machine offers.

    Tools, packages, cache, environment and GPU."""
    from fasim import doctor as examination

    if clear_cache:
        path, size = examination.clear_cache()
        screen.note(f"removed {units.capacity(size)} of compiled kernels from {path}")
    examined = examination.examine()
    if as_json:
        return screen.document(examined)
    show.doctor(screen, examined)


@command("fasim demo")
def demo(screen: Screen) -> None:
    """Take the two-minute tour.

    Check the algorithm in NumPy; plan, generate, compile, verify and emulate one kernel."""
    from fasim import demo as tour

    tour.take(screen)

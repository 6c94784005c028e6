"""The `advise` command: options in, text or JSON out, an exit status.

Exit status: 0 something fits (or the command did its work), 1 nothing fits (`batch`: some line failed, `verify`: outside the
band), 2 bad usage or a question that cannot be answered, 130 interrupted, 143 terminated, 141 the reader of the output went away.
Heavy imports are inside the commands: `advise --help` imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from advisor import options
from advisor.interruption import terminated_cleanly
from probes.workload import EXECUTORS, MAX_ACCUMULATE, WorkloadError

if TYPE_CHECKING:
    from advisor.api import Plan, Session
    from decision_rules.ladder import Objective
    from decision_rules.support import Executor
    from estimators.devices import Device
    from probes.workload import Workload

# typer carries click in some versions and depends on it in others; its public exceptions are click's in both.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

DONE, NOTHING_FITS, BAD_USAGE, INTERRUPTED, READER_GONE = 0, 1, 2, 130, 141
MAX_STEPS = 10_000_000
MAX_LR = 1000.0
FULL_TIER_GB = 24
"""The memory tier whose whole table is shown when no device is known."""


class _AsGiven:
    """Takes an option's text as it is. Stands in for typer's own conversion, which imports pydantic: 0.15 s a start."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        return value


class _Strict:
    """What all commands share: an option given twice is refused (one of its values would be dropped), and a quick help."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if hasattr(param, "_runtime_param"):
                param._runtime_param = _AsGiven()
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        order = self.make_parser(ctx).parse_args(list(args))[2]  # type: ignore[attr-defined]
        seen = set()
        for param in order:
            if param.param_type_name != "option" or getattr(param, "is_flag", False) or param.multiple:
                continue
            if param.name in seen:
                raise _UsageError(f"{param.opts[0]} is given twice", ctx=ctx)
            seen.add(param.name)
        return super().parse_args(ctx, args)  # type: ignore[misc]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from advisor import help_panels

        formatter.write(help_panels.draw(self, ctx))


class _Command(_Strict, TyperCommand):
    pass


class _Group(_Strict, TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            names = ", ".join(self.list_commands(ctx))
            raise _UsageError(
                f"unknown command {args[0]!r}; valid: {names}; or no command: advise --model NAME", ctx=ctx
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Errors become one line on standard error."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.stdout = sys.stdout or io.StringIO()  # None where the caller has closed it
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        with terminated_cleanly():
            status = _run(args)
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        _silence_stdout()
        return READER_GONE
    except KeyboardInterrupt as stop:
        _complain(str(stop) or "interrupted")
        return getattr(stop, "status", INTERRUPTED)
    except _ClickException as error:
        text = " ".join(error.format_message().split())
        _complain(text[:1].lower() + text[1:])
    except Exception as error:
        if os.environ.get("ADVISE_DEBUG") and not options.is_expected(error):
            raise
        what = ""
        if isinstance(error, OSError):
            # Errors about files name them (`store.atomic_write`).
            full = error.filename is None and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)
            what = "standard output: " if full else ""
            _silence_stdout()
        _complain(what + options.describe(error))
    return BAD_USAGE


def _run(args: list[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context("advise", args) as context:
            result = command.invoke(context)
    except typer.Exit as stop:
        result = stop.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else DONE


def _complain(text: str) -> None:
    """One line; on a terminal it is broken between words, not in them."""
    line = f"advise: error: {text}"
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            import shutil
            import textwrap

            width = max(40, shutil.get_terminal_size().columns)
            line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        print(line, file=sys.stderr)


def _silence_stdout() -> None:
    """Points standard output at nothing, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _say(text: str) -> None:
    """A line about what is going on, on standard error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _busy(text: str) -> Iterator[None]:
    """Shows that something slow is going on: a spinner on a terminal, one line elsewhere."""
    if not sys.stderr.isatty():
        _say(f"{text} ...")
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextlib.contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """A function that shows what is going on now: beside a spinner on a terminal, a line each elsewhere."""
    if not sys.stderr.isatty():
        yield _say
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _session(*, refresh: bool = False) -> Session:
    from advisor.api import Session

    return Session(refresh=refresh, progress=lambda what: _busy(f"tracing {what} (once; the profile is kept)"))


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"advise {version('checkpoint-advisor')}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
]


@app.callback(invoke_without_command=True)
@options.takes(
    options.NAMED,
    options.JOB,
    {"executor": options.ExecutorName, "objective": options.ObjectiveName, "gpu": options.Gpu},
    options.ROOM,
    options.ANSWER,
    {"version": _Version},
)
def advise(ctx: typer.Context, **_: Any) -> None:
    """Which gradient-checkpointing schedule trains a diffusion model on your card, fastest without running out of memory?

    advise --model flux --resolution 1024 --gpu 4090 predicts peak memory and step time of every schedule, picks one
    and prints SimpleTuner's JSON. Without a GPU here and without --gpu or --vram it answers for every memory tier.

    Exit status: 0 something fits, 1 nothing fits, 2 bad usage.
    """
    given = [name for name in ctx.params if str(getattr(ctx.get_parameter_source(name), "name", "")) == "COMMANDLINE"]
    if ctx.invoked_subcommand is not None:
        if given:
            spelling = {"as_json": "json", "buckets": "bucket", "os_name": "os"}.get(
                given[0], given[0].replace("_", "-")
            )
            option = f"--{spelling}"
            raise _UsageError(f"{option} goes after the command {ctx.invoked_subcommand!r}, or without a command")
        return
    if not given:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(BAD_USAGE)
    _check_model(ctx.params)
    raise typer.Exit(_answer(ctx.params))


def _check_model(params: Mapping[str, Any]) -> None:
    """That a model is named, one way or the other. The option --model-class is what allows its class to be imported."""
    model, model_class, model_config = (params[key] for key in ("model", "model_class", "model_config"))
    if model is None and model_class is None:
        what = (
            f"--model-config {model_config} goes with --model-class"
            if model_config is not None
            else "--model is missing"
        )
        raise _UsageError(f"{what}; give a name that `advise models` lists, ORG/NAME, ./FOLDER, or --model-class")
    if model_class is not None:
        from probes import outside

        outside.allow(model_class)


def _given(value: str | None, default: str) -> str:
    """An option's text; an empty one counts as given, for the check that follows to refuse."""
    return default if value is None else value


@dataclass(frozen=True)
class _Asked:
    """What a plan is asked for, besides the job. Bytes."""

    device: Device | None
    """None: no card is named and this machine has none."""
    executor: Executor
    objective: Objective
    headroom: int
    host_ram: int | None

    def plan(self, session: Session, job: Workload, device: Device, **more: Any) -> Plan:
        """
        Args:
            more: as `Session.plan`.
        """
        return session.plan(
            job, device, self.executor, self.objective, headroom=self.headroom, host_ram=self.host_ram, **more
        )


def _asked(params: Mapping[str, Any], executor: Executor | None = None) -> _Asked:
    """
    Args:
        executor: of a command without that option.

    Raises:
        WorkloadError, DeviceError: a value that cannot be.
    """
    from advisor.present import detect_gpu
    from decision_rules.ladder import Objective
    from decision_rules.support import Executor

    if executor is None:
        executor = Executor(options.choice("executor", _given(params["executor"], "bundled"), EXECUTORS))
    objective = Objective(options.choice("objective", _given(params["objective"], "ladder"), options.OBJECTIVES))
    headroom = options.gib("headroom", options.number(_given(params["headroom"], "0")))
    host_ram = None if params["host_ram"] is None else options.gib("host-ram", options.number(params["host_ram"]))
    vram = None if params["vram"] is None else options.number(params["vram"])
    own = params["gpu"] is None and vram is None
    device = options.on_system(options.device(params["gpu"], vram, detect_gpu), params["os_name"], own=own)
    if device is not None:
        options.check_headroom(headroom, device)
    return _Asked(device, executor, objective, headroom, host_ram)


def _answer(params: Mapping[str, Any]) -> int:
    """The main job. Returns the exit status."""
    request = options.request(params)
    workload = options.workload(request)
    asked = _asked(params)
    device = asked.device
    files = _output_files(params)
    if device is None and files:
        raise WorkloadError(
            f"--{next(iter(files))} needs a card to plan for and this machine has no GPU; give --gpu or --vram"
        )
    session = _session()

    def plan_for(card: Device, job: Workload = workload) -> Plan:
        return asked.plan(session, job, card, advising=job is workload)

    ignored = options.without_effect(request, workload)
    if device is None:
        if params["os_name"] is not None:
            ignored = (*ignored, "--os has no effect without a card (--gpu, --vram)")
        return _answer_tiers(plan_for, ignored, as_json=params["as_json"])
    answer = plan_for(device)
    files = _write_found(None if answer.recommended is None else answer, files)
    near = None
    if answer.recommended is None:
        from advisor.nearest import nearest

        near = nearest(request, answer, asked.headroom, lambda job: plan_for(device, job))
    if params["as_json"]:
        content = answer.to_json()
        content["warnings"] += ignored
        if near is not None:
            content["nearest"] = near.to_json()
        _print_json(content)
    else:
        from advisor import reports

        def draw(console: Any) -> None:
            reports.draw_plan(answer, console, near=near)
            reports.draw_lines([f"warning: {text}" for text in ignored], console)
            if files:
                reports.draw_written(files, console)

        sys.stdout.write(reports.render(draw))
    return DONE if answer.recommended is not None else NOTHING_FITS


def _answer_tiers(plan_for: Callable[[Device], Plan], ignored: Sequence[str], *, as_json: bool) -> int:
    """The answer without a device. Returns the exit status: 0 when any tier holds something.

    As JSON it is the whole answer for the 24 GB tier, and ``tiers``: for each one ``tier_gb``, ``device``, ``recommended`` (null
    where nothing fits) and ``reasons``.
    """
    from estimators import devices

    plans = [(gb, plan_for(card)) for gb, card in zip(devices.TIERS, devices.tiers(), strict=True)]
    full = dict(plans)[FULL_TIER_GB]
    if as_json:
        content = full.to_json()
        content["warnings"] += ignored
        content["tiers"] = [
            {"tier_gb": gb, **{key: plan.to_json()[key] for key in ("device", "recommended", "reasons")}}
            for gb, plan in plans
        ]
        _print_json(content)
    else:
        from advisor import reports

        def draw(console: Any) -> None:
            reports.draw_tiers(plans, full, console)
            reports.draw_lines([f"warning: {text}" for text in ignored], console)

        sys.stdout.write(reports.render(draw))
    return DONE if any(plan.recommended is not None for _, plan in plans) else NOTHING_FITS


def _output_files(params: Mapping[str, Any]) -> dict[str, Path]:
    """The files to write, by option; checked before anything slow is done."""
    from advisor.api import PLAN_FORMAT
    from estimators.schedule import KEYS

    files = {key: options.output_file(key, params[key]) for key in ("export", "plan") if params[key] is not None}
    if len(files) == 2 and files["export"] == files["plan"]:
        raise WorkloadError(f"--export and --plan both name {params['export']}; give two files")
    if "export" in files and params["adapter"] in (None, "lora"):
        for key in ("dora", "rslora"):
            if params[key]:
                raise WorkloadError(
                    f"--export: no key of the trainer for --{key} is known; leave --export or --{key} out"
                )
    for option, path in files.items():
        if option == "export":
            options.check_replaced(
                option, params[option], path, lambda v: isinstance(v, dict) and set(v) <= KEYS, "schedule keys"
            )
        else:
            kind = f"a plan (format {PLAN_FORMAT})"
            options.check_replaced(option, params[option], path, lambda v: _holds(v, "plan_format"), kind)
    return files


def _holds(value: Any, key: str) -> bool:
    return isinstance(value, dict) and key in value


def _write_found(answer: Plan | None, files: dict[str, Path]) -> dict[str, Path]:
    """Writes a plan's files, or says that there is nothing to write. Returns those that were written."""
    if answer is not None:
        _write(answer, files)
        return files
    for option in files:
        _say(f"advise: nothing fits, so --{option} was not written")
    return {}


def _write(answer: Plan, files: Mapping[str, Path]) -> None:
    """Writes export and plan: both or none of them.

    Raises:
        OSError: one could not be written; a file that was not there before is not there now.
    """
    from probes import store

    new = []
    try:
        for option, path in files.items():
            is_new = not path.exists()
            if option == "export":
                if answer.export is None:
                    raise WorkloadError(
                        "--export: the trainer's keys cannot express a decision for every block; use --plan FILE and apply()"
                    )
                store.atomic_write(path, (json.dumps(answer.export, indent=2) + "\n").encode())
            else:
                answer.save(path)
            if is_new:
                new.append(path)
    except BaseException as error:
        for path in new:
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, OSError):
            raise WorkloadError(f"--{option} {path}: could not be written ({error.strerror})") from None
        raise


@app.command(cls=_Command)
def batch(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines, one request each; - reads standard input.")],
    model_class: Annotated[
        list[str] | None,
        typer.Option(
            "--model-class",
            metavar="CLASS",
            help="A class of your own, package.module:Class, that requests may name as model_class. Importing it runs its code. "
            "May be given several times.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answers many requests: JSON lines in, JSON lines out, in the same order.

    A request that cannot be answered gives {"error": "..."} on its line. Exit status: 0 all answered, 1 some not.
    """
    for reference in model_class or ():
        from probes import outside

        outside.allow(reference)
    if file == "-":
        if sys.stdin is None:
            raise WorkloadError("FILE -: standard input is closed")
        raise typer.Exit(_batch(sys.stdin.buffer))
    options.input_file("FILE", file)
    if not Path(file).is_file():
        what = "is a folder" if Path(file).is_dir() else "is not a file" if Path(file).exists() else "does not exist"
        raise WorkloadError(f"FILE {file}: {what}; give a file of JSON lines, or - for standard input")
    with open(file, "rb") as lines:
        raise typer.Exit(_batch(lines))


def _batch(lines: Any) -> int:
    from advisor import batch as batches
    from advisor.api import Session
    from advisor.present import detect_gpu

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def tracing(what: str) -> Any:
        return _busy(f"tracing {what}") if sys.stderr.isatty() else contextlib.nullcontext()

    return DONE if batches.run(lines, write, session=Session(progress=tracing), detect=detect_gpu) else 1


@app.command(cls=_Command)
def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="One model, in detail: a name of the list, ORG/NAME or ./FOLDER with a diffusers config.json.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Lists the models of the catalogue, or says all about one."""
    from probes import catalogue

    if name is not None:
        if not name:
            raise WorkloadError("NAME '' is not a model; valid: " + ", ".join(catalogue.families()))
        from probes import hub
        from probes.workload import from_request

        family = from_request({"model": name}).family if hub.is_outside(name) else catalogue.find(name)
        from advisor import reports

        if as_json:
            _print_json(reports.model_json(family))
        else:
            sys.stdout.write(reports.render(lambda console: reports.draw_model(family, console)))
        return
    from advisor import reports

    families = list(catalogue.families().values())
    if as_json:
        _print_json(reports.models_json(families))
    else:
        sys.stdout.write(reports.render(lambda console: reports.draw_models(families, console)))


@app.command(cls=_Command)
def gpus(as_json: options.AsJson = False) -> None:
    """Lists the cards that --gpu takes."""
    from estimators import devices

    cards = devices.gpus()
    if as_json:
        _print_json([card.to_json() for card in cards])
    else:
        from advisor import reports

        sys.stdout.write(reports.render(lambda console: reports.draw_gpus(cards, console)))


@app.command(cls=_Command)
@options.takes(options.NAMED, options.SIZED, options.TRAINED, {"refresh": options.Refresh})
def probe(ctx: typer.Context, **_: Any) -> None:
    """Makes a model's profile, stores it and says what was found: measured on this machine's GPU, traced without one.

    Exit status: 0 done, 2 bad usage or a model that cannot be profiled.
    """
    _check_model(ctx.params)
    from advisor import reports
    from advisor.present import detect_gpu
    from probes import store
    from probes.target import Target

    request = options.request(ctx.params)
    workload = options.workload(request)
    gpu = detect_gpu()
    capability = (gpu.capability if gpu is not None else None) or (8, 0)
    target = Target("cuda", capability, workload.attention)
    source = "traced" if gpu is None else "measured"
    if gpu is None:
        _say("no CUDA GPU in this machine: the profile is traced, not measured")

    def build() -> Any:
        with _busy(
            f"{'tracing' if gpu is None else 'measuring'} {workload.model} {workload.variant} {workload.resolution}"
        ):
            if gpu is None:
                from probes.traced import trace

                return trace(workload, target)
            from probes.measured import measure

            return measure(workload, device="cuda")

    warnings = list(options.without_effect(request, workload))
    began = time.perf_counter()
    profile = store.get(workload, target.key(), source, build, warnings.append, refresh=ctx.params["refresh"])
    took = time.perf_counter() - began
    path = store.cache_folder() / f"{store.key(workload, target.key(), source)}.npz"

    def draw(console: Any) -> None:
        reports.draw_profile(profile, path, path.exists(), took, console)
        reports.draw_lines([f"warning: {text}" for text in warnings], console)

    sys.stdout.write(reports.render(draw))


_PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="A plan file, as --plan writes it.", show_default=False)
]


@app.command(cls=_Command)
def verify(
    plan: _PlanArgument,
    model_class: options.PlanModelClass = None,
    steps: Annotated[str, typer.Option("--steps", metavar="N", help="Timed training steps. Default: 8.")] = "8",
    pretrained: Annotated[
        str | None,
        typer.Option(
            "--pretrained",
            metavar="PATH_OR_ID",
            help="Weights: a folder or a Hugging Face id. Default: random.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="KIND", help="Where to run: auto (the GPU if there is one), cpu, cuda. Default: auto."
        ),
    ] = "auto",
    as_json: options.AsJson = False,
    receipt: Annotated[
        str | None,
        typer.Option(
            "--receipt", metavar="FILE", help="Write the receipt as JSON. Default: not kept.", show_default=False
        ),
    ] = None,
) -> None:
    """Trains a few real steps with a plan's schedule: predicted against measured memory and time.

    Exit status: 0 inside the predicted band, 1 outside, 2 could not run.
    """
    from advisor import plan_files
    from advisor.present import detect_gpu

    count = options.whole("steps", steps, 1, MAX_STEPS)
    options.choice("device", device, ("auto", "cpu", "cuda"))
    path = None if receipt is None else options.output_file("receipt", receipt)
    loaded = plan_files.load(options.input_file("PLAN", plan), model_class=model_class)
    for note in loaded.notes:
        _say(f"advise: note: {note}")
    if path is not None and path == loaded.path.resolve():
        raise WorkloadError(f"--receipt {receipt} is the plan itself; give another file")
    if path is not None and receipt is not None:
        options.check_replaced("receipt", receipt, path, lambda v: _holds(v, "receipt_format"), "a receipt")
    if device == "cuda" and detect_gpu() is None:
        raise WorkloadError("--device cuda: this machine has no CUDA GPU; auto and cpu run a reduced copy on the CPU")
    from advisor import verification

    with _telling() as tell, contextlib.redirect_stdout(sys.stderr):
        found = verification.verify(loaded, steps=count, pretrained=pretrained, device=device, progress=tell)
    content = found.to_json()
    if path is not None:
        from probes import store

        store.atomic_write(path, (json.dumps(content, indent=2) + "\n").encode())
    if as_json:
        _print_json(content)
    else:
        from advisor import reports

        def draw(console: Any) -> None:
            reports.draw_lines(found.lines(), console)
            if path is not None:
                reports.draw_written({"receipt": path}, console)

        sys.stdout.write(reports.render(draw))
    raise typer.Exit(DONE if found.within_band else 1)


@app.command("max", cls=_Command)
@options.takes(
    options.NAMED,
    options.JOB,
    {"executor": options.ExecutorName, "objective": options.ObjectiveName, "gpu": options.NeededGpu},
    options.ROOM,
    options.ANSWER,
)
def largest_that_fits(
    ctx: typer.Context,
    vary: Annotated[
        str,
        typer.Option(
            "--vary",
            metavar="WHAT",
            help="What to make larger: batch, frames, resolution or rank. Default: batch.",
            show_default=False,
        ),
    ] = "batch",
    **_: Any,
) -> None:
    """Finds the largest batch, frame count, resolution or rank that fits a card, and what it costs.

    The search starts at the given value (or the model's default) and traces a handful of jobs. Ranks above 8 are multiples
    of 8. Exit status: 0 found, 1 not even the smallest value fits, 2 bad usage.
    """
    _check_model(ctx.params)
    from advisor import largest
    from advisor.api import Session

    options.choice("vary", vary, largest.VARIED)
    request = options.request(ctx.params)
    workload = options.workload(request)
    asked = _asked(ctx.params)
    files = _output_files(ctx.params)
    card = asked.device
    if card is None:
        raise WorkloadError("advise max needs a card to fill and this machine has no GPU; give --gpu or --vram")
    session = Session()
    with _telling() as tell:
        found = largest.search(request, vary, lambda job: asked.plan(session, job, card, advising=False), tell)
    ignored = options.without_effect({**request, **({vary: None} if vary == "rank" else {})}, workload)
    files = _write_found(None if found.best is None else found.best.plan, files)
    if ctx.params["as_json"]:
        _print_json({**found.to_json(), "warnings": list(ignored)})
    else:
        from advisor import reports

        def draw(console: Any) -> None:
            reports.draw_largest(found, console)
            reports.draw_lines([f"warning: {text}" for text in ignored], console)
            if files:
                reports.draw_written(files, console)

        sys.stdout.write(reports.render(draw))
    raise typer.Exit(DONE if found.best is not None else NOTHING_FITS)


@app.command("import", cls=_Command)
@options.takes(
    options.JOB,
    {"objective": options.ObjectiveName, "gpu": options.NeededGpu},
    options.ROOM,
    {"as_json": options.AsJson, "plan": options.PlanFile},
)
def import_config(
    ctx: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A SimpleTuner config.json.", show_default=False)],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the configuration with the recommended keys. Default: only say them.",
            show_default=False,
        ),
    ] = None,
    **_: Any,
) -> None:
    """Reads a trainer's configuration: what it needs on a card, and which checkpointing keys would be better.

    Options about the job count instead of what the configuration says, or does not say (buckets, frames, captions). Only keys for
    checkpointing are changed in it. The file that its lycoris_config names is read too.

    Exit status: 0 something fits, 1 nothing fits, 2 bad usage.
    """
    from advisor import importing
    from decision_rules.support import Executor, job_candidates

    request = {k: v for k, v in options.request(ctx.params).items() if v is not False}
    read = importing.read(options.input_file("CONFIG", config), request)
    path = None
    if output is not None:
        path = options.output_file("output", output)
        options.check_replaced("output", output, path, importing.is_configuration, "a SimpleTuner configuration")
        if path == read.path.resolve():
            _say(f"advise: note: --output {output} is the configuration that was read; it is replaced")
    workload = importing.workload(read)
    asked = _asked(ctx.params, Executor.SIMPLETUNER)
    files = _output_files({**ctx.params, "export": None})
    card = asked.device
    if card is None:
        raise WorkloadError("advise import needs a card to plan for and this machine has no GPU; give --gpu or --vram")
    session = _session()
    answer = asked.plan(session, workload, card)
    if all(e.schedule != read.schedule for e in answer.schedules):
        others = job_candidates(Executor.SIMPLETUNER, workload, answer.structure)
        answer = asked.plan(session, workload, card, schedules=[read.schedule, *others])
    own = next(e for e in answer.schedules if e.schedule == read.schedule)
    fits = answer.recommended is not None
    if path is not None and fits:
        from probes import store

        store.atomic_write(path, (json.dumps(read.patched(answer.export or {}), indent=2) + "\n").encode())
    ignored = options.without_effect(request, workload)
    files = _write_found(answer if fits else None, files)
    if ctx.params["as_json"]:
        content = answer.to_json()
        content["warnings"] += [*read.notes, *ignored]
        content["imported"] = {"request": dict(read.request), "schedule": own.to_json()}
        if fits:
            content["patched"] = read.patched(answer.export or {})
        _print_json(content)
    else:
        from advisor import reports

        def draw(console: Any) -> None:
            reports.draw_imported(read, own, answer, console)
            reports.draw_lines([f"warning: {text}" for text in ignored], console)
            written = {**({} if path is None or not fits else {"output": path}), **files}
            if written:
                reports.draw_written(written, console)

        sys.stdout.write(reports.render(draw))
    if path is not None and not fits:
        _say("advise: nothing fits, so --output was not written")
    raise typer.Exit(DONE if fits else NOTHING_FITS)


@app.command(cls=_Command)
def calibrate(
    receipts: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECEIPTS]",
            help="A folder of receipts that verify --receipt wrote, or one. Default: published rows only.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the calibration there. Default: where estimates look for it.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and print; keep nothing. Default: off.")] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Forget the own calibration; the packaged one counts again. Default: off.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Refits step-time rates and bands on published measurements and on receipts of one's own.

    Takes a minute or two. Estimates use the result from then on. Exit status: 0 done, 2 bad usage or no usable receipt.
    """
    from estimators import calibration

    if reset:
        if receipts is not None or output is not None or dry_run:
            raise WorkloadError("--reset goes with no receipts, --output or --dry-run")
        calibration.own_file().unlink(missing_ok=True)
        _say("the packaged calibration counts again")
        return
    folder = None if receipts is None else options.input_file("RECEIPTS", receipts)
    path = None if output is None else options.output_file("output", output)
    if path is not None and output is not None:
        options.check_replaced("output", output, path, lambda v: _holds(v, "calibration_format"), "a calibration")
    from advisor import calibrating

    with _telling() as tell:
        found = calibrating.calibrate(folder, save=not dry_run, output=path, say=tell)
    for line in found.left_aside:
        _say(f"advise: note: left aside: {line}")
    if as_json:
        _print_json(found.calibration.to_json())
    else:
        from advisor import reports

        sys.stdout.write(reports.render(lambda console: reports.draw_lines(found.lines(), console)))


@app.command(cls=_Command)
def run(
    plan: _PlanArgument,
    model_class: options.PlanModelClass = None,
    steps: Annotated[
        str, typer.Option("--steps", metavar="N", help="Training steps, those before --resume included. Default: 10.")
    ] = "10",
    latents: Annotated[
        str | None,
        typer.Option(
            "--latents", metavar="FOLDER", help="Cached latents. Default: synthetic ones.", show_default=False
        ),
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(
            "--pretrained",
            metavar="PATH_OR_ID",
            help="Base weights: a folder or a Hugging Face id. Default: random.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FOLDER",
            help="Where to save what was trained, and checkpoints. Default: nowhere.",
            show_default=False,
        ),
    ] = None,
    lr: Annotated[
        str | None, typer.Option("--lr", metavar="RATE", help="Learning rate. Default: 1e-4.", show_default=False)
    ] = None,
    accumulate: Annotated[
        str | None,
        typer.Option("--accumulate", metavar="N", help="Batches a step. Default: the plan's.", show_default=False),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option("--seed", metavar="N", help="Of weights, data and noise. Default: 0.", show_default=False),
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-every",
            metavar="N",
            help="Save a checkpoint every N steps. Default: only when stopped.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the newest checkpoint in --output. Default: off.", show_default=False
        ),
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", metavar="FILE", help="Write a JSON line a step. Default: not kept.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="KIND", help="Where to run: auto (the GPU if there is one), cpu, cuda. Default: auto."
        ),
    ] = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Trains with the bundled runtime, as the plan says.

    Ctrl-C and SIGTERM stop it after the step, with a checkpoint in --output. Exit status: 0 done, 1 out of memory with no smaller
    schedule left, 2 could not run, 130 or 143 stopped.
    """
    from advisor import plan_files
    from advisor.present import detect_gpu

    asked: dict[str, Any] = {
        "steps": options.whole("steps", steps, 1, MAX_STEPS),
        "seed": None if seed is None else options.whole("seed", seed, 0, 2**63 - 1),
        "accumulate": None if accumulate is None else options.whole("accumulate", accumulate, 1, MAX_ACCUMULATE),
        "checkpoint_every": None
        if checkpoint_every is None
        else options.whole("checkpoint-every", checkpoint_every, 1, MAX_STEPS),
        "lr": None if lr is None else options.positive("lr", lr, MAX_LR),
        "device": options.choice("device", device, ("auto", "cpu", "cuda")),
        "pretrained": pretrained,
        "resume": resume,
    }
    asked["latents"] = None if latents is None else Path(latents)
    if latents is not None and not asked["latents"].is_dir():
        raise WorkloadError(
            f"--latents {latents}: {'is not a folder' if asked['latents'].exists() else 'does not exist'}"
        )
    asked["output"] = None if output is None else options.output_folder("output", output)
    if metrics is not None and asked["output"] is not None and Path(metrics).absolute().parent == asked["output"]:
        asked["output"].mkdir(exist_ok=True)
    asked["metrics"] = None if metrics is None else options.output_file("metrics", metrics)
    loaded = plan_files.load(options.input_file("PLAN", plan), model_class=model_class)
    for note in loaded.notes:
        _say(f"advise: note: {note}")
    if asked["metrics"] == loaded.path.resolve():
        raise WorkloadError(f"--metrics {metrics} is the plan itself; give another file")
    if device == "cuda" and detect_gpu() is None:
        raise WorkloadError("--device cuda: this machine has no CUDA GPU; auto and cpu run on the CPU")
    from advisor.interruption import Interruption

    with _steps_bar(asked["steps"]) as (on_step, say), Interruption(say) as interruption:
        from advisor import training

        try:
            with contextlib.redirect_stdout(sys.stderr):
                result = training.run(loaded, **asked, on_step=on_step, say=say, interruption=interruption)
        except training.OutOfMemory as error:
            _complain(str(error))
            raise typer.Exit(NOTHING_FITS) from None
    content = result.to_json()
    if as_json:
        _print_json(content)
    else:
        from advisor import reports

        sys.stdout.write(reports.render(lambda console: reports.draw_run(content, console)))
    if interruption.asked is not None:
        raise typer.Exit(128 + interruption.asked)


@contextlib.contextmanager
def _steps_bar(steps: int) -> Iterator[tuple[Callable[[int, float, float], None], Callable[[str], None]]]:
    """What to call after each step (number from 1, loss, seconds), and for a line about what goes on: a bar on a terminal, about
    ten lines elsewhere."""
    if not sys.stderr.isatty():
        every = max(1, steps // 10)

        def line(step: int, loss: float, seconds: float) -> None:
            if step % every == 0 or step == steps:
                _say(f"step {step} of {steps}: loss {loss:.4g}, {seconds:.3g} s")

        yield line, _say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=steps, last="")

        def advance(step: int, loss: float, seconds: float) -> None:
            bar.update(task, completed=step, last=f"loss {loss:.4g}, {seconds:.3g} s/step")

        def say(text: str) -> None:
            bar.console.print(text, highlight=False, markup=False)

        yield advance, say


if __name__ == "__main__":
    sys.exit(main())

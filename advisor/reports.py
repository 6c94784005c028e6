"""What people read: plans, memory tiers, models, cards, profiles and receipts as plain text and tables.

Memory is GiB (2^30 bytes), time is seconds a step. Everything fits 80 columns; nothing is told by colour alone.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from advisor.api import SWAP_ADVICE, Plan
from decision_rules.support import Executor, Ffn, TrainerSupport, job_check, trainer_support
from estimators.devices import Device
from estimators.estimate import GIB, Estimate
from estimators.schedule import Backend, IntervalForm, Schedule
from probes.catalogue import Family
from probes.profile import Profile
from probes.workload import ADAPTER_NAMES, Workload

if TYPE_CHECKING:
    from advisor.importing import Imported
    from advisor.largest import Largest
    from advisor.nearest import Nearest

LEAST_WIDTH = 80
PIPED_WIDTH = 100
"""Columns when standard output is no terminal and COLUMNS is not set."""

CERTAIN = 0.975
"""Probability of fitting below which a fit is called tight: that of the upper end of a 95 % band."""


def render(draw: Callable[[Console], None]) -> str:
    """What `draw` prints, as text for standard output: coloured only on a terminal, without trailing blanks elsewhere."""
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False)
    if not terminal and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = PIPED_WIDTH
    console.width = max(console.width, LEAST_WIDTH)
    if not terminal:
        console = Console(
            file=io.StringIO(),
            width=console.width,
            force_terminal=False,
            color_system=None,
            highlight=False,
            markup=False,
            emoji=False,
        )
    with console.capture() as captured:
        draw(console)
    text = captured.get()
    return text if terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def gib(value: int) -> str:
    """Bytes as GiB with one decimal, two below 10."""
    amount = value / GIB
    return f"{amount:.1f}" if amount >= 9.95 or amount == 0 else f"{amount:.2f}"


def seconds(value: float | None) -> str:
    """Seconds with at least three digits; a dash when unknown."""
    if value is None:
        return "-"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:.{digits}f}"


def gib_band(e: Estimate) -> str:
    """The peak's band in at most nine characters."""
    low, high = e.peak_low / GIB, e.peak_high / GIB
    digits = 2 if high < 9.995 else 1 if high < 99.95 else 0
    return f"{low:.{digits}f}-{high:.{digits}f}"


def seconds_band(e: Estimate) -> str:
    """The step time's band, nine characters unless it is a matter of milliseconds; empty when unknown."""
    low, high = e.step_seconds_low, e.step_seconds_high
    if low is None or high is None:
        return ""
    digits = 3 if high < 0.0995 else 2 if high < 9.995 else 1 if high < 99.95 else 0
    return f"{low:.{digits}f}-{high:.{digits}f}"


def fit_word(estimate: Estimate) -> str:
    """``yes``, ``tight`` (less than `CERTAIN` likely), ``no`` or ``unsupported``."""
    if not estimate.supported:
        return "unsupported"
    if not estimate.fits:
        return "no"
    return "yes" if estimate.fit_probability >= CERTAIN else "tight"


_STYLES = {"yes": "green", "tight": "yellow", "no": "red", "unsupported": "dim"}


LAUNCH_BOUND = "^"
"""Marks step times that kernel launches limit."""


def _seconds_cell(e: Estimate) -> str:
    return seconds(e.step_seconds) + (LAUNCH_BOUND if e.launch_bound else "")


def _launch_bound_note(estimates: Iterable[Estimate | None]) -> str:
    marked = any(e is not None and e.supported and e.launch_bound for e in estimates)
    return f" {LAUNCH_BOUND}: limited by kernel launches, not by the card." if marked else ""


def _interval(schedule: Schedule) -> str:
    return "/".join(str(k) for k in (schedule.interval, schedule.stride) if k is not None) or "-"


def _short_name(schedule: Schedule) -> str:
    if schedule.actions is not None:
        return "per block"
    return schedule.backend.value + ("+A" if schedule.offload_attention else "")


def _table(*columns: tuple[str, str]) -> Table:
    """Columns as (heading, justification); a heading may have two lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading, justify in columns:
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _print_table(table: Table, console: Console) -> None:
    """Prints a table in full: a narrow terminal wraps its lines, but no number is ever cut."""
    width = console.width
    console.width = max(width, console.measure(table).maximum)
    console.print(table)
    console.width = width


def _bullets(lines: Iterable[str]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("  -", line)
    return grid


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def workload_lines(w: Workload) -> list[str]:
    """The job in two lines: model and shape, then what is trained."""
    family = w.family
    parts = [f"{family.title} ({w.model}) {w.variant}" + (", reduced copy" if w.reduced else "")]
    parts.append(f"{w.seconds} s of audio" if family.kind == "audio" else f"{w.resolution} pixels")
    if family.kind == "video":
        parts.append(f"{w.frames} frames")
    if w.references:
        parts.append(f"{w.references} reference image{'s' if w.references > 1 else ''}")
    if len(w.buckets) > 1:
        parts[1] += f" (of {len(w.buckets)} buckets)"
    parts += [f"batch {w.batch}{' x 2 (guidance)' if w.cfg_batch else ''}", f"{w.text_tokens} text tokens"]
    if w.accumulate > 1:
        parts.append(f"{w.accumulate} batches a step")
    shape = ", ".join(parts)
    if w.adapter == "full":
        trained = f"full fine-tune{', float32 weights' if w.master_weights else ''}"
    else:
        factor = ""
        if w.adapter == "lokr":
            form = {"full matrix": w.lokr_full_matrix, "trained scalar": w.lokr_scalar, "rebuilt": w.lokr_rebuild}
            factor = ", ".join((f", factor {w.lokr_factor}", *(text for text, on in form.items() if on)))
        kind = ADAPTER_NAMES[w.adapter]
        if w.adapter == "lora":
            kind += f"{' with DoRA' if w.dora else ''}{', rank-stabilised,' if w.rslora else ''}"
        dropout = f", dropout {w.lora_dropout:g}" if w.adapter == "lora" else ""
        trained = f"{kind} rank {w.rank}, alpha {w.alpha:g}{factor}{dropout} on {', '.join(w.lora_targets)}"
    average = ", EMA" if w.ema else ""
    return [shape, f"{trained}; base {w.precision}, {w.optimizer}{average}, attention {w.attention}"]


def _device_line(plan: Plan) -> str:
    trust = {
        "traced": "from a traced profile (predicted, not measured)",
        "measured": "from a profile measured on the card",
    }
    return (
        f"{plan.device.name}, {gib(plan.device.usable_bytes)} GiB usable; executor {plan.executor}; "
        f"{trust.get(plan.profile_source, plan.profile_source)}"
    )


def _draw_device(plan: Plan, console: Console) -> None:
    """The device, and directly below what its name was taken for."""
    console.print(_device_line(plan))
    if _is_taken_for(plan.device):
        console.print(f"note: {plan.device.note}")


def _is_taken_for(device: Device) -> bool:
    return " is taken as " in device.note


def _time_text(e: Estimate) -> str:
    if e.step_seconds is None:
        return "step time unknown"
    text = f"{seconds(e.step_seconds)} s/step ({seconds(e.step_seconds_low)} to {seconds(e.step_seconds_high)})"
    return text + (", limited by kernel launches" if e.launch_bound else "")


def draw_plan(plan: Plan, console: Console, *, head: bool = True, near: Nearest | None = None) -> None:
    """The whole answer for one device.

    Args:
        head: begin with the workload.
        near: where nothing fits, what was tried instead.
    """
    if head:
        for line in workload_lines(plan.workload):
            console.print(line)
    _draw_device(plan, console)
    console.print()
    best = plan.recommended
    if best is None:
        console.print(_heading(f"Nothing fits on the {plan.device.name}."))
        console.print(_bullets([*plan.choice.reasons, *nearest_lines(near)]))
    else:
        word = ", a tight fit" if fit_word(best) == "tight" else ""
        word += ", a rough guess" if any(n.startswith("a rough guess") for n in best.notes) else ""
        console.print(_heading(f"Recommended: {best.schedule.name}"))
        console.print(
            f"peak {gib(best.peak)} GiB allocated ({gib(best.peak_low)} to {gib(best.peak_high)}), "
            f"{gib(best.device)} GiB on the device{word}; {_time_text(best)}"
        )
        console.print(_bullets(plan.choice.reasons))
        console.print()
        if plan.export is None:
            console.print(
                "No JSON for SimpleTuner: it cannot express a decision for every block. --plan FILE keeps it for apply()."
            )
        else:
            if (refusal := _refused_by_trainer(plan)) is not None:
                console.print(f"SimpleTuner would not run these keys: {refusal}. --executor simpletuner plans for it.")
            elif plan.executor is Executor.BUNDLED and plan.workload.swapped_blocks:
                console.print(
                    "SimpleTuner's block swap keeps blocks on the card in backward and needs more memory than this plan; "
                    "--executor simpletuner plans for it."
                )
            elsewhere = plan.executor is not Executor.SIMPLETUNER
            console.print(
                f"SimpleTuner's JSON{f' (the figures are for {plan.executor}; --executor simpletuner plans for that trainer)' if elsewhere else ''}:"
            )
            console.print(json.dumps(plan.export, indent=2), soft_wrap=True)
    _draw_phases(plan, console)
    console.print()
    _print_table(schedule_table(plan), console)
    shown = best or min((e for e in plan.schedules if e.supported), key=lambda e: e.peak, default=None)
    if shown is not None:
        console.print()
        console.print(breakdown_text(shown))
    _draw_notes(plan, console)


def _draw_phases(plan: Plan, console: Console) -> None:
    for phase in plan.phases:
        console.print(f"Beside the training step, {phase.text}.")
    if (largest := plan.largest_phase) is not None:
        what = "the training step" if largest == "training" else largest
        console.print(f"The largest of these peaks is that of {what}.")


def nearest_lines(near: Nearest | None) -> list[str]:
    """The nearest change of a job under which something fits, and what else was tried."""
    if near is None or not near.tried:
        return []
    failed = [change.text for change in near.tried if change is not near.change]
    also = f" ({', '.join(failed)}: {'does' if len(failed) == 1 else 'do'} not fit)" if failed else ""
    if near.change is None:
        return [f"tried, and nothing fits either: {', '.join(failed)}"]
    best = near.change.plan.recommended
    assert best is not None
    word = ", a tight fit" if fit_word(best) == "tight" else ""
    return [
        f"fits with {near.change.text}: {best.schedule.name}, peak {gib(best.peak)} GiB{word}, {_time_text(best)}{also}"
    ]


def schedule_table(plan: Plan) -> Table:
    """All schedules of a plan, in the order of the ladder; an asterisk marks the recommended one."""
    table = _table(
        ("\n\nschedule", "left"),
        ("\nint/\nstride", "left"),
        ("peak\nalloc\nGiB", "right"),
        ("\n\n95% band", "right"),
        ("\nreserved\nGiB", "right"),
        ("\ndevice\nGiB", "right"),
        ("\nhost\nGiB", "right"),
        ("\n\ns/step", "right"),
        ("\n\n95% band", "right"),
        ("\n\nfits", "left"),
    )
    for e in plan.schedules:
        word = fit_word(e)
        chosen = plan.recommended is not None and e.schedule == plan.recommended.schedule
        name = Text(_short_name(e.schedule) + ("*" if chosen else ""))
        if e.supported:
            cells = [
                gib(e.peak),
                gib_band(e),
                gib(e.reserved),
                gib(e.device),
                gib(e.host),
                _seconds_cell(e),
                seconds_band(e),
            ]
        else:
            cells = [""] * 7
        table.add_row(
            name, _interval(e.schedule), *cells, Text(word, style=_STYLES[word]), style="bold" if chosen else ""
        )
    return table


def breakdown_text(e: Estimate) -> str:
    """The parts of one schedule's peak."""
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in e.breakdown.items())
    where = {"optimizer": "at the optimizer step"}.get(e.phase, f"in the {e.phase} pass")
    return f"Peak of {e.schedule.name}, {where}, GiB: {parts}; in all {e.peak / GIB:.2f}"


def _refused_by_trainer(plan: Plan) -> str | None:
    """Why the trainer whose keys are printed would not take them; None: it does, or the plan is for it."""
    if plan.executor is Executor.SIMPLETUNER or plan.recommended is None:
        return None
    family = plan.workload.family
    w, schedule = plan.workload, plan.recommended.schedule
    verdict = job_check(Executor.SIMPLETUNER, w, plan.structure, schedule)
    if not verdict.supported:
        return verdict.reason
    if verdict.effective != plan.recommended.schedule:
        return "; ".join(verdict.notes) or f"{family.name} runs {verdict.effective.name} there"
    return None


def _draw_notes(plan: Plan, console: Console) -> None:
    usable = gib(plan.device.usable_bytes)
    console.print()
    console.print(
        "peak: allocated (torch.cuda.max_memory_allocated); device: what nvidia-smi shows, reserved + context. "
        f"Fits: device against {usable} GiB usable less the headroom asked for; tight: less than {CERTAIN:.1%} likely to fit. "
        "int/stride: gradient_checkpointing_interval and _segment_stride; "
        f"+A: attention saves offloaded; *: recommended.{_launch_bound_note(plan.schedules)}"
    )
    by_note: dict[str, list[str]] = {}
    for e in plan.schedules:
        for note in e.notes if e.supported else filter(None, [e.reason]):
            by_note.setdefault(note, []).append(e.schedule.name)
    lines = []
    for note, names in by_note.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"{', '.join(names[:3])}{more}: {note}")
    lines += [f"{name}: unsupported: {reason}" for name, reason in unsupported(plan)]
    if lines:
        console.print()
        console.print("Notes:")
        console.print(_bullets(lines))
    _draw_warnings(plan, console)


def _draw_warnings(plan: Plan, console: Console) -> None:
    for text in plan.warnings:
        if not text.startswith("stands for ") and not (text == plan.device.note and _is_taken_for(plan.device)):
            console.print(f"note: {text}")


def unsupported(plan: Plan) -> list[tuple[str, str]]:
    """Kinds of schedule that the executor does not run on this model: (name, why)."""
    there = {(e.schedule.backend, e.schedule.offload_attention) for e in plan.schedules}
    found = []
    for schedule in (*(Schedule(b) for b in Backend), Schedule(offload_attention=True)):
        if (schedule.backend, schedule.offload_attention) in there:
            continue
        verdict = job_check(plan.executor, plan.workload, plan.structure, schedule)
        reason = verdict.reason or "; ".join(verdict.notes)
        if reason:
            found.append((schedule.name, reason))
    return found


def draw_tiers(tiers: Sequence[tuple[int, Plan]], full: Plan, console: Console) -> None:
    """The answer without a device: one line a memory tier, then the full answer for one of them."""
    for line in workload_lines(full.workload):
        console.print(line)
    console.print(
        f"No GPU in this machine and none named (--gpu, --vram): one card a memory tier; executor {full.executor}"
    )
    console.print()
    table = _table(
        ("\ntier\nGB", "right"),
        ("\n\ncard assumed", "left"),
        ("\nusable\nGiB", "right"),
        ("\n\nrecommended", "left"),
        ("\nint/\nstride", "left"),
        ("peak\nalloc\nGiB", "right"),
        ("\ndevice\nGiB", "right"),
        ("\n\ns/step", "right"),
        ("\n\nfits", "left"),
    )
    for gb, plan in tiers:
        best = plan.recommended
        head = (str(gb), plan.device.name, gib(plan.device.usable_bytes))
        if best is None:
            smallest = min((e for e in plan.schedules if e.supported), key=lambda e: e.peak, default=None)
            least = "" if smallest is None else gib(smallest.peak)
            table.add_row(*head, "nothing fits", "", f">{least}" if least else "", "", "", Text("no", style="red"))
        else:
            word = fit_word(best)
            table.add_row(
                *head,
                _short_name(best.schedule),
                _interval(best.schedule),
                gib(best.peak),
                gib(best.device),
                _seconds_cell(best),
                Text(word, style=_STYLES[word]),
            )
    _print_table(table, console)
    if note := _launch_bound_note(plan.recommended for _, plan in tiers):
        console.print(note.strip())
    if lines := _refusals(tiers):
        console.print(_bullets(lines))
    console.print()
    console.print(_heading(f"In full, {full.device.note.removeprefix('stands for ')}:"))
    draw_plan(full, console, head=False)


def _refusals(tiers: Sequence[tuple[int, Plan]]) -> list[str]:
    """Why tiers hold nothing and what would change that; once for all tiers with the same way out, for the largest of them."""
    groups: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    swaps: list[str] = []
    for gb, plan in tiers:
        if plan.recommended is None:
            first, *rest = plan.choice.reasons
            for swap in [r for r in rest if r.startswith(SWAP_ADVICE)]:
                rest.remove(swap)
                swaps.append(f"{gb} GB: {swap}")
            groups.setdefault(tuple(rest), []).append((gb, first.removeprefix("nothing fits: ")))
    lines = []
    for ways_out, members in groups.items():
        sizes = ", ".join(str(gb) for gb, _ in members)
        gb, first = members[-1]
        lines.append("; ".join([f"{sizes} GB: nothing fits; with {gb} GB {first}", *ways_out]))
    return lines + swaps


def draw_written(files: Mapping[str, Path], console: Console) -> None:
    """Names the files that were written."""
    console.print()
    for what, path in files.items():
        console.print(f"wrote {what}: {path}", soft_wrap=True)


# models and cards


def models_json(families: Iterable[Family]) -> list[dict[str, Any]]:
    """The list that ``advise models --json`` prints."""
    return [
        {
            "name": f.name,
            "title": f.title,
            "kind": f.kind,
            "aliases": list(f.aliases),
            "variants": list(f.variants),
            "default_variant": f.default_variant,
        }
        for f in families
    ]


def draw_models(families: Iterable[Family], console: Console) -> None:
    """All models, one a line."""
    table = _table(("name", "left"), ("title", "left"), ("kind", "left"))
    table.add_column("variants (* default)", overflow="fold")
    table.add_column("also called", overflow="fold")
    for f in families:
        variants = ", ".join(name + ("*" if name == f.default_variant else "") for name in f.variants)
        table.add_row(f.name, f.title, f.kind, variants, ", ".join(f.aliases))
    _print_table(table, console)
    console.print("\n`advise models NAME` says more about one.")


_FORMS = {
    IntervalForm.SEGMENTS: "k puts k consecutive blocks into one checkpoint; a stride leaves the blocks between two segments alone",
    IntervalForm.SEGMENTS_OVERALL: "k puts k consecutive blocks into one checkpoint, from one list of blocks into the next; a stride leaves the "
    "blocks between two segments alone",
    IntervalForm.EVERY_KTH: "k recomputes every k-th block on its own; a stride s those with index % s < k",
    IntervalForm.EVERY_KTH_OVERALL: "k recomputes every k-th block on its own; a stride s those with index % s < k; the index counts on from one list of "
    "blocks to the next",
    IntervalForm.IGNORED: "ignored, and the stride: every block is a checkpoint of its own",
}


def executor_facts(f: Family, variant: str) -> dict[str, dict[str, str]]:
    """What each executor makes of the controls for one variant, as texts by control."""
    row = trainer_support(f.name, variant)
    usual = f.of(variant)
    sides = (
        "yes, each side of a block as one checkpoint: " + _feed_forward_text(usual)
        if _has_ffn(usual)
        else "no: no block has a separate side"
    )
    bundled = {
        "interval": _FORMS[IntervalForm.SEGMENTS]
        + ", in lists whose blocks hand on their outputs unchanged; else block by block",
        "feed-forward only": f"{sides}; an interval selects every k-th block",
        "unsloth": "yes",
        "attention offload": "yes: what only attention holds; recomputation skips attention",
        "per-block schedules": "yes (Schedule.per_block)",
    }
    diffusers = {
        "interval": "none: every block or nothing"
        if row.diffusers
        else "no model class with checkpointing in diffusers",
        "feed-forward only": "no",
        "unsloth": "no",
        "attention offload": "no",
    }
    return {"bundled": bundled, "simpletuner": _trainer_facts(row), "diffusers": diffusers}


def _trainer_facts(row: TrainerSupport) -> dict[str, str]:
    facts: dict[str, str] = {}
    if not row.checkpoints:
        facts["interval"] = "no checkpointing at all: the options do nothing"
    elif not row.interval:
        facts["interval"] = "dropped with a warning, and the stride: every block is a checkpoint of its own"
    else:
        facts["interval"] = _FORMS[row.interval_form] + ("" if row.stride else "; the stride is dropped with a warning")
    if row.per_block_when:
        facts["block by block"] = f"{row.per_block_loop}, instead of segments, with: {', '.join(row.per_block_when)}"
    match row.ffn:
        case Ffn.YES:
            facts["feed-forward only"] = f"yes: {row.ffn_scope}; interval: {row.ffn_interval}"
        case Ffn.NO:
            facts["feed-forward only"] = "rejected"
        case Ffn.UNSLOTH_ONLY:
            facts["feed-forward only"] = (
                f"unsloth-ffn: {row.ffn_scope}; interval: {row.ffn_interval}; torch-ffn stops with an error"
            )
        case Ffn.AS_WHOLE_BLOCKS:
            facts["feed-forward only"] = "stops with an error; with an interval it runs on whole blocks instead"
    facts["unsloth"] = "ignored, runs as torch" if row.unsloth == "ignored" else row.unsloth
    facts["attention offload"] = f"yes: {row.offload_scope}" if row.attention_offload else "rejected"
    if row.training_mode:
        facts["needs"] = "training mode (model.train())"
    if row.note:
        facts["note"] = row.note
    return facts


def model_json(f: Family) -> dict[str, Any]:
    """The object that ``advise models NAME --json`` prints."""
    usual = f.of(f.default_variant)
    return {
        **models_json([f])[0],
        "class": f.model_class,
        "variant_details": [
            {
                "name": v.name,
                "title": v.title,
                "aliases": list(v.aliases),
                "parameters": v.parameters,
                "text_tokens": v.text_tokens or f.of(v.name).text_tokens,
                **_sizes_json(f.of(v.name)),
            }
            for v in f.variants.values()
        ],
        "lora_targets": list(usual.lora_targets),
        "text_tokens": usual.text_tokens,
        "text_padding": usual.padding,
        **_sizes_json(usual),
        "block_lists": list(usual.regions),
        "executors": _executors_json(f, f.default_variant),
        "variant_executors": {v: _executors_json(f, v) for v in _other_rows(f)},
        "source": f.source,
        "notes": list(f.notes),
    }


def _other_rows(f: Family) -> list[str]:
    """Variants that the trainer treats in another way than the default one."""
    usual = trainer_support(f.name, f.default_variant)
    return [v for v in f.variants if trainer_support(f.name, v) != usual]


def _executors_json(f: Family, variant: str) -> dict[str, dict[str, Any]]:
    row, texts = trainer_support(f.name, variant), executor_facts(f, variant)

    def executor(form: IntervalForm, stride: bool, unsloth: str, ffn: str, offload: bool, name: str) -> dict[str, Any]:
        return {
            "interval": str(form),
            "stride": stride,
            "unsloth": unsloth,
            "ffn": ffn,
            "attention_offload": offload,
            "details": texts[name],
        }

    sides = "yes" if _has_ffn(f.of(variant)) else "no"
    return {
        "bundled": executor(IntervalForm.SEGMENTS, True, "yes", sides, True, "bundled"),
        "simpletuner": {
            **executor(row.form, row.stride, row.unsloth, str(row.ffn), row.attention_offload, "simpletuner"),
            "checkpoints": row.checkpoints,
            "ffn_scope": row.ffn_scope,
            "ffn_interval": row.ffn_interval,
            "attention_offload_scope": row.offload_scope,
            "per_block_when": list(row.per_block_when),
            "per_block_loop": row.per_block_loop,
            "note": row.note,
        },
        "diffusers": {
            **executor(IntervalForm.IGNORED, False, "no", "no", False, "diffusers"),
            "checkpoints": row.diffusers,
        },
    }


def _sizes_json(f: Family) -> dict[str, Any]:
    if f.kind == "audio":
        return {"default_seconds": f.default_seconds, "max_seconds": f.max_seconds}
    out: dict[str, Any] = {"default_resolution": _default_size(f), "resolution_multiple": f.pixel_multiple}
    if f.kind == "video":
        out["frames"] = {"default": f.default_frames, "first": f.first_frames, "step": f.temporal_factor}
    return out


def _default_size(f: Family) -> str:
    if f.kind == "audio":
        return f"{f.default_seconds} s"
    return f"{f.default_resolution[1]}x{f.default_resolution[0]}"


def _has_ffn(f: Family) -> bool:
    return any(r.feed_forward for r in f.regions.values())


def draw_model(f: Family, console: Console) -> None:
    """One model in detail."""
    usual = f.of(f.default_variant)
    console.print(_heading(f"{f.title} ({f.name})"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    pad = {
        "max_length": "padded to the variant's text tokens",
        "longest": "keep their own length, up to the variant's text tokens (--caption-tokens)",
    }.get(f.padding, f.padding)
    rows = [
        ("kind", f.kind),
        ("also called", ", ".join(f.aliases) or "-"),
        ("class", f.model_class),
        ("captions", pad),
    ]
    if f.kind == "video":
        rows.append(("frames", f"default {f.default_frames}; {f.first_frames} + a multiple of {f.temporal_factor}"))
    rows += [
        ("LoRA targets", ", ".join(usual.lora_targets)),
        ("block lists", ", ".join(usual.regions) or "-"),
        ("feed-forward", _feed_forward_text(usual)),
        ("source", f.source),
    ]
    for name, text in rows:
        facts.add_row(name, text)
    console.print(facts)
    console.print()
    table = _table(
        ("\nvariant", "left"),
        ("billion\nparameters", "right"),
        ("default\nsize" if f.kind == "audio" else "default\npixels", "left"),
        ("\nmultiple of", "right"),
        ("text\ntokens", "right"),
    )
    table.add_column("\nalso called", overflow="fold")
    for v in f.variants.values():
        g = f.of(v.name)
        table.add_row(
            v.name + ("*" if v.name == f.default_variant else ""),
            f"{v.parameters / 1e9:.2f}" if v.parameters else "-",
            _default_size(g),
            "1" if g.kind == "audio" else str(g.pixel_multiple),
            str(v.text_tokens or g.text_tokens),
            ", ".join(v.aliases),
        )
    _print_table(table, console)
    console.print()
    _draw_executors(f, f.default_variant, "Checkpointing", console)
    for variant in _other_rows(f):
        _draw_executors(f, variant, f"Checkpointing of {variant}", console, besides=f.default_variant)
    for note in f.notes:
        console.print(f"note: {note}")


def _draw_executors(f: Family, variant: str, title: str, console: Console, besides: str | None = None) -> None:
    """`besides`: only what differs from this variant."""
    known = {} if besides is None else executor_facts(f, besides)
    for name, facts in executor_facts(f, variant).items():
        if facts == known.get(name):
            continue
        console.print(f"{title}, executor {name}:")
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for control, text in facts.items():
            grid.add_row("  -", control, text)
        console.print(grid)


def _feed_forward_text(f: Family) -> str:
    parts = [
        f"{path}: {' and '.join('+'.join(run) for run in r.feed_forward)}"
        for path, r in f.regions.items()
        if r.feed_forward
    ]
    return "; ".join(parts) or "no separate feed-forward side known"


def draw_gpus(cards: Iterable[Device], console: Console) -> None:
    """All cards, one a line."""
    table = _table(
        ("\nname", "left"),
        ("memory\nGiB", "right"),
        ("usable\nGiB", "right"),
        ("bf16 dense\nTFLOP/s", "right"),
        ("memory\nGB/s", "right"),
        ("host link\nGB/s", "right"),
        ("compute\ntarget", "left"),
    )

    def rate(value: float | None, unit: float) -> str:
        return "-" if value is None else f"{value / unit:.0f}"

    for d in cards:
        table.add_row(
            d.name,
            gib(d.total_bytes),
            gib(d.usable_bytes),
            rate(d.bf16_flops, 1e12),
            rate(d.memory_bytes_per_second, 1e9),
            rate(d.host_to_device_bytes_per_second, 1e9),
            d.compute_target or "-",
        )
    _print_table(table, console)
    console.print("\nRates are nominal. A card that is not listed: --vram GIB.")


# profiles, receipts, runs


def draw_profile(profile: Profile, path: Path, stored: bool, took: float, console: Console) -> None:
    """What a probe found out, and where it is kept."""
    for line in workload_lines(profile.workload):
        console.print(line)
    console.print()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    tape = profile.tape
    where = f"{path} ({path.stat().st_size / 2**20:.2f} MiB)" if stored else "could not be stored"
    for name, text in (
        ("profile", f"{profile.source}, for {profile.target}"),
        ("stored in", where),
        ("seconds", f"{took:.1f}"),
        ("parameters", f"{profile.parameters:,} base, {profile.trained_elements:,} trained"),
        ("tape", f"{tape.length:,} events, {len(tape.size):,} storages, {len(tape.saved_at):,} saved tensors, {len(tape.op_at):,} kernels"),
        ("versions", ", ".join(f"{k} {v}" for k, v in profile.versions.items())),
    ):  # fmt: skip
        facts.add_row(name, text)
    console.print(facts)
    console.print()
    table = _table(("chain", "left"), ("blocks", "right"), ("linked", "left"), ("grouped", "left"))
    table.add_column("kinds of block", overflow="fold")
    for chain in profile.structure.chains:
        kinds: dict[str, int] = {}
        for block in chain.blocks:
            kinds[block.kind] = kinds.get(block.kind, 0) + 1
        linked = {True: "yes", False: "no", None: "unknown"}[chain.linked]
        table.add_row(
            chain.path,
            str(len(chain.blocks)),
            linked,
            "yes" if chain.groupable else "never",
            ", ".join(f"{n} x {kind}" for kind, n in kinds.items()),
        )
    _print_table(table, console)
    if profile.measured:
        console.print()
        console.print("Measured, by kind of block:")
        console.print(
            _bullets(
                f"{kind}: {', '.join(f'{k} {v:g}' for k, v in values.items())}"
                for kind, values in profile.measured.items()
            )
        )
    for note in (*profile.workload.family.notes, *profile.notes):
        console.print(f"note: {note}")


def draw_lines(lines: Iterable[RenderableType], console: Console) -> None:
    """Text as it is."""
    for line in lines:
        console.print(line)


def draw_largest(found: Largest, console: Console) -> None:
    """A search: every value tried, and the largest that fits."""
    for line in workload_lines((found.best or found.tried[0]).plan.workload):
        console.print(line)
    _draw_device(found.tried[0].plan, console)
    console.print()
    table = _table(
        (f"\n{found.vary}", "right"),
        ("\nrecommended", "left"),
        ("peak\nGiB", "right"),
        ("\n95% band", "right"),
        ("device\nGiB", "right"),
        ("\ns/step", "right"),
        ("\nfits", "left"),
    )
    for tried in found.tried:
        e = tried.plan.recommended
        mark = "*" if found.best is tried else ""
        if e is None:
            smallest = min((s for s in tried.plan.schedules if s.supported), key=lambda s: s.peak, default=None)
            peak = "-" if smallest is None else f">{smallest.peak / GIB:.1f}"
            table.add_row(tried.value, "nothing fits", peak, "", "", "", "no")
            continue
        seconds = "-" if e.step_seconds is None else f"{e.step_seconds:.3g}"
        table.add_row(
            tried.value + mark,
            e.schedule.name,
            f"{e.peak / GIB:.1f}",
            gib_band(e),
            f"{e.device / GIB:.1f}",
            seconds,
            fit_word(e),
        )
    _print_table(table, console)
    console.print()
    if found.best is None:
        console.print(
            f"Not even {found.vary} {found.tried[0].value} fits; advise with the same options says what would help."
        )
        return
    e = found.best.plan.recommended
    assert e is not None
    what = "number of frames" if found.vary == "frames" else found.vary
    console.print(f"The largest {what} that fits is {found.best.value}, with {e.schedule.name}.")
    if found.limit is not None:
        console.print(f"More was not tried: {found.limit}.")
    if fit_word(e) == "tight":
        console.print(f"It is a tight fit, {e.fit_probability:.0%} likely. --headroom keeps memory free.")
    _draw_phases(found.best.plan, console)
    _draw_warnings(found.best.plan, console)


def draw_imported(read: Imported, own: Estimate, answer: Plan, console: Console) -> None:
    """A trainer's configuration: its own schedule, the recommended one, and the keys that differ."""
    for line in workload_lines(answer.workload):
        console.print(line)
    _draw_device(answer, console)
    console.print()
    best = answer.recommended
    table = _table(
        ("", "left"),
        ("schedule", "left"),
        ("peak GiB", "right"),
        ("95% band", "right"),
        ("s/step", "right"),
        ("fits", "left"),
    )
    for name, e in (("configured", own), ("recommended", best)):
        if e is None:
            table.add_row(name, "nothing fits", "", "", "", "no")
            continue
        seconds = "-" if e.step_seconds is None else f"{e.step_seconds:.3g}"
        if e.supported:
            table.add_row(name, e.schedule.name, f"{e.peak / GIB:.1f}", gib_band(e), seconds, fit_word(e))
        else:
            table.add_row(name, e.schedule.name, "-", "", "", "unsupported")
    _print_table(table, console)
    console.print()
    lines = [f"{own.schedule.name}: {own.reason}"] if own.reason else []
    lines += list(answer.choice.reasons)
    console.print(_bullets(lines))
    _draw_phases(answer, console)
    if best is not None:
        changed = read.changes(answer.export or {})
        console.print("Keys to change:" if changed else "Its checkpointing keys are the recommended ones already.")
        for line in changed:
            console.print(f"  {line}")
    notes = [*read.notes, *(t for t in answer.warnings if t != answer.device.note or not _is_taken_for(answer.device))]
    if notes:
        console.print("Notes:")
        console.print(_bullets(notes))


def draw_run(result: Mapping[str, Any], console: Console) -> None:
    """What a training run did, from its JSON form."""
    losses = result["losses"]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    w = result["workload"]
    rows = [
        ("model", f"{w['model']} {w['variant']}, {w['resolution']} pixels, batch {w['batch']}"),
        ("schedule", result["schedule"]),
        ("steps", f"{result['first_step']} to {result['steps']}" if losses else "none left to do"),
        (
            "settings",
            f"learning rate {result['lr']:g}, {result['accumulate']} batch{'' if result['accumulate'] == 1 else 'es'} a step, seed {result['seed']}",
        ),
        ("seconds a step", f"{result['seconds_per_step']:.4g} (median)" if losses else "-"),
        ("loss", f"{losses[0]:.4g} at first, {losses[-1]:.4g} at last" if losses else "-"),
        ("saved", result["saved"] or "nothing (--output FOLDER saves)"),
    ]
    rows += [(name, result[name]) for name in ("checkpoint", "metrics") if result[name]]
    for name, text in rows:
        facts.add_row(name, text)
    console.print(facts)
    for note in result["notes"]:
        console.print(f"note: {note}")

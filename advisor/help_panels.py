"""Draws `--help`: one panel a group of options. rich's tables only; typer's own renderer imports a Markdown parser first,
which takes longer than everything else that `advise --help` does.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 80


def draw(command: Any, context: Any) -> str:
    """The help text of a click command or group, coloured only on a terminal."""
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, emoji=False, force_terminal=None if terminal else False)
    if not terminal:
        console.width = PIPED_WIDTH
    with console.capture() as captured:
        console.print(f"\n {command.get_usage(context)}\n", style="bold")
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            console.print(Text(" ".join(paragraph.split("\n"))))
            console.print()
        _draw_panels(command, context, console)
    text = captured.get()
    return text if terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _draw_panels(command: Any, context: Any, console: Console) -> None:
    panels: dict[str, list[tuple[str, str, str]]] = {}
    for parameter in command.get_params(context):
        is_argument = parameter.param_type_name == "argument"
        panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
        name = parameter.metavar or parameter.name.upper() if is_argument else ", ".join(reversed(parameter.opts))
        value = "" if is_argument or getattr(parameter, "is_flag", False) else parameter.metavar or ""
        panels.setdefault(panel, []).append((name, value, parameter.help or ""))
    for title in sorted(panels, key=lambda t: t != "Arguments"):
        console.print(_panel(title, panels[title]))
    names: list[str] = getattr(command, "list_commands", lambda _: [])(context)
    if names:
        commands = [command.get_command(context, name) for name in names]
        console.print(
            _panel("Commands", [(c.name, "", inspect.cleandoc(c.help or "").split("\n\n")[0]) for c in commands])
        )


def _panel(title: str, rows: list[tuple[str, str, str]]) -> Panel:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, style="bold cyan")
    if any(value for _, value, _ in rows):
        table.add_column(no_wrap=True, style="yellow")
    table.add_column(ratio=1, overflow="fold")
    for name, value, text in rows:
        cells = (name, value, text) if len(table.columns) == 3 else (name, text)
        table.add_row(*cells)
    return Panel(table, title=title, title_align="left", border_style="dim")

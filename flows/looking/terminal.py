"""Where commands that look at runs print to: tables for the terminal's width, JSON for programs."""

import os
from collections.abc import Mapping, Sequence

import orjson
import typer
from rich.console import Console

from flows.looking.view import Column, View, counted
from tasks.store.export import Exported

UNBOUNDED = 100_000
"""Characters that no line of a table has."""


def print_json(values: Mapping[str, object]) -> None:
    """Print one JSON object in UTF-8; NaN, which JSON does not have, is null, and times are ISO 8601."""
    typer.echo(orjson.dumps(values, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def print_view(view: View) -> None:
    """Print a table: as many columns as the terminal is wide enough for, all of them into a file or a pipe."""
    console = terminal()
    if console.is_terminal or "COLUMNS" in os.environ:
        console.print(view.page(console.width))
        return
    page = view.page(None)
    unbounded = console.options.update(max_width=UNBOUNDED)
    console.width = console.measure(page, options=unbounded).maximum
    console.print(page)


def print_exported(files: Sequence[Exported]) -> None:
    """Print the files of an export, with rows and sizes."""
    columns = [Column("file"), Column("rows"), Column("megabytes")]
    rows = [{"file": str(each.path), "rows": each.rows, "megabytes": each.bytes / 1e6} for each in files]
    print_view(View({}, counted(len(files), "file"), columns, rows))


def terminal() -> Console:
    """Standard output, without colours where it is no terminal, or NO_COLOR asks for none."""
    return Console(highlight=False)


def has_colours(console: Console) -> bool:
    """True when colours can be seen."""
    return console.is_terminal and console.color_system is not None and not console.no_color

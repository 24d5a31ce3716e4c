"""Output of commands that read runs: tables for the terminal's width, JSON for programs."""

import os
from collections.abc import Mapping, Sequence

import orjson
import typer
from rich.console import Console, RenderableType

from rollmill.tasks.look.export.dataset_export import ExportedFile
from rollmill.tasks.look.tables.view import Column, View, count_noun

UNBOUNDED = 100_000
"""Line width that no table exceeds."""


def print_json(values: Mapping[str, object]) -> None:
    """Print one JSON object in UTF-8; NaN becomes null, times are ISO 8601."""
    typer.echo(orjson.dumps(values, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def print_view(view: View) -> None:
    """Print a table with as many columns as fit the terminal; all columns into a file or a pipe."""
    console = open_console()
    page = view.page(console.width if _has_width(console) else None)
    widen_to_fit(console, page)
    console.print(page)


def widen_to_fit(console: Console, shown: RenderableType) -> None:
    """Make the lines of a file or a pipe as long as what is shown needs; a terminal keeps its width."""
    if not _has_width(console):
        unbounded = console.options.update(max_width=UNBOUNDED)
        console.width = console.measure(shown, options=unbounded).maximum


def _has_width(console: Console) -> bool:
    # A file has none, and Rich takes 80; COLUMNS is how a user gives it one.
    return console.is_terminal or "COLUMNS" in os.environ


def print_exported_files(files: Sequence[ExportedFile]) -> None:
    """Print the files of an export, with rows and sizes."""
    columns = [Column("file"), Column("rows"), Column("megabytes")]
    rows = [{"file": str(each.path), "rows": each.rows, "megabytes": each.bytes / 1e6} for each in files]
    print_view(View({}, count_noun(len(files), "file"), columns, rows))


def open_console() -> Console:
    """Return a console on standard output; without colours if it is no terminal, or NO_COLOR is set."""
    return Console(highlight=False)


def has_colours(console: Console) -> bool:
    """Return True if the console shows colours."""
    return console.is_terminal and console.color_system is not None and not console.no_color

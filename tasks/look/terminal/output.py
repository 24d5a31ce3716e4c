"""Output of commands that read runs: tables for the terminal's width, JSON for programs, findings with their remedies."""

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from typing import Literal

import orjson
import typer
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from rollmill.tasks.look.export.dataset_export import ExportedFile
from rollmill.tasks.look.publish.publication import Publication
from rollmill.tasks.look.tables.view import Column, View, count_noun, escape_controls
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.verify.run_verification import Check, VerificationReport, verify_run
from rollmill.tasks.store.verify.run_views import Finding, RunView

UNBOUNDED = 100_000
"""Line width that no table exceeds."""


def print_json(values: Mapping[str, object]) -> None:
    """Print one JSON object in UTF-8; NaN becomes null, times are ISO 8601. For a terminal it has no control characters."""
    text = encode_json(values, indent=2).decode()
    # None if the command was started without standard output.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    typer.echo(escape_json(text) if is_terminal else text)


def encode_json(values: Mapping[str, object], indent: Literal[0, 2] = 0) -> bytes:
    r"""Return a JSON object in UTF-8; half a surrogate pair, which a model may write and UTF-8 lacks, is an escape: \ud83d."""
    try:
        option = orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
        return orjson.dumps(values, default=str, option=option)
    except orjson.JSONEncodeError:
        return json.dumps(_prepare_json(values), default=str, indent=indent or None).encode()


def _prepare_json(value: object) -> object:
    """Return a value for the library `json` with NaN, infinity and times as orjson writes them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(name): _prepare_json(each) for name, each in value.items()}
    return [_prepare_json(each) for each in value] if isinstance(value, list | tuple) else value


def escape_json(text: str) -> str:
    r"""Escape control, invisible and bidirectional characters in JSON text, which stays the same JSON: DEL becomes \u007f."""
    # Line ends of the layout stay; within texts they are escaped already.
    return re.sub(
        r"[^ -~\n]", lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text
    )


def print_view(view: View, *, as_json: bool = False) -> None:
    """Print a table with as many columns as fit the terminal, all columns into a file or a pipe; or its values as JSON."""
    if as_json:
        print_json(view.values)
        return
    console = open_console()
    page = view.page(terminal_width(console))
    widen_to_fit(console, page)
    console.print(page)


def widen_to_fit(console: Console, shown: RenderableType) -> None:
    """Make the lines of a file or a pipe as long as what is shown needs; a terminal keeps its width."""
    if terminal_width(console) is None:
        unbounded = console.options.update(max_width=UNBOUNDED)
        console.width = console.measure(shown, options=unbounded).maximum


def terminal_width(console: Console) -> int | None:
    """Return the width of a terminal, or COLUMNS, in cells; None for a file or a pipe without COLUMNS."""
    # Rich takes 80 for a file.
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def print_exported_files(files: Sequence[ExportedFile]) -> None:
    """Print the files of an export, with rows and sizes."""
    columns = [Column("file"), Column("rows"), Column("megabytes")]
    rows = [{"file": str(each.path), "rows": each.rows, "megabytes": each.bytes / 1e6} for each in files]
    print_view(View({}, count_noun(len(files), "file"), columns, rows))


def print_publication(published: Publication, to: str) -> None:
    """Print the rows and parts that were added to each table; to standard error, which stored rows it did not add."""
    columns = [Column("table"), Column("rows"), Column("parts")]
    rows = [
        {"table": table, "rows": n, "parts": published.parts[table]} for table, n in published.rows.items()
    ]
    print_view(View({}, f"{count_noun(sum(published.rows.values()), 'new row')} in {to}", columns, rows))
    for part in published.replaced:
        what = "its rows were replaced since they were published, and the table keeps the earlier ones"
        typer.echo(f"rollmill: {part}: {what}; publish to another place for the new ones", err=True)


def open_console() -> Console:
    """Return a console on standard output; without colours if it is no terminal, or NO_COLOR is set."""
    return Console(highlight=False)


def has_colours(console: Console) -> bool:
    """Return True if the console shows colours."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def verify_and_print(folder: RunFolder, *, as_json: bool, more: Sequence[Check[RunView]] = ()) -> bool:
    """Verify a run and print the findings; returns True if there are none, raises StoreError if it could not be checked.

    `more` are checks of the whole run beyond those of `verify_run`.
    """
    console = Console(stderr=True)
    # Without a terminal Rich would print an empty line in place of the bar.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verify", total=None)
        found = verify_run(
            folder, lambda done, total: bar.update(task, completed=done, total=total), more=more
        )
    if as_json:
        print_json({"run": folder.location, "ok": not found.findings, **asdict(found)})
    else:
        _print_report(folder, found)
    return not found.findings


def print_findings(location: str, findings: Sequence[Finding]) -> None:
    """Print a table of faults with their remedies; nothing without any. `location` is left out of the paths in it."""
    if not findings:
        return
    console = open_console()
    table = Table(title=f"Findings in {location}", title_justify="left")
    for heading in ("where", "what", "remedy"):
        table.add_column(heading, overflow="fold")
    for each in findings:
        where = each.where.removeprefix(f"{location}/")
        table.add_row(*(Text(escape_controls(text)) for text in (where, each.what, each.remedy)))
    widen_to_fit(console, table)
    console.print(table)


def _print_report(folder: RunFolder, found: VerificationReport) -> None:
    console = open_console()
    print_findings(folder.location, found.findings)
    for note in found.notes:
        console.print(escape_controls(note), markup=False, soft_wrap=True)
    said = count_noun(len(found.findings), "finding") if found.findings else "nothing is wrong"
    verified = f"{count_noun(found.shards, 'shard')} and {count_noun(found.steps, 'step')} verified"
    console.print(f"{folder.location}: {verified}, {said}", markup=False, soft_wrap=True)

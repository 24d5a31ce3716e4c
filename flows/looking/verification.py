"""What `rollmill verify` shows: everything that is wrong with a run, and what to do about it."""

import os
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from flows.looking.terminal import UNBOUNDED, print_json, terminal
from tasks.store.findings import Finding
from tasks.store.layout import RunFolder
from tasks.store.verification import Verified, verify_run


def verify(folder: RunFolder, *, as_json: bool) -> bool:
    """Verify a run and print what was found; returns True when nothing is wrong.

    Raises:
        StoreError: it could not be checked.
    """
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)
        found = verify_run(folder, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print_json({"run": folder.location, "ok": not found.findings, **asdict(found)})
    else:
        _print(folder, found)
    return not found.findings


def _print(folder: RunFolder, found: Verified) -> None:
    console = terminal()
    if found.findings:
        table = _table(folder, found.findings)
        if not console.is_terminal and "COLUMNS" not in os.environ:  # a file has no width
            unbounded = console.options.update(max_width=UNBOUNDED)
            console.width = console.measure(table, options=unbounded).maximum
        console.print(table)
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)
    said = f"{len(found.findings)} findings" if found.findings else "nothing is wrong"
    console.print(
        f"{folder.location}: {found.shards} shards and {found.steps} steps verified, {said}",
        markup=False,
        soft_wrap=True,
    )


def _table(folder: RunFolder, findings: Sequence[Finding]) -> Table:
    table = Table(title=f"Findings in {folder.location}", title_justify="left")
    for heading in ("where", "what", "remedy"):
        table.add_column(heading, overflow="fold")
    for each in findings:
        where = each.where.removeprefix(f"{folder.location}/")
        table.add_row(*(Text(text) for text in (where, each.what, each.remedy)))
    return table

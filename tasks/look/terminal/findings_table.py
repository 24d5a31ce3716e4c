"""Print the findings of `rollmill verify`, each with its remedy."""

from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from rollmill.tasks.look.terminal.output import open_console, print_json, widen_to_fit
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.verify.run_verification import VerificationReport, verify_run


def verify_and_print(folder: RunFolder, *, as_json: bool) -> bool:
    """Verify a run and print the findings; returns True if there are none, raises StoreError if it could not be checked."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)
        found = verify_run(folder, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print_json({"run": folder.location, "ok": not found.findings, **asdict(found)})
    else:
        _print_report(folder, found)
    return not found.findings


def _print_report(folder: RunFolder, found: VerificationReport) -> None:
    console = open_console()
    if found.findings:
        table = Table(title=f"Findings in {folder.location}", title_justify="left")
        for heading in ("where", "what", "remedy"):
            table.add_column(heading, overflow="fold")
        for each in found.findings:
            where = each.where.removeprefix(f"{folder.location}/")
            table.add_row(*(Text(text) for text in (where, each.what, each.remedy)))
        widen_to_fit(console, table)
        console.print(table)
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)
    said = f"{len(found.findings)} findings" if found.findings else "nothing is wrong"
    verified = f"{found.shards} shards and {found.steps} steps verified"
    console.print(f"{folder.location}: {verified}, {said}", markup=False, soft_wrap=True)

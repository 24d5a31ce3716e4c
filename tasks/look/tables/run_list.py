"""The table of `rollmill list`: the runs below a folder, newest first."""

from collections.abc import Mapping

from rollmill.tasks.errors import RollmillError
from rollmill.tasks.look.tables.run_tables import read_held_out
from rollmill.tasks.look.tables.view import Column, View, count_noun, limit_notes
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import MANIFEST, RunFolder
from rollmill.tasks.store.reader import list_steps
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.store.run.lock import is_written_to
from rollmill.tasks.store.run.manifest import read_manifest

COLUMNS = (
    Column("run"),
    Column("state"),
    Column("steps"),
    Column("planned", rank=4, header="planned"),
    Column("reward", rank=1, header="held-out reward"),
    Column("greedy_accuracy", rank=2, header="greedy accuracy"),
    Column("created_at", rank=3, header="begun"),
    Column("error", rank=5, is_text=True),
)


def make_runs_view(root: str, limit: int = 0) -> View:
    """Return the table of the runs directly below a folder, local or on S3; at most `limit` of them unless that is 0.

    The state is finished, running (a process of this machine or a lease on S3 holds it), stopped (it can be resumed), or unreadable.
    """
    place = RunFolder(root)
    names = [key.rpartition("/")[0] for key in open_files(place).keys(f"*/{MANIFEST}")]
    rows = sorted((_describe(place, name) for name in names), key=lambda row: str(row["created_at"] or ""))
    shown = rows[::-1][: limit or None]
    columns = [each for each in COLUMNS if each.name != "error" or any(row["error"] for row in shown)]
    title = f"{count_noun(len(rows), 'run')} in {place.location}"
    return View(
        {"root": place.location, "runs": shown}, title, columns, shown, limit_notes(len(shown), len(rows))
    )


def _describe(place: RunFolder, name: str) -> Mapping[str, object]:
    folder = RunFolder(place.path(name))
    row: dict[str, object] = dict.fromkeys(column.name for column in COLUMNS) | {"run": name, "error": ""}
    try:
        manifest = read_manifest(folder)
        held_out = read_held_out(folder)
    except RollmillError as error:
        return row | {"state": "unreadable", "error": str(error)}
    unfinished = "running" if is_written_to(folder) else "stopped"
    row |= {
        "state": "finished" if manifest.status == "finished" else unfinished,
        # A step that fails has metrics too; one that trains is done when its batch is stored.
        "steps": len(list_steps(folder, "batches" if manifest.trains else "metrics")),
        "planned": get_setting(manifest.config, "steps", None),
        "created_at": manifest.created_at[:16].replace("T", " "),
    }
    return row | (held_out.select("reward", "greedy_accuracy").row(-1, named=True) if len(held_out) else {})

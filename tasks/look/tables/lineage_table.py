"""The table of trajectories that made a policy."""

from dataclasses import asdict

from rollmill.tasks.look.tables.view import Column, View, count_noun, limit_notes
from rollmill.tasks.store.lineage.lineage_trace import LineageReport

SHOWN_DIGITS = 16
_COLUMNS = (
    Column("run"),
    Column("step"),
    Column("group"),
    Column("sample"),
    Column("trained_step", rank=3, header="trained in"),
    Column("scorer", rank=2),
    Column("reward", rank=1),
    Column("digest"),
    Column("location", rank=4, is_text=True),
)


def make_lineage_view(policy: str, report: LineageReport, limit: int = 0) -> View:
    """Return the table of a traced policy's first `limit` trajectories (0: all); its values have all, and every fault."""
    rows = [asdict(row) for row in (report.rows[:limit] if limit else report.rows)]
    shown = [row | {"digest": row["digest"][:SHOWN_DIGITS]} for row in rows]
    origins = {(row.location, row.step) for row in report.rows}
    n = len({(row.location, row.trajectory_id) for row in report.rows})
    title = f"{policy}: {count_noun(n, 'trajectory', 'trajectories')}"
    if n < len(report.rows):
        title += f", trained on {len(report.rows)} times in all"
    n_runs = len({each for each, _ in origins})
    title += f", sampled in {count_noun(len(origins), 'step')} of {count_noun(n_runs, 'run')}"
    notes = [
        f"{each.location}: version {each.version} of run {each.run} in {each.folder}, digest {each.digest}"
        + (f", taught by {', '.join(each.teachers)}" if each.teachers else "")
        for each in report.policies
    ]
    values = {"policy": policy, "ok": not report.findings, **asdict(report)}
    return View(values, title, _COLUMNS, shown, [*limit_notes(len(rows), len(report.rows)), *notes])

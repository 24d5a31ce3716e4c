"""The summary that a finished run prints: held-out rewards and answers before and after, and where to look further."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollmill.tasks.look.comparisons.changed_answers import ChangedAnswers, compare_answers, count_unscored
from rollmill.tasks.look.tables.run_tables import format_with_interval, list_held_out
from rollmill.tasks.look.tables.view import count_noun, escape_controls
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps

MAX_CELL = 200
"""Characters of a problem or an answer that are shown."""


def print_summary(folder: RunFolder, run_url: str) -> None:
    """Print first and last held-out rewards, changed answers, the path of the plot, code to read the data, and the run's address."""
    # A flow imports no matplotlib before it draws.
    from rollmill.tasks.look.terminal.plot import plot_run

    console = Console()
    for env, rows in list_held_out(folder):
        console.print(_before_and_after(folder, env, rows[0], rows[-1]))
        for shown in _changed_answers(folder, env, rows[0], rows[-1]):
            console.print(shown, highlight=False)
    dataset = "rollouts" if list_steps(folder, "rollouts") else "batches"
    lines = {
        "curves": str(plot_run(folder)),
        "data set": f'pl.scan_ipc("{folder.location}/{dataset}/**/*.arrow", hive_partitioning=True)',
        "the run in the UI": run_url,
    }
    for name, value in lines.items():
        console.print(f"[bold]{name}[/bold]", highlight=False)
        console.print(f"  {value}", highlight=False, soft_wrap=True, markup=False)


def _before_and_after(
    folder: RunFolder, env: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Table:
    of_env = "" if env == ALL else f" of {env}"
    table = Table(title=f"held-out problems{of_env}, with 95 % intervals", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("policy version", str(before["step"]), str(after["step"]))
    table.add_row("problems", str(before["n"]), str(after["n"]))
    values = {"reward, sampled": "reward", "accuracy, greedy": "greedy_accuracy"}
    if before["samples"] != 1 and before["pass_at_k"] is not None:
        values[f"pass@{before['samples']}"] = "pass_at_k"
    counts = [count_unscored(folder, env, each["step"]) for each in (before, after)]
    if any(counts):
        table.add_row("no score, counts as 0", *map(str, counts))
    for name, key in values.items():
        table.add_row(name, format_with_interval(before, key), format_with_interval(after, key))
    return table


def _changed_answers(
    folder: RunFolder, env: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Text | Table]:
    """Yield a sentence about the greedy answers that changed, and a table of examples; nothing if none changed."""
    if before["step"] == after["step"]:
        return
    changed = compare_answers(folder, env, before["step"], after["step"])
    if not changed.gained and not changed.lost:
        return
    yield Text(
        f"Greedy answers: {count_noun(changed.gained, 'problem')} turned right, {changed.lost} turned wrong."
    )
    if changed.examples:
        yield _list_examples(changed)


def _list_examples(changed: ChangedAnswers) -> Table:
    table = Table("problem", "before", "after", title="examples that turned right", title_justify="left")
    for row in changed.examples:
        table.add_row(*(Text(_shorten(each)) for each in row))
    return table


def _shorten(text: str) -> str:
    shown = escape_controls(" ".join(text.split()))
    return shown if len(shown) <= MAX_CELL else f"{shown[: MAX_CELL - 1]}…"

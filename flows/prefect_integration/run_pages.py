"""The Markdown pages in Prefect's UI: of a run, of a step, of a run's scores."""

import base64
import io
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollmill.tasks.look.ledger.run_ledger import read_ledger
from rollmill.tasks.look.tables.cost_view import make_costs_view
from rollmill.tasks.look.tables.curves import read_curves
from rollmill.tasks.look.tables.ledger_tables import PATH, make_ledger_views
from rollmill.tasks.look.tables.notable_trajectories import NotableTrajectory, choose_notable
from rollmill.tasks.look.tables.run_tables import format_with_interval, list_held_out, make_run_view
from rollmill.tasks.look.tables.scores import explain_scorers, read_score_totals
from rollmill.tasks.look.tables.selection import Interval
from rollmill.tasks.look.tables.view import View, count_noun
from rollmill.tasks.look.terminal.markdown_escape import escape_block, escape_inline, make_table
from rollmill.tasks.look.terminal.trajectory_print import message_texts
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, scan

CAUSE = "drops/cause_"
# Messages of a longer conversation that are shown.
FIRST_MESSAGES, LAST_MESSAGES = 2, 4
# Rows in the table of steps on the run's page.
LAST_STEPS = 20
# Steps over which the run's page averages where time went: reading the spans of all would be slow.
TIMED_STEPS = 100
# Resolution of the curves; the picture has some 60 kB.
PICTURE_DPI = 80
# Longest title or note of a table, in characters.
MOST_LINE = 2000


@dataclass(frozen=True, slots=True)
class StepPage:
    """The Markdown page of a step in Prefect's UI.

    Attributes:
        scorer: NAME@VERSION of the rewards; empty: the step has no trajectories to show.
        viewer: address of the viewer; empty: no links to it.
    """

    folder: RunFolder
    step: int
    scorer: str
    viewer: str = ""

    def around_time(self) -> tuple[str, str]:
        """Return the Markdown before and after the tables of where time went, which are complete only once the step has ended."""
        metrics = _metrics(self.folder, self.step)
        before = [f"# {escape_inline(self.folder.name)}, step {self.step}", "", *self._summary(metrics)]
        return "\n".join(before), "\n".join([*_drops(metrics), *self._trajectories(), *self._further()])

    def _summary(self, metrics: Mapping[str, float]) -> list[str]:
        groups = scan(self.folder, "groups", ["group", "reason"], step=self.step).collect()
        reward = metrics.get("rollout/reward", metrics.get("retrain/reward"))
        # A reward that is NaN is not shown: no group of the step has one.
        facts = [f"reward **{reward:z.3f}**"] if reward is not None and reward == reward else []
        if len(groups):
            trained = groups.filter(groups["reason"] == "")["group"].n_unique()
            facts.append(f"{trained} of {count_noun(groups['group'].n_unique(), 'group')} trained on")
        if "rollout/tokens" in metrics:
            facts.append(f"{metrics['rollout/tokens']:,.0f} tokens sampled")
        updated = "" if metrics.get("train/updated", 1.0) else "; no update was made"
        return [f"{', '.join(facts)}{updated}", ""] if facts else []

    def time(self) -> str:
        """Return tables of where the time of an ended step went, in Markdown, as in `rollmill spans RUN --step N`.

        Raises:
            ConfigError: the step has no spans.
        """
        ledger = read_ledger(self.folder, Interval(self.step, self.step))
        return _tables(make_ledger_views(self.folder.name, ledger))

    def time_placeholder(self) -> str:
        """Return the text shown instead of the tables of where time went until the step has ended."""
        return f"Where the time of step {self.step} went is shown here when the next step, or the run, has ended.\n"

    def _trajectories(self) -> Iterator[str]:
        for reading in choose_notable(self.folder, self.step, self.scorer) if self.scorer else ():
            yield from trajectory_lines(reading, self.viewer)

    def _further(self) -> Iterator[str]:
        run, step = shlex.quote(self.folder.location), self.step
        commands = [f"rollmill {what} {run} --step {step}" for what in ("inspect", "spans")]
        commands.append(f"rollmill view {run}")
        if self.viewer and self.scorer:
            links = [f"[{what}]({self.viewer}/{what}?step={step})" for what in ("groups", "trajectories")]
            yield f"In the viewer, while it runs: {', '.join(links)}."
            yield ""
        yield from _code("\n".join(commands))
        yield from _polars(self.folder, f"step={step:06d}/*.arrow")


def draw_run_page(folder: RunFolder, viewer: str) -> str:
    """Draw a run's curves, and return the Markdown page of the run with them, as `run_page`."""
    # Imported here: it is a quarter of all that a flow imports, and a flow draws no page itself.
    from rollmill.tasks.look.terminal.plot import draw

    picture = io.BytesIO()
    draw(folder.name, read_curves(folder)).savefig(picture, dpi=PICTURE_DPI, format="png")
    return run_page(folder, picture.getvalue(), viewer)


def run_page(folder: RunFolder, picture: bytes, viewer: str = "") -> str:
    """Return the Markdown page of a run: curves, held-out rewards, steps, where time went, how to open its data sets.

    Args:
        folder: of the run.
        picture: PNG of its curves.
        viewer: address of the viewer; empty: no links to it.
    """
    view = make_run_view(folder)
    heading, rule, *steps = make_table(view)
    lines = [f"# {escape_inline(folder.name)}", "", escape_inline(view.title, MOST_LINE), ""]
    lines += [f"{escape_inline(line, MOST_LINE)}\n" for line in explain_scorers(folder)]
    lines += [f"![curves](data:image/png;base64,{base64.b64encode(picture).decode()})", ""]
    for env, rows in list_held_out(folder):
        evaluations = [
            f"| {each['step']} | {each['n']} | {format_with_interval(each, 'reward')} | "
            f"{format_with_interval(each, 'greedy_accuracy')} |"
            for each in rows
        ]
        of_env = "" if env == ALL else f" of {escape_inline(env)}"
        lines += [
            f"| policy version | held-out problems{of_env} | reward, sampled (95 %) | accuracy, greedy (95 %) |",
            "|---|---|---|---|",
        ]
        lines += [*evaluations[:1], *evaluations[1:][-LAST_STEPS:], ""]
    shown = steps[-LAST_STEPS:]
    which = "steps" if len(shown) == len(steps) else f"the last {len(shown)} of {len(steps)} steps"
    lines += [f"**{which}**", "", heading, rule, *shown, "", *_describe_run_time(folder)]
    commands = [f"rollmill {what} {shlex.quote(folder.location)}" for what in ("view", "spans")]
    if viewer:
        lines += [f"In the viewer, while it runs: [the run]({viewer}/).", ""]
    return "\n".join([*lines, *_code("\n".join(commands)), *_polars(folder, "**/*.arrow")])


def scores_page(folder: RunFolder) -> str:
    """Return the Markdown page of a run's scores: mean reward and counts for each scorer."""
    lines = [f"# {escape_inline(folder.name)}: scores", ""]
    lines += ["| scorer | mean reward | scored | failed | dropped |", "|---|---:|---:|---:|---:|"]
    for each in read_score_totals(folder):
        counts = " | ".join(str(each.by_status[status]) for status in ("scored", "failed", "dropped"))
        lines.append(f"| {escape_inline(each.scorer)} | {each.reward:z.4f} | {counts} |")
    lines += ["", *(f"- {escape_inline(line, MOST_LINE)}" for line in explain_scorers(folder))]
    run, place = shlex.quote(folder.location), f"{folder.absolute}/scores/**/*.arrow"
    shown = _code(f"pl.scan_ipc({place!r}, hive_partitioning=True)")
    return "\n".join([*lines, "", *_code(f"rollmill view {run}"), *shown])


def table_page(view: View) -> str:
    """Return a Markdown page with a table, its title as heading and its notes."""
    notes = "\n".join(f"- {escape_inline(note, MOST_LINE)}" for note in view.notes)
    return "\n".join([f"# {escape_inline(view.title, MOST_LINE)}", "", *make_table(view), "", notes])


def _metrics(folder: RunFolder, step: int) -> dict[str, float]:
    rows = scan(folder, "metrics", ["name", "env", "stat", "value"], step=step).collect()
    values = rows.filter((rows["env"] == "all") & rows["stat"].is_in(["value", "mean"]))
    return dict(zip(values["name"].to_list(), values["value"].to_list(), strict=True))


def _describe_run_time(folder: RunFolder) -> list[str]:
    """Return Markdown tables of where the time of a step went, as a mean over the last steps that have ended, and of their costs."""
    steps = list_steps(folder, "spans")
    if not steps:
        return []
    ledger = read_ledger(folder, most=TIMED_STEPS)
    name = folder.name if len(steps) <= TIMED_STEPS else f"{folder.name}, its last steps"
    views = make_ledger_views(name, replace(ledger, ends=ledger.ends.clear()))
    return [_tables([*views, make_costs_view(folder, ledger)])]


def _tables(views: Iterable[View]) -> str:
    """Return tables with their titles and notes in Markdown, without the critical path, which is long."""
    lines: list[str] = []
    for view in views:
        if view.rows and view.title != PATH:
            notes = (escape_inline(note, MOST_LINE) for note in view.notes)
            lines += [f"**{escape_inline(view.title, MOST_LINE)}**", "", *make_table(view), "", *notes, ""]
    return "\n".join(lines)


def _drops(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield Markdown lines: a table of the trajectories lost to training by cause, or a sentence that none was lost."""
    causes = {name.removeprefix(CAUSE): n for name, n in metrics.items() if name.startswith(CAUSE)}
    if causes:
        yield from ("| trajectories lost to | |", "|---|---:|")
        yield from (
            f"| {escape_inline(cause)} | {n:.0f} |"
            for cause, n in sorted(causes.items(), key=lambda each: -each[1])
        )
        yield ""
    elif "drops/trajectories" in metrics:
        yield from ("No trajectory was lost.", "")


def trajectory_lines(reading: NotableTrajectory, viewer: str) -> Iterator[str]:
    """Yield Markdown lines with a trajectory's reward, status, error and conversation."""
    row = reading.row
    name = f"[{reading.short}]({viewer}/trajectory/{reading.short})" if viewer else reading.short
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:z.3f}"
    yield from (
        f"### {reading.why}: {name}",
        "",
        f"{reward}, {escape_inline(row['status'])}, {escape_inline(row['env'])}",
        "",
    )
    if row["error_type"]:
        yield from (f"{escape_inline(row['error_type'])}: {escape_inline(row['error'])}", "")
    for message in _shorten_conversation(reading.messages):
        if isinstance(message, int):
            yield from (f"*{count_noun(message, 'message')} more*", "")
            continue
        yield from (
            f"**{escape_inline(message.get('role', '?'))}**",
            "",
            *escape_block("\n".join(text for text, _ in message_texts(message))),
            "",
        )


def _shorten_conversation(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | int]:
    """Return the first and the last messages, with the number of messages left out between them as an integer."""
    left = len(messages) - FIRST_MESSAGES - LAST_MESSAGES
    if left <= 0:
        return [*messages]
    return [*messages[:FIRST_MESSAGES], left, *messages[-LAST_MESSAGES:]]


def _code(text: str) -> list[str]:
    return [*escape_block(text), ""]


def _polars(folder: RunFolder, which: str) -> list[str]:
    dataset = "rollouts" if list_steps(folder, "rollouts") else "batches"
    place = f"{folder.absolute}/{dataset}/{which}"
    return _code(f"pl.scan_ipc({place!r}, hive_partitioning=True)")

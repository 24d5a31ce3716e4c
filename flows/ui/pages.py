"""Markdown pages for people: one of a run, one of a step."""

import base64
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.looking.harmless import block, inline
from flows.looking.inspection import held_out, run_view
from flows.looking.ledger_views import PATH, ledger_views
from flows.looking.readings import Reading, choose
from flows.looking.run_ledger import read_ledger
from flows.looking.selection import Interval
from flows.looking.view import View, counted
from tasks.store.layout import RunFolder
from tasks.store.partitions import stored_steps
from tasks.store.reader import scan
from tasks.store.totals import score_totals

CAUSE = "drops/cause_"
FIRST_MESSAGES, LAST_MESSAGES = 2, 4
"""Messages of a conversation that are shown when it has more."""
LAST_STEPS = 20
"""Steps that the run's page has in its table."""
TIMED_STEPS = 100
"""Of more steps the run's page has the mean of the last ones' time: all are read for it."""
MOST_LINE = 2000
"""Characters of a line that is ours."""


@dataclass(frozen=True, slots=True)
class StepPage:
    """What a step's page is made of.

    Attributes:
        scorer: NAME@VERSION by which rewards are shown; empty: there are no trajectories of the step's own to read.
        viewer: address of the viewer; empty: none is linked to.
    """

    folder: RunFolder
    step: int
    scorer: str
    viewer: str = ""

    def around_time(self) -> tuple[str, str]:
        """The page before and after the tables of the step's time, which are known only when the step is over."""
        metrics = _metrics(self.folder, self.step)
        before = [f"# {inline(self.folder.name)}, step {self.step}", "", *self._summary(metrics)]
        return "\n".join(before), "\n".join([*_drops(metrics), *self._readings(), *self._further()])

    def _summary(self, metrics: Mapping[str, float]) -> list[str]:
        groups = scan(self.folder, "groups", ["group", "reason"], step=self.step).collect()
        reward = metrics.get("rollout/reward", metrics.get("retrain/reward"))
        facts = [f"reward **{reward:.3f}**"] if reward is not None and reward == reward else []
        if len(groups):
            trained = groups.filter(groups["reason"] == "")["group"].n_unique()
            facts.append(f"{trained} of {counted(groups['group'].n_unique(), 'group')} trained on")
        if "rollout/tokens" in metrics:
            facts.append(f"{metrics['rollout/tokens']:,.0f} tokens sampled")
        updated = "" if metrics.get("train/updated", 1.0) else "; no update was made"
        return [f"{', '.join(facts)}{updated}", ""] if facts else []

    def time(self) -> str:
        """Where the step's time went, as `rollmill spans RUN --step N` says it; to be asked for when the step is over.

        Raises:
            ConfigError: it has no spans.
        """
        return _tables(
            ledger_views(self.folder.name, read_ledger(self.folder, Interval(self.step, self.step)))
        )

    def time_to_come(self) -> str:
        """What stands there until the step is over."""
        return (
            f"Where the time of step {self.step} went stands here once the next step is done, or the run.\n"
        )

    def _readings(self) -> Iterator[str]:
        for reading in choose(self.folder, self.step, self.scorer) if self.scorer else ():
            yield from reading_lines(reading, self.viewer)

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


def run_page(folder: RunFolder, picture: bytes, viewer: str = "") -> str:
    """The page of a run: held-out table, curves, steps, where their time went, and how to open what it has stored.

    Args:
        folder: of the run.
        picture: PNG of its curves.
        viewer: address of the viewer; empty: none is linked to.
    """
    evaluations = [
        f"| {each['step']} | {each['reward']:.3f} | {each['greedy_accuracy']:.3f} |"
        for each in held_out(folder).to_dicts()
    ]
    view = run_view(folder)
    heading, rule, *steps = view.markdown()
    lines = [f"# {inline(folder.name)}", "", inline(view.title, MOST_LINE), ""]
    lines += [f"![curves](data:image/png;base64,{base64.b64encode(picture).decode()})", ""]
    if evaluations:
        lines += ["| policy version | held-out reward, sampled | accuracy, greedy |", "|---|---|---|"]
        lines += [*evaluations[:1], *evaluations[1:][-LAST_STEPS:], ""]
    shown = steps[-LAST_STEPS:]
    which = "steps" if len(shown) == len(steps) else f"the last {len(shown)} of {len(steps)} steps"
    lines += [f"**{which}**", "", heading, rule, *shown, "", *_time_of_run(folder)]
    commands = [f"rollmill {what} {shlex.quote(folder.location)}" for what in ("view", "spans")]
    if viewer:
        lines += [f"In the viewer, while it runs: [the run]({viewer}/).", ""]
    return "\n".join([*lines, *_code("\n".join(commands)), *_polars(folder, "**/*.arrow")])


def scores_page(folder: RunFolder) -> str:
    """The page of a run's scores: what each scorer said of its rollouts."""
    lines = [f"# {inline(folder.name)}: scores", ""]
    lines += ["| scorer | mean reward | scored | failed | dropped |", "|---|---:|---:|---:|---:|"]
    for each in score_totals(folder):
        counts = " | ".join(str(each.by_status[status]) for status in ("scored", "failed", "dropped"))
        lines.append(f"| {inline(each.scorer)} | {each.reward:.4f} | {counts} |")
    run, place = shlex.quote(folder.location), f"{folder.absolute}/scores/**/*.arrow"
    shown = _code(f"pl.scan_ipc({place!r}, hive_partitioning=True)")
    return "\n".join([*lines, "", *_code(f"rollmill view {run}"), *shown])


def _metrics(folder: RunFolder, step: int) -> dict[str, float]:
    rows = scan(folder, "metrics", ["name", "env", "stat", "value"], step=step).collect()
    told = rows.filter((rows["env"] == "all") & rows["stat"].is_in(["value", "mean"]))
    return dict(zip(told["name"].to_list(), told["value"].to_list(), strict=True))


def _time_of_run(folder: RunFolder) -> list[str]:
    """Where the time of a step went, on average of those that are over; what the run took beside them is to come."""
    steps = stored_steps(folder, "spans")
    if not steps:
        return []
    ledger = read_ledger(folder, most=TIMED_STEPS)
    name = folder.name if len(steps) <= TIMED_STEPS else f"{folder.name}, its last steps"
    return [_tables(ledger_views(name, replace(ledger, ends=ledger.ends.clear())))]


def _tables(views: Iterable[View]) -> str:
    """Tables with their titles and notes; the critical path, which is long, is left to the command and the viewer."""
    lines: list[str] = []
    for view in views:
        if view.rows and view.title != PATH:
            notes = (inline(note, MOST_LINE) for note in view.notes)
            lines += [f"**{inline(view.title, MOST_LINE)}**", "", *view.markdown(), "", *notes, ""]
    return "\n".join(lines)


def _drops(metrics: Mapping[str, float]) -> Iterator[str]:
    """Trajectories that were lost to training, by cause."""
    causes = {name.removeprefix(CAUSE): n for name, n in metrics.items() if name.startswith(CAUSE)}
    if causes:
        yield from ("| trajectories lost to | |", "|---|---:|")
        yield from (
            f"| {inline(cause)} | {n:.0f} |" for cause, n in sorted(causes.items(), key=lambda each: -each[1])
        )
        yield ""
    elif "drops/trajectories" in metrics:
        yield from ("No trajectory was lost.", "")


def reading_lines(reading: Reading, viewer: str) -> Iterator[str]:
    """A trajectory's facts, and what was said."""
    row = reading.row
    name = f"[{reading.short}]({viewer}/trajectory/{reading.short})" if viewer else reading.short
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3f}"
    yield from (
        f"### {reading.why}: {name}",
        "",
        f"{reward}, {inline(row['status'])}, {inline(row['env'])}",
        "",
    )
    if row["error_type"]:
        yield from (f"{inline(row['error_type'])}: {inline(row['error'])}", "")
    for message in _shown(reading.messages):
        if isinstance(message, int):
            yield from (f"*{counted(message, 'message')} more*", "")
            continue
        yield from (f"**{inline(message.get('role', '?'))}**", "", *block(_said(message)), "")


def _shown(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | int]:
    """The first and the last messages, and how many are between them."""
    left = len(messages) - FIRST_MESSAGES - LAST_MESSAGES
    if left <= 0:
        return [*messages]
    return [*messages[:FIRST_MESSAGES], left, *messages[-LAST_MESSAGES:]]


def _said(message: Mapping[str, Any]) -> str:
    """What a message says, and the tools that it calls."""
    said = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        said.append(f"→ {function.get('name', '?')}({function.get('arguments', '')})")
    return "\n".join(said)


def _code(text: str) -> list[str]:
    return [*block(text), ""]


def _polars(folder: RunFolder, which: str) -> list[str]:
    dataset = "rollouts" if stored_steps(folder, "rollouts") else "batches"
    place = f"{folder.absolute}/{dataset}/{which}"
    return _code(f"pl.scan_ipc({place!r}, hive_partitioning=True)")

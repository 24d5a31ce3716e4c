"""Where the time of a step went: second by second, and in the tables of `rollmill spans`."""

from dash import dcc, html
from dash.development.base_component import Component

from flows.looking.ledger_views import ledger_views
from flows.looking.run_ledger import asked_steps, over, read_spans
from flows.looking.selection import Interval
from flows.looking.step_timeline import StepTimeline, step_timeline
from flows.looking.view import View, counted, visible
from flows.viewer.address import TIMING, Query
from flows.viewer.charts import timeline_chart
from flows.viewer.pages import plain_table, problem, told, waiting
from flows.viewer.source import Source
from tasks.errors import ConfigError
from tasks.observe.ledger.attribution import Ledger, ledger_of

MOST_STEPS = 100
"""Steps whose mean is shown when none is asked for: the last ones."""


def timing(source: Source, query: Query) -> Component:
    """The page of one step's time, or of the mean of several; where there are no such steps, ways to those that are."""
    known = source.shelf.steps("spans")
    if not known and not source.shelf.steps("metrics"):
        return html.Section([_head(known, []), waiting()])
    try:
        asked = Interval.parse("step", query["step"]) if query["step"] else None
        steps = asked_steps(source.folder, asked)[0 if asked else -MOST_STEPS :]
    except ConfigError as error:
        return html.Section([_head(known, []), problem(told(error))])
    ledger, timeline = source.made(("timing", tuple(steps)), source.parts(), lambda: _read(source, steps))
    views = [view for view in ledger_views(source.folder.name, ledger) if view.rows]
    return html.Section(
        [
            _head(known, steps),
            html.P(_which(steps), className="quiet"),
            *(_drawn(timeline) if timeline else []),
            *(part for view in views for part in _table(view)),
        ]
    )


def _read(source: Source, steps: list[int]) -> tuple[Ledger, StepTimeline | None]:
    spans = read_spans(source.folder, steps)
    ledger = ledger_of(spans, over(spans, steps))
    return ledger, step_timeline(spans, steps[0], ledger.path) if len(steps) == 1 else None


def _which(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}; the rows of its first table add up to it"
    return f"steps {steps[0]} to {steps[-1]}; a step by itself has its timeline and its critical path too"


def _head(known: list[int], steps: list[int]) -> Component:
    links = _around(known, steps) if known else []
    return html.Div([html.H1("where the time goes"), html.Nav(links, className="around")], className="head")


def _around(known: list[int], steps: list[int]) -> list[Component]:
    """Links to the steps beside this one, or to the newest; and to the mean of many where it is not shown."""
    near = {"newest step": known[-1]}
    if len(steps) == 1:
        at = known.index(steps[0])
        near = {
            f"step {each}": each for each in (*known[max(0, at - 1) : at], *known[at + 1 : at + 2])
        } | near
    links: list[Component] = [dcc.Link(name, href=f"{TIMING}?step={step}") for name, step in near.items()]
    return [dcc.Link("mean of many", href=TIMING), *links] if len(steps) < 2 else links


def _drawn(timeline: StepTimeline) -> list[Component]:
    left = (
        [counted(timeline.n_processes, "rank or server", "ranks and servers")] if timeline.n_processes else []
    )
    left += [counted(timeline.n_pieces, "short stretch", "short stretches")] if timeline.n_pieces else []
    note = f"{' and '.join(left)} not drawn; rollmill spans RUN --perfetto FILE has all" if left else ""
    return [timeline_chart(timeline), *([html.P(note, className="quiet")] if note else [])]


def _table(view: View) -> list[Component]:
    notes = [html.P(visible(note), className="quiet") for note in view.notes]
    return [html.H2(visible(view.title)), plain_table(view.columns, view.rows), *notes]

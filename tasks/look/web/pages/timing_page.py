"""The page of where the time of a step went: its timeline, and the tables of `rollmill spans`."""

from dash import dcc, html
from dash.development.base_component import Component

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.ledger.run_ledger import read_step_spans, select_finished, select_steps
from rollmill.tasks.look.ledger.step_attribution import Ledger, build_ledger
from rollmill.tasks.look.ledger.step_timeline import StepTimeline, lay_out_step
from rollmill.tasks.look.tables.cost_view import make_costs_view
from rollmill.tasks.look.tables.ledger_tables import make_ledger_views
from rollmill.tasks.look.tables.selection import Interval
from rollmill.tasks.look.tables.view import View, count_noun, escape_controls
from rollmill.tasks.look.web.charts import make_timeline_chart
from rollmill.tasks.look.web.pages.table_pages import (
    describe_error,
    render_plain_table,
    render_problem,
    render_waiting,
)
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.look.web.urls import TIMING, Query

MOST_STEPS = 100
"""Number of last steps whose mean is shown by default."""


def render_timing(source: RunData, query: Query) -> Component:
    """Render how the time of one step was spent, or the mean of several; for unknown steps, links to known ones."""
    known = source.shelf.steps("spans")
    if not known and not source.shelf.steps("metrics"):
        return html.Section([_render_head(known, []), render_waiting()])
    try:
        asked = Interval.parse("step", query["step"]) if query["step"] else None
        steps = select_steps(source.folder, asked)[0 if asked else -MOST_STEPS :]
    except ConfigError as error:
        return html.Section([_render_head(known, []), render_problem(describe_error(error))])
    ledger, timeline, costs = source.derive(
        ("timing", tuple(steps)), source.parts(), lambda: _read_ledger(source, steps)
    )
    which = f"steps {steps[0]} to {steps[-1]}; a single step also has a timeline and its critical path"
    if len(steps) == 1:
        which = f"step {steps[0]}; the rows of its first table add up to it"
    views = [view for view in (*make_ledger_views(source.folder.name, ledger), costs) if view.rows]
    return html.Section(
        [
            _render_head(known, steps),
            html.P(which, className="quiet"),
            *(_render_timeline(timeline) if timeline else []),
            *(part for view in views for part in _render_view(view)),
        ]
    )


def _read_ledger(source: RunData, steps: list[int]) -> tuple[Ledger, StepTimeline | None, View]:
    spans = read_step_spans(source.folder, steps)
    ledger = build_ledger(spans, select_finished(spans, steps))
    timeline = lay_out_step(spans, steps[0], ledger.path) if len(steps) == 1 else None
    return ledger, timeline, make_costs_view(source.folder, ledger)


def _render_head(known: list[int], steps: list[int]) -> Component:
    links = _step_links(known, steps) if known else []
    return html.Div([html.H1("where the time goes"), html.Nav(links, className="around")], className="head")


def _step_links(known: list[int], steps: list[int]) -> list[Component]:
    """Return links to the previous, next and newest step; with one step also a link to the mean of several."""
    around: list[int] = []
    if len(steps) == 1:
        at = known.index(steps[0])
        around = [*known[max(0, at - 1) : at], *known[at + 1 : at + 2]]
    near = {f"step {each}": each for each in around} | {"newest step": known[-1]}
    links: list[Component] = [dcc.Link(name, href=f"{TIMING}?step={step}") for name, step in near.items()]
    return [dcc.Link("mean of many", href=TIMING), *links] if len(steps) < 2 else links


def _render_timeline(timeline: StepTimeline) -> list[Component]:
    left = {
        count_noun(timeline.n_processes, "rank or server", "ranks and servers"): timeline.n_processes,
        count_noun(timeline.n_pieces, "short stretch", "short stretches"): timeline.n_pieces,
    }
    named = " and ".join(text for text, n in left.items() if n)
    note = f"{named} not drawn; `rollmill spans RUN --otlp URL` sends all of them"
    return [make_timeline_chart(timeline), *([html.P(note, className="quiet")] if named else [])]


def _render_view(view: View) -> list[Component]:
    notes = [html.P(escape_controls(note), className="quiet") for note in view.notes]
    return [html.H2(escape_controls(view.title)), render_plain_table(view.columns, view.rows), *notes]

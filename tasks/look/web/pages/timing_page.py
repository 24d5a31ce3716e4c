"""The page of where the time of steps went: charts first, and the tables of `rollmill spans`, folded."""

from dash import dcc, html
from dash.development.base_component import Component

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.ledger.run_ledger import read_step_spans, select_finished, select_steps
from rollmill.tasks.look.ledger.step_attribution import Ledger, build_ledger
from rollmill.tasks.look.ledger.step_timeline import StepTimeline, lay_out_step
from rollmill.tasks.look.tables.cost_view import make_costs_view
from rollmill.tasks.look.tables.ledger_tables import make_ledger_views, sum_step_owners
from rollmill.tasks.look.tables.selection import Interval
from rollmill.tasks.look.tables.view import View, count_noun, escape_controls
from rollmill.tasks.look.web.pages.table_pages import (
    describe_error,
    render_plain_table,
    render_problem,
    render_waiting,
)
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.look.web.time_charts import make_legend, make_step_bars, make_timeline_chart
from rollmill.tasks.look.web.urls import TIMING, Query

MOST_STEPS = 100
"""Number of last steps whose bars, and whose mean, are shown by default."""


def render_timing(source: RunData, query: Query) -> Component:
    """Render where the time of steps went: bars of steps, the timeline of one, and tables of it, or of the mean of several.

    For unknown steps it has links to known ones.
    """
    known = source.shelf.steps("spans")
    if not known and not source.shelf.steps("metrics"):
        return html.Section([_render_head(known, []), render_waiting()])
    try:
        asked = Interval.parse("step", query["step"]) if query["step"] else None
        steps = select_steps(source.folder, asked)[0 if asked else -MOST_STEPS :]
    except ConfigError as error:
        return html.Section([_render_head(known, []), render_problem(describe_error(error))])
    ledger = _read_steps(source, steps)
    # Of several steps the newest one that has ended is drawn; the bars of one are among those of its neighbours.
    step = int(ledger.steps["step"][-1]) if len(ledger.steps) else steps[-1]
    around = ledger if len(steps) > 1 else _read_steps(source, _choose_neighbours(known, step))
    timeline = source.derive(
        ("timeline", step),
        source.parts(),
        lambda: lay_out_step(read_step_spans(source.folder, [step]), step, ledger.path.filter(step=step)),
    )
    costs = source.derive(
        ("costs", tuple(steps)), source.parts(), lambda: make_costs_view(source.folder, ledger)
    )
    kind = "steps" if len(steps) > 1 else "step"
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {step}"
    owners = sum_step_owners(around.path)
    bars = [make_step_bars(owners, step)] if len(owners) else []
    views = [view for view in (*make_ledger_views(source.folder.name, ledger), costs) if view.rows]
    return html.Section(
        [
            _render_head(known, steps),
            html.Div(
                [*bars, make_legend(owners, timeline), make_timeline_chart(timeline, step)],
                className="column",
            ),
            *_render_missing(timeline),
            html.H2(f"tables of {which}"),
            *(_render_view(f"{kind}-table-{number}", view) for number, view in enumerate(views)),
        ]
    )


def _read_steps(source: RunData, steps: list[int]) -> Ledger:
    def read() -> Ledger:
        spans = read_step_spans(source.folder, steps)
        return build_ledger(spans, select_finished(spans, steps))

    made: Ledger = source.derive(("timing", tuple(steps)), source.parts(), read)
    return made


def _choose_neighbours(known: list[int], step: int) -> list[int]:
    """Return MOST_STEPS steps, or all: the last ones if `step` is among them, otherwise those around it."""
    first = max(0, min(len(known) - MOST_STEPS, known.index(step) - MOST_STEPS // 2))
    return known[-MOST_STEPS:] if step in known[-MOST_STEPS:] else known[first : first + MOST_STEPS]


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


def _render_missing(timeline: StepTimeline) -> list[Component]:
    """Return a note on what the timeline of a step leaves out, as a list; empty if it has everything."""
    left = {
        count_noun(timeline.n_processes, "rank or server", "ranks and servers"): timeline.n_processes,
        count_noun(timeline.n_pieces, "short stretch", "short stretches"): timeline.n_pieces,
    }
    named = " and ".join(text for text, n in left.items() if n)
    note = f"{named} not drawn; `rollmill spans RUN --otlp URL` sends all of them"
    return [html.P(note, className="quiet")] if named else []


def _render_view(name: str, view: View) -> Component:
    """Render a table that is shown when its title is clicked; `name` is its id."""
    notes = [html.P(escape_controls(note), className="quiet") for note in view.notes]
    table = render_plain_table(view.columns, view.rows)
    return html.Details([html.Summary(escape_controls(view.title)), table, *notes], id=name)

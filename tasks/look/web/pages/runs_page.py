"""Several runs side by side: their curves, their last evaluations, and their answers to the same held-out problems."""

from dash import html
from dash.development.base_component import Component

from rollmill.tasks.look.comparisons.run_overlay import compare_problems, overlay_charts
from rollmill.tasks.look.tables.run_tables import OF_SEVERAL_SAMPLES, VERSION_COLUMNS, read_held_out
from rollmill.tasks.look.tables.view import Column, count_noun, escape_controls
from rollmill.tasks.look.web.charts import render_charts
from rollmill.tasks.look.web.grid import make_whole_grid
from rollmill.tasks.look.web.pages.compare_page import summarize_pairs
from rollmill.tasks.look.web.pages.table_pages import render_plain_table
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.look.web.urls import PAIR
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.folders import RunFolder

MAX_PROBLEMS = 2000
"""Largest number of problems in a table."""


def render_runs(source: RunData) -> Component:
    """Render the curves of all runs of the viewer, and a table of problems for the first run with each other one."""
    curves = {data.folder.name: data.curves() for data in source.all_runs()}
    tables = [each for data in source.others for each in _render_problems(source.folder, data.folder)]
    return html.Section(
        [
            html.H1("runs"),
            html.Div(render_charts(overlay_charts(curves)), className="charts"),
            html.H2("last evaluation of each run"),
            _render_evaluations(source),
            *tables,
        ]
    )


def _render_evaluations(source: RunData) -> Component:
    rows = []
    for data in source.all_runs():
        held_out = read_held_out(data.folder, scan=data.shelf.scan)
        if len(held_out):
            rows.append({"run": data.folder.name, **held_out.row(-1, named=True)})
    if not rows:
        return html.P("No run has a complete evaluation.", className="quiet")
    unshown = ("env", *(OF_SEVERAL_SAMPLES if all(row["samples"] == 1 for row in rows) else ()))
    columns = [column for column in VERSION_COLUMNS if column.name not in unshown]
    return render_plain_table([Column("run"), *columns], rows)


def _render_problems(first: RunFolder, second: RunFolder) -> list[Component]:
    """Render a summary and a table of the held-out problems that two runs have in common; nothing if there are none."""
    rows = compare_problems(first, second)
    a, b = first.name, second.name
    title = html.H2(escape_controls(f"{a} and {b}: last answers to the same held-out problems"))
    both = rows.drop_nulls("b")
    if both.is_empty():
        return [title, html.P("They have no held-out problem in common.", className="quiet")]
    lines = [
        html.P(f"{kind}: {summarize_pairs(each, a, b, ('problem', ''))}", className="summary")
        for kind in ("sampled", "greedy")
        if len(each := both.filter(kind=kind))
    ]
    columns = [
        Column("example_id", header="problem", is_text=True),
        Column("kind"),
        Column("a", header=a),
        Column("b", header=b),
        Column("difference"),
        Column("first"),
        Column("second"),
    ]
    links = {"example_id": f"{PAIR}{{first}}/{b}:{{second}}"}
    shown = [
        row | {name: short_id(row[name]) for name in ("first", "second")}
        for row in both.head(MAX_PROBLEMS).to_dicts()
    ]
    more = [html.P(f"the first {MAX_PROBLEMS} of {count_noun(len(both), 'answer')}", className="quiet")]
    return [
        title,
        *lines,
        *(more if len(both) > MAX_PROBLEMS else []),
        make_whole_grid(f"problems-{b}", columns, shown, links),
    ]

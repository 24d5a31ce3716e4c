"""The viewer's pages with tables: the run as a whole, and its filtered tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from rollmill.tasks.errors import ConfigError, RollmillError
from rollmill.tasks.look.tables.curves import list_charts
from rollmill.tasks.look.tables.run_tables import GROUP_COLUMNS, TRAINED
from rollmill.tasks.look.tables.selection import check_known
from rollmill.tasks.look.tables.trajectory_table import STATUSES, TRAJECTORY_COLUMNS, UNSCORED
from rollmill.tasks.look.tables.view import Column, count_noun, escape_controls
from rollmill.tasks.look.web.charts import render_charts
from rollmill.tasks.look.web.grid import make_grid, make_whole_grid
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.look.web.urls import GROUPS, HELD_OUT, TIMING, TRAJECTORIES, TRAJECTORY, Query
from rollmill.tasks.store.reader import list_scorers


@dataclass(frozen=True, slots=True)
class Table:
    """Layout of a page with a table: heading, columns, addresses that cells link to, by column, and names of its filters."""

    title: str
    columns: Sequence[Column]
    links: Mapping[str, str]
    filters: Sequence[str]


_PLACE = next(place for place, column in enumerate(TRAJECTORY_COLUMNS) if column.name == "status")
COLUMNS = (*TRAJECTORY_COLUMNS[:_PLACE], Column("problem", is_text=True), *TRAJECTORY_COLUMNS[_PLACE:])
"""Of a table of trajectories: an answer can be judged with the id of its problem."""
OF_TRAJECTORY = {"trajectory": f"{TRAJECTORY}{{value}}"}
TABLES = {
    GROUPS: Table(
        "groups",
        GROUP_COLUMNS,
        {"group": f"{TRAJECTORIES}?group={{value}}"},
        ("step", "status", "env", "reward"),
    ),
    TRAJECTORIES: Table(
        "trajectories",
        COLUMNS,
        OF_TRAJECTORY,
        ("step", "group", "status", "env", "reward", "text", "scorer", "where"),
    ),
    HELD_OUT: Table(
        "held-out trajectories",
        [
            Column("step", header="version") if column.name == "step" else column
            for column in COLUMNS
            if column.name not in ("advantage", "policy_version_last")
        ],
        OF_TRAJECTORY,
        ("step", "status", "env", "reward", "text", "where"),
    ),
}
PLACEHOLDERS = {
    "step": "12, or 3:7",
    "group": "784",
    "reward": "0.5:, or :0.2",
    "text": "what is said",
    "where": "in SQL: reward > 0.5 and n_completion_tokens < 40",
}


def render_home(source: RunData) -> Component:
    """Render the first page: the charts of the run and the table of its steps."""
    curves, steps = source.curves(), source.steps()
    if not steps.rows and not steps.values["trajectories"]:
        return html.Section([html.H1(source.folder.name), render_waiting()])
    links = {"step": f"{GROUPS}?step={{step}}", "seconds": f"{TIMING}?step={{step}}"}
    # The newest step first, as in all tables of the viewer.
    return html.Section(
        [
            html.H1(source.folder.name),
            html.P(escape_controls(steps.title), className="quiet"),
            html.Div(render_charts(list_charts(curves)), className="charts"),
            html.H2("steps"),
            make_whole_grid("steps", steps.columns, steps.rows[::-1], links),
        ]
    )


def render_problem(text: str) -> Component:
    """Render a page that describes an error."""
    return html.Section(html.P(escape_controls(text), className="problem", role="alert"))


def describe_error(error: RollmillError) -> str:
    """Return the text of an error; for a ConfigError the setting, its value and the remedy."""
    if not isinstance(error, ConfigError):
        return str(error)
    # Filters are named like the options of `rollmill inspect`, without the dashes.
    return f"{error.field.removeprefix('--')} {error.value}: {error.remedy}"


def render_waiting() -> Component:
    """Render the text that is shown before the first rollouts are stored."""
    return html.P("Waiting for the first rollouts. This page fills as they are stored.", className="waiting")


def render_plain_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Component:
    """Render a table with all its rows as plain HTML, for few rows."""
    of_words = {column.name for column in columns if any(isinstance(row[column.name], str) for row in rows)}

    def kind(column: Column) -> str:
        return "words" if column.name in of_words else ""

    head = [html.Th(column.heading, scope="col", className=kind(column)) for column in columns]
    body = [
        html.Tr([html.Td(column.cell(row), className=kind(column)) for column in columns]) for row in rows
    ]
    table = html.Table([html.Thead(html.Tr(head)), html.Tbody(body)], className="plain")
    return html.Div(table, className="wide")


def render_table(source: RunData, path: str, query: Query) -> Component:
    """Render a table with its filters set from the address; raises ConfigError for an unknown filter or order, and lists the known ones."""
    kind = TABLES[path]
    choices = {name: _choices(source, path, name) for name in kind.filters}
    choices["sort"] = [column.name for column in kind.columns]
    for name, known in choices.items():
        asked = query[name].removeprefix("-") if name == "sort" else query[name]
        for each in asked.split(",") if name == "status" else (asked,):
            if each and known:
                check_known(name, each, known)
    filters = [
        render_filter(
            name, query[name], choices[name], "version" if (path, name) == (HELD_OUT, "step") else name
        )
        for name in kind.filters
    ]
    return html.Section(
        [
            render_head(kind.title),
            html.Div(filters, className="filters", role="search"),
            dcc.Store(id="asked", data={"path": path, "search": query.search}),
            make_grid(kind.columns, query["sort"], kind.links),
        ]
    )


def render_head(title: str) -> Component:
    """Render the heading of a table; the number of its rows appears next to it when they are read."""
    return html.Div(
        [html.H1(title), html.Span(id="count", className="quiet", role="status")], className="head"
    )


def render_filter(
    name: str, value: str, known: Sequence[str] | None, label: str, *, is_required: bool = False
) -> Component:
    """Render a filter: a list of the known values, or a field for text if they are None."""
    of = {"type": "filter", "name": name}
    if known is None:
        # Each value requests the table again, so it waits for a pause in typing.
        shown: Component = dcc.Input(
            id=of,
            value=value,
            debounce=0.6,
            placeholder=PLACEHOLDERS.get(name, ""),
            type="text",
            className="field",
        )
    else:
        shown = dcc.Dropdown(
            id=of,
            options=[{"label": escape_controls(each), "value": each} for each in known],
            value=value.split(",") if name == "status" and value else value or None,
            multi=name == "status",
            clearable=not is_required,
            searchable=False,
            placeholder="all" if name != "scorer" else "the run's own",
            className="choice",
        )
    return html.Label([html.Span(label), shown], className=f"filter {name}")


def _choices(source: RunData, path: str, name: str) -> list[str] | None:
    """Return the values that a table's filter `name` can have; None if the filter takes free text."""
    if name == "status" and path == GROUPS:
        reasons = source.shelf.rows("groups", ["reason"])["reason"].unique().to_list()
        return [TRAINED, *sorted(each for each in reasons if each)]
    if name == "status":
        return [*STATUSES, UNSCORED]
    if name == "env":
        return sorted(
            source.shelf.rows("evaluations" if path == HELD_OUT else "groups", ["env"])["env"].unique()
        )
    if name == "scorer":
        return list_scorers(source.folder)
    return None


def count_rows(path: str, n: int, note: str) -> str:
    """Format a table's number of rows and a note. Example: "48 groups", or "1 trajectory · NOTE"."""
    noun = {GROUPS: ("group", "")}.get(path, ("trajectory", "trajectories"))
    return f"{count_noun(n, *noun)}{note and f' · {note}'}"

"""The viewer's pages: the run as a whole, and its tables with what they are filtered by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from flows.looking.inspection import GROUP_COLUMNS, TRAINED
from flows.looking.selection import known_value
from flows.looking.trajectories import COLUMNS, STATUSES, UNSCORED
from flows.looking.view import Column, counted, visible
from flows.viewer.address import GROUPS, HELD_OUT, TIMING, TRAJECTORIES, TRAJECTORY, Query
from flows.viewer.charts import charts
from flows.viewer.grid import grid, whole_grid
from flows.viewer.source import Source
from tasks.errors import ConfigError, RollmillError
from tasks.store.partitions import stored_scorers


@dataclass(frozen=True, slots=True)
class Table:
    """A page with a table.

    Attributes:
        title: its heading.
        columns: of the table.
        links: column: where its cells lead.
        filters: names of its filters, as in the address.
    """

    title: str
    columns: Sequence[Column]
    links: Mapping[str, str]
    filters: Sequence[str]


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
        ("step", "group", "status", "env", "reward", "text", "scorer"),
    ),
    HELD_OUT: Table(
        "held-out trajectories",
        [
            Column("step", header="version") if column.name == "step" else column
            for column in COLUMNS
            if column.name not in ("advantage", "policy_version_last")
        ],
        OF_TRAJECTORY,
        ("step", "status", "env", "reward", "text"),
    ),
}
PLACEHOLDERS = {
    "step": "12, or 3:7",
    "group": "784",
    "reward": "0.5:, or :0.2",
    "text": "what is said",
}


def home(source: Source) -> Component:
    """Curves, and the table of steps."""
    curves, steps = source.curves(), source.steps()
    if not steps.rows and not steps.values["trajectories"]:
        return html.Section([html.H1(source.folder.name), waiting()])
    links = {"step": f"{GROUPS}?step={{step}}", "seconds": f"{TIMING}?step={{step}}"}
    return html.Section(
        [
            html.H1(source.folder.name),
            html.P(visible(steps.title), className="quiet"),
            html.Div(charts(curves), className="charts"),
            html.H2("steps"),
            whole_grid("steps", steps.columns, steps.rows[::-1], links),
        ]
    )


def problem(text: str) -> Component:
    """A page that says what is wrong."""
    return html.Section(html.P(visible(text), className="problem", role="alert"))


def told(error: RollmillError) -> str:
    """What is wrong, and what to do about it."""
    return f"{error.field} {error.value}: {error.remedy}" if isinstance(error, ConfigError) else str(error)


def waiting() -> Component:
    """What stands where nothing has been stored yet; the page goes on by itself."""
    return html.P("Waiting for the first rollouts. This page fills as they are stored.", className="waiting")


def plain_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> Component:
    """A table of few rows."""
    of_words = {column.name for column in columns if any(isinstance(row[column.name], str) for row in rows)}

    def kind(column: Column) -> str:
        return "words" if column.name in of_words else ""

    head = [html.Th(column.heading, scope="col", className=kind(column)) for column in columns]
    body = [
        html.Tr([html.Td(column.cell(row), className=kind(column)) for column in columns]) for row in rows
    ]
    table = html.Table([html.Thead(html.Tr(head)), html.Tbody(body)], className="plain")
    return html.Div(table, className="wide")


def table(source: Source, path: str, query: Query) -> Component:
    """A table and its filters, set as the address says.

    Raises:
        ConfigError: the address has a filter, or an order, that the table has not; names what there is.
    """
    kind = TABLES[path]
    for name in kind.filters:
        _check(name, query[name], _choices(source, path, name) or ())
    _check("sort", query["sort"].removeprefix("-"), [column.name for column in kind.columns])
    filters = [_filter(source, path, name, query[name]) for name in kind.filters]
    return html.Section(
        [
            html.Div(
                [html.H1(kind.title), html.Span(id="count", className="quiet", role="status")],
                className="head",
            ),
            html.Div(filters, className="filters", role="search"),
            dcc.Store(id="asked", data={"path": path, "search": query.search}),
            grid(kind.columns, query["sort"], kind.links),
        ]
    )


def _check(name: str, value: str, known: Sequence[str]) -> None:
    for each in value.split(",") if name == "status" else (value,):
        if each and known:
            known_value(name, each, known)


def _filter(source: Source, path: str, name: str, value: str) -> Component:
    known = _choices(source, path, name)
    of = {"type": "filter", "name": name}
    label = "version" if path == HELD_OUT and name == "step" else name
    if known is None:
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
            options=[{"label": visible(each), "value": each} for each in known],
            value=value.split(",") if name == "status" and value else value or None,
            multi=name == "status",
            clearable=True,
            searchable=False,
            placeholder="all" if name != "scorer" else "the run's own",
            className="choice",
        )
    return html.Label([html.Span(label), shown], className=f"filter {name}")


def _choices(source: Source, path: str, name: str) -> list[str] | None:
    """The values that a filter can have; None where one writes them."""
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
        return stored_scorers(source.folder)
    return None


def counted_rows(path: str, n: int, note: str) -> str:
    """What stands beside a table's heading."""
    noun = {GROUPS: ("group", "")}.get(path, ("trajectory", "trajectories"))
    return f"{counted(n, *noun)}{note and f' · {note}'}"

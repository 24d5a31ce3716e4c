"""The viewer as a Dash application: which page an address shows, and what the pages ask for."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component
from flask import Response, abort

from flows.looking.found import find_trajectory
from flows.looking.view import Column, visible
from flows.viewer.address import (
    BESIDE,
    COMPARE,
    GROUPS,
    HELD_OUT,
    HOME,
    TIMING,
    TRAJECTORIES,
    TRAJECTORY,
    Query,
)
from flows.viewer.comparison import compared_page, comparison, comparison_columns
from flows.viewer.grid import ROWS_AT_ONCE, cells, sort_of
from flows.viewer.guard import guard
from flows.viewer.pages import TABLES, counted_rows, home, problem, table, told
from flows.viewer.reading import beside, trajectory
from flows.viewer.source import CELL, Page, Source
from flows.viewer.timing import timing
from tasks.errors import RollmillError
from tasks.store.manifest import has_manifest, read_manifest

NAVIGATION = {
    "run": HOME,
    "groups": GROUPS,
    "trajectories": TRAJECTORIES,
    "held out": HELD_OUT,
    "compare": COMPARE,
    "time": TIMING,
}
INDEX = """<!DOCTYPE html>
<html lang="en">
<head>{%metas%}<title>{%title%}</title>{%favicon%}{%css%}</head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body>
</html>"""


def viewer(source: Source, port: int, refresh_s: float) -> Dash:
    """The application over one run.

    Args:
        source: the run.
        port: that it will be asked at.
        refresh_s: seconds between two looks for something new.
    """
    app = Dash(
        "rollmill_viewer",
        assets_folder=str(Path(__file__).parent / "assets"),
        title=f"{source.folder.name} · Rollmill",
        update_title="",
        suppress_callback_exceptions=True,
        serve_locally=True,
        index_string=INDEX,
        enable_mcp=False,
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "color-scheme", "content": "light dark"},
        ],
    )
    app.layout = _frame(source, refresh_s)
    _route(app, source)
    _fill_tables(app, source)
    _paint(app)
    _downloads(app, source)
    guard(app.server, port, app.csp_hashes())
    return app


def _frame(source: Source, refresh_s: float) -> Component:
    links = [dcc.Link(name, href=path) for name, path in NAVIGATION.items()]
    return html.Div(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Interval(id="tick", interval=refresh_s * 1000),
            dcc.Store(id="revision"),
            dcc.Store(id="shown"),
            dcc.Store(id="written"),
            dcc.Store(id="purged"),
            html.Header(
                [
                    dcc.Link("Rollmill", href=HOME, className="brand"),
                    html.Nav(links),
                    html.Span(id="state", className="quiet", title=source.folder.location),
                ]
            ),
            html.Main(id="page"),
        ]
    )


def _route(app: Dash, source: Source) -> None:
    @app.callback(
        Output("state", "children"),
        Output("revision", "data"),
        Input("tick", "n_intervals"),
        State("revision", "data"),
        State("shown", "data"),
    )
    def look(_: int | None, known: str | None, shown: str | None) -> tuple[Any, Any]:
        """What is new: the pages go by the revision.

        A new one is told when the browser has the page of the one before: it drops what it asks for anew before it is
        there, so that a page which takes longer than a tick would never come.
        """
        state, revision = _state(source), source.revision()
        return state, revision if revision != known == shown else no_update

    @app.callback(
        Output("page", "children"),
        Output("shown", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("revision", "data"),
        State("written", "data"),
    )
    def show(path: str, search: str, revision: str | None, written: str | None) -> tuple[Any, Any]:
        """The page of an address; when there is something new, pages that are read again as a whole."""
        is_whole = path == HOME or path.startswith(COMPARE) or (path == TIMING and not search)
        asked = {each["prop_id"] for each in ctx.triggered}
        if asked == {"revision.data"} and not is_whole:
            return no_update, revision
        if asked == {"url.search"} and search == (written or ""):
            return no_update, revision
        return page(source, path, search), revision


def _state(source: Source) -> str:
    """How far the run is, in a few words."""
    if not has_manifest(source.folder):
        return "the run is not there any more"
    steps = source.shelf.steps("groups")
    status = read_manifest(source.folder).status
    return f"{status}{f' · step {steps[-1]}' if steps else ''}"


def page(source: Source, path: str, search: str) -> Component:
    """What an address shows; of a wrong one, what is wrong with it."""
    path = unquote(path)
    try:
        query = Query.of(search or "")
        if not has_manifest(source.folder):
            return problem(
                f"{source.folder.location} is not there any more: it was removed, or moved elsewhere."
            )
        if path == HOME:
            return home(source)
        if path in TABLES:
            return table(source, path, query)
        if path == COMPARE:
            return comparison(source, query)
        if path == TIMING:
            return timing(source, query)
        if path.startswith(TRAJECTORY):
            return trajectory(source, path.removeprefix(TRAJECTORY), query["by"])
        if path.startswith(BESIDE) and path.count("/") == 3:
            return beside(source, *path.removeprefix(BESIDE).split("/"))
    except RollmillError as error:
        return problem(told(error))
    return problem("There is no such page.")


def _fill_tables(app: Dash, source: Source) -> None:
    @app.callback(
        Output("grid", "getRowsResponse"),
        Output("count", "children"),
        Input("grid", "getRowsRequest"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def fill(request: dict[str, Any] | None, asked: dict[str, str]) -> tuple[Any, Any]:
        """The rows that a table has scrolled to."""
        if request is None:
            return no_update, no_update
        path, query = asked["path"], Query.of(asked["search"]).but(sort=sort_of(request))
        start, stop = request.get("startRow", 0), request.get("endRow", ROWS_AT_ONCE)
        try:
            found, columns = _asked_rows(source, path, query, start, stop)
        except RollmillError as error:
            return {"rowData": [], "rowCount": 0}, html.Span(visible(told(error)), className="problem")
        if not found.n and not source.shelf.steps("rollouts"):
            return {"rowData": [], "rowCount": 0}, "waiting for the first rollouts"
        shown = {"rowData": cells(columns, found.rows, CELL), "rowCount": found.n}
        return shown, counted_rows(path, found.n, found.note)

    @app.callback(
        Output("asked", "data"),
        Output("url", "search"),
        Output("written", "data"),
        Input({"type": "filter", "name": ALL}, "value"),
        State({"type": "filter", "name": ALL}, "id"),
        State("asked", "data"),
        State("grid", "getRowsRequest"),
        prevent_initial_call=True,
    )
    def select(
        values: list[Any], names: list[dict[str, str]], asked: dict[str, str], request: dict[str, Any] | None
    ) -> tuple[Any, Any, Any]:
        """The table by its filters, and the address that shows it again."""
        given = {
            name["name"]: ",".join(value) if isinstance(value, list) else str(value or "").strip()
            for name, value in zip(names, values, strict=True)
        }
        sort = sort_of(request) if request else Query.of(asked["search"])["sort"]
        search = Query.of(asked["search"]).but(**given, sort=sort).search
        if search == asked["search"]:
            return no_update, no_update, no_update
        if asked["path"] == COMPARE:
            return no_update, search, no_update  # its figures are others, so all of the page is made anew
        return {"path": asked["path"], "search": search}, search, search


def _asked_rows(
    source: Source, path: str, query: Query, start: int, stop: int
) -> tuple[Page, Sequence[Column]]:
    """Rows of the table of a page, and its columns."""
    if path == COMPARE:
        return compared_page(source, query, start, stop), comparison_columns(query)
    columns = TABLES[path].columns
    if path == GROUPS:
        return source.groups(query.selection(), start, stop), columns
    selection = query.selection(evaluations=path == HELD_OUT)
    return source.trajectories(selection, query["text"], start, stop), columns


def _paint(app: Dash) -> None:
    """What the page's own script does: tokens, tables that are asked again, and the order of a table in the address."""
    app.clientside_callback(  # type: ignore[no-untyped-call] # Dash has no types there
        ClientsideFunction("viewer", "paint"),
        Output("legend", "children"),
        Input("tokens", "data"),
        Input("by", "value"),
    )
    app.clientside_callback(  # type: ignore[no-untyped-call] # Dash has no types there
        ClientsideFunction("viewer", "ask_again"),
        Output("purged", "data"),
        Input("asked", "data"),
        prevent_initial_call=True,
    )
    app.clientside_callback(  # type: ignore[no-untyped-call] # as above
        ClientsideFunction("viewer", "look_again"),
        Output("purged", "data", allow_duplicate=True),
        Input("revision", "data"),
        prevent_initial_call=True,
    )
    app.clientside_callback(  # type: ignore[no-untyped-call] # Dash has no types there
        ClientsideFunction("viewer", "note_order"),
        Output("purged", "data", allow_duplicate=True),
        Input("grid", "getRowsRequest"),
        prevent_initial_call=True,
    )


def _downloads(app: Dash, source: Source) -> None:
    def download(short: str) -> Response:
        """All that is known of a trajectory, as one JSON object."""
        try:
            found = find_trajectory(source.folder, short)
        except RollmillError as error:
            abort(Response(f"{told(error)}\n", 404, mimetype="text/plain"))
        name = re.sub(r"[^\w.-]", "_", f"{source.folder.name}-{found.short}.json", flags=re.ASCII)
        head = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(_json(found.values()), mimetype="application/json", headers=head)

    app.server.add_url_rule(f"/download{TRAJECTORY}<short>.json", view_func=download)


def _json(values: Mapping[str, object]) -> bytes:
    """One JSON object; half of a character, which UTF-8 does not have, as the escape that it was stored as."""
    try:
        return orjson.dumps(values, default=str, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:
        return json.dumps(values, default=str).encode()

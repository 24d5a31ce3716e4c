"""The viewer: its web server on loopback, and the routes and callbacks of its Dash application."""

import importlib
import logging
import re
import secrets
import socket
import threading
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import typer
from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component
from flask import Response, abort
from werkzeug.serving import make_server

from rollmill.tasks.errors import ConfigError, RollmillError
from rollmill.tasks.look.comparisons.run_overlay import check_names
from rollmill.tasks.look.tables.trajectory_record import find_trajectory
from rollmill.tasks.look.tables.view import Column, escape_controls
from rollmill.tasks.look.terminal.output import encode_json
from rollmill.tasks.look.terminal.trajectory_tokens import LoadTokenizer
from rollmill.tasks.look.web.grid import ROWS_AT_ONCE, cells, parse_sort
from rollmill.tasks.look.web.pages.compare_page import comparison_columns, read_comparison, render_comparison
from rollmill.tasks.look.web.pages.runs_page import render_runs
from rollmill.tasks.look.web.pages.table_pages import (
    TABLES,
    count_rows,
    describe_error,
    render_home,
    render_problem,
    render_table,
)
from rollmill.tasks.look.web.pages.timing_page import render_timing
from rollmill.tasks.look.web.pages.trajectory_page import render_pair, render_trajectory
from rollmill.tasks.look.web.request_guard import (
    FIRST_PAGE,
    LOOPBACK,
    N_TOKEN_BYTES,
    TOKEN,
    TOKEN_FILE,
    install_guard,
    read_token,
    write_first_page,
)
from rollmill.tasks.look.web.run_data import CELL, RunData, TablePage
from rollmill.tasks.look.web.time_charts import STEP_BARS
from rollmill.tasks.look.web.urls import (
    COMPARE,
    GROUPS,
    HELD_OUT,
    HOME,
    PAIR,
    RUNS,
    TIMING,
    TRAJECTORIES,
    TRAJECTORY,
    Query,
)
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import has_manifest, read_manifest

PORT = 4300
"""Default port of the viewer."""
# Further ports to try if it is taken: a viewer of each of some runs may be open.
OTHER_PORTS = 20
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


def serve_viewer(
    folder: RunFolder,
    tokenizer: LoadTokenizer,
    port: int | None,
    refresh_s: float,
    *,
    opens_browser: bool,
    others: Sequence[RunFolder] = (),
) -> None:
    """Serve a run's pages on loopback, in this process, until interrupted.

    Args:
        folder: the run.
        tokenizer: loads the run's tokenizer.
        port: loopback port; None: PORT, or the next free one if it is taken.
        refresh_s: seconds between two checks for new data.
        opens_browser: True: open the first page in a browser, if there is one.
        others: further runs, which are shown beside it on the page "runs", the first that is opened then.

    Raises:
        ConfigError: the port is taken.
        StoreError: the manifest of a run is damaged, or of another schema version.
    """
    for each in (folder, *others):
        read_manifest(each)
    with suppress(ModuleNotFoundError):
        # Arrow imports it at its first conversion, in some thread, and Plotly looks into it when it is half imported.
        importlib.import_module("pandas")
    check_names([folder, *others])
    token, is_stored = _take_token()
    listener = open_listener(LOOPBACK, port)
    chosen = int(listener.getsockname()[1])
    if port is None and chosen != PORT:
        typer.echo(f"port {PORT} is taken; using {chosen}", err=True)
    # It would print a line for each request, several a second while a page is open.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    source = RunData(folder, refresh_s / 2, tokenizer, others)
    app = make_app(source, token, refresh_s)
    # The socket is open already, so that no other process takes the port between the choice and the server.
    server = make_server(LOOPBACK, chosen, app.server, threaded=True, fd=listener.fileno())
    address = f"http://{LOOPBACK}:{chosen}{RUNS if others else HOME}?{TOKEN}={token}"
    shown = ", ".join(each.location for each in (folder, *others))
    typer.echo(f"{shown}: {address}  (Ctrl-C ends it)")
    threading.Thread(target=source.warm, name="viewer-warm", daemon=True).start()
    # A text browser lasts until it is closed, and pages would wait for it.
    if opens_browser and is_stored:
        page = write_first_page(FIRST_PAGE, address)
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
    with suppress(KeyboardInterrupt), server:
        server.serve_forever()


def _take_token() -> tuple[str, bool]:
    """Return the token of this folder's viewers, and True; where nothing can be stored, a token of this viewer alone, and False."""
    try:
        return read_token(TOKEN_FILE), True
    except OSError as error:
        typer.echo(
            f"{TOKEN_FILE} cannot be kept ({error.strerror}); the token ends with this viewer", err=True
        )
        return secrets.token_urlsafe(N_TOKEN_BYTES), False


def open_listener(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on `port` (None: PORT or the next free one); raises ConfigError if that is taken."""
    for each in range(PORT, PORT + OTHER_PORTS) if port is None else [port]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Otherwise a viewer that has just ended keeps its port from the next one for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, each))
            listener.listen()
        except OSError as error:
            listener.close()
            reason = error.strerror
            continue
        return listener
    asked = port if port is not None else f"{PORT} to {PORT + OTHER_PORTS - 1}"
    raise ConfigError(
        "--port", asked, f"the viewer cannot listen there ({reason}); give another, 0 is any free one"
    )


def make_app(source: RunData, token: str, refresh_s: float) -> Dash:
    """Create the Dash application of one run's pages, for whoever has `token`; it checks for new data every `refresh_s` seconds."""
    app = Dash(
        "rollmill_viewer",
        assets_folder=str(Path(__file__).parent / "assets"),
        title=f"{source.folder.name} · Rollmill",
        update_title="",
        # Callbacks name components of pages that are not in the page yet.
        suppress_callback_exceptions=True,
        # Without a network, and under the Content-Security-Policy, nothing is loaded from elsewhere.
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
    _choose_step(app)
    # Last, because the hashes are of the inline scripts that Dash has by then.
    install_guard(app.server, app.csp_hashes(), token)
    return app


def _frame(source: RunData, refresh_s: float) -> Component:
    pages = {**NAVIGATION, "runs": RUNS} if source.others else NAVIGATION
    links = [dcc.Link(name, href=path) for name, path in pages.items()]
    return html.Div(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Interval(id="tick", interval=refresh_s * 1000),
            *(dcc.Store(id=name) for name in ("revision", "shown", "written", "purged")),
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


def _route(app: Dash, source: RunData) -> None:
    @app.callback(
        Output("state", "children"),
        Output("revision", "data"),
        Input("tick", "n_intervals"),
        State("revision", "data"),
        State("shown", "data"),
    )
    def look(_: int | None, known: str | None, shown: str | None) -> tuple[Any, Any]:
        """Return the run's status with its newest step and, if there is new data, the data's revision."""
        if has_manifest(source.folder):
            steps = source.shelf.steps("groups")
            status = read_manifest(source.folder).status
            state = f"{status}{f' · step {steps[-1]}' if steps else ''}"
        else:
            state = "the run no longer exists"
        # The browser drops the answer to a callback that is triggered again. A page that takes longer than a tick would
        # never be shown, so a new revision is sent only when the browser shows the page of the one before.
        revision = source.revision()
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
        """Return the page of an address, or `no_update` if the browser shows it already and need not draw it again."""
        is_whole = path in (HOME, RUNS) or path.startswith(COMPARE) or (path == TIMING and not search)
        asked = {each["prop_id"] for each in ctx.triggered}
        # A table reloads its rows without a redraw and keeps its scroll position; a trajectory does not change.
        if asked == {"revision.data"} and not is_whole:
            return no_update, revision
        # The address that a filter wrote is the one of the table that is shown already.
        if asked == {"url.search"} and search == (written or ""):
            return no_update, revision
        return render_page(source, path, search), revision


def render_page(source: RunData, path: str, search: str) -> Component:
    """Render the page of an address; for an invalid address, what is wrong with it."""
    # Dash passes the path as the browser writes it; ids of trajectories have letters that it quotes.
    path = unquote(path)
    try:
        query = Query.of(search or "")
        if not has_manifest(source.folder):
            return render_problem(f"{source.folder.location} no longer exists: it was removed or moved.")
        if path == HOME:
            return render_home(source)
        if path == RUNS and source.others:
            return render_runs(source)
        if path in TABLES:
            return render_table(source, path, query)
        if path == COMPARE:
            return render_comparison(source, query)
        if path == TIMING:
            return render_timing(source, query)
        if path.startswith(TRAJECTORY):
            return render_trajectory(source, path.removeprefix(TRAJECTORY), query["by"])
        if path.startswith(PAIR) and path.count("/") == 3:
            return render_pair(source, *path.removeprefix(PAIR).split("/"))
    except RollmillError as error:
        return render_problem(describe_error(error))
    return render_problem("There is no such page.")


def _fill_tables(app: Dash, source: RunData) -> None:
    @app.callback(
        Output("grid", "getRowsResponse"),
        Output("count", "children"),
        Input("grid", "getRowsRequest"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def fill(request: dict[str, Any] | None, asked: dict[str, str]) -> tuple[Any, Any]:
        """Return the requested rows of a table, and the number of rows as text for the table's heading."""
        if request is None:
            return no_update, no_update
        path, query = asked["path"], Query.of(asked["search"]).but(sort=parse_sort(request))
        start, stop = request.get("startRow", 0), request.get("endRow", ROWS_AT_ONCE)
        try:
            found, columns = _read_requested_rows(source, path, query, start, stop)
        except RollmillError as error:
            return {"rowData": [], "rowCount": 0}, html.Span(
                escape_controls(describe_error(error)), className="problem"
            )
        if not found.n and not source.shelf.steps("rollouts"):
            return {"rowData": [], "rowCount": 0}, "waiting for the first rollouts"
        shown = {"rowData": cells(columns, found.rows, CELL), "rowCount": found.n}
        return shown, count_rows(path, found.n, found.note)

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
        """Return a table's new path and query, the query for the address, and the same again; `no_update` if unchanged."""
        given = {
            name["name"]: ",".join(value) if isinstance(value, list) else str(value or "").strip()
            for name, value in zip(names, values, strict=True)
        }
        sort = parse_sort(request) if request else Query.of(asked["search"])["sort"]
        search = Query.of(asked["search"]).but(**given, sort=sort).search
        if search == asked["search"]:
            return no_update, no_update, no_update
        # Figures and chart of a comparison change too, so the new address redraws the whole page.
        if asked["path"] == COMPARE:
            return no_update, search, no_update
        return {"path": asked["path"], "search": search}, search, search


def _read_requested_rows(
    source: RunData, path: str, query: Query, start: int, stop: int
) -> tuple[TablePage, Sequence[Column]]:
    """Return rows `start` to `stop` of the table at the path of a page, and the columns of that table."""
    if path == COMPARE:
        return read_comparison(source, query, start, stop), comparison_columns(query)
    columns = TABLES[path].columns
    if path == GROUPS:
        return source.groups(query.selection(), start, stop), columns
    selection = query.selection(evaluations=path == HELD_OUT)
    return source.trajectories(selection, query["text"], start, stop, query["where"]), columns


def _paint(app: Dash) -> None:
    """Register the callbacks that run in the browser: colour tokens, reload tables, write a table's order to the address."""
    tokens, by = Input("tokens", "data"), Input("by", "value")
    _run_in_page(app, "paint", Output("legend", "children"), tokens, by, late=False)
    # These change the page itself; the store that they write to is there because Dash asks for an output.
    purged = Output("purged", "data", allow_duplicate=True)
    _run_in_page(app, "ask_again", purged, Input("asked", "data"))
    _run_in_page(app, "look_again", purged, Input("revision", "data"))
    _run_in_page(app, "note_order", purged, Input("grid", "getRowsRequest"))


def _run_in_page(app: Dash, name: str, output: Output, *inputs: Input, late: bool = True) -> None:
    register = app.clientside_callback
    function = ClientsideFunction("viewer", name)
    register(function, output, *inputs, prevent_initial_call=late)  # type: ignore[no-untyped-call] # Dash has no types there


def _choose_step(app: Dash) -> None:
    @app.callback(
        Output("url", "search", allow_duplicate=True),
        Input(STEP_BARS, "clickData"),
        prevent_initial_call=True,
    )
    def choose(clicked: dict[str, Any] | None) -> Any:
        """Return the query of the step whose bar was clicked."""
        return Query.of("").but(step=str(clicked["points"][0]["x"])).search if clicked else no_update


def _downloads(app: Dash, source: RunData) -> None:
    def download(short: str) -> Response:
        """Return an HTTP response with everything about one trajectory as a JSON file; 404 if there is none."""
        try:
            found = find_trajectory(source.folder, short)
        except RollmillError as error:
            abort(Response(f"{describe_error(error)}\n", 404, mimetype="text/plain"))
        # The id is part of the address, and must not inject a line break into a header.
        name = re.sub(r"[^\w.-]", "_", f"{source.folder.name}-{found.short}.json", flags=re.ASCII)
        head = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(encode_json(found.values()), mimetype="application/json", headers=head)

    app.server.add_url_rule(f"/download{TRAJECTORY}<short>.json", view_func=download)

"""Tables that load their rows while they are scrolled."""

from collections.abc import Mapping, Sequence
from typing import Any

import dash_ag_grid as dag
from dash import html
from dash.development.base_component import Component

from rollmill.tasks.look.tables.view import Column

ROWS_AT_ONCE = 100
ROW_HEIGHT, HEAD_HEIGHT = 30, 34
"""Pixels."""
MOST_ROWS_SHOWN = 20
"""Visible rows of a table that has all its rows in the page."""
WIDTHS = {
    "trajectory": 130,
    "group": 100,
    "status": 100,
    "env": 110,
    # Those of a trajectory fit into 1280 pixels, with its error.
    "step": 70,
    "reward": 85,
    "n_completion_tokens": 80,
    "policy_version_last": 80,
    "duration_s": 90,
    "answer": 340,
    "error": 300,
    "reason": 200,
    "first": 150,
    "second": 150,
}
USUAL_WIDTH = 100
PINNED = ("trajectory", "group", "prompt")
"""Columns that stay fixed when the table is scrolled sideways."""
UNSORTED = ("answer", "problem")
"""Columns that are read only for the rows of the current page."""


def make_grid(columns: Sequence[Column], sort: str = "", links: Mapping[str, str] | None = None) -> Component:
    """Create a table that loads rows on demand, sorted by `sort` (a leading - sorts largest first); cells are text, never markup.

    `links` are the addresses that a column's cells link to, by column; {value} in one is the cell's value.
    """
    shown = [_column(column, sort, (links or {}).get(column.name, "")) for column in columns]
    options = {
        "cacheBlockSize": ROWS_AT_ONCE,
        "maxBlocksInCache": 20,
        # Dash drops the answer to a request when the next one begins, which `ask_in_turn` of viewer.js prevents but for new filters.
        # With a limit, a table would wait for two dropped ones forever.
        "maxConcurrentDatasourceRequests": 0,
        "infiniteInitialRowCount": 1,
        "noRowsOverlayComponentParams": {},
    }
    return html.Div(_grid("grid", shown, options, rowModelType="infinite"), className="rows")


def make_whole_grid(
    name: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], links: Mapping[str, str]
) -> Component:
    """Create a table that has all rows in the page, up to some thousands; the browser renders only visible rows.

    `name` is the component's id, `links` as for `make_grid`; {NAME} in an address is the row's value of that column.
    """
    shown = [_column(column, "", links.get(column.name, "")) for column in columns]
    # Cells are texts, which the browser would sort 10 before 9.
    for each in shown:
        each["comparator"] = {"function": "byNumber(valueA, valueB)"}
    cells = [{column.name: column.cell(row) for column in columns} for row in rows]
    height = min(len(rows), MOST_ROWS_SHOWN) * ROW_HEIGHT + HEAD_HEIGHT + 4
    return html.Div(_grid(name, shown, {}, rowData=cells), style={"height": height}, className="steps")


def _grid(name: str, columns: Sequence[Mapping[str, Any]], options: dict[str, Any], **more: Any) -> Component:
    of_all = {
        "rowHeight": ROW_HEIGHT,
        "headerHeight": HEAD_HEIGHT,
        # So that text can be selected over several rows, and screen readers read them in order.
        "enableCellTextSelection": True,
        "ensureDomOrder": True,
        "suppressColumnVirtualisation": True,
        # An address holds one column to sort by.
        "suppressMultiSort": True,
    }
    table: Component = dag.AgGrid(
        id=name,
        columnDefs=columns,
        defaultColDef={"resizable": True, "sortable": True, "suppressMovable": True},
        dashGridOptions=of_all | options,
        className="table",
        style={"height": None, "width": "100%"},
        **more,
    )
    return table


def parse_sort(request: Mapping[str, Any]) -> str:
    """Return the column that a table request sorts by, with a leading - for descending order; empty if it names none."""
    model = request.get("sortModel")
    return f"{'-' if model[0]['sort'] == 'desc' else ''}{model[0]['colId']}" if model else ""


def cells(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], cut: int) -> list[dict[str, str]]:
    """Convert rows to texts by column; strings longer than `cut` characters are shortened."""
    texts = []
    for row in rows:
        values = {column.name: row.get(column.name) for column in columns}
        long = {name for name, value in values.items() if isinstance(value, str) and len(value) > cut}
        # A long text is cut before it is formatted, which looks at each character.
        values |= {name: str(values[name])[:cut] for name in long}
        texts.append({each.name: each.cell(values) + ("…" if each.name in long else "") for each in columns})
    return texts


def _column(column: Column, sort: str, link: str) -> dict[str, Any]:
    known: dict[str, Any] = {
        "field": column.name,
        "headerName": column.heading,
        "width": WIDTHS.get(column.name, USUAL_WIDTH),
        "sortable": column.name not in UNSORTED,
        "cellRenderer": "Said",
    }
    if column.is_text:
        known |= {"flex": 1, "minWidth": 110 if column.name == "problem" else 140}
    if link:
        known |= {"cellRenderer": "Address", "cellRendererParams": {"address": link}}
        known |= {"pinned": "left"} if column.name in PINNED else {}
    if sort.removeprefix("-") == column.name:
        known["sort"] = "desc" if sort.startswith("-") else "asc"
    return known

"""A table whose rows come as they are scrolled to."""

from collections.abc import Mapping, Sequence
from typing import Any

import dash_ag_grid as dag
from dash import html
from dash.development.base_component import Component

from flows.looking.view import Column

ROWS_AT_ONCE = 100
ROW_HEIGHT, HEAD_HEIGHT = 30, 34
"""Pixels."""
MOST_ROWS_SHOWN = 20
"""Rows that are seen at once of a table whose rows are all in the page."""
WIDTHS = {
    "trajectory": 130,
    "group": 100,
    "status": 110,
    "env": 130,
    "answer": 340,
    "error": 300,
    "reason": 200,
}
USUAL_WIDTH = 100
PINNED = ("trajectory", "group", "prompt")
"""Columns that stay where they are when a narrow window is scrolled."""
UNSORTED = ("answer",)
"""Columns that are read for the rows of a page alone."""


def grid(columns: Sequence[Column], sort: str = "", links: Mapping[str, str] | None = None) -> Component:
    """A table of these columns; what its cells say is text, whatever it looks like.

    Args:
        columns: in their order.
        sort: column, - before it for largest first.
        links: column: where its cells lead; {value} of the address is the cell's.
    """
    shown = [_column(column, sort, (links or {}).get(column.name, "")) for column in columns]
    options = {
        "cacheBlockSize": ROWS_AT_ONCE,
        "maxBlocksInCache": 20,
        "infiniteInitialRowCount": 1,
        "noRowsOverlayComponentParams": {},
    }
    return html.Div(_grid("grid", shown, options, rowModelType="infinite"), className="rows")


def whole_grid(
    name: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], links: Mapping[str, str]
) -> Component:
    """A table whose rows are all in the page: some thousands at most. The browser has elements for those it shows.

    A thousand rows as elements of the page each would keep the browser busy for a minute.

    Args:
        name: id of the component.
        columns: in their order.
        rows: all of them.
        links: as for `grid`; {NAME} of the address is the row's, of that column.
    """
    shown = [_column(column, "", links.get(column.name, "")) for column in columns]
    for each in shown:
        each["comparator"] = {"function": "byNumber(valueA, valueB)"}
    told = [{column.name: column.cell(row) for column in columns} for row in rows]
    height = min(len(rows), MOST_ROWS_SHOWN) * ROW_HEIGHT + HEAD_HEIGHT + 4
    return html.Div(_grid(name, shown, {}, rowData=told), style={"height": height}, className="steps")


def _grid(name: str, columns: Sequence[Mapping[str, Any]], options: dict[str, Any], **more: Any) -> Component:
    of_all = {
        "rowHeight": ROW_HEIGHT,
        "headerHeight": HEAD_HEIGHT,
        "enableCellTextSelection": True,
        "ensureDomOrder": True,
        "suppressColumnVirtualisation": True,
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


def sort_of(request: Mapping[str, Any]) -> str:
    """The order that a table's request asks for, as an address has it."""
    model = request.get("sortModel") or []
    if not model:
        return ""
    return f"{'-' if model[0]['sort'] == 'desc' else ''}{model[0]['colId']}"


def cells(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], cut: int) -> list[dict[str, str]]:
    """Rows as texts, each of `cut` characters at most."""
    return [{column.name: _cut(column, row, cut) for column in columns} for row in rows]


def _cut(column: Column, row: Mapping[str, Any], cut: int) -> str:
    value = row.get(column.name)
    if isinstance(value, str) and len(value) > cut:
        return f"{column.cell({column.name: value[:cut]})}…"
    return column.cell({column.name: value})


def _column(column: Column, sort: str, link: str) -> dict[str, Any]:
    known: dict[str, Any] = {
        "field": column.name,
        "headerName": column.heading,
        "width": WIDTHS.get(column.name, USUAL_WIDTH),
        "sortable": column.name not in UNSORTED,
        "cellRenderer": "Said",
    }
    if column.is_text:
        known |= {"flex": 1, "minWidth": 160}
    if link:
        known |= {"cellRenderer": "Address", "cellRendererParams": {"address": link}}
        known |= {"pinned": "left"} if column.name in PINNED else {}
    if sort.removeprefix("-") == column.name:
        known["sort"] = "desc" if sort.startswith("-") else "asc"
    return known

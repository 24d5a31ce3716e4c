"""A run's curves as Plotly figures, one chart for each question, over one axis of steps."""

from collections.abc import Sequence
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from rollmill.tasks.look.tables.curves import BLUE, Chart, Series
from rollmill.tasks.look.tables.view import escape_controls

# Of more points every n-th is drawn: a chart has fewer pixels, and the page would be long.
MOST_POINTS = 2000
MOST_DRAWN = 3000
"""Most points of a scatter plot; of more every n-th is drawn."""
LINE_WIDTHS = {"thin": 1, "broad": 4}
"""Width in pixels of a line by form; 2 for all others."""
BY_STEP = ("step", "")
HEIGHT = 240
"""Height of a chart in pixels."""
FEW_STEPS = 8
"""With fewer steps, each gets a tick."""
QUIET = "rgba(128,128,128,0.25)"
INK = "#7d8590"
LOOK = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": INK, "size": 11, "family": "inherit"},
    "hoverlabel": {"font": {"size": 11}},
}
"""Plotly configuration of every chart."""


def render_charts(charts: Sequence[Chart]) -> list[Component]:
    """Return charts as components; one without data has a note."""
    return [
        _chart(
            chart.name,
            chart.unit,
            [trace for each in chart.series for trace in _traces(each)],
            absent=chart.absent,
        )
        for chart in charts
    ]


def make_scatter(title: str, rows: pl.DataFrame, a: str, b: str) -> Component:
    """Plot the column "b" of `rows` over their column "a"; the arguments `a` and `b` are the axes' titles."""
    drawn = _thin(rows.select("a", "b").drop_nulls(), MOST_DRAWN)
    points = {
        "x": drawn["a"].to_list(),
        "y": drawn["b"].to_list(),
        "mode": "markers",
        "type": "scatter",
        "marker": {"color": BLUE, "size": 6, "opacity": 0.55},
    }
    return _chart(title, f"{a} across, {b} up", [points], axes=(a, b))


def _chart(
    name: str,
    unit: str,
    traces: Sequence[dict[str, Any]],
    *,
    axes: tuple[str, str] = BY_STEP,
    absent: str = "nothing to show yet",
) -> Component:
    shown = [trace for trace in traces if len(trace["x"])]
    head = html.H3([name, html.Small(f" {unit}")])
    if not shown:
        return html.Figure([head, html.P(absent, className="quiet")], className="chart")
    is_scatter = axes != BY_STEP
    axis = {"gridcolor": QUIET, "zerolinecolor": QUIET, "automargin": True}
    layout = LOOK | {
        "margin": {"l": 40, "r": 10, "t": 6, "b": 30},
        "height": HEIGHT,
        "xaxis": axis | ({"title": {"text": axes[0]}} if is_scatter else tick_steps(shown)),
        "yaxis": axis | {"title": {"text": axes[1]}, "nticks": 6},
        "hovermode": "closest" if is_scatter else "x unified",
        "legend": {"orientation": "h", "y": -0.14, "font": {"size": 10}, "traceorder": "normal"},
        "showlegend": len([trace for trace in shown if trace.get("showlegend", True)]) > 1,
        # While this stays the same, a redrawn chart keeps the part that was zoomed into.
        "uirevision": name,
        "barmode": "stack",
    }
    return html.Figure([head, draw_graph(shown, layout, HEIGHT)], className="chart")


def draw_graph(
    traces: Sequence[dict[str, Any]], layout: dict[str, Any], height: int, name: str = ""
) -> Component:
    """Return a Plotly figure as a component, `height` pixels high; `name` is its id, empty for none."""
    identity: dict[str, Any] = {"id": name} if name else {}
    return dcc.Graph(
        **identity,
        figure={"data": traces, "layout": layout},
        config={"displayModeBar": False, "responsive": True, "displaylogo": False},
        style={"height": height},
    )


def tick_steps(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return Plotly settings for the axis of steps, with ticks at every step if there are few."""
    steps = [step for trace in traces for step in (trace["x"][0], trace["x"][-1])]
    return {"dtick": 1} if max(steps) - min(steps) < FEW_STEPS else {"nticks": 8}


def _traces(series: Series) -> list[dict[str, Any]]:
    """Return Plotly's traces of a series: one, or for a band its two ends, invisible, with the area between them."""
    drawn, name = _thin(series.rows, MOST_POINTS), escape_label(series.label)
    trace = {"x": drawn["step"].to_list(), "name": name, "hovertemplate": "%{y:.4g}"}
    if series.form == "bars":
        return [trace | {"y": drawn["value"].to_list(), "type": "bar", "marker": {"color": series.colour}}]
    # Plotly draws no line through a single point, and a short one through two is easily missed.
    is_marked = len(drawn) <= 2 or series.form in ("marked", "dotted")
    trace |= {"type": "scatter", "mode": "lines+markers" if is_marked else "lines"}
    if series.form == "band":
        hidden = {"showlegend": False, "hoverinfo": "skip", "mode": "lines", "line": {"width": 0}}
        low, high = (trace | hidden | {"y": _round(drawn[end])} for end in ("low", "high"))
        red, green, blue = (int(series.colour[at : at + 2], 16) for at in (1, 3, 5))
        return [low, high | {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.14)"}]
    line = {"color": series.colour, "width": LINE_WIDTHS.get(series.form, 2)}
    line |= {"dash": "dot"} if series.form == "dotted" else {}
    return [trace | {"y": _round(drawn["value"]), "line": line}]


def _round(values: pl.Series) -> list[float | None]:
    """Return values rounded to 6 decimals, so that the page is shorter."""
    return values.round(6).to_list()


def _thin(rows: pl.DataFrame, most: int) -> pl.DataFrame:
    return rows.gather_every(max(1, -(-len(rows) // most)))


def escape_label(label: str) -> str:
    """Escape a name for Plotly, which interprets some HTML in texts."""
    return escape_controls(label).replace("&", "&amp;").replace("<", "&lt;")

"""Where the time of steps went, as Plotly figures: a stacked bar a step, and the timeline of one step."""

from collections.abc import Mapping
from typing import Any

import polars as pl
from dash import html
from dash.development.base_component import Component

from rollmill.tasks.look.ledger.span_timeline import IDLE, NO_SPANS, UNATTRIBUTED, is_wait
from rollmill.tasks.look.ledger.step_timeline import StepTimeline
from rollmill.tasks.look.tables.ledger_tables import OTHERS
from rollmill.tasks.look.tables.view import escape_controls
from rollmill.tasks.look.web.charts import INK, LOOK, QUIET, draw_graph, escape_label, tick_steps

STEP_BARS = "step-bars"
"""Id of the stacked bars; a click on one chooses its step."""
BLUE, ORANGE, GREEN, SKY, PURPLE, VERMILLION, YELLOW = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#56b4e9",
    "#cc79a7",
    "#d55e00",
    "#f0e442",
)
"""Colours that colour-blind people distinguish (Okabe and Ito, 2008), on a light and on a dark ground."""
# More names than colours: names of one colour differ by a pattern, and those that are most often adjacent by both.
_NAMES_BY_PATTERN: Mapping[str, Mapping[str, str]] = {
    "": {
        "collect": BLUE,
        "train": ORANGE,
        "evaluate": GREEN,
        "generating": SKY,
        "scoring": PURPLE,
        "forward": VERMILLION,
        "optimizer": YELLOW,
    },
    "/": {
        "sync": PURPLE,
        "environment": GREEN,
        "backward": VERMILLION,
        "evaluating": SKY,
        "packing": YELLOW,
        "recomputing": ORANGE,
        "storing": BLUE,
    },
    "\\": {
        "sending": PURPLE,
        "receiving": SKY,
        "gathering": YELLOW,
        "loading": BLUE,
        "switching": ORANGE,
        "checkpoint": GREEN,
        "parity": VERMILLION,
    },
    "x": {"checkpointing": GREEN, "report": BLUE, "measuring": SKY, "recording": YELLOW},
}
WORK: Mapping[str, tuple[str, str]] = {
    name: (colour, pattern)
    for pattern, colours in _NAMES_BY_PATTERN.items()
    for name, colour in colours.items()
}
"""Colour and pattern of the most common work."""
OTHER = "#a3acb6"
"""Colour of work without a colour; hovering shows its name."""
WAITING = "rgba(128,128,128,0.45)"
GREYS = {IDLE: "rgba(128,128,128,0.15)", UNATTRIBUTED: INK, NO_SPANS: "rgba(128,128,128,0.05)"}
"""Colour of time that is neither work nor a wait."""
LEAST_DRAWN = 0.005
"""Share of the drawn time from which the legend has a name; hovering shows every name."""
PATTERNS = {
    "/": "repeating-linear-gradient(135deg, transparent 0 3px, #0008 3px 4px)",
    "\\": "repeating-linear-gradient(45deg, transparent 0 3px, #0008 3px 4px)",
    "x": "repeating-linear-gradient(135deg, transparent 0 3px, #0008 3px 4px), "
    "repeating-linear-gradient(45deg, transparent 0 3px, #0008 3px 4px)",
}
"""The patterns of Plotly as images of CSS, for the legend."""
LANE = 26
"""Height of a timeline row in pixels."""
BARS_HEIGHT = 260
"""Height of the stacked bars in pixels."""


def make_step_bars(owners: pl.DataFrame, chosen: int) -> Component:
    """Plot the seconds of each step as a stacked bar, one colour per name; the bar of the step `chosen` is framed.

    `owners` is a table of `sum_step_owners`.
    """
    whole = owners.group_by("step").agg(pl.col("seconds").sum().alias("whole"))
    rows = owners.join(whole, on="step", maintain_order="left")
    bars = [
        {
            "type": "bar",
            "name": escape_label(str(name)),
            "x": of_name["step"].to_list(),
            "y": of_name["seconds"].round(6).to_list(),
            "customdata": (100.0 * of_name["seconds"] / of_name["whole"]).round(1).to_list(),
            "marker": _marker(str(name)),
            "hovertemplate": "step %{x}, %{fullData.name}: %{y:.3f} s, %{customdata} %<extra></extra>",
        }
        for (name,), of_name in rows.group_by("name", maintain_order=True)
    ]
    axis = {"gridcolor": QUIET, "zeroline": False, "automargin": True}
    frame = {
        "type": "rect",
        "yref": "paper",
        "x0": chosen - 0.5,
        "x1": chosen + 0.5,
        "y0": 0,
        "y1": 1,
        "line": {"color": INK, "width": 2},
    }
    layout = LOOK | {
        "height": BARS_HEIGHT,
        "margin": {"l": 40, "r": 10, "t": 6, "b": 30},
        "barmode": "stack",
        "bargap": 0.12,
        "xaxis": axis | tick_steps([{"x": sorted(whole["step"])}]) | {"showgrid": False},
        "yaxis": axis | {"ticksuffix": " s", "nticks": 6},
        "hovermode": "closest",
        "shapes": [frame],
        "showlegend": False,
        "uirevision": STEP_BARS,
    }
    head = html.H3(
        ["steps", html.Small(" seconds by what decided how long a step took; click a bar for its step")]
    )
    return html.Figure([head, draw_graph(bars, layout, BARS_HEIGHT, STEP_BARS)], className="chart")


def make_timeline_chart(timeline: StepTimeline, step: int) -> Component:
    """Plot the spans of a step over time: one row of bars per lane, one colour per span name, waits in grey."""
    names = timeline.pieces["name"].unique().sort()
    bars = [_draw_pieces(timeline.pieces.filter(name=name), name) for name in names]
    # A server is named by its address, whose scheme would take the room of the bars on a phone.
    lanes = {lane: escape_label(lane.removeprefix("http://")) for lane in timeline.lanes[::-1]}
    height = LANE * len(lanes) + 50
    axis = {"gridcolor": QUIET, "zeroline": False, "automargin": True}
    layout = LOOK | {
        "height": height,
        "margin": {"l": 40, "r": 10, "t": 6, "b": 30},
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": axis | {"ticksuffix": " s"},
        "yaxis": axis
        | {"categoryorder": "array", "categoryarray": [*lanes], "showgrid": False}
        | {"tickvals": [*lanes], "ticktext": [*lanes.values()]},
        "hovermode": "closest",
        "showlegend": False,
    }
    head = html.H3(
        [
            f"timeline of step {step}",
            html.Small(
                " its critical path, and what ranks and servers did, in seconds of the step; drag to look closer"
            ),
        ]
    )
    return html.Figure([head, draw_graph(bars, layout, height)], className="chart timeline")


def make_legend(owners: pl.DataFrame, timeline: StepTimeline) -> Component:
    """Return the colours of both charts with their names, those of the bars first; time of less than LEAST_DRAWN has none."""
    seconds = timeline.pieces.group_by("name").agg(pl.col("seconds").sum())
    drawn = seconds.filter(pl.col("seconds") >= LEAST_DRAWN * pl.col("seconds").sum())
    names = [*owners["name"].unique(maintain_order=True), *drawn.sort("seconds", descending=True)["name"]]
    keys = [
        html.Span([html.I(style=_swatch(each)), escape_controls(each)])
        for each in dict.fromkeys(names)
        if each == OTHERS or _marker(each)["color"] != OTHER
    ]
    return html.Div(keys, className="keys")


def _swatch(name: str) -> dict[str, str]:
    marker = _marker(name)
    pattern = marker.get("pattern", {}).get("shape", "")
    return {"backgroundColor": marker["color"]} | ({"backgroundImage": PATTERNS[pattern]} if pattern else {})


def _draw_pieces(pieces: pl.DataFrame, name: str) -> dict[str, Any]:
    causes = [f"<br>{escape_label(cause)}" if cause else "" for cause in pieces["cause"]]
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape_label(name),
        "y": pieces["lane"].to_list(),
        "base": pieces["start_s"].round(6).to_list(),
        "x": pieces["seconds"].round(6).to_list(),
        "customdata": [
            [f"{seconds:.3f} s", cause] for seconds, cause in zip(pieces["seconds"], causes, strict=True)
        ],
        "marker": _marker(name),
        "hovertemplate": "%{customdata[0]}, from %{base:.3f} s%{customdata[1]}",
    }


def _marker(name: str) -> dict[str, Any]:
    """Return Plotly's colour and pattern of a name; time that is no work is grey, so that the colours show the work."""
    colour, pattern = WORK.get(name, (OTHER, ""))
    if name in GREYS or is_wait(name) or name == OTHERS:
        colour, pattern = GREYS.get(name, OTHER if name == OTHERS else WAITING), ""
    marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
    return marker | (
        {"pattern": {"shape": pattern, "fillmode": "overlay", "size": 6, "solidity": 0.25}} if pattern else {}
    )

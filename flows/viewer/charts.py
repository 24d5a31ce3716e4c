"""A run's curves as figures of Plotly: one chart a question, over one axis of steps."""

from collections.abc import Sequence
from typing import Any

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from flows.looking.curves import REST, SPANS, Curves
from flows.looking.plot import BLUE, GREEN, HUES, ORANGE, SPAN_COLOURS
from flows.looking.step_timeline import StepTimeline
from flows.looking.view import visible
from tasks.observe.ledger.timeline import IDLE, NO_SPANS, UNATTRIBUTED, is_wait

MOST_POINTS = 2000
"""Of more points of a line every n-th is drawn."""
BY_STEP = ("step", "")
HEIGHT = 240
"""Pixels of a chart."""
FEW_STEPS = 8
"""Of fewer steps each has its tick."""
QUIET = "rgba(128,128,128,0.25)"
INK = "#7d8590"
WAITING = "rgba(128,128,128,0.45)"
OTHER = "#a3acb6"
"""Of work in a timeline that has no colour of its own; pointing at it tells its name."""
GREYS = {IDLE: "rgba(128,128,128,0.15)", UNATTRIBUTED: INK, NO_SPANS: "rgba(128,128,128,0.05)"}
"""Of what is neither work nor a wait."""
WORK = {name: SPAN_COLOURS[name] for name in SPANS} | {
    "generating": "#5aa9c9",
    "environment": "#6b7f3f",
    "scoring": "#d58fb4",
    "evaluating": "#7cc4a8",
    "packing": "#e3b778",
    "recomputing": "#8c3b36",
    "forward": "#c2504a",
    "backward": "#a07a52",
    "optimizer": "#b8a03a",
    "gathering": "#6c5fa8",
    "sending": "#a994d6",
    "receiving": "#74528f",
    "loading": "#5b6ea0",
    "switching": "#c08ad0",
    "parity": "#985f7e",
    "storing": "#43617f",
    "checkpoint": "#3f7f86",
    "checkpointing": "#5fa3a8",
    "report": "#93a8c4",
    "measuring": "#84b3d9",
    "recording": "#c9b98a",
}
"""Of work in a timeline: what a step's line, its trajectories, ranks and servers have most of."""
LEAST_TOLD = 0.005
"""Share of the time drawn from which on a name of a timeline is in its legend; pointing at it tells any."""
LANE = 26
"""Pixels of a row of a timeline."""
LOOK = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": INK, "size": 11, "family": "inherit"},
    "hoverlabel": {"font": {"size": 11}},
}
"""Of every chart."""


def charts(curves: Curves) -> list[Component]:
    """The six charts; one that has no data says so."""
    return [
        _chart("reward", "mean over groups, 10 to 90 %", _rewards(curves)),
        _chart("length", "sampled tokens a trajectory", _banded(curves.groups, "tokens", "tokens")),
        _chart("entropy", "nats a token", [_line(curves.entropy, "entropy", "entropy", BLUE)]),
        _chart(
            "staleness",
            "policy versions behind",
            [
                _line(curves.staleness, "mean", "mean", BLUE),
                _line(curves.staleness, "max", "largest", ORANGE),
            ],
        ),
        _chart("drops", "trajectories by cause", _drops(curves.drops), is_stacked=True),
        _chart("time", "seconds a step", _spans(curves.spans), is_stacked=True),
    ]


def scatter(title: str, rows: pl.DataFrame, a: str, b: str) -> Component:
    """Two columns of numbers against each other."""
    points = {
        "x": rows[a].to_list(),
        "y": rows[b].to_list(),
        "mode": "markers",
        "type": "scatter",
        "marker": {"color": BLUE, "size": 6, "opacity": 0.55},
    }
    return _chart(title, f"{a} across, {b} up", [points], axes=(a, b))


def timeline_chart(timeline: StepTimeline) -> Component:
    """What was done when: a row a lane, a colour of its own for each phase, in every step the same; waits in grey."""
    names = (
        timeline.pieces.group_by("name")
        .agg(pl.col("seconds").sum())
        .sort("seconds", "name", descending=[True, False])
    )
    least_s = LEAST_TOLD * float(names["seconds"].sum())
    bars = [
        _stretches(timeline.pieces.filter(name=name), name, is_told=seconds >= least_s)
        for name, seconds in names.rows()
    ]
    height = LANE * len(timeline.lanes) + 90
    axis = {"gridcolor": QUIET, "zeroline": False, "automargin": True}
    layout = LOOK | {
        "height": height,
        "margin": {"l": 40, "r": 10, "t": 6, "b": 30},
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": axis | {"ticksuffix": " s"},
        "yaxis": axis | {"categoryorder": "array", "categoryarray": timeline.lanes[::-1], "showgrid": False},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -40 / height, "yanchor": "top", "font": {"size": 10}},
    }
    head = html.H3(
        ["timeline", html.Small(" what was done when, in seconds of the step; drag to look closer")]
    )
    return html.Figure([head, _graph(bars, layout, height)], className="chart timeline")


def _colour(name: str) -> str:
    """Of a name in a timeline; OTHER for work that has none of its own."""
    if name in GREYS or is_wait(name):
        return GREYS.get(name, WAITING)
    return WORK.get(name, OTHER)


def _stretches(pieces: pl.DataFrame, name: str, *, is_told: bool) -> dict[str, Any]:
    colour = _colour(name)
    told = [f"<br>{_plain(cause)}" if cause else "" for cause in pieces["cause"]]
    return {
        "type": "bar",
        "orientation": "h",
        "name": _plain(name),
        "y": pieces["lane"].to_list(),
        "base": pieces["start_s"].round(6).to_list(),
        "x": pieces["seconds"].round(6).to_list(),
        "customdata": [
            [f"{seconds:.3f} s", cause] for seconds, cause in zip(pieces["seconds"], told, strict=True)
        ],
        "marker": {"color": colour, "line": {"width": 0}},
        "showlegend": is_told and colour != OTHER,
        "hovertemplate": "%{customdata[0]}, from %{base:.3f} s%{customdata[1]}",
    }


def _chart(
    name: str,
    unit: str,
    traces: Sequence[dict[str, Any]],
    *,
    is_stacked: bool = False,
    axes: tuple[str, str] = BY_STEP,
) -> Component:
    shown = [trace for trace in traces if len(trace["x"])]
    head = html.H3([name, html.Small(f" {unit}")])
    if not shown:
        return html.Figure([head, html.P("nothing to show yet", className="quiet")], className="chart")
    is_scatter = axes != BY_STEP
    axis = {"gridcolor": QUIET, "zerolinecolor": QUIET, "automargin": True}
    layout = LOOK | {
        "margin": {"l": 40, "r": 10, "t": 6, "b": 30},
        "height": HEIGHT,
        "xaxis": axis | ({"title": {"text": axes[0]}} if is_scatter else _whole(shown)),
        "yaxis": axis | {"title": {"text": axes[1]}, "nticks": 6},
        "hovermode": "closest" if is_scatter else "x unified",
        "legend": {"orientation": "h", "y": -0.14, "font": {"size": 10}, "traceorder": "normal"},
        "showlegend": len([trace for trace in shown if trace.get("showlegend", True)]) > 1,
        "uirevision": name,
    }
    if is_stacked:
        layout["barmode"] = "stack"
    return html.Figure([head, _graph(shown, layout, HEIGHT)], className="chart")


def _graph(traces: Sequence[dict[str, Any]], layout: dict[str, Any], height: int) -> Component:
    return dcc.Graph(
        figure={"data": traces, "layout": layout},
        config={"displayModeBar": False, "responsive": True, "displaylogo": False},
        style={"height": height},
    )


def _whole(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ticks of an axis of steps, at whole numbers."""
    steps = [step for trace in traces for step in (trace["x"][0], trace["x"][-1])]
    return {"dtick": 1} if max(steps) - min(steps) < FEW_STEPS else {"nticks": 8}


def _rewards(curves: Curves) -> list[dict[str, Any]]:
    traces = _banded(curves.groups, "reward", "training")
    envs = curves.by_env["env"].unique(maintain_order=True).to_list()
    for at, env in enumerate(envs if len(envs) > 1 else []):
        rows = curves.by_env.filter(pl.col("env") == env)
        traces.append(_line(rows, "reward", env, HUES[(3 + at) % len(HUES)], width=1))
    traces.append(_line(curves.held_out, "reward", "held out", ORANGE, mode="lines+markers"))
    traces.append(
        _line(curves.held_out, "greedy_accuracy", "held out, greedy accuracy", GREEN, mode="lines+markers")
    )
    return traces


def _banded(rows: pl.DataFrame, name: str, label: str) -> list[dict[str, Any]]:
    """A mean over the band between its quantiles."""
    low, high = (_line(rows, f"{name}_{end}", end, "rgba(0,0,0,0)") for end in ("low", "high"))
    hidden = {"showlegend": False, "hoverinfo": "skip"}
    band = high | hidden | {"fill": "tonexty", "fillcolor": "rgba(47,111,176,0.14)"}
    return [low | hidden, band, _line(rows, name, label, BLUE)]


def _line(
    rows: pl.DataFrame, column: str, label: str, colour: str, *, width: float = 2, mode: str = "lines"
) -> dict[str, Any]:
    drawn = rows.gather_every(max(1, -(-len(rows) // MOST_POINTS)))
    values = drawn[column].cast(pl.Float64).fill_nan(None)
    few = "lines+markers" if len(drawn) <= 2 else mode
    return {
        "x": drawn["step"].to_list(),
        "y": [None if value is None else round(value, 6) for value in values],
        "name": _plain(label),
        "mode": few,
        "type": "scatter",
        "line": {"color": colour, "width": width},
        "hovertemplate": "%{y:.4g}",
    }


def _drops(drops: pl.DataFrame) -> list[dict[str, Any]]:
    causes = drops["cause"].unique(maintain_order=True).to_list()
    return [
        _bar(drops.filter(pl.col("cause") == cause), "n", cause, HUES[(4 + at) % len(HUES)])
        for at, cause in enumerate(causes)
    ]


def _spans(spans: pl.DataFrame) -> list[dict[str, Any]]:
    return [_bar(spans, name, name, SPAN_COLOURS[name]) for name in (*SPANS, REST)]


def _bar(rows: pl.DataFrame, column: str, label: str, colour: str) -> dict[str, Any]:
    drawn = rows.gather_every(max(1, -(-len(rows) // MOST_POINTS)))
    return {
        "x": drawn["step"].to_list(),
        "y": drawn[column].cast(pl.Float64).fill_nan(None).to_list(),
        "name": _plain(label),
        "type": "bar",
        "marker": {"color": colour},
        "hovertemplate": "%{y:.4g}",
    }


def _plain(label: str) -> str:
    """A name of the run's as Plotly shows it, which reads some HTML in its texts."""
    return visible(label).replace("&", "&amp;").replace("<", "&lt;")

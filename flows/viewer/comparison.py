"""Two scorers of the same trajectories side by side, or two policy versions on the same held-out prompts."""

import math

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from flows.looking.ordering import ordered
from flows.looking.view import Column, counted
from flows.viewer.address import BESIDE, COMPARE, TRAJECTORY, Query
from flows.viewer.charts import scatter
from flows.viewer.grid import grid
from flows.viewer.pages import waiting
from flows.viewer.source import Page, Source
from tasks.errors import ConfigError
from tasks.store.attempts import short_id
from tasks.store.partitions import stored_scorers

MOST_DRAWN = 3000
"""Points of the picture; of more every n-th."""
MOST_ROWS = 200_000
"""Of more scores the newest steps that come to so many, unless steps are given."""
SCORE_COLUMNS = ("step", "trajectory_id", "reward")
HELD_OUT_COLUMNS = ("group", "greedy", "example_id", "trajectory_id", "reward")


def comparison(source: Source, query: Query) -> Component:
    """What is compared, in figures, as a picture, and row by row.

    Raises:
        ConfigError: there is no such scorer or version.
    """
    choices = _choices(source)
    if len(choices) < 2:
        has = f"This run has {choices[0]} alone." if choices else ""
        text = (
            f"{has} Two scorers (`rollmill rescore`), or two evaluated policy versions, can be compared here."
        )
        return html.Section(
            [html.H1("compare"), waiting() if not choices else html.P(text, className="waiting")]
        )
    query = _with_defaults(query, choices)
    rows = _rows(source, query)
    a, b = query["a"], query["b"]
    table_columns = comparison_columns(query)
    links = {
        "trajectory": f"{TRAJECTORY}{{value}}",
        "first": f"{TRAJECTORY}{{value}}",
        "second": f"{TRAJECTORY}{{value}}",
        "prompt": f"{BESIDE}{{first}}/{{second}}",
    }
    return html.Section(
        [
            html.Div(
                [html.H1("compare"), html.Span(id="count", className="quiet", role="status")],
                className="head",
            ),
            html.Div(
                [*(_choice(name, query[name], choices) for name in ("a", "b")), _steps(query)],
                className="filters",
            ),
            html.P(_summary(rows, a, b), className="summary"),
            html.Div(scatter("rewards", _thinned(rows, a, b), a, b), className="charts one"),
            dcc.Store(id="asked", data={"path": COMPARE, "search": query.search}),
            grid(
                table_columns,
                query["sort"],
                {c.name: links[c.name] for c in table_columns if c.name in links},
            ),
        ]
    )


def compared_page(source: Source, query: Query, start: int, stop: int) -> Page:
    """Rows of the comparison's table, the largest difference first unless another order is asked for."""
    columns = comparison_columns(query)
    rows = ordered(_rows(source, query), columns, query["sort"], 0)
    shown = rows.slice(start, stop - start)
    for name in ("trajectory", "first", "second"):
        if name in shown.columns:
            shown = shown.with_columns(pl.Series(name, [short_id(each) for each in shown[name]], pl.String))
    return Page(shown.to_dicts(), len(rows))


def comparison_columns(query: Query) -> list[Column]:
    """The columns of the comparison's table."""
    a, b = query["a"], query["b"]
    rewards = [Column("a", header=a), Column("b", header=b), Column("difference")]
    if is_version(a):
        example = Column("example_id", header="problem", is_text=True)
        return [Column("prompt"), example, *rewards, Column("first"), Column("second")]
    return [Column("trajectory"), Column("step"), *rewards]


def is_version(name: str) -> bool:
    """True for a policy version, v12; False for a scorer, addition@1."""
    return name.startswith("v") and name[1:].isdigit()


def _choices(source: Source) -> list[str]:
    """Scorers, and evaluated policy versions; those of one kind when the other has fewer than two."""
    versions = [f"v{version}" for version in source.shelf.steps("evaluations")]
    scorers = stored_scorers(source.folder)
    return (
        [*(scorers if len(scorers) > 1 else []), *(versions if len(versions) > 1 else [])]
        or scorers
        or versions
    )


def _with_defaults(query: Query, choices: list[str]) -> Query:
    """What is compared when the address does not say: the first two scorers, or the first version and the last."""
    a = query["a"] or choices[0]
    alike = [each for each in choices if is_version(each) == is_version(a)]
    b = query["b"] if is_version(query["b"]) == is_version(a) else ""
    last = alike[-1] if is_version(a) else alike[min(1, len(alike) - 1)]
    for name, value in (("a", a), ("b", b)):
        if value and value not in choices:
            raise ConfigError(name, value, f"give one of {', '.join(choices)}")
    return query.but(a=a, b=b or last)


def _rows(source: Source, query: Query) -> pl.DataFrame:
    """Both rewards of each row, the largest difference first."""
    query = _with_defaults(query, _choices(source))
    a, b = query["a"], query["b"]
    selection = query.selection()
    if is_version(a):
        parts = [source.shelf.rows("evaluations", HELD_OUT_COLUMNS, version=int(each[1:])) for each in (a, b)]
    else:
        parts = [source.shelf.rows("scores", SCORE_COLUMNS, scorer=each) for each in (a, b)]

    def join() -> pl.DataFrame:
        first, second = (part.with_columns(pl.col("reward").fill_nan(None)) for part in parts)
        if selection.steps and not is_version(a):
            steps = pl.col("step").is_between(selection.steps.low, selection.steps.high)
            first, second = first.filter(steps), second.filter(steps)
        elif len(first) > MOST_ROWS:
            newest = first["step"].sort(descending=True)[MOST_ROWS]
            first, second = first.filter(pl.col("step") > newest), second.filter(pl.col("step") > newest)
        joined = _held_out(first, second) if is_version(a) else _scored(first, second)
        joined = joined.with_columns((pl.col("b") - pl.col("a")).alias("difference"))
        return joined.sort(pl.col("difference").abs(), descending=True, nulls_last=True, maintain_order=True)

    rows: pl.DataFrame = source.made(("compared", a, b, selection.steps), parts, join)
    return rows


def _scored(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
    others = second.unique("trajectory_id").select("trajectory_id", pl.col("reward").alias("b"))
    return (
        first.unique("trajectory_id", maintain_order=True)
        .rename({"reward": "a", "trajectory_id": "trajectory"})
        .join(others, left_on="trajectory", right_on="trajectory_id", maintain_order="left")
    )


def _held_out(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
    keys = ["group", "greedy", "example_id"]
    joined = first.rename({"reward": "a", "trajectory_id": "first"}).join(
        second.rename({"reward": "b", "trajectory_id": "second"}), on=keys, maintain_order="left"
    )
    number = pl.col("first").str.extract(r"(\d+)\.\w+$")
    kind = pl.when("greedy").then(pl.lit("greedy")).otherwise(pl.lit("sampled"))
    return joined.with_columns(pl.format("{} {}", number, kind).alias("prompt"))


def _thinned(rows: pl.DataFrame, a: str, b: str) -> pl.DataFrame:
    there = rows.select(pl.col("a").alias(a), pl.col("b").alias(f"{b} " if a == b else b)).drop_nulls()
    return there.gather_every(max(1, -(-len(there) // MOST_DRAWN)))


def _summary(rows: pl.DataFrame, a: str, b: str) -> str:
    """Example: "48 trajectories in both; mean 0.544 and -0.071; rank correlation 0.31"."""
    noun = ("prompt", "") if is_version(a) else ("trajectory", "trajectories")
    both = rows.drop_nulls(["a", "b"])
    if both.is_empty():
        return f"{counted(len(rows), *noun)} in both, none with both rewards"
    first, second = (float(both.select(pl.col(name).mean()).item()) for name in ("a", "b"))
    said = "of" if is_version(a) else "by"
    means = f"mean reward {first:.3f} {said} {a} and {second:.3f} {said} {b}"
    rank = both.select(pl.corr("a", "b", method="spearman")).item()
    correlation = "" if rank is None or math.isnan(rank) else f"; rank correlation {rank:.2f}"
    better = both.filter(pl.col("difference") > 0).height
    worse = both.filter(pl.col("difference") < 0).height
    return f"{counted(len(both), *noun)} in both; {means}; {better} higher {said} {b}, {worse} lower{correlation}"


def _choice(name: str, value: str, choices: list[str]) -> Component:
    shown = dcc.Dropdown(
        id={"type": "filter", "name": name},
        options=[{"label": each, "value": each} for each in choices],
        value=value,
        clearable=False,
        searchable=False,
        className="choice",
    )
    return html.Label([html.Span({"a": "this", "b": "with this"}[name]), shown], className=f"filter {name}")


def _steps(query: Query) -> Component:
    of = {"type": "filter", "name": "step"}
    field = dcc.Input(
        id=of, value=query["step"], debounce=0.6, placeholder="12, or 3:7", type="text", className="field"
    )
    return html.Label([html.Span("step"), field], className="filter step")

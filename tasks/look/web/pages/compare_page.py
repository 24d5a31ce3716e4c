"""Compare two scorers on the same trajectories, or two policy versions on the same held-out prompts."""

import math

import polars as pl
from dash import dcc, html
from dash.development.base_component import Component

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_tables import MIN_NORMAL, Z
from rollmill.tasks.look.tables.scores import explain_scorers
from rollmill.tasks.look.tables.view import Column, count_noun, order_rows
from rollmill.tasks.look.web.charts import make_scatter
from rollmill.tasks.look.web.grid import make_grid
from rollmill.tasks.look.web.pages.table_pages import render_filter, render_head, render_waiting
from rollmill.tasks.look.web.run_data import RunData, TablePage
from rollmill.tasks.look.web.urls import COMPARE, PAIR, TRAJECTORY, Query
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.reader import list_scorers

# Most scores to compare by default, those of the newest steps: a page of more would take seconds.
MOST_ROWS = 200_000
LINKS = {
    "trajectory": f"{TRAJECTORY}{{value}}",
    "first": f"{TRAJECTORY}{{value}}",
    "second": f"{TRAJECTORY}{{value}}",
    "prompt": f"{PAIR}{{first}}/{{second}}",
}
"""Address that a column's cells link to; {NAME} is the row's value of that column."""
COMPARED_SCORE_COLUMNS = ("step", "trajectory_id", "reward")
COMPARED_HELD_OUT_COLUMNS = ("group", "greedy", "example_id", "trajectory_id", "reward")


def render_comparison(source: RunData, query: Query) -> Component:
    """Render the figures, scatter plot and table of two scorers or policy versions; raises ConfigError for an unknown one."""
    choices = _choices(source)
    if len(choices) < 2:
        has = f"This run has {choices[0]} alone." if choices else ""
        text = (
            f"{has} Two scorers (`rollmill rescore`), or two evaluated policy versions, can be compared here."
        )
        return html.Section(
            [html.H1("compare"), render_waiting() if not choices else html.P(text, className="waiting")]
        )
    query = _with_defaults(query, choices)
    rows = _rows(source, query)
    a, b = query["a"], query["b"]
    filters = [
        render_filter("a", a, choices, "this", is_required=True),
        render_filter("b", b, choices, "with this", is_required=True),
        render_filter("step", query["step"], None, "step"),
    ]
    return html.Section(
        [
            render_head("compare"),
            html.Div(filters, className="filters"),
            *(html.P(line, className="summary") for line in _summarize(rows, a, b)),
            *(html.P(line, className="quiet") for line in explain_scorers(source.folder, a, b)),
            html.Div(make_scatter("rewards", rows, a, b), className="charts one"),
            dcc.Store(id="asked", data={"path": COMPARE, "search": query.search}),
            make_grid(comparison_columns(query), query["sort"], LINKS),
        ]
    )


def read_comparison(source: RunData, query: Query, start: int, stop: int) -> TablePage:
    """Return rows `start` to `stop` of the two compared rewards, sorted by the query, else by largest difference."""
    rows = order_rows(_rows(source, query), comparison_columns(query), query["sort"], 0)
    ids = [name for name in ("trajectory", "first", "second") if name in rows.columns]
    shown = rows.slice(start, stop - start).with_columns(pl.col(ids).map_elements(short_id, pl.String))
    return TablePage(shown.to_dicts(), len(rows))


def comparison_columns(query: Query) -> list[Column]:
    """Return the columns of the table that compares two scorers or two policy versions."""
    a, b = query["a"], query["b"]
    rewards = [Column("a", header=a), Column("b", header=b), Column("difference")]
    if is_version(a):
        example = Column("example_id", header="problem", is_text=True)
        return [Column("prompt"), example, *rewards, Column("first"), Column("second")]
    return [Column("trajectory"), Column("step"), *rewards]


def is_version(name: str) -> bool:
    """Return True for a policy version, v12; False for a scorer, addition@1."""
    return name.startswith("v") and name[1:].isdigit()


def _choices(source: RunData) -> list[str]:
    """Return the names of the scorers and policy versions to compare; one kind only if the other has fewer than two."""
    versions = [f"v{version}" for version in source.shelf.steps("evaluations")]
    scorers = list_scorers(source.folder)
    return (
        [*(scorers if len(scorers) > 1 else []), *(versions if len(versions) > 1 else [])]
        or scorers
        or versions
    )


def _with_defaults(query: Query, choices: list[str]) -> Query:
    """Set the missing one of `a` and `b` in a query: to the first two scorers, or to the first and last version."""
    a = query["a"] or choices[0]
    alike = [each for each in choices if is_version(each) == is_version(a)]
    b = query["b"] if is_version(query["b"]) == is_version(a) else ""
    last = alike[-1] if is_version(a) else alike[min(1, len(alike) - 1)]
    for name, value in (("a", a), ("b", b)):
        if value and value not in choices:
            raise ConfigError(name, value, f"give one of {', '.join(choices)}")
    return query.but(a=a, b=b or last)


def _rows(source: RunData, query: Query) -> pl.DataFrame:
    """Return rows with both compared rewards, `a` and `b`, and their difference b - a, largest difference first."""
    query = _with_defaults(query, _choices(source))
    a, b = query["a"], query["b"]
    selection = query.selection()
    if is_version(a):
        parts = [
            source.shelf.rows("evaluations", COMPARED_HELD_OUT_COLUMNS, version=int(each[1:]))
            for each in (a, b)
        ]
    else:
        parts = [source.shelf.rows("scores", COMPARED_SCORE_COLUMNS, scorer=each) for each in (a, b)]

    def sort(joined: pl.DataFrame) -> pl.DataFrame:
        joined = joined.with_columns((pl.col("b") - pl.col("a")).alias("difference"))
        return joined.sort(pl.col("difference").abs(), descending=True, nulls_last=True, maintain_order=True)

    def join() -> pl.DataFrame:
        # A held-out answer without a reward counts as 0, as in the mean of an evaluation.
        missing = 0.0 if is_version(a) else None
        first, second = (part.with_columns(pl.col("reward").fill_nan(missing)) for part in parts)
        if is_version(a):
            return sort(_join_held_out(first, second))
        if selection.steps:
            steps = pl.col("step").is_between(selection.steps.low, selection.steps.high)
            first, second = first.filter(steps), second.filter(steps)
        elif len(first) > MOST_ROWS:
            newest = first["step"].sort(descending=True)[MOST_ROWS]
            first, second = first.filter(pl.col("step") > newest), second.filter(pl.col("step") > newest)
        # A rescored trajectory may have two rows of one scorer, which would pair up to four.
        first, others = first.unique("trajectory_id", maintain_order=True), second.unique("trajectory_id")
        joined = first.rename({"reward": "a"}).join(
            others.select("trajectory_id", b="reward"), on="trajectory_id", maintain_order="left"
        )
        return sort(joined.rename({"trajectory_id": "trajectory"}))

    rows: pl.DataFrame = source.derive(("compared", a, b, selection.steps), parts, join)
    return rows


def _join_held_out(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
    # The end of an id names the answer to a prompt: greedy, sampled, sampled2.
    answer = pl.col("trajectory_id").str.extract(r"(\d+\.\w+)$").str.replace(".", " ", literal=True)
    first, second = (part.with_columns(answer.alias("prompt")) for part in (first, second))
    return first.rename({"reward": "a", "trajectory_id": "first"}).join(
        second.rename({"reward": "b", "trajectory_id": "second"}),
        on=["group", "greedy", "example_id", "prompt"],
        maintain_order="left",
    )


def _difference(both: pl.DataFrame) -> str:
    """Return the mean difference of pairs with its 95 % interval, as part of a line; empty for few pairs and for equal differences."""
    if len(both) < MIN_NORMAL:
        return ""
    mean, error = both.select(
        pl.col("difference").mean().alias("mean"),
        (pl.col("difference").std() / pl.len().sqrt()).alias("error"),
    ).row(0)
    return "" if not error else f", difference {mean:z.3f} ± {Z * error:.3f} (95 %)"


def _summarize(rows: pl.DataFrame, a: str, b: str) -> list[str]:
    """Summarize the compared rows, in lines; of versions, sampled and greedy answers each, since those to one prompt are not independent."""
    if not is_version(a) or rows.is_empty():
        return [
            summarize_pairs(rows, a, b, ("prompt", "") if is_version(a) else ("trajectory", "trajectories"))
        ]
    # Intervals count prompts: the sampled answers to one are alike.
    prompts = rows.group_by("group", "greedy", "example_id").agg(pl.col("a", "b", "difference").mean())
    kinds = {"sampled": prompts.filter(~pl.col("greedy")), "greedy": prompts.filter("greedy")}
    return [
        f"{kind}: {summarize_pairs(each, a, b, ('prompt', ''))}"
        for kind, each in kinds.items()
        if not each.is_empty()
    ]


def summarize_pairs(rows: pl.DataFrame, a: str, b: str, noun: tuple[str, str]) -> str:
    """Summarize compared rows in one line: number of rows, mean rewards, counts of differences, rank correlation.

    Args:
        rows: columns a, b and difference.
        a: name of the scorer, policy version or run that the rewards `a` are of.
        b: the same for `b`.
        noun: what a row is, and its plural if that is irregular.

    Example: "48 trajectories in both; mean reward 0.544 by addition@1 and 0.571 by addition@2, difference 0.027 ± 0.012 (95 %);
    addition@2 is higher for 12, lower for 9; rank correlation 0.31".
    """
    both = rows.drop_nulls(["a", "b"])
    if both.is_empty():
        return f"{count_noun(len(rows), *noun)} in both, none with both rewards"
    first, second = (float(both.select(pl.col(name).mean()).item()) for name in ("a", "b"))
    said = "by" if noun[0] == "trajectory" else "of"
    means = f"mean reward {first:z.3f} {said} {a} and {second:z.3f} {said} {b}{_difference(both)}"
    rank = both.select(pl.corr("a", "b", method="spearman")).item()
    correlation = "" if rank is None or math.isnan(rank) else f"; rank correlation {rank:z.2f}"
    better = both.filter(pl.col("difference") > 0).height
    worse = both.filter(pl.col("difference") < 0).height
    return f"{count_noun(len(both), *noun)} in both; {means}; {b} is higher for {better}, lower for {worse}{correlation}"

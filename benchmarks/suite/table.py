"""The table of docs/lab/performance.md: every figure as measured last, its target, and what it is compared with."""

from collections.abc import Iterable, Sequence

from benchmarks.suite.figures import Benchmark, Comparison, Figure
from benchmarks.suite.process import ROOT
from benchmarks.suite.results import Result, Results

PAGE = ROOT / "docs" / "lab" / "performance.md"
MISSED = "**missed**"
HEADINGS = ("benchmark", "figure", "measured", "target", "", "to the peer", "to the limit", "measured on")


class PageError(Exception):
    """The page has no place for a text between its markers."""


def between(page: str, name: str, text: str) -> str:
    """The page with a text between its markers `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises:
        PageError: it has not both.
    """
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, begun, rest = page.partition(first)
    _, ended, tail = rest.partition(last)
    if not begun or not ended:
        raise PageError(f"the page needs the lines {first.strip()} and {last}, in this order")
    return head + first + text + last + tail


def table(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """The table, and below it when and where each benchmark ran."""
    lines = [line(HEADINGS), "|" + "---|" * len(HEADINGS)]
    used: dict[tuple[str, str], Result] = {}
    for benchmark in benchmarks:
        for number, figure in enumerate(benchmark.figures):
            name = f"`{benchmark.script}`" if number == 0 else ""
            newest = results.newest(benchmark.script, figure)
            if newest:
                used[newest.script, newest.mode] = newest
            lines.append(line((name, *cells(figure, newest))))
    return "\n".join([*lines, "", count(benchmarks, results), "", *places(used.values())]) + "\n"


def cells(figure: Figure, newest: Result | None) -> tuple[str, ...]:
    """All cells of a figure's row but the first, all of one result."""
    value = figure.value(newest.values) if newest else None
    sign = "≥" if figure.more_is_better else "≤"
    target = "" if figure.target is None else f"{sign} {figure.target:g}{unit(figure)}"
    return (
        f"`{figure.key}`",
        "" if value is None else f"{show(value)}{unit(figure)}",
        target,
        verdict(figure, value),
        compare(figure, figure.peer, newest),
        compare(figure, figure.limit, newest),
        f"{newest.date[:10]}, {newest.mode}" if newest else "",
    )


def unit(figure: Figure) -> str:
    """Behind a number: nothing for a ratio."""
    return "" if figure.unit == "x" else f" {figure.unit}"


def verdict(figure: Figure, value: float | None) -> str:
    """What became of a figure's target."""
    if value is None:
        return "not run"
    met = figure.is_met(value)
    return "" if met is None else "met" if met else MISSED


def compare(figure: Figure, comparison: Comparison | None, newest: Result | None) -> str:
    """Return the figure's ratio to a peer or a limit in the same run, with its name: `0.83 x orjson`; empty without one."""
    ratio = figure.ratio(newest.values, comparison) if newest and comparison else None
    return "" if ratio is None or comparison is None else f"{show(ratio)} x {comparison.name}"


def count(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """How many targets are met."""
    verdicts = [verdict(figure, value) for _, figure, value in targets(benchmarks, results)]
    met, missed, not_run = (verdicts.count(each) for each in ("met", MISSED, "not run"))
    return f"Of {len(verdicts)} targets {met} are met, {missed} missed, {not_run} not run."


def missed(benchmarks: Sequence[Benchmark], results: Results) -> str:
    """Return the list of missed targets."""
    found = targets(benchmarks, results)
    lines = [
        f"- `{script}`: `{figure.key}` {show(value)}{unit(figure)}, wanted {figure.target:g}{unit(figure)}{_explain(figure)}"
        for script, figure, value in found
        if value is not None and verdict(figure, value) == MISSED
    ]
    return "\n".join([f"{len(lines)} of {len(found)} targets of our own are missed:", "", *lines]) + "\n"


def _explain(figure: Figure) -> str:
    known = figure.known_miss
    return f"; {known.reason}, bound {known.bound:g}{unit(figure)}" if known else ""


def targets(benchmarks: Sequence[Benchmark], results: Results) -> list[tuple[str, Figure, float | None]]:
    """Each figure that has a target, with its script and what was measured last."""
    return [
        (benchmark.script, figure, figure.value(newest.values) if newest else None)
        for benchmark in benchmarks
        for figure in benchmark.figures
        if figure.target is not None
        for newest in [results.newest(benchmark.script, figure)]
    ]


def places(results: Iterable[Result]) -> list[str]:
    """On which machines, how, with which versions, at which commits: a line for each place that is not the same."""
    found: dict[str, dict[str, list[str]]] = {}
    for each in results:
        versions = ", ".join(f"{name} {version}" for name, version in each.versions.items())
        priority = f"{each.priority} priority" if each.priority else ""
        place = "; ".join(filter(None, (each.machine, priority, versions)))
        found.setdefault(place, {}).setdefault(each.commit, []).append(f"`{each.script}` {each.mode}")
    return [
        f"- {place}: "
        + "; ".join(f"{', '.join(names)} at {commit}" for commit, names in commits.items())
        + "."
        for place, commits in found.items()
    ]


def show(value: float) -> str:
    """Three figures that count; small ones with a power of ten.

    Example: 0.0345, 1.00, 62.4, 5014, 7.9e-07.
    """
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:.0f}"


def line(row: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(row) + " |"

"""Runs the benchmarks, one after another, each in a process of its own: `python -m benchmarks.run quick|full`.

Quick ones measure the same figures with fewer passes, and no peer; full ones everything, peers in environments of their
own. A script that fails is told at the end, and the others go on. Results go to benchmarks/results.json, and from there
into the table of docs/performance.md. A ratio that looks worse than benchmarks/baseline.json allows is measured twice
more; when the median of three is worse too, the command fails.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import model
from benchmarks.suite import regression, table
from benchmarks.suite.declared import BENCHMARKS
from benchmarks.suite.figures import Benchmark, Mode
from benchmarks.suite.process import ScriptError, run_script
from benchmarks.suite.results import Results, result_of


@dataclass(slots=True)
class Outcome:
    """What became of all scripts.

    Attributes:
        failed: what each failed script said.
        worse: ratios that are worse than the baseline allows, with their medians.
        seconds: of each script, all its tries together.
    """

    failed: dict[str, str] = field(default_factory=dict)
    worse: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


async def measured(
    benchmark: Benchmark, mode: Mode, results: Results, baseline: Path, *, keeps: bool
) -> dict[str, float]:
    """Run a script, keep its result, and return what of its ratios stays worse than the baseline.

    Args:
        benchmark: which one.
        mode: how.
        results: what its result is put into.
        baseline: file of the stored ratios.
        keeps: add the ratios to the baseline, and compare none.

    Raises:
        ScriptError: it failed.
    """
    stored = regression.baselines(regression.read_baseline(baseline), benchmark)
    tries: list[dict[str, float]] = []
    while True:
        arguments, started = benchmark.arguments(mode), datetime.now(UTC)
        assert arguments is not None
        values = await run_script(benchmark.script, arguments, benchmark.timeout_s)
        results.keep(result_of(benchmark.script, mode, values, started))
        tries.append(regression.ratios(benchmark, values))
        if keeps:
            regression.keep(tries[-1], baseline)
            return {}
        if len(tries) == 1 and not regression.suspects(tries[0], stored):
            return {}
        if len(tries) == regression.TRIES:
            return regression.regressions(tries, stored)
        print(f"{benchmark.script}: worse than the baseline allows, measured again", flush=True)


async def run_all(
    benchmarks: Sequence[Benchmark], mode: Mode, results: Results, baseline: Path, *, keeps: bool = False
) -> Outcome:
    """Run scripts one after another, as `measured` does each; none stops the others."""
    outcome = Outcome()
    for benchmark in benchmarks:
        print(f"== {benchmark.script} {' '.join(benchmark.arguments(mode) or ())}", flush=True)
        started = time.monotonic()
        try:
            outcome.worse |= await measured(benchmark, mode, results, baseline, keeps=keeps)
        except ScriptError as error:
            outcome.failed[benchmark.script] = str(error)
            print(f"{benchmark.script} FAILED: {error}", flush=True)
        outcome.seconds[benchmark.script] = round(time.monotonic() - started, 1)
    return outcome


def write_page(results: Results) -> None:
    """Bring the table, and what the model says, in docs/performance.md up to date."""
    page = table.between(table.PAGE.read_text(), "table", table.table(BENCHMARKS, results))
    table.PAGE.write_text(table.between(page, "model", model.text(results)))


def chosen(names: Sequence[str], mode: Mode) -> list[Benchmark]:
    """The declared benchmarks of a mode, or those of them that are named.

    Raises:
        SystemExit: a name is of none.
    """
    having = [each for each in BENCHMARKS if each.arguments(mode) is not None]
    unknown = set(names) - {each.script for each in having}
    if unknown:
        known = ", ".join(each.script for each in having)
        sys.exit(f"no {mode} benchmark is called {', '.join(sorted(unknown))}; there are {known}")
    return [each for each in having if not names or each.script in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "mode", choices=("quick", "full", "table"), help="table: write the page again, run nothing"
    )
    parser.add_argument("scripts", nargs="*", help="of these benchmarks alone")
    parser.add_argument("--keep", action="store_true", help="add the ratios to the baseline, do not compare")
    given = parser.parse_intermixed_args()
    results, outcome = Results(), Outcome()
    if given.mode != "table":
        benchmarks = chosen(given.scripts, given.mode)
        run = run_all(benchmarks, given.mode, results, regression.BASELINE, keeps=given.keep)
        outcome = asyncio.run(run)
    write_page(results)
    for name, value in outcome.worse.items():
        bound = regression.read_baseline(regression.BASELINE)[name]
        print(f"WORSE: {name} is {value:.3g}, median of {regression.TRIES}; baseline {bound}")
    for script, said in outcome.failed.items():
        print(f"FAILED: {script}: {said.splitlines()[0]}")
    told = {"benchmark": "run", "mode": given.mode, "failed": sorted(outcome.failed)}
    print(json.dumps(told | {"worse": outcome.worse, "seconds": outcome.seconds}))
    sys.exit(bool(outcome.worse or outcome.failed))


if __name__ == "__main__":
    main()

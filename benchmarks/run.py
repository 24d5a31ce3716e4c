"""Runs the benchmarks, one after another, each in a separate process: `python -m benchmarks.run quick|full`.

Quick ones measure the same figures with fewer passes, and no peer; full ones everything, peers in separate environments.
A script that fails is reported at the end, and the others still run. Results go to benchmarks/results.json, and from there
into the table of docs/lab/performance.md. A ratio that looks worse than benchmarks/baseline.json allows is measured twice
more; when the median of three is worse too, the command fails. It fails too when a declared figure is not measured, and
when one misses its target: any in a full run, one that has no noise in a quick run. A target that is known to be missed is
declared with the reason and a bound, which then takes the target's place.
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
from benchmarks.suite.regression import Baseline
from benchmarks.suite.results import Results, commit_of, result_of


@dataclass(slots=True)
class Outcome:
    """What became of all scripts.

    Attributes:
        failed: what each failed script said.
        worse: ratios that are worse than the baseline allows, with their medians.
        unguarded: ratios that the baseline has too few values of to compare them.
        seconds: of each script, all its tries together.
    """

    failed: dict[str, str] = field(default_factory=dict)
    worse: dict[str, float] = field(default_factory=dict)
    unguarded: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Suite:
    """How scripts are run, and where what they measure goes.

    Attributes:
        mode: how.
        results: what their results are put into.
        baseline: file of the stored ratios.
        keeps: add the ratios to the baseline, and compare none.
        commit: of the checkout before the first result changed it.
    """

    mode: Mode
    results: Results
    baseline: Path
    keeps: bool = False
    commit: str = field(default_factory=commit_of)

    def baselines(self, benchmark: Benchmark) -> dict[str, Baseline]:
        """What the ratios of a benchmark are compared with."""
        return regression.baselines(regression.read_baseline(self.baseline, self.mode), benchmark, self.mode)

    async def run(self, benchmark: Benchmark) -> dict[str, float]:
        """Run a script once, keep its result, and return its ratios.

        Raises:
            ScriptError: it failed, has not measured what is declared of it, or misses a target.
        """
        arguments, started = benchmark.arguments(self.mode), datetime.now(UTC)
        assert arguments is not None
        values = await run_script(benchmark.script, arguments, benchmark.timeout_s)
        if missing := benchmark.missing(values, self.mode):
            raise ScriptError(f"printed no finite number for {', '.join(missing)}")
        self.results.keep(result_of(benchmark.script, self.mode, values, started, self.commit))
        if missed := benchmark.missed(values, self.mode):
            raise ScriptError("; ".join(missed))
        return regression.ratios(benchmark, values, self.mode)


async def measure(benchmark: Benchmark, suite: Suite) -> dict[str, float]:
    """Run a script, thrice where it looks worse than the baseline, and return what stays worse.

    Raises:
        ScriptError: it failed.
    """
    tries = [await suite.run(benchmark)]
    if suite.keeps:
        regression.keep(tries[0], suite.baseline, suite.mode)
        return {}
    stored = suite.baselines(benchmark)
    if not regression.suspects(tries[0], stored):
        return {}
    while len(tries) < regression.TRIES:
        print(f"{benchmark.script}: worse than the baseline allows, measured again", flush=True)
        tries.append(await suite.run(benchmark))
    worse = regression.regressions(tries, stored)
    for name, value in worse.items():
        print(f"{name} is {value:.3g}, and may be {stored[name].bound:.3g}", flush=True)
    return worse


async def run_all(benchmarks: Sequence[Benchmark], suite: Suite) -> Outcome:
    """Run scripts one after another, as `measure` does each; none stops the others."""
    outcome = Outcome()
    for benchmark in benchmarks:
        print(f"== {benchmark.script} {' '.join(benchmark.arguments(suite.mode) or ())}", flush=True)
        started = time.monotonic()
        try:
            outcome.worse |= await measure(benchmark, suite)
        except ScriptError as error:
            outcome.failed[benchmark.script] = str(error)
            print(f"{benchmark.script} FAILED: {error}", flush=True)
        outcome.seconds[benchmark.script] = round(time.monotonic() - started, 1)
        compared = suite.baselines(benchmark)
        outcome.unguarded += [
            name for name in regression.names(benchmark, suite.mode) if name not in compared
        ]
    return outcome


def write_pages(results: Results) -> None:
    """Write the figures, the missed targets and the cost model of docs/lab/performance.md."""
    page = table.between(table.PAGE.read_text(), "table", table.table(BENCHMARKS, results))
    page = table.between(page, "missed", table.missed(BENCHMARKS, results))
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
        "mode", choices=("quick", "full", "table"), help="table: write the pages again, run nothing"
    )
    parser.add_argument("scripts", nargs="*", help="of these benchmarks alone")
    parser.add_argument("--keep", action="store_true", help="add the ratios to the baseline, do not compare")
    given = parser.parse_intermixed_args()
    results, outcome = Results(), Outcome()
    if given.mode != "table":
        benchmarks = chosen(given.scripts, given.mode)
        suite = Suite(given.mode, results, regression.BASELINE, given.keep)
        outcome = asyncio.run(run_all(benchmarks, suite))
    write_pages(results)
    for name, value in outcome.worse.items():
        print(f"WORSE: {name} is {value:.3g}, median of {regression.TRIES}")
    for name in outcome.unguarded:
        print(f"NO BASELINE: {name} has fewer than {regression.LEAST_KEPT} values, and is not compared")
    for script, said in outcome.failed.items():
        print(f"FAILED: {script}: {said.splitlines()[0]}")
    summary = {"benchmark": "run", "mode": given.mode, "failed": sorted(outcome.failed)}
    print(json.dumps(summary | {"worse": outcome.worse, "seconds": outcome.seconds}))
    sys.exit(bool(outcome.worse or outcome.failed))


if __name__ == "__main__":
    main()

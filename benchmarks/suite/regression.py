"""When is a ratio worse than it was? 20 % worse than the baseline's median, outside its spread, in the median of three.

Wall times are another machine's next time; ratios to a peer, to a bare loop or to a bound are not. The baseline has the
values of each ratio as measured on one state that was accepted, at least three of them.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.figures import Benchmark, Values
from benchmarks.suite.process import ROOT

BASELINE = ROOT / "benchmarks" / "baseline.json"
WORSE = 0.2
MOST_KEPT = 9
TRIES = 3
Measured = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The stored values of one ratio.

    Example: Baseline((1.0, 1.1, 1.2)) finds 1.3 within 20 % of 1.1, and 1.4 worse; of Baseline((1.0, 1.1, 1.5)) 1.4 lies
    in the spread.
    """

    values: tuple[float, ...]
    more_is_better: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def bound(self) -> float:
        """The worst that passes."""
        if self.more_is_better:
            return min(self.median * (1.0 - WORSE), *self.values)
        return max(self.median * (1.0 + WORSE), *self.values)

    def is_worse(self, value: float) -> bool:
        return value < self.bound if self.more_is_better else value > self.bound


def ratios(benchmark: Benchmark, values: Values) -> dict[str, float]:
    """All ratios of one run of a script, by `SCRIPT: KEY` or `SCRIPT: KEY / PEER`."""
    return {
        f"{benchmark.script}: {name}": ratio
        for figure in benchmark.figures
        for name, ratio in figure.ratios(values).items()
    }


def better_when_more(benchmark: Benchmark) -> set[str]:
    """Which of a benchmark's ratios are better when they are more."""
    keys = {figure.key for figure in benchmark.figures if figure.more_is_better}
    return {f"{benchmark.script}: {key}" for key in keys}


def baselines(stored: Mapping[str, Sequence[float]], benchmark: Benchmark) -> dict[str, Baseline]:
    """A benchmark's stored ratios."""
    more = better_when_more(benchmark)
    return {
        name: Baseline(tuple(values), name.partition(" / ")[0] in more)
        for name, values in stored.items()
        if name.startswith(f"{benchmark.script}: ") and values
    }


def suspects(found: Measured, stored: Mapping[str, Baseline]) -> list[str]:
    """The ratios that are worse than their baseline allows; those without a baseline are none."""
    return [name for name, value in found.items() if name in stored and stored[name].is_worse(value)]


def regressions(tries: Sequence[Measured], stored: Mapping[str, Baseline]) -> dict[str, float]:
    """The ratios whose median over all tries is worse than allowed, with that median."""
    names = {name for found in tries for name in found}
    medians = {name: statistics.median(each[name] for each in tries if name in each) for name in names}
    return {name: medians[name] for name in sorted(suspects(medians, stored))}


def read_baseline(path: Path) -> dict[str, list[float]]:
    """The stored values by name; none where the file is not."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def keep(found: Measured, path: Path) -> None:
    """Add a run's ratios to the stored ones, of which the newest nine stay."""
    stored = read_baseline(path)
    for name, value in found.items():
        stored[name] = [*stored.get(name, []), float(f"{value:.4g}")][-MOST_KEPT:]
    path.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")

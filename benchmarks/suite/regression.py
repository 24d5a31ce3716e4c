"""When is a ratio worse than it was? 20 % worse than the baseline's median, outside its spread, in the median of three.

Wall times are another machine's next time; ratios to a peer, to a bare loop or to a bound are not. The baseline has the
values that each ratio had in runs whose state was accepted, those of quick runs and of full ones apart. Where it has fewer
than three of a ratio, there is no spread to be outside of: that ratio is not compared, and the command reports it. Figures
without noise need no baseline: their target is their bound (`Figure.is_exact`).
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.figures import Benchmark, Mode, Values
from benchmarks.suite.process import ROOT

BASELINE = ROOT / "benchmarks" / "baseline.json"
WORSE = 0.2
LEAST_KEPT, MOST_KEPT = 3, 9
TRIES = 3
Measured = Mapping[str, float]
Stored = Mapping[str, Sequence[float]]
"""Values of a mode by ratio."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The stored values of one ratio.

    Example: Baseline((1.0, 1.1, 1.2)) finds 1.3 within 20 % of 1.1, and 1.4 worse; in Baseline((1.0, 1.1, 1.5)) 1.4 is
    within the spread.
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


def ratios(benchmark: Benchmark, values: Values, mode: Mode) -> dict[str, float]:
    """All ratios of one run of a script, by `SCRIPT: KEY` or `SCRIPT: KEY / PEER`."""
    return {
        f"{benchmark.script}: {name}": ratio
        for figure in benchmark.figures
        for name, ratio in figure.ratios(values, mode).items()
        if ratio is not None
    }


def names(benchmark: Benchmark, mode: Mode) -> list[str]:
    """What the ratios of a run of a mode are called."""
    return [f"{benchmark.script}: {name}" for each in benchmark.figures for name in each.ratios({}, mode)]


def baselines(stored: Stored, benchmark: Benchmark, mode: Mode) -> dict[str, Baseline]:
    """Those of a benchmark's ratios that are compared."""
    more = {f"{benchmark.script}: {each.key}" for each in benchmark.figures if each.more_is_better}
    return {
        name: Baseline(tuple(stored[name]), name.partition(" / ")[0] in more)
        for name in names(benchmark, mode)
        if len(stored.get(name, ())) >= LEAST_KEPT
    }


def suspects(found: Measured, stored: Mapping[str, Baseline]) -> list[str]:
    """The ratios that are worse than their baseline allows; those without a baseline are none."""
    return [name for name, value in found.items() if name in stored and stored[name].is_worse(value)]


def regressions(tries: Sequence[Measured], stored: Mapping[str, Baseline]) -> dict[str, float]:
    """The ratios whose median over all tries is worse than allowed, with that median."""
    found = {name for each in tries for name in each}
    medians = {name: statistics.median(each[name] for each in tries if name in each) for name in found}
    return {name: medians[name] for name in sorted(suspects(medians, stored))}


def read_baseline(path: Path, mode: Mode) -> dict[str, list[float]]:
    """The stored values of a mode by name; none where the file is not."""
    return dict(_read(path).get(mode, {}))


def keep(found: Measured, path: Path, mode: Mode) -> None:
    """Add a run's ratios to the stored ones of its mode, of which the newest nine stay."""
    every = _read(path)
    stored = every.setdefault(mode, {})
    for name, value in found.items():
        stored[name] = [*stored.get(name, []), float(f"{value:.4g}")][-MOST_KEPT:]
    path.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")


def _read(path: Path) -> dict[str, dict[str, list[float]]]:
    return dict(json.loads(path.read_text())) if path.exists() else {}

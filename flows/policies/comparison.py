"""What a replay is compared by: which versions, which metrics of a step, which bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from tasks.errors import ConfigError
from tasks.store.layout import RunFolder
from tasks.store.reader import scan
from tasks.train.protocol import StepResult

COMPARED = ("train/loss", "train/gradient_norm")
"""Metrics that a replayed step is compared by."""


@dataclass(frozen=True, slots=True)
class Versions:
    """From which policy version to which; `first` is 0, the start model, or has a checkpoint, and `last` has one."""

    first: int
    last: int


def versions_of(checkpoints: list[int], first: int | None, last: int | None) -> Versions:
    """What to replay; by default from the last checkpoint but one to the last.

    Example: of checkpoints 10, 20 and 30 it is 20 to 30; with first 0, 0 to 30; with last 10, 0 to 10.

    Raises:
        ConfigError: there is no checkpoint at all, or none of a version asked for, or nothing between the two.
    """
    if not checkpoints and last is None:
        remedy = "a replay is compared with a checkpoint, and the run has none; train it up to one first"
        raise ConfigError("checkpoints", checkpoints, remedy)
    there_are = f"; there are checkpoints of {', '.join(map(str, checkpoints)) or 'no version'}"
    if last is None:
        last = max(checkpoints)
    if last not in checkpoints:
        raise ConfigError("--to", last, f"there is no checkpoint of that version to compare with{there_are}")
    if first is None:
        first = max((each for each in checkpoints if each < last), default=0)
    if first and first not in checkpoints:
        raise ConfigError("--from", first, f"there is no checkpoint of that version to begin from{there_are}")
    if first >= last:
        raise ConfigError("--from", first, f"give a version below {last}, to which it is replayed{there_are}")
    return Versions(first, last)


@dataclass(frozen=True, slots=True)
class StepComparison:
    """A step's metrics, as stored and as replayed; a metric that one of them lacks is absent there."""

    step: int
    stored: Mapping[str, float]
    replayed: Mapping[str, float]

    @classmethod
    def of(cls, folder: RunFolder, result: StepResult) -> "StepComparison":
        """Read what is stored of the step that gave a result."""
        step = result.version - 1
        rows = scan(folder, "metrics", ["name", "env", "stat", "value"], step=step).collect().rows()
        found = {name: value for name, *told, value in rows if told == ["all", "mean"] and name in COMPARED}
        ours = {
            each.name: each.value
            for each in result.metrics
            if (each.env, each.stat) == ("all", "mean") and each.name in COMPARED
        }
        return cls(step, found, ours)

    @property
    def difference(self) -> str:
        """The first metric that is not the same; empty when all are. A step that is not measured yet has none.

        NaN is the same as NaN, which is the norm of a gradient that is not finite.
        """
        return next(
            (
                f"step {self.step}: {name} was {self.stored[name]}, is {self.replayed.get(name)}"
                for name in self.stored
                if not _is_same(self.stored[name], self.replayed.get(name))
            ),
            "",
        )


def _is_same(stored: float, replayed: float | None) -> bool:
    return replayed is not None and (stored == replayed or (math.isnan(stored) and math.isnan(replayed)))


def first_difference(
    steps: list[StepComparison], stored: Mapping[str, str], replayed: Mapping[str, str]
) -> str:
    """The first of all that is not the same: a step's metrics, or a tensor; empty when all are."""
    unlike = [name for name in sorted({*stored, *replayed}) if stored.get(name) != replayed.get(name)]
    tensors = f"{unlike[0]} is another, and {len(unlike) - 1} of {len(stored)} tensors more" if unlike else ""
    return next((step.difference for step in steps if step.difference), tensors)


def table_of(folder: RunFolder, steps: list[StepComparison]) -> Table:
    """The steps' metrics side by side."""
    table = Table(title=f"{folder.location}: replayed", title_justify="left")
    table.add_column("step", justify="right")
    for name in COMPARED:
        table.add_column(name, justify="right")
        table.add_column("again", justify="right")
    table.add_column("same")
    for step in steps:
        values = [each.get(name) for name in COMPARED for each in (step.stored, step.replayed)]
        cells = ["" if value is None else f"{value:.9g}" for value in values]
        table.add_row(str(step.step), *cells, "no" if step.difference else "yes")
    return table

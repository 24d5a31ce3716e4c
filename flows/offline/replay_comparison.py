"""The comparison of a replay with the stored run: versions, metrics of each step, digests of tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.train.service.answers import StepResult

# Metrics of a step that are compared.
COMPARED = ("train/loss", "train/gradient_norm")


def choose_versions(checkpoints: list[int], first: int | None, last: int | None) -> tuple[int, int]:
    """Return the start and end version of a replay; default: the last checkpoint but one, and the last.

    Both have a checkpoint, or the first is 0, the start model.

    Example: with checkpoints 10, 20 and 30 they are 20 and 30; with first=0, 0 and 30; with last=10, 0 and 10.

    Raises:
        ConfigError: there is no checkpoint, none of a requested version, or no step between the two.
    """
    if not checkpoints and last is None:
        remedy = "a replay is compared with a checkpoint, and the run has none yet; train further first"
        raise ConfigError("checkpoints", checkpoints, remedy)
    there_are = f"; there are checkpoints of {', '.join(map(str, checkpoints)) or 'no version'}"
    if last is None:
        last = max(checkpoints)
    if last not in checkpoints:
        raise ConfigError("--to", last, f"that version has no checkpoint to compare with{there_are}")
    if first is None:
        # The shortest replay that tests anything.
        first = max((each for each in checkpoints if each < last), default=0)
    if first and first not in checkpoints:
        raise ConfigError("--from", first, f"that version has no checkpoint to start from{there_are}")
    if first >= last:
        raise ConfigError("--from", first, f"give a version below {last}, the end version{there_are}")
    return first, last


@dataclass(frozen=True, slots=True)
class StepComparison:
    """The loss and the gradient norm of one step, as stored and as replayed, by metric name."""

    step: int
    stored: Mapping[str, float]
    replayed: Mapping[str, float]

    @classmethod
    def of(cls, folder: RunFolder, result: StepResult) -> "StepComparison":
        """Return the comparison of a replayed step's loss and gradient norm with the stored ones."""
        step = result.version - 1
        rows = scan(folder, "metrics", ["name", "env", "stat", "value"], step=step).collect().rows()
        found = {name: value for name, *kind, value in rows if kind == ["all", "mean"] and name in COMPARED}
        ours = {
            each.name: each.value
            for each in result.metrics
            if (each.env, each.stat) == ("all", "mean") and each.name in COMPARED
        }
        return cls(step, found, ours)

    @property
    def difference(self) -> str:
        """The first metric that differs, in words; empty if none does, or if the step has no stored metrics yet.

        NaN equals NaN: it is the norm of a gradient that is not finite.
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
    """Return the first metric or tensor that differs, in words; empty if none does.

    Args:
        steps: the replayed steps.
        stored: digest of each tensor in the checkpoint, by name.
        replayed: the same of the replayed weights and moments.
    """
    unlike = [name for name in sorted({*stored, *replayed}) if stored.get(name) != replayed.get(name)]
    tensors = f"{unlike[0]} differs, and {len(unlike) - 1} more of {len(stored)} tensors" if unlike else ""
    return next((step.difference for step in steps if step.difference), tensors)


def comparison_table(folder: RunFolder, steps: list[StepComparison]) -> Table:
    """Return a table of the loss and the gradient norm of each step, stored and replayed side by side.

    Its column "same" is empty for a step without stored metrics, which is not compared.
    """
    table = Table(title=f"{folder.location}: replayed", title_justify="left")
    table.add_column("step", justify="right")
    for name in COMPARED:
        table.add_column(name.removeprefix("train/").replace("_", " "), justify="right")
        table.add_column("again", justify="right")
    table.add_column("same")
    for step in steps:
        values = [each.get(name) for name in COMPARED for each in (step.stored, step.replayed)]
        cells = ["" if value is None else f"{value:.9g}" for value in values]
        same = "no" if step.difference else "yes"
        table.add_row(str(step.step), *cells, same if step.stored else "")
    return table

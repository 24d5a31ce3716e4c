"""The selection of rows by the options of `rollmill inspect`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.folders import PartitionValue, RunFolder
from rollmill.tasks.store.reader import Scan, list_steps, scan

Level: TypeAlias = Literal["steps", "groups", "trajectories", "costs"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from `low` to `high`, both included.

    Example: Interval.parse("--reward", "0.5:") is 0.5 and above; Interval.parse("--step", "3") is only 3.
    """

    low: float
    high: float

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Parse LOW:HIGH, where either end may be missing, or one number; raises ConfigError for anything else."""
        low, colon, high = text.partition(":")
        try:
            first = float(low) if low else float("-inf")
            last = (float(high) if high else float("inf")) if colon else first
        except ValueError:
            # An empty interval, so that the one error below is raised.
            first, last = 1.0, 0.0
        # This also refuses NaN, which is no number to compare with.
        if not text or not first <= last:
            raise ConfigError(
                option, text, "give one number, or LOW:HIGH, both included, such as 3:7 or 0.5:"
            )
        return cls(first, last)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def is_single(self) -> bool:
        """True if the interval contains exactly one number, because `low` equals `high`."""
        return self.low == self.high


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a run to show, in which order and how many; None and empty fields restrict nothing.

    Attributes:
        steps: steps; with `evaluations` policy versions.
        status: status of trajectories; for groups `trained`, or the reason why they are not.
        reward: reward of a trajectory, or mean reward of a group.
        scorer: NAME@VERSION; empty: the run's scorer.
        sort: column; a leading - sorts largest first.
        limit: largest number of rows; None: the default, 0: all.
    """

    level: Level | None = None
    steps: Interval | None = None
    group: int | None = None
    status: tuple[str, ...] = ()
    env: str = ""
    reward: Interval | None = None
    scorer: str = ""
    evaluations: bool = False
    sort: str = ""
    limit: int | None = None

    @property
    def resolved_level(self) -> Level:
        """The kind of rows to show: as selected, or as the other options imply."""
        if self.level:
            return self.level
        if self.group is not None or self.status or self.reward or self.scorer:
            return "trajectories"
        if self.steps and self.steps.is_single:
            return "trajectories" if self.evaluations else "groups"
        return "steps"

    def check(self) -> None:
        """Raise ConfigError if an option does not apply to the selected kind of rows."""
        level = self.resolved_level
        if level == "groups" and self.evaluations:
            raise ConfigError(
                "--groups", "--evaluations", "held-out trajectories have no groups; leave one out"
            )
        if level == "costs" and self.evaluations:
            raise ConfigError("--costs", "--evaluations", "evaluations are among the costs; leave one out")
        of_rows = {"--status": self.status, "--reward": self.reward, "--group": self.group is not None}
        for option, value in of_rows.items():
            if level in ("steps", "costs") and value:
                raise ConfigError(option, f"--{level}", f"is of trajectories and groups; leave --{level} out")
        if self.scorer and (level != "trajectories" or self.evaluations):
            raise ConfigError("--scorer", self.scorer, "is of --trajectories that were not held out")


def select_partitions(
    folder: RunFolder, dataset: str, key: str, asked: Interval | None, known: list[int] | None = None
) -> list[int] | None:
    """Return the steps (or versions) of a data set that are in `asked`, in order; None if `asked` is None.

    `known` are the steps (or versions) that the data set has, if they are listed already.

    Raises:
        ConfigError: none of the data set's steps (or versions) is in `asked`.
    """
    if asked is None:
        return None
    known = list_steps(folder, dataset) if known is None else known
    found = [value for value in known if value in asked]
    if not found:
        name = "version" if key == "version" else "step"
        has = f"it has {name}s {format_ranges(known)}" if known else f"it has no {dataset} yet"
        wanted = f"{asked.low:g}" if asked.is_single else f"{asked.low:g}:{asked.high:g}"
        raise ConfigError("--step", wanted, f"the run has no such {name}; {has}")
    return found


def scan_partitions(
    folder: RunFolder,
    dataset: str,
    columns: list[str],
    key: str,
    values: list[int] | None,
    scan: Scan = scan,
    **outer: PartitionValue,
) -> pl.LazyFrame:
    """Scan some columns of those partitions of a data set whose `key` has one of `values`; None: of all partitions."""
    if values is None:
        return scan(folder, dataset, columns, **outer)
    return pl.concat([scan(folder, dataset, columns, **outer, **{key: value}) for value in values])


def parse_names(option: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list; an empty text has no names; raises ConfigError for commas only."""
    names = tuple(each.strip() for each in text.split(",") if each.strip())
    if text and not names:
        raise ConfigError(option, text, "give names with commas between them")
    return names


def check_known(option: str, asked: str, known: Iterable[str]) -> None:
    """Raise ConfigError unless `asked` is one of the known values; the error lists them."""
    names = sorted(set(known))
    if asked not in names:
        raise ConfigError(option, asked, f"the run has {', '.join(names) or 'none yet'}")


def format_ranges(numbers: list[int]) -> str:
    """Format sorted numbers as ranges. Example: 0, 1, 2, 5 and 6 give "0 to 2, 5 to 6"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in found)


def parse_level(*, steps: bool, groups: bool, trajectories: bool, costs: bool) -> Level | None:
    """Return the one of the kinds of rows that is True; None if none is; raise ConfigError if several are."""
    named: dict[Level, bool] = {
        "steps": steps,
        "groups": groups,
        "trajectories": trajectories,
        "costs": costs,
    }
    asked = [level for level, is_asked in named.items() if is_asked]
    if len(asked) > 1:
        raise ConfigError(f"--{asked[1]}", f"--{asked[0]}", "give one of them")
    return asked[0] if asked else None

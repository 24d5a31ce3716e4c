"""Which rows `rollmill inspect` is asked for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import polars as pl

from tasks.errors import ConfigError
from tasks.store.layout import PartitionValue, RunFolder
from tasks.store.partitions import stored_steps
from tasks.store.reader import Scan, scan

Level: TypeAlias = Literal["steps", "groups", "trajectories"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from `low` to `high`, both included.

    Example: Interval.parse("--reward", "0.5:") is 0.5 and above; Interval.parse("--step", "3") is 3 alone.
    """

    low: float
    high: float

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Read LOW:HIGH, either end left out for none, or one number; ConfigError when it is neither."""
        low, colon, high = text.partition(":")
        try:
            first = float(low) if low else float("-inf")
            last = (float(high) if high else float("inf")) if colon else first
        except ValueError:
            first, last = 1.0, 0.0
        if not text or not first <= last:
            raise ConfigError(
                option, text, "give one number, or LOW:HIGH, both included, such as 3:7 or 0.5:"
            )
        return cls(first, last)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def is_single(self) -> bool:
        """True for one number."""
        return self.low == self.high


@dataclass(frozen=True, slots=True)
class Selection:
    """What is asked for; None and empty: all.

    Attributes:
        steps: with `evaluations`, policy versions.
        status: of trajectories; of groups `trained`, or the reason why they are not.
        reward: of a trajectory, or a group's mean.
        scorer: NAME@VERSION; empty: the run's own.
        sort: column; with - before it, largest first.
        limit: most rows; None: what is natural, 0: all.
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
        """The level asked for, or the one that the other options are about."""
        if self.level:
            return self.level
        if self.group is not None or self.status or self.reward or self.scorer:
            return "trajectories"
        if self.steps and self.steps.is_single:
            return "trajectories" if self.evaluations else "groups"
        return "steps"

    def check(self) -> None:
        """Refuse options that the level does not have; ConfigError says which has them."""
        level = self.resolved_level
        if level == "groups" and self.evaluations:
            raise ConfigError(
                "--groups", "--evaluations", "held-out trajectories have no groups; leave one out"
            )
        of_rows = {"--status": self.status, "--reward": self.reward, "--group": self.group is not None}
        for option, value in of_rows.items():
            if level == "steps" and value:
                raise ConfigError(option, "--steps", "is of trajectories and groups; leave --steps out")
        if self.scorer and (level != "trajectories" or self.evaluations):
            raise ConfigError("--scorer", self.scorer, "is of --trajectories that were not held out")


def partitions(folder: RunFolder, dataset: str, key: str, asked: Interval | None) -> list[int] | None:
    """The steps (or versions) of a data set among those asked for, in order; None when all are asked for.

    Raises:
        ConfigError: it has none of them.
    """
    if asked is None:
        return None
    known = stored_steps(folder, dataset)
    found = [value for value in known if value in asked]
    if not found:
        name = "version" if key == "version" else "step"
        has = f"it has {name}s {spans(known)}" if known else f"it has no {dataset} yet"
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
    """A query over some columns of chosen partitions; the others are not opened. None: all of them."""
    if values is None:
        return scan(folder, dataset, columns, **outer)
    return pl.concat([scan(folder, dataset, columns, **outer, **{key: value}) for value in values])


def names_in(option: str, text: str) -> tuple[str, ...]:
    """The names of a list with commas; none where it is empty; ConfigError when it has commas alone."""
    names = tuple(each.strip() for each in text.split(",") if each.strip())
    if text and not names:
        raise ConfigError(option, text, "give names with commas between them")
    return names


def known_value(option: str, asked: str, known: Iterable[str]) -> None:
    """ConfigError unless `asked` is among the known values, which it names."""
    names = sorted(set(known))
    if asked not in names:
        raise ConfigError(option, asked, f"the run has {', '.join(names) or 'none yet'}")


def spans(numbers: list[int]) -> str:
    """Sorted numbers in words. Example: 0, 1, 2, 5 and 6 are "0 to 2, 5 to 6"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in found)


def level_of(*, steps: bool, groups: bool, trajectories: bool) -> Level | None:
    """The level that options name; None: none does; ConfigError when several do."""
    named: dict[Level, bool] = {"steps": steps, "groups": groups, "trajectories": trajectories}
    asked = [level for level, is_asked in named.items() if is_asked]
    if len(asked) > 1:
        raise ConfigError(f"--{asked[1]}", f"--{asked[0]}", "give one of them")
    return asked[0] if asked else None

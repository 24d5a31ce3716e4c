"""Metrics as typed values with their own reduction, by environment and `all`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Stat = Literal["value", "mean", "max"]

ALL = "all"


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of a step, as a row of the `metrics` data set.

    Attributes:
        name: stage/metric, with its unit as suffix.
        env: environment, or `all`.
        stat: value (a sum, or a single value), mean or max.
        value: the value; NaN for a mean of nothing.
    """

    name: str
    env: str
    stat: Stat
    value: float


@dataclass(frozen=True, slots=True)
class Reduced:
    """A value that can be joined with another of its kind, in any order.

    Attributes:
        stat: how two are joined: `value` adds totals, `mean` totals and counts, `effective` squares too, `max` takes the larger total.
        total: the sum so far, or the largest value.
        count: how many values a mean is over.
        squares: with `effective`, whose result is the share of `count` that values of this sum and this sum of
            squares are worth, total^2 / (count squares): 1 when all are alike, 1 / count when one is all.

    Example: Reduced("mean", 6.0, 2) joined with Reduced("mean", 0.0, 1) is Reduced("mean", 6.0, 3), whose result is 2.0.
    """

    stat: Stat | Literal["effective"]
    total: float
    count: float = 1.0
    squares: float = 0.0

    def join(self, other: "Reduced") -> "Reduced":
        """The same over the values of both; ValueError when they are of different kinds."""
        if self.stat != other.stat:
            raise ValueError(f"a {self.stat} cannot be joined with a {other.stat}")
        if self.stat == "max":
            return Reduced(self.stat, max(self.total, other.total))
        return Reduced(
            self.stat, self.total + other.total, self.count + other.count, self.squares + other.squares
        )

    @property
    def result(self) -> float:
        """The value that is reported."""
        if self.stat == "effective":
            return self.total**2 / (self.count * self.squares) if self.squares else math.nan
        if self.stat != "mean":
            return self.total
        return self.total / self.count if self.count else math.nan


class MetricTable:
    """Values by (name, environment), gathered in parts and joined."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], Reduced] = {}

    def add(self, name: str, value: Reduced, env: str | None = None) -> None:
        """Join a value into its environment and `all`; without an environment, into `all` alone."""
        for key in {(name, env or ALL), (name, ALL)}:
            self._values[key] = self._values[key].join(value) if key in self._values else value

    def join(self, others: Iterable["MetricTable"]) -> None:
        """Take in the values of other tables, other ranks' for example."""
        for other in others:
            for key, value in other._values.items():
                self._values[key] = self._values[key].join(value) if key in self._values else value

    def metrics(self) -> list[Metric]:
        """What is reported, in order of name and environment."""
        return [
            Metric(name, env, "value" if each.stat == "effective" else each.stat, each.result)
            for (name, env), each in sorted(self._values.items())
        ]

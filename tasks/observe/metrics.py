"""Metrics as typed values with their own reduction, by environment and `all`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Stat = Literal["value", "mean", "std", "min", "max"]
Kind = Literal["value", "mean", "max", "effective", "distribution"]

ALL = "all"
"""In the column `env`: all environments together. No environment may be called that."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of a step, as a row of the `metrics` data set.

    Attributes:
        name: stage/metric, with its unit as suffix.
        env: environment, or `all`.
        stat: value (a sum, or a single value), mean, std (of the population), min or max.
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
        kind: how two are joined: `value` adds totals, `mean` totals and counts, `effective` squares too, `max` takes
            the larger total, `distribution` joins all there is.
        total: the sum so far, or the largest value.
        count: how many values a mean is over.
        squares: sum of the squares. With `effective` the result is the share of `count` that values of this sum and
            this sum of squares are worth, total^2 / (count squares): 1 when all are alike, 1 / count when one is all.
        least: with `distribution`, the least value.
        most: with `distribution`, the largest value.

    Example: Reduced("mean", 6.0, 2) joined with Reduced("mean", 0.0, 1) is Reduced("mean", 6.0, 3), whose result is 2.0.
    """

    kind: Kind
    total: float
    count: float = 1.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def join(self, other: "Reduced") -> "Reduced":
        """The same over the values of both; ValueError when they are of different kinds."""
        if self.kind != other.kind:
            raise ValueError(f"a {self.kind} cannot be joined with a {other.kind}")
        if self.kind == "max":
            return Reduced(self.kind, max(self.total, other.total))
        return Reduced(
            self.kind,
            self.total + other.total,
            self.count + other.count,
            self.squares + other.squares,
            min(self.least, other.least),
            max(self.most, other.most),
        )

    @property
    def result(self) -> float:
        """The value that is reported; of a distribution its mean."""
        if self.kind == "effective":
            return self.total**2 / (self.count * self.squares) if self.squares else math.nan
        if self.kind in ("value", "max"):
            return self.total
        return self.total / self.count if self.count else math.nan

    @property
    def reported(self) -> dict[Stat, float]:
        """What is reported, by stat.

        Example: a distribution of 1, 1 and 4 has mean 2, std 1.414, min 1 and max 4.
        """
        if self.kind == "distribution":
            mean = self.result
            variance = self.squares / self.count - mean**2 if self.count else math.nan
            std = math.nan if math.isnan(variance) else math.sqrt(max(0.0, variance))
            return {"mean": mean, "std": std, "min": self.least, "max": self.most}
        return {"value" if self.kind == "effective" else self.kind: self.result}


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
            Metric(name, env, stat, value)
            for (name, env), each in sorted(self._values.items())
            for stat, value in each.reported.items()
        ]

"""Metrics as typed values with their own reduction, by environment and `all`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Stat = Literal["value", "mean", "std", "min", "max"]
Kind = Literal["value", "mean", "max", "effective", "distribution"]

# Value of the column `env` for all environments together; no environment may have this name.
ALL = "all"


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
    """A partial reduction of a metric; partial results of the same kind merge in any order.

    Attributes:
        kind: how two merge: `value` adds totals, `mean` totals and counts, `effective` squares too, `max` takes
            the larger total, `distribution` merges all fields.
        total: sum of the values, or the largest value for `max`.
        count: number of values.
        squares: sum of the squares. The result of `effective` is the effective sample size as a share of `count`,
            total^2 / (count * squares): 1 if all values are equal, 1 / count if one value is the whole sum.
        least: smallest value, for `distribution`.
        most: largest value, for `distribution`.

    Example: Reduced("mean", 6.0, 2) merged with Reduced("mean", 0.0, 1) is Reduced("mean", 6.0, 3); its result is 2.0.
    """

    kind: Kind
    total: float
    count: float = 1.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def join(self, other: "Reduced") -> "Reduced":
        """Merge two partial reductions; raises ValueError if their kinds differ."""
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a {other.kind} into a {self.kind}")
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
        """The reduced value; for a distribution its mean."""
        if self.kind == "effective":
            return self.total**2 / (self.count * self.squares) if self.squares else math.nan
        if self.kind in ("value", "max"):
            return self.total
        return self.total / self.count if self.count else math.nan

    @property
    def by_stat(self) -> dict[Stat, float]:
        """The reported values by stat.

        Example: a distribution of 1, 1 and 4 gives mean 2, std 1.414, min 1 and max 4.
        """
        if self.kind == "distribution":
            mean = self.result
            variance = self.squares / self.count - mean**2 if self.count else math.nan
            # The difference of two rounded numbers may be slightly negative.
            std = math.nan if math.isnan(variance) else math.sqrt(max(0.0, variance))
            return {"mean": mean, "std": std, "min": self.least, "max": self.most}
        return {"value" if self.kind == "effective" else self.kind: self.result}


@dataclass(slots=True)
class MetricTable:
    """Partial reductions by (metric name, environment).

    Attributes:
        values: the reductions.
    """

    values: dict[tuple[str, str], Reduced] = field(default_factory=dict)

    def add(self, name: str, value: Reduced, env: str | None = None) -> None:
        """Merge a value into its environment and into `all`; without an environment into `all` only."""
        for key in {(name, env or ALL), (name, ALL)}:
            self.values[key] = self.values[key].join(value) if key in self.values else value

    def join(self, others: Iterable["MetricTable"]) -> None:
        """Merge other tables into this one, such as those of other ranks."""
        for other in others:
            for key, value in other.values.items():
                self.values[key] = self.values[key].join(value) if key in self.values else value

    def metrics(self) -> list[Metric]:
        """Return the reported metrics, ordered by name and environment."""
        return [
            Metric(name, env, stat, value)
            for (name, env), each in sorted(self.values.items())
            for stat, value in each.by_stat.items()
        ]

"""What a benchmark is to the suite: a script, how it is called, and what its figures should reach."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["quick", "full"]
Values = Mapping[str, Any]
"""The JSON object that a script's last line is."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a figure is compared with: a peer, or the limit that nothing can pass.

    Attributes:
        name: of the peer, or of the limit.
        key: of its value in the same JSON object; empty when the figure is itself the ratio to it.
        in_quick: False where a quick run does not measure it.
    """

    name: str
    key: str = ""
    in_quick: bool = True


@dataclass(frozen=True, slots=True)
class KnownMiss:
    """A target that is missed for a reason that was measured.

    Attributes:
        bound: what the figure has to reach instead.
        reason: one sentence, for the list of missed targets.
    """

    bound: float
    reason: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a benchmark measures.

    Attributes:
        key: in the JSON object, names of nested objects before it: `ways/orjson/cpu_ms`.
        unit: `x` for a ratio, which a machine's speed does not change; else as printed.
        target: what it is to reach; None where it is only reported.
        known_miss: why it does not reach its target, and what it reaches; None: a full run that misses the target has failed.
        more_is_better: True when the target is the least, not the most.
        peer: what others have on the same work.
        limit: the bound.
        is_steady: False for a ratio that is not compared with the baseline, being lost in noise here.
        is_exact: True for one that has no noise at all: a quick run that misses its target has failed, too.
        in_quick: False where a quick run does not measure it.
    """

    key: str
    unit: str
    target: float | None = None
    more_is_better: bool = False
    peer: Comparison | None = None
    limit: Comparison | None = None
    is_steady: bool = True
    is_exact: bool = False
    in_quick: bool = True
    known_miss: KnownMiss | None = None

    def value(self, values: Values) -> float | None:
        """Its value in what a script has printed; None when it is not there."""
        return find(values, self.key)

    def ratio(self, values: Values, comparison: Comparison) -> float | None:
        """Return the ratio of the figure to its comparison, of one run of the script; None when either is missing.

        Example: cpu_ms 62 to a peer's 75 is 0.83.
        """
        own = self.value(values)
        other = find(values, comparison.key) if comparison.key else 1.0
        return None if own is None or not other else own / other

    def is_met(self, value: float) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self._reaches(value, self.target)

    def has_failed(self, value: float) -> bool:
        """Whether it misses its target, or the bound of a known miss."""
        bound = self.known_miss.bound if self.known_miss else self.target
        return bound is not None and not self._reaches(value, bound)

    def _reaches(self, value: float, bound: float) -> bool:
        return value >= bound if self.more_is_better else value <= bound

    def comparisons(self, mode: Mode) -> list[Comparison]:
        """Return the comparisons that a run of a mode measures."""
        return [
            comparison
            for comparison in (self.peer, self.limit)
            if comparison and comparison.key and (mode == "full" or comparison.in_quick)
        ]

    def ratios(self, values: Values, mode: Mode) -> dict[str, float | None]:
        """All that is compared with the baseline, by name: the figure if it is a ratio, else its ratios to others.

        Example: {"cpu_ms / orjson": 0.83}; None for one whose values are missing.
        """
        if not self.is_steady or self.is_exact or (mode == "quick" and not self.in_quick):
            return {}
        if self.unit == "x":
            return {self.key: self.value(values)}
        return {f"{self.key} / {each.name}": self.ratio(values, each) for each in self.comparisons(mode)}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script of this folder.

    Attributes:
        script: its module, `benchmarks.SCRIPT`.
        figures: in the order of the table.
        full: its arguments in `make bench-full`.
        quick: its arguments in `make bench`, which measure the same with fewer passes; None when that takes too long.
        timeout_s: after which it is ended; its own processes end with it.
    """

    script: str
    figures: tuple[Figure, ...]
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    timeout_s: float = 3600.0

    def arguments(self, mode: Mode) -> tuple[str, ...] | None:
        """Of a mode; None when it has no part in it."""
        return self.full if mode == "full" else self.quick

    def missing(self, values: Values, mode: Mode) -> list[str]:
        """What a run of a mode should have measured, and what it printed has not, or not as a finite number."""
        found = {key: find(values, key) for key in self._keys(mode)}
        return [key for key, value in found.items() if value is None or not math.isfinite(value)]

    def missed(self, values: Values, mode: Mode) -> list[str]:
        """The figures that miss their target, or the bound of a known miss, with both; in a quick run the exact ones alone."""
        found = [
            (each, value)
            for each in self.figures
            if (mode == "full" or each.is_exact) and (value := each.value(values)) is not None
        ]
        return [
            f"{each.key} is {value:g}, {_describe_bound(each)}"
            for each, value in found
            if each.has_failed(value)
        ]

    def _keys(self, mode: Mode) -> Iterator[str]:
        for figure in self.figures:
            if mode == "full" or figure.in_quick:
                yield figure.key
                yield from (comparison.key for comparison in figure.comparisons(mode))


def _describe_bound(figure: Figure) -> str:
    if figure.known_miss:
        return f"bound {figure.known_miss.bound:g} (target {figure.target:g})"
    return f"target {figure.target:g}"


def find(values: Values, key: str) -> float | None:
    """The number at a key, names of nested objects before it and a slash between; None when it is not there."""
    place: Any = values
    for name in key.split("/"):
        if not isinstance(place, Mapping) or name not in place:
            return None
        place = place[name]
    return float(place) if isinstance(place, int | float) else None

"""What a benchmark is to the suite: a script, how it is called, and what its figures should reach."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["quick", "full"]
Values = Mapping[str, Any]
"""The JSON object that a script's last line is."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What a figure is compared with: a peer, or the limit that nothing can pass.

    Attributes:
        name: of the peer, or of the limit.
        key: where its value lies in the same JSON object; empty when the figure is itself the ratio to it.
    """

    name: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a benchmark measures.

    Attributes:
        key: where it lies in the JSON object, names of nested objects before it: `ways/orjson/cpu_ms`.
        unit: `x` for a ratio, which a machine's speed does not change; else as printed.
        target: what it is to reach; None where it is only told.
        more_is_better: True when the target is the least, not the most.
        peer: what others have on the same work.
        limit: the bound.
        is_steady: False for a ratio that is not compared with the baseline, being lost in noise here.
    """

    key: str
    unit: str
    target: float | None = None
    more_is_better: bool = False
    peer: Beside | None = None
    limit: Beside | None = None
    is_steady: bool = True

    def value(self, values: Values) -> float | None:
        """Its value in what a script has printed; None when it is not there."""
        return find(values, self.key)

    def ratio(self, values: Values, beside: Beside) -> float | None:
        """The figure to what it is compared with, of one run of the script; None when either is not there.

        Example: of cpu_ms 62 beside a peer's 75 it is 0.83.
        """
        own = self.value(values)
        other = find(values, beside.key) if beside.key else 1.0
        return None if own is None or not other else own / other

    def is_met(self, value: float) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return value >= self.target if self.more_is_better else value <= self.target

    def ratios(self, values: Values) -> dict[str, float]:
        """All that is compared with the baseline, by name: the figure if it is a ratio, else its ratios to others.

        Example: {"cpu_ms / orjson": 0.83}.
        """
        if not self.is_steady:
            return {}
        if self.unit == "x":
            own = self.value(values)
            return {} if own is None else {self.key: own}
        found = {
            f"{self.key} / {beside.name}": self.ratio(values, beside)
            for beside in (self.peer, self.limit)
            if beside and beside.key
        }
        return {name: ratio for name, ratio in found.items() if ratio is not None}


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


def find(values: Values, key: str) -> float | None:
    """The number at a key, names of nested objects before it and a slash between; None when it is not there."""
    place: Any = values
    for name in key.split("/"):
        if not isinstance(place, Mapping) or name not in place:
            return None
        place = place[name]
    return float(place) if isinstance(place, int | float) else None

"""Seconds of a step by the name of what owned them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Adds up the seconds of named spans; a span's name is the metric `time/<name>_s`.

    Example: with clock.span("train"): ... makes clock.seconds == {"train": 0.2}.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Book the seconds inside to `name`, also when an error ends them."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

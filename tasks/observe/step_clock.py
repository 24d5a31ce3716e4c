"""The step's own line: its phases one after the other, as spans and as seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tasks.observe.spans import NS, OpenSpan, current_lane, within


class StepClock:
    """The spans of a step's own line, added up: a span's name is the metric `time/<name>_s`; a context manager.

    Inside, spans belong to the lane `step` of that step, and the whole of it is the span `step`.

    Example: with clock.span("train"): ... makes clock.seconds == {"train": 0.2}.
    """

    def __init__(self, step: int) -> None:
        self.seconds: dict[str, float] = {}
        self._within = within(step=step, lane="step")
        self._whole = OpenSpan("step")
        self._started = time.perf_counter_ns()

    def __enter__(self) -> Self:
        self._within.__enter__()
        if (line := current_lane()) is not None:
            line.recorder.begin_step(line)
        self._whole.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole.end()
        if (line := current_lane()) is not None:
            line.recorder.end_step()
        self._within.__exit__(None, None, None)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Book the seconds inside to `name`, also when an error ends them."""
        opened = OpenSpan(name)
        try:
            with opened:
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + opened.duration_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return (time.perf_counter_ns() - self._started) * NS

"""Spans of a flow: its start, the phases of each step, and its end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Self

import psutil

from rollmill.tasks.observe.spans import (
    NS,
    OpenSpan,
    P,
    Recorder,
    Result,
    TimedFunction,
    current_lane,
    recording,
    within,
)


class StepClock:
    """Context manager around a step: records its spans in the lane `step`, and adds their seconds up by name.

    The seconds become the metrics `time/<name>_s`. The whole block is the span `step`.

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

    def __exit__(self, *_: object) -> None:
        self._whole.end()
        if (line := current_lane()) is not None:
            line.recorder.end_step()
        self._within.__exit__(None, None, None)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the time inside as the span `name` and add it to `seconds`, also if an error ends it."""
        opened = OpenSpan(name)
        try:
            with opened:
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + opened.duration_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was created."""
        return (time.perf_counter_ns() - self._started) * NS


# Value of the column `process` for a run's flow.
FLOW = "flow"


@contextmanager
def record_command() -> Iterator[None]:
    """Record spans inside the `with` block, for a command that runs a flow; they start when its process started."""
    age_s = time.time() - psutil.Process().create_time()
    with recording(Recorder(FLOW, time.perf_counter_ns() - int(1e9 * age_s))):
        yield


def record_flow(flow: TimedFunction[P, Result]) -> TimedFunction[P, Result]:
    """Decorate a flow to record its spans; the time since its command began becomes the span `launching`."""

    @wraps(flow)
    async def record(*args: P.args, **kwargs: P.kwargs) -> Result:
        if (lane := current_lane()) is None:
            with recording(Recorder(FLOW)):
                return await flow(*args, **kwargs)
        lane.add("launching", lane.recorder.began, time.perf_counter_ns())
        return await flow(*args, **kwargs)

    return record


def current_recorder() -> Recorder:
    """Return the recorder of the current lane, or a new one if nothing is recorded."""
    lane = current_lane()
    return lane.recorder if lane is not None else Recorder(FLOW)

"""Spans: who had the seconds of a step, in which process, and what a wait was for."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

MOST_SPANS = 200_000
"""Spans that a recorder keeps until they are taken; the oldest go first, and are counted."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in one process, with one owner; a row of the data set `spans`.

    Spans of one lane lie inside one another or apart, never across: of nested ones the innermost is the owner.

    Attributes:
        process: `flow`, `trainer/RANK`, or a server's address.
        lane: one line of control in it: `step`, `main`, or a trajectory as GROUP.SAMPLE.
        name: what was done, as in docs/spans.md.
        step: the step that it was done for; -1 for none.
        started_ns: nanoseconds since 1970, by that process's machine.
        duration_ns: nanoseconds, by its monotonic clock.
        cause: of a wait: the name of what it was for, whoever holds the stopwatch, or the process waited for;
            else empty.

    The lane `step` of the flow has one span `step` around all others of each step, which ends where the next one's
    begins: the steps' spans leave no gap, so that a step's seconds can be added up.
    """

    process: str
    lane: str
    name: str
    step: int
    started_ns: int
    duration_ns: int
    cause: str = ""


class Recorder:
    """Keeps the spans of one process until they are taken; from any thread."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.n_lost = 0
        self._spans: deque[Span] = deque()

    def add(self, span: Span) -> None:
        """Keep a span, also one of another process that was told to this one."""
        if len(self._spans) >= MOST_SPANS:
            self._spans.popleft()
            self.n_lost += 1
        self._spans.append(span)

    def take(self) -> Sequence[Span]:
        """All spans so far, which are kept no longer."""
        taken = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken


@dataclass(frozen=True, slots=True)
class _Place:
    recorder: Recorder
    step: int
    lane: str


_place: ContextVar[_Place | None] = ContextVar("place", default=None)


@contextmanager
def recording(recorder: Recorder, *, step: int = -1, lane: str = "main") -> Iterator[None]:
    """Have spans that are opened inside, also by tasks begun there, go to a recorder."""
    token = _place.set(_Place(recorder, step, lane))
    try:
        yield
    finally:
        _place.reset(token)


@contextmanager
def within(*, step: int | None = None, lane: str | None = None) -> Iterator[None]:
    """Have spans that are opened inside belong to another step or lane of the same recorder."""
    place = _place.get()
    if place is None:
        yield
        return
    token = _place.set(
        _Place(
            place.recorder,
            place.step if step is None else step,
            place.lane if lane is None else lane,
        )
    )
    try:
        yield
    finally:
        _place.reset(token)


@contextmanager
def span(name: str, *, cause: str = "") -> Iterator[None]:
    """Book the time inside to `name`, also when an error ends it; nothing where nobody records."""
    place = _place.get()
    if place is None:
        yield
        return
    started_ns, started = time.time_ns(), time.perf_counter_ns()
    try:
        yield
    finally:
        duration = time.perf_counter_ns() - started
        place.recorder.add(
            Span(place.recorder.process, place.lane, name, place.step, started_ns, duration, cause)
        )


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
            with span(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

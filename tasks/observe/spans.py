"""Spans: which work the seconds of a step went to, in which process, and what each wait was for."""

import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")
Timed: TypeAlias = Coroutine[Any, Any, Result]
TimedFunction: TypeAlias = Callable[P, Timed[Result]]

# Lane of work that belongs to no step.
MAIN = "main"

# Most spans that a recorder buffers; beyond it the oldest are dropped and counted, so that memory does not grow without bound.
MOST_SPANS = 200_000

# Seconds in a nanosecond.
NS = 1e-9


class Span(NamedTuple):
    """A named interval of time in one process; a row of the data set `spans`.

    Two spans of one lane are nested or disjoint, never partly overlapping. The innermost span owns the time.

    Attributes:
        process: `flow`, `trainer/RANK`, or a server's address.
        lane: one sequence of work in the process: `step`, `main`, or a trajectory as GROUP.SAMPLE.
        name: the work, as listed in docs/reference/spans.md.
        step: the step the work was done for; -1 for none.
        started_ns: nanoseconds since 1970, by the clock of that process's machine.
        duration_ns: nanoseconds, by that process's monotonic clock.
        cause: for a wait, the name of the work or the process waited for; otherwise empty.

    In the flow's lane `step`, each step has one span `step` that encloses all others and ends where the next one
    begins. The steps therefore leave no gap, and the seconds of a step add up.
    """

    process: str
    lane: str
    name: str
    step: int
    started_ns: int
    duration_ns: int
    cause: str = ""


class Recorder:
    """Buffers the spans of one process until they are taken; safe to call from any thread.

    In the lane `main`, a span `start` covers the time before the first step and a span `end` the time after the last.

    Args:
        process: value of the column `process`.
        began: start of the recording as `time.perf_counter_ns`; None: now.

    Attributes:
        n_lost: spans that were dropped because the buffer was full.
        began: start of the recording as `time.perf_counter_ns`.
    """

    def __init__(self, process: str, began: int | None = None) -> None:
        self.process = process
        self.began = time.perf_counter_ns() if began is None else began
        self.n_lost = 0
        self._last_step_ended = 0
        self._spans: deque[Span] = deque()
        self._step_line: Lane | None = None
        self._step_watchers: list[Callable[[], None]] = []
        self._cuts: list[Callable[[], None]] = []
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    @property
    def n_waiting(self) -> int:
        """Number of spans in the buffer."""
        return len(self._spans)

    @property
    def step_does(self) -> str:
        """Name of the innermost open span of the lane `step`; empty between steps."""
        return self._step_line.doing if self._step_line is not None else ""

    def begin_step(self, line: "Lane") -> None:
        """Make `line` the lane `step` of the recorder from now on; the first call also records the span `start`."""
        # The time before the first step is the span `start`.
        if self._step_line is None:
            Lane(self, -1, MAIN).add("start", self.began, time.perf_counter_ns())
        self._step_line = line
        line.watchers = self._step_watchers

    def end_step(self) -> None:
        """Record that a step has ended; the span `end` starts here if no other step follows."""
        self._last_step_ended = time.perf_counter_ns()

    def end(self) -> None:
        """Close the recording: add the span `end`, or `start` if no step ever began."""
        now, main = time.perf_counter_ns(), Lane(self, -1, MAIN)
        if self._step_line is None:
            main.add("start", self.began, now)
        else:
            main.add("end", self._last_step_ended, now)

    def watch(self, look: Callable[[], None], cut: Callable[[], None]) -> None:
        """Register callbacks: `look` when a span of the lane `step` opens or ends, `cut` when `take` is called.

        `cut` can add the part of an open span until now, so that `take` returns it.
        """
        self._step_watchers.append(look)
        self._cuts.append(cut)

    def foreign_lane(self, process: str, name: str) -> "Lane":
        """Create a lane for spans of another process that this one measures; they get the step with which they are stored."""
        return Lane(self, -1, name, process)

    def add(self, span: Span) -> None:
        """Buffer a span of this process, or one that another process reported."""
        # By hand and not by deque's maxlen, so that dropped spans are counted.
        if len(self._spans) >= MOST_SPANS:
            self._spans.popleft()
            self.n_lost += 1
        self._spans.append(span)

    def take(self) -> Sequence[Span]:
        """Return all buffered spans and empty the buffer."""
        # Open waits are split first, so that a step's rows have all of its time.
        for cut in self._cuts:
            cut()
        taken = []
        # One by one: other threads may add spans meanwhile, and `list` of a deque that changes fails.
        while self._spans:
            taken.append(self._spans.popleft())
        return taken

    def since_1970(self, monotonic_ns: int) -> int:
        """Convert a `time.perf_counter_ns` value to nanoseconds since 1970."""
        # The offset is measured once: a wall clock that is adjusted meanwhile would make nested spans overlap.
        return monotonic_ns + self._offset_ns


class Lane:
    """A sequence of nested spans, and the stack of those that are open.

    Attributes:
        recorder: buffers the lane's spans.
        step: the step of its spans; -1 for none.
        name: value of the column `lane`.
        process: value of the column `process`.
        watchers: called whenever the innermost open span changes.
    """

    __slots__ = ("_open", "name", "process", "recorder", "step", "watchers")

    def __init__(self, recorder: Recorder, step: int, name: str, process: str = "") -> None:
        self.recorder, self.step, self.name = recorder, step, name
        self.process = process or recorder.process
        self.watchers: list[Callable[[], None]] = []
        self._open: list[str] = []

    @property
    def doing(self) -> str:
        """Name of the innermost open span; empty if none is open."""
        return self._open[-1] if self._open else ""

    def sibling(self, name: str) -> "Lane":
        """Create another lane of the same step."""
        return Lane(self.recorder, self.step, name)

    def add(self, name: str, started: int, ended: int, cause: str = "") -> None:
        """Record a span of this lane that has ended; both times are `time.perf_counter_ns` values."""
        recorder = self.recorder
        at = recorder.since_1970(started)
        recorder.add(Span(self.process, self.name, name, self.step, at, ended - started, cause))

    def push(self, name: str) -> None:
        """Put a span that begins on the stack of open spans."""
        self._open.append(name)
        for watcher in self.watchers:
            watcher()

    def pop(self, name: str) -> None:
        """Remove a span that ended from the stack of open spans."""
        if self._open[-1] == name:
            self._open.pop()
        else:
            # Concurrent tasks that share a lane end out of order; each should have had a lane.
            self._open.remove(name)
        for watcher in self.watchers:
            watcher()


_lane: ContextVar[Lane | None] = ContextVar("lane", default=None)


def current_lane() -> Lane | None:
    """Return the lane to which spans opened in this context belong; None if nothing is recorded."""
    return _lane.get()


@contextmanager
def recording(recorder: Recorder, *, step: int = -1, lane: str = MAIN) -> Iterator[None]:
    """Send spans opened inside the `with` block, and by tasks started in it, to `recorder`."""
    token = _lane.set(Lane(recorder, step, lane))
    try:
        yield
    finally:
        _lane.reset(token)


@contextmanager
def within(*, step: int | None = None, lane: str | None = None, process: str | None = None) -> Iterator[None]:
    """Record spans opened inside the `with` block under another step, lane or process; None keeps the current one.

    A task that runs concurrently with others needs a separate lane.
    """
    outer = _lane.get()
    if outer is None:
        yield
        return
    inner = Lane(
        outer.recorder,
        outer.step if step is None else step,
        outer.name if lane is None else lane,
        outer.process if process is None else process,
    )
    token = _lane.set(inner)
    try:
        yield
    finally:
        _lane.reset(token)


class OpenSpan:
    """A span that lasts for its `with` block, or from `begin` to `end`.

    Attributes:
        duration_s: seconds it lasted; 0 until it has ended.
    """

    __slots__ = ("_cause", "_lane", "_name", "_started", "duration_s")

    def __init__(self, name: str, cause: str = "") -> None:
        self._name, self._cause = name, cause
        self.duration_s = 0.0

    def __enter__(self) -> Self:
        return self.begin(_lane.get())

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, lane: Lane | None) -> Self:
        """Start the span in a lane; None records nothing."""
        self._lane = lane
        if lane is not None:
            lane.push(self._name)
        self._started = time.perf_counter_ns()
        return self

    def end(self) -> None:
        """End the span and record it."""
        ended, lane = time.perf_counter_ns(), self._lane
        self.duration_s = (ended - self._started) * NS
        if lane is not None:
            lane.pop(self._name)
            lane.add(self._name, self._started, ended, self._cause)


def span(name: str, *, cause: str = "") -> OpenSpan:
    """Return a context manager that records the time inside it as the span `name`, also if an error ends it.

    Example: with span("storing"): await writer.append(...)
    """
    return OpenSpan(name, cause)


def record_span(name: str) -> Callable[[TimedFunction[P, Result]], TimedFunction[P, Result]]:
    """Decorate a coroutine function: the time of each call is recorded as the span `name`.

    Example: @record_span("report")
    """

    def decorate(function: TimedFunction[P, Result]) -> TimedFunction[P, Result]:
        @wraps(function)
        async def call_in_span(*args: P.args, **kwargs: P.kwargs) -> Result:
            with OpenSpan(name):
                return await function(*args, **kwargs)

        return call_in_span

    return decorate


T = TypeVar("T")

# Shorter intervals (0.2 ms) are left to the enclosing span: there may be thousands of them.
LEAST_NS = 200_000


def add_short_span(name: str, started: int, cause: str = "") -> None:
    """Record the time since `started` (a `time.perf_counter_ns` value) as a span, unless it is shorter than LEAST_NS."""
    lane, ended = current_lane(), time.perf_counter_ns()
    if lane is not None and ended - started >= LEAST_NS:
        lane.add(name, started, ended, cause)


def time_items(given: Iterable[T], name: str) -> Iterator[T]:
    """Yield the given items and record the wait for each one as the span `name`."""
    items, end = iter(given), object()
    while True:
        started = time.perf_counter_ns()
        item = next(items, end)
        add_short_span(name, started)
        if item is end:
            return
        yield item  # type: ignore[misc]  # it is not the sentinel, so it is an item


def shift_spans(
    spans: Sequence[Span], since_ns: int, until_ns: int, asked: Sequence[Span] | None = None
) -> list[Span]:
    """Convert spans of another process to our clock, by the smallest shift that moves `asked` into the request's interval.

    The shift is 0 if they are in it already, as on one machine. Its error is at most the request's time on the network.

    Args:
        spans: of one process, or of several that share a clock.
        since_ns: time of our request, by our clock, in nanoseconds since 1970.
        until_ns: time of the response, by our clock, in nanoseconds since 1970.
        asked: the spans between request and response; None: all.

    Example: spans from 5 to 7 with a request from 10 to 13 are shifted by 5; with a request from 4 to 8, by 0.
    """
    asked = spans if asked is None else asked
    if not asked:
        return list(spans)
    least = since_ns - min(each.started_ns for each in asked)
    most = until_ns - max(each.started_ns + each.duration_ns for each in asked)
    # If the clocks run at different rates, the spans may last longer than the request: then the middle.
    shift = (least + most) // 2 if least > most else min(max(0, least), most)
    return [each._replace(started_ns=each.started_ns + shift) for each in spans]


def add_spans(spans: Iterable[Span]) -> None:
    """Add spans of other processes to the current recorder, if there is one."""
    if (lane := current_lane()) is not None:
        for each in spans:
            lane.recorder.add(each)

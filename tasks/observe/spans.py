"""Spans: who had the seconds of a step, in which process, and what a wait was for."""

import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")
Timed: TypeAlias = Coroutine[Any, Any, Result]
TimedFunction: TypeAlias = Callable[P, Timed[Result]]

MAIN = "main"
"""Lane of what is done for no step."""

MOST_SPANS = 200_000
"""Spans that a recorder keeps until they are taken; the oldest go first, and are counted."""

NS = 1e-9
"""Seconds of a nanosecond."""


class Span(NamedTuple):
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
    """Keeps the spans of one process until they are taken; from any thread.

    Around the steps' own spans go `start`, until the first one, and `end`, since the last, in the lane `main`.

    Args:
        process: as in the column of that name.
        began: moment of `time.perf_counter_ns`; None: now.

    Attributes:
        n_lost: spans that were let go of since too many were kept.
        began: when what is recorded began.
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
        """Spans that are kept until they are taken."""
        return len(self._spans)

    @property
    def step_does(self) -> str:
        """Name of the innermost span that is open in the lane `step`; empty between steps."""
        return self._step_line.doing if self._step_line is not None else ""

    def begin_step(self, line: "Lane") -> None:
        """Take a lane for the step's own line from now on."""
        if self._step_line is None:
            Lane(self, -1, MAIN).add("start", self.began, time.perf_counter_ns())
        self._step_line = line
        line.watchers = self._step_watchers

    def end_step(self) -> None:
        """Note that a step is over, which may have been the last."""
        self._last_step_ended = time.perf_counter_ns()

    def end(self) -> None:
        """Note that all is over; what had no step was a start."""
        now, main = time.perf_counter_ns(), Lane(self, -1, MAIN)
        if self._step_line is None:
            main.add("start", self.began, now)
        else:
            main.add("end", self._last_step_ended, now)

    def watch(self, look: Callable[[], None], cut: Callable[[], None]) -> None:
        """Call `look` whenever `step_does` changes, and `cut` before spans are taken: what is open may add its part."""
        self._step_watchers.append(look)
        self._cuts.append(cut)

    def lane_of(self, process: str, name: str) -> "Lane":
        """A lane of another process, as this one sees it; its spans belong to the step that they are stored with."""
        return Lane(self, -1, name, process)

    def add(self, span: Span) -> None:
        """Keep a span, also one of another process that was told to this one."""
        if len(self._spans) >= MOST_SPANS:
            self._spans.popleft()
            self.n_lost += 1
        self._spans.append(span)

    def take(self) -> Sequence[Span]:
        """All spans so far, which are kept no longer."""
        for cut in self._cuts:
            cut()
        taken = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken

    def since_1970(self, monotonic_ns: int) -> int:
        """A moment of `time.perf_counter_ns` as nanoseconds since 1970.

        The clock is set once, and then goes by the monotonic one: spans that lie inside one another, or apart, stay so.
        """
        return monotonic_ns + self._offset_ns


class Lane:
    """One line of control, and what it does now.

    Attributes:
        recorder: keeps its spans.
        step: that they belong to.
        name: as in the column `lane`.
        process: as in that column.
        watchers: called whenever it does something else.
    """

    __slots__ = ("_open", "name", "process", "recorder", "step", "watchers")

    def __init__(self, recorder: Recorder, step: int, name: str, process: str = "") -> None:
        self.recorder, self.step, self.name = recorder, step, name
        self.process = process or recorder.process
        self.watchers: list[Callable[[], None]] = []
        self._open: list[str] = []

    @property
    def doing(self) -> str:
        """Name of the innermost span that is open; empty when none is."""
        return self._open[-1] if self._open else ""

    def beside(self, name: str) -> "Lane":
        """Another lane of the same step."""
        return Lane(self.recorder, self.step, name)

    def add(self, name: str, started: int, ended: int, cause: str = "") -> None:
        """Keep a span of this lane, from and to moments of `time.perf_counter_ns`."""
        recorder = self.recorder
        at = recorder.since_1970(started)
        recorder.add(Span(self.process, self.name, name, self.step, at, ended - started, cause))

    def opened(self, name: str) -> None:
        """Note that a span begins."""
        self._open.append(name)
        for watcher in self.watchers:
            watcher()

    def closed(self, name: str) -> None:
        """Note that a span is over."""
        if self._open[-1] == name:
            self._open.pop()
        else:  # of tasks side by side, which should have had lanes of their own
            self._open.remove(name)
        for watcher in self.watchers:
            watcher()


_lane: ContextVar[Lane | None] = ContextVar("lane", default=None)


def current_lane() -> Lane | None:
    """The lane that spans which are opened here belong to; None where nobody records."""
    return _lane.get()


@contextmanager
def recording(recorder: Recorder, *, step: int = -1, lane: str = MAIN) -> Iterator[None]:
    """Have spans that are opened inside, also by tasks begun there, go to a recorder."""
    token = _lane.set(Lane(recorder, step, lane))
    try:
        yield
    finally:
        _lane.reset(token)


@contextmanager
def within(*, step: int | None = None, lane: str | None = None, process: str | None = None) -> Iterator[None]:
    """Have spans that are opened inside belong to another step or lane of the same recorder, or to what another process does.

    A task that goes on beside others needs a lane of its own.
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
    """A span from its `with` to the end of that, or from `begin` to `end`.

    Attributes:
        duration_s: seconds that it took, once it is over.
    """

    __slots__ = ("_cause", "_lane", "_name", "_started", "duration_s")

    def __init__(self, name: str, cause: str = "") -> None:
        self._name, self._cause = name, cause
        self.duration_s = 0.0

    def __enter__(self) -> Self:
        return self.begin(_lane.get())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self, lane: Lane | None) -> Self:
        """Begin, in a lane."""
        self._lane = lane
        if lane is not None:
            lane.opened(self._name)
        self._started = time.perf_counter_ns()
        return self

    def end(self) -> None:
        """Be over."""
        ended, lane = time.perf_counter_ns(), self._lane
        self.duration_s = (ended - self._started) * NS
        if lane is not None:
            lane.closed(self._name)
            lane.add(self._name, self._started, ended, self._cause)


def span(name: str, *, cause: str = "") -> OpenSpan:
    """Book the time inside to `name`, also when an error ends it; nothing is kept where nobody records.

    Example: with span("storing"): await writer.append(...)
    """
    return OpenSpan(name, cause)


def spanned(name: str) -> Callable[[TimedFunction[P, Result]], TimedFunction[P, Result]]:
    """Book the time that a coroutine function takes to `name`.

    Example: @spanned("report")
    """

    def spanned_function(function: TimedFunction[P, Result]) -> TimedFunction[P, Result]:
        @wraps(function)
        async def timed(*args: P.args, **kwargs: P.kwargs) -> Result:
            with OpenSpan(name):
                return await function(*args, **kwargs)

        return timed

    return spanned_function

"""Describe what a thread executes, and sample that of an event loop's thread while the loop is late."""

import asyncio
import gc
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rollmill.tasks.observe.loop_lag import LoopLag

PACKAGE_ROOT = Path(__file__).parents[2]
OURS = (f"{PACKAGE_ROOT}/flows/", f"{PACKAGE_ROOT}/tasks/")
OF_OBSERVE = f"{PACKAGE_ROOT}/tasks/observe/"
# File and function from which the event loop calls each callback.
RUN_LOOP = ("/asyncio/events.py", "_run")
NUMBERED = re.compile(r"Task-\d+")
# Functions in which idle threads wait.
WAITING = frozenset({"wait", "select", "poll", "acquire", "get", "_worker", "read", "recv", "accept", "join"})


class StallSampler:
    """Counts what a stalled event loop's thread executes, sampled from a second thread.

    Args:
        lag: schedules a timer callback on the loop, the beat, and knows when the next one is due.
        every_s: seconds between two samples; the loop counts as stalled while its beat is at least so late.
    """

    def __init__(self, lag: LoopLag, every_s: float) -> None:
        self._lag, self._every_s = lag, every_s
        self._seen: Counter[str] = Counter()
        self._has_ended = threading.Event()

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Run the sampling thread for the running event loop inside the `with` block; enter it in the loop's thread."""
        watched = (asyncio.get_running_loop(), threading.get_ident())
        # A blocked loop cannot observe itself, so a second thread does.
        threading.Thread(target=self._watch, args=watched, name="stall-sampler", daemon=True).start()
        try:
            yield
        finally:
            self._has_ended.set()

    def take(self) -> Counter[str]:
        """Return how often each stack site was sampled since the last call."""
        seen, self._seen = self._seen, Counter()
        return seen

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        while not self._has_ended.is_set():
            late_s = time.monotonic() - self._lag.due_s
            if late_s >= self._every_s:
                self._seen[describe_thread(loop, thread_id)] += 1
            # An idle loop's next beat is due in the future: sleep until it would be late enough, and at most a second, since
            # `due_s` is infinite before the first beat.
            self._has_ended.wait(self._every_s if late_s >= 0.0 else min(self._every_s - late_s, 1.0))


def describe_thread(loop: asyncio.AbstractEventLoop, thread_id: int) -> str:
    """Describe what an event loop's thread executes: the task, our innermost function, the innermost function of all.

    A task or callback that contains no function of ours is described by its innermost function alone. If the thread waits
    in the loop itself, other threads that execute our code are named instead.

    Example: "task score-3 (score_rows) in tasks/score/scoring.py:40 score, json/decoder.py:353 raw_decode".
    """
    frames = thread_frames()
    frame = frames.get(thread_id)
    if frame is None:
        return "its thread is gone"
    task = asyncio.current_task(loop)
    if task is None and frame.f_code.co_name in WAITING:
        others = {
            _describe_frame(each)
            for key, each in frames.items()
            if key != thread_id and each.f_code.co_name not in WAITING and any(map(_is_ours, _outwards(each)))
        }
        return f"waiting{'; other threads in ' * bool(others)}{', and in '.join(sorted(others))}"
    if task is None:
        return f"a callback in {_describe_frame(frame)}"
    coroutine, name = task.get_coro(), task.get_name()
    # asyncio numbers tasks without a name: a number would make each task a new site.
    known = "a task" if NUMBERED.fullmatch(name) else f"task {name}"
    return f"{known} ({getattr(coroutine, '__qualname__', coroutine)}) in {_describe_frame(frame)}"


def thread_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by thread id."""
    # Before Python 3.12.3 a garbage collection inside `sys._current_frames` can deadlock the process: it runs while the
    # list of threads is locked, and a thread that starts or ends another one waits for that list (gh-106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _describe_frame(frame: FrameType) -> str:
    """Describe a frame by our innermost function and the innermost function of all."""
    # What observes the loop runs on it too, and would hide the code that it observes.
    frame = next((each for each in _outwards(frame) if not _is_of_observe(each)), frame)
    ours = next(filter(_is_ours, _outwards(frame)), None)
    return ", ".join(_frame_line(each) for each in dict.fromkeys((ours, frame)) if each is not None)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS) and not _is_of_observe(frame)


def _is_of_observe(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OF_OBSERVE)


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frame and its callers, up to the event loop's callback."""
    file, function = RUN_LOOP
    each: FrameType | None = frame
    # The frames below the callback are those of the command that runs the loop, which is ours and explains nothing.
    while each is not None and not (
        each.f_code.co_name == function and each.f_code.co_filename.endswith(file)
    ):
        yield each
        each = each.f_back


def _frame_line(frame: FrameType) -> str:
    """Describe a frame by file, line and function, such as "tasks/score/scoring.py:40 score"."""
    file = frame.f_code.co_filename
    is_ours = file.startswith(OURS)
    short = file.removeprefix(f"{PACKAGE_ROOT}/") if is_ours else "/".join(Path(file).parts[-2:])
    return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"

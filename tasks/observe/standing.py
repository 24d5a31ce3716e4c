"""Where a thread stands, in a few words."""

import asyncio
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

HOUSE = Path(__file__).resolve().parents[2]
OURS = (f"{HOUSE}/flows/", f"{HOUSE}/tasks/")
OF_THE_WATCH = f"{HOUSE}/tasks/observe/"
RUN_LOOP = ("/asyncio/events.py", "_run")
"""File and function in which the event loop begins each of its callbacks."""
NUMBERED = re.compile(r"Task-\d+")
WAITING = frozenset({"wait", "select", "poll", "acquire", "get", "_worker", "read", "recv", "accept", "join"})
"""Functions in which a thread that has nothing to do stands."""


def where_it_stands(loop: asyncio.AbstractEventLoop, thread_id: int) -> str:
    """What a loop's thread is doing: its task, the innermost function of ours, and the innermost of all.

    Of a task or a callback that is a library's alone it is the innermost function of all: who runs the loop did not
    begin it. When the thread stands in the loop itself, it is another one that has the interpreter, or none of ours: then those
    that stand in a function of ours are named.

    Example: "task score-3 (ScorePart.score) stood in tasks/score/part.py:40 score, json/decoder.py:353 raw_decode".
    """
    frames = frames_of_threads()
    frame = frames.get(thread_id)
    if frame is None:
        return "its thread is gone"
    task = asyncio.current_task(loop)
    if task is None and frame.f_code.co_name in WAITING:
        others = sorted({_place(each) for key, each in frames.items() if key != thread_id and _works(each)})
        return f"it waited{'; other threads stood in ' * bool(others)}{', and in '.join(others)}"
    return f"{_called(task)} stood in {_place(frame)}"


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the thread's number; no garbage is collected meanwhile.

    Before Python 3.12.3 a collection that begins in `sys._current_frames` runs with the interpreter's list of threads
    locked; another thread that comes to run then and begins or ends one waits for that list, holds the interpreter, and the process
    stands still for ever (gh-106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _called(task: "asyncio.Task[object] | None") -> str:
    """A task by its name, unless asyncio numbered it, and its coroutine: those that do the same are called the same."""
    if task is None:
        return "a callback"
    coroutine, name = task.get_coro(), task.get_name()
    known = "a task" if NUMBERED.fullmatch(name) else f"task {name}"
    return f"{known} ({getattr(coroutine, '__qualname__', coroutine)})"


def _place(frame: FrameType) -> str:
    """The innermost function of ours with what it called last; the innermost of all where none is ours."""
    frame = next((each for each in _outwards(frame) if not _is_of_the_watch(each)), frame)
    innermost = _line(frame)
    ours = next((each for each in _outwards(frame) if _is_ours(each)), None)
    return innermost if ours in (None, frame) else f"{_line(ours)}, {innermost}"


def _works(frame: FrameType) -> bool:
    """True for a thread that does something of ours, and does not wait."""
    return frame.f_code.co_name not in WAITING and any(_is_ours(each) for each in _outwards(frame))


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(OURS) and not _is_of_the_watch(frame)


def _is_of_the_watch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OF_THE_WATCH)


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    """The frame and those that called it, as far as the callback of the event loop that it began with."""
    each: FrameType | None = frame
    while each is not None and not _is_run_loop(each):
        yield each
        each = each.f_back


def _is_run_loop(frame: FrameType) -> bool:
    file, function = RUN_LOOP
    return frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file)


def _line(frame: FrameType) -> str:
    """Example: "tasks/score/part.py:40 score"."""
    file = frame.f_code.co_filename
    short = file.removeprefix(f"{HOUSE}/") if file.startswith(OURS) else "/".join(Path(file).parts[-2:])
    return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"

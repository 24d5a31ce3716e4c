"""SIGTERM to a flow's process, by which Prefect's worker cancels it: the flow ends what it began, in order."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from prefect.exceptions import TerminationSignal
from prefect.utilities import engine

PREFECTS = "_prefect_sigterm_handler"


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Inside, the first SIGTERM cancels the flow's task, further ones do nothing; to be used in a flow's coroutine.

    Prefect's own handler raises TerminationSignal wherever the main thread happens to be. A callback of the event loop
    swallows it, and so does code that catches everything, a scorer's call say: then the flow goes on until the worker kills
    it 30 s later. Elsewhere it becomes the error of whichever task was running.

    Prefect acknowledges a cancel only while SIGTERM is handled by what has that name in its module, so the handler has it as long.

    Raises:
        CancelledError: SIGTERM came, and all inside has ended; its cause is a TerminationSignal.
    """
    # A name of its own that Prefect may give up; without it, its way of ending is left as it is.
    prefects = getattr(engine, PREFECTS, None)
    in_main_thread = threading.current_thread() is threading.main_thread()
    task = asyncio.current_task()
    if task is None or not in_main_thread or signal.getsignal(signal.SIGTERM) is not prefects:
        yield
        return
    loop, came = asyncio.get_running_loop(), False

    def cancel(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if not came:
            came = True
            loop.call_soon_threadsafe(task.cancel)

    _install(cancel)
    try:
        yield
    except BaseException:
        if came:
            raise asyncio.CancelledError from TerminationSignal(signal.SIGTERM)
        raise
    finally:
        _install(prefects)


def _install(handler: Callable[[int, FrameType | None], object] | int | None) -> None:
    with engine._prefect_sigterm_bridge_lock:
        setattr(engine, PREFECTS, handler)
        signal.signal(signal.SIGTERM, handler)

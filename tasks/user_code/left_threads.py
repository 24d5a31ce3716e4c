"""Threads that user code in this process has left running: no thread can be stopped, and Python waits for them.

Example: an environment of the flow's process that calls `asyncio.to_thread(time.sleep, 1000)`.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

# Seconds that a process may live once its work is done: Prefect sends its last logs and events in them.
EXIT_TIMEOUT_S = 3.0

Result = TypeVar("Result")


def run_to_end(call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Call a coroutine function and return its result, as `asyncio.run` does, without waiting for threads that it has left."""

    async def run() -> Result:
        try:
            return await call()
        finally:
            # `asyncio.run` waits for the threads of the executor that is the default one at its end.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    return asyncio.run(run())


def exit_within(timeout_s: float, status: int) -> None:
    """Let this process end with an exit status within so many seconds, even if a thread or a function at exit is still running."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(timeout_s, leave)
    timer.daemon = True
    timer.start()

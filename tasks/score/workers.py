"""Where scorers run: worker processes that end with the flow, or threads."""

import asyncio
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def score_workers(n_workers: int) -> Executor | None:
    """Worker processes for CPU-bound scorers; None when there are to be none, and a thread serves."""
    if not n_workers:
        return None
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(n_workers, mp_context=context, initializer=end_with_parent)


def end_with_parent() -> None:
    """End this process when its parent is gone, killed included."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True, name="end-with-parent").start()


async def run_in(executor: Executor | None, work: Callable[[], Result], timeout_s: float) -> Result:
    """Run `work` in `executor`, or in a thread when that is None.

    Raises:
        TimeoutError: it took longer than `timeout_s` seconds.
    """
    async with asyncio.timeout(timeout_s):
        return await asyncio.get_running_loop().run_in_executor(executor, work)

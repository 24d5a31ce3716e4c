"""The process that writes a run's Markdown pages: reading tables and drawing curves takes CPU, and no step waits for it."""

import pickle
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from rollmill.tasks.errors import WorkerTimeoutError
from rollmill.tasks.processes.priority import lower_priority
from rollmill.tasks.processes.python_child import python_command
from rollmill.tasks.user_code.worker_main import Handler, serve
from rollmill.tasks.user_code.worker_process import WorkerProcess

COMMAND = tuple(python_command("rollmill.flows.prefect_integration.page_process"))
PAGE_TIMEOUT_S = 300.0
"""Limit for one page; that of a long run on S3 takes a minute."""

Page = TypeVar("Page")


class PageProcess:
    """Calls functions that write pages in a process with low priority, which the first call starts; an async context manager.

    A process that has died is replaced at the next call.
    """

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            await self._worker.stop()

    async def call(self, make: Callable[[], Page]) -> Page:
        """Call a function that can be pickled, such as a method of a StepPage, and return its result.

        Raises:
            WorkerError: the function raised an error or took too long, or the process died.
        """
        if self._worker is None or self._worker.is_dead:
            self._worker = await WorkerProcess.start(
                "the process of the run's pages", COMMAND, b"", log=None, stop_grace_s=0.0
            )
        worker = self._worker
        try:
            await worker.wait_until_ready(PAGE_TIMEOUT_S)
            page: Page = pickle.loads(await worker.receive(worker.send(pickle.dumps(make)), PAGE_TIMEOUT_S))
        except WorkerTimeoutError:
            self._worker = None
            await worker.stop()
            raise
        return page


def create_page_handler(start: bytes) -> Handler:
    """Lower this process's priority; returns the function that calls a pickled function and pickles its result."""
    lower_priority()
    return lambda make: pickle.dumps(pickle.loads(make)())


if __name__ == "__main__":
    serve(create_page_handler)

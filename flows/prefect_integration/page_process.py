"""The process that writes a run's Markdown pages: reading tables and drawing curves takes CPU, and no step waits for it."""

from typing import Literal, Self

import msgspec

from rollmill.flows.prefect_integration.run_pages import StepPage, draw_run_page
from rollmill.tasks.errors import WorkerTimeoutError
from rollmill.tasks.processes.priority import lower_priority
from rollmill.tasks.processes.python_child import python_command
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.user_code.worker_main import Handler, serve
from rollmill.tasks.user_code.worker_process import WorkerProcess

COMMAND = tuple(python_command("rollmill.flows.prefect_integration.page_process"))
PAGE_TIMEOUT_S = 300.0
"""Limit for one page; that of a long run on S3 takes a minute."""


class PageRequest(msgspec.Struct):
    """A page, or a part of it, that the process is to write.

    Attributes:
        part: `run`: the run's page; `around_time`, `time`: of a step's page, as the methods of StepPage.
        location: of the run's folder.
        step, scorer, viewer: see StepPage; the run's page has no step and no scorer.
    """

    part: Literal["run", "around_time", "time"]
    location: str
    viewer: str
    step: int = -1
    scorer: str = ""

    def write(self) -> list[str]:
        """Return the texts of the part: two for `around_time`, else one."""
        folder = RunFolder(self.location)
        if self.part == "run":
            return [draw_run_page(folder, self.viewer)]
        page = StepPage(folder, self.step, self.scorer, self.viewer)
        return list(page.around_time()) if self.part == "around_time" else [page.time()]


class PageProcess:
    """Writes pages in a process with low priority, which the first page starts; an async context manager.

    A process that has died is replaced at the next page.
    """

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._worker is not None:
            await self._worker.stop()

    async def write(self, request: PageRequest) -> list[str]:
        """Write a page, or a part of it; returns its texts.

        Raises:
            WorkerError: it cannot be written or took too long, or the process died.
        """
        if self._worker is None or self._worker.is_dead:
            self._worker = await WorkerProcess.start(
                "the process of the run's pages", COMMAND, b"", log=None, stop_grace_s=0.0
            )
        worker = self._worker
        try:
            await worker.wait_until_ready(PAGE_TIMEOUT_S)
            answer = await worker.receive(worker.send(msgspec.json.encode(request)), PAGE_TIMEOUT_S)
        except WorkerTimeoutError:
            self._worker = None
            await worker.stop()
            raise
        return msgspec.json.decode(answer, type=list[str])


def create_page_handler(start: bytes) -> Handler:
    """Lower this process's priority; returns the function that writes the page of an encoded PageRequest."""
    lower_priority()
    return lambda request: msgspec.json.encode(msgspec.json.decode(request, type=PageRequest).write())


if __name__ == "__main__":
    serve(create_page_handler)

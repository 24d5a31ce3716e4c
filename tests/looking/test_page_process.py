"""The process that writes a run's pages in Prefect's UI."""

import os
import time

import psutil
import pytest

from rollmill.flows.prefect_integration.page_process import PageProcess, PageRequest
from rollmill.flows.prefect_integration.run_pages import StepPage
from rollmill.tasks.errors import WorkerError
from rollmill.tasks.processes.priority import NICENESS
from rollmill.tasks.store.folders import RunFolder

pytestmark = pytest.mark.slow


def page_processes() -> list[psutil.Process]:
    """The processes that write pages, below this one."""
    children = psutil.Process().children(recursive=True)
    return [each for each in children if "page_process" in " ".join(each.cmdline()) and not each.children()]


async def test_pages_are_the_same_and_made_by_a_process_of_lower_priority(small_run: RunFolder) -> None:
    page = StepPage(small_run, 1, "addition@1")
    async with PageProcess() as pages:
        around = await pages.write(PageRequest("around_time", small_run.location, "", 1, "addition@1"))
        assert around == list(page.around_time())
        (whole,) = await pages.write(PageRequest("run", small_run.location, ""))
        assert "![curves](data:image/png;base64," in whole
        (process,) = page_processes()
        assert process.nice() == os.getpriority(os.PRIO_PROCESS, 0) + NICENESS


async def test_an_error_reaches_the_caller_and_the_process_writes_further_pages(small_run: RunFolder) -> None:
    async with PageProcess() as pages:
        with pytest.raises(WorkerError, match="spans"):
            await pages.write(PageRequest("time", small_run.location, "", 9))
        (first,) = page_processes()
        await pages.write(PageRequest("around_time", small_run.location, "", 1))
        assert page_processes() == [first]


async def test_a_process_that_was_killed_is_replaced_and_none_is_left(small_run: RunFolder) -> None:
    request = PageRequest("around_time", small_run.location, "", 1)
    async with PageProcess() as pages:
        await pages.write(request)
        (first,) = page_processes()
        first.kill()
        deadline = time.monotonic() + 20
        while first.is_running():
            assert time.monotonic() < deadline, "it was not killed"
        try:
            await pages.write(request)
        except WorkerError:
            await pages.write(request)  # the end of the first one was noticed by the request
        (second,) = page_processes()
        assert second != first
    assert not page_processes()

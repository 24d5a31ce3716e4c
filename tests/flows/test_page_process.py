"""The process that writes a run's pages in Prefect's UI."""

import os
import signal
import time
from functools import partial

import psutil
import pytest

from rollmill.flows.prefect_integration.page_process import PageProcess
from rollmill.tasks.errors import WorkerError
from rollmill.tasks.processes.priority import NICENESS

pytestmark = pytest.mark.slow


async def test_pages_are_made_in_another_process_of_lower_priority() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    async with PageProcess() as pages:
        assert await pages.call(os.getpid) != os.getpid()
        assert await pages.call(partial(os.getpriority, os.PRIO_PROCESS, 0)) == ours + NICENESS


async def test_an_error_reaches_the_caller_and_the_process_makes_further_pages() -> None:
    async with PageProcess() as pages:
        first = await pages.call(os.getpid)
        with pytest.raises(WorkerError, match="No such file"):
            await pages.call(partial(os.stat, "/no/such/file"))
        assert await pages.call(os.getpid) == first


async def test_a_process_that_was_killed_is_replaced_and_none_is_left() -> None:
    async with PageProcess() as pages:
        first = await pages.call(os.getpid)
        with pytest.raises(WorkerError):
            await pages.call(partial(os.kill, first, signal.SIGKILL))
        second = await pages.call(os.getpid)
        assert second != first
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, (first, second))):
        assert time.monotonic() < deadline, "a process is left"

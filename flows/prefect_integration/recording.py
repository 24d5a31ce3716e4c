"""How far Prefect's server is behind with the task runs of this flow run."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from prefect import get_client

from rollmill.flows.failure import PREFECT_ERRORS
from rollmill.flows.prefect_integration.background_requests import RECORD_TIMEOUT_S
from rollmill.flows.prefect_integration.flow_run import current_flow_run, in_flow_run
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.observe.spans import record_span, span

CHECK_INTERVAL_S = 0.5

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
"""Types of the states that a task run does not leave again."""


async def count_recorded(since: datetime) -> int:
    """Count the task runs of this flow run, begun after `since`, that Prefect's server has recorded as ended."""
    task_runs = {"state": {"type": {"any_": ENDED}}, "start_time": {"after_": since.isoformat()}}
    async with get_client() as client:
        body = {"flow_runs": in_flow_run(current_flow_run().id), "task_runs": task_runs}
        response = await client.request("POST", "/task_runs/count", json=body)
    return int(response.json())


class Recording:
    """Counts started task runs against those that Prefect's server has recorded as ended.

    The server's in-memory broker drops events beyond 10,000 queued ones, and a task run whose events are
    dropped stays "Running" for ever; so new rollouts are held back long before that.

    Args:
        count: says how many task runs that began after a time are recorded.
        warn: prints a warning.
        max_unrecorded: task runs that are not recorded yet, above which new rollouts are held back.
        hold_back_timeout_s: seconds without progress of the server after which the run continues all the same.
        record_timeout_s: seconds that the end of a run waits until everything is recorded.
    """

    def __init__(
        self,
        count: Callable[[datetime], Awaitable[int]] = count_recorded,
        warn: Callable[[str], None] = say,
        *,
        max_unrecorded: int = 2000,
        hold_back_timeout_s: float = 60.0,
        record_timeout_s: float = RECORD_TIMEOUT_S,
    ) -> None:
        self.n_started = 0
        self._count, self._warn, self._max_unrecorded = count, warn, max_unrecorded
        self._hold_back_timeout_s, self._record_timeout_s = hold_back_timeout_s, record_timeout_s
        self._since = datetime.now(UTC)
        self._recorded = 0
        self._waits_for_server = True
        self._asking = asyncio.Lock()

    def count_start(self) -> None:
        """Count a task run that begins."""
        self.n_started += 1

    async def hold_back(self) -> None:
        """Wait while more than `max_unrecorded` started task runs are not yet recorded by Prefect's server.

        The server is asked only if its last count leaves so many. If it records nothing for `hold_back_timeout_s`, that is reported once and the run continues: the UI may miss task runs, and nothing else is lost.
        """
        if not self._is_too_far_ahead:
            return
        with span("recording", cause="unrecorded task runs"):
            await self._catch_up()

    async def _catch_up(self) -> None:
        async with self._asking:
            # One asks, for all that wait.
            deadline = time.monotonic() + self._hold_back_timeout_s
            while self._is_too_far_ahead:
                before = self._recorded
                problem = await self._refresh(deadline)
                if self._recorded > before:
                    deadline = time.monotonic() + self._hold_back_timeout_s
                elif time.monotonic() >= deadline:
                    self._continue_without(problem)
                elif self._is_too_far_ahead:
                    await asyncio.sleep(CHECK_INTERVAL_S)

    @record_span("recording")
    async def wait_until_recorded(self) -> int:
        """Wait until the server has recorded every task run, for `record_timeout_s` at most.

        A server that fails to answer is asked again.

        Returns:
            How many it has not recorded.
        """
        deadline = time.monotonic() + self._record_timeout_s
        while True:
            await self._refresh(deadline)
            left = max(0, self.n_started - self._recorded)
            if not left or time.monotonic() >= deadline:
                return left
            await asyncio.sleep(CHECK_INTERVAL_S)

    @property
    def _is_too_far_ahead(self) -> bool:
        return self._waits_for_server and self.n_started - self._recorded > self._max_unrecorded

    def _continue_without(self, problem: str) -> None:
        self._waits_for_server = False
        self._warn(
            f"Prefect has recorded {self._recorded} of {self.n_started} task runs and no more within "
            f"{self._hold_back_timeout_s:g} s{problem}; the run continues, and "
            "the UI may miss some of its task runs"
        )

    async def _refresh(self, deadline: float) -> str:
        """Ask Prefect's server how many task runs it has recorded; returns the error in words, empty if there was none."""
        try:
            async with asyncio.timeout(max(CHECK_INTERVAL_S, deadline - time.monotonic())):
                self._recorded = await self._count(self._since)
        except PREFECT_ERRORS as error:
            return f" ({type(error).__name__}: {error})"
        return ""

"""How far Prefect's server is behind with the task runs of this flow run."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from prefect import get_client
from prefect.context import FlowRunContext

from flows.failure import PREFECT_ERRORS
from flows.ui.belonging import own_and_steps, run_flow_run
from flows.ui.progress import say
from tasks.observe.config import ObserveConfig
from tasks.observe.spans import span, spanned

CHECK_INTERVAL_S = 0.5

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
"""Types of the states that a task run does not leave again."""


async def count_recorded(since: datetime) -> int:
    """How many task runs of this flow run and its steps', begun after `since`, Prefect's server has recorded as ended."""
    task_runs = {
        "state": {"type": {"any_": ENDED}},
        "start_time": {"after_": since.isoformat()},
        "subflow_runs": {"exists_": False},  # the nodes of steps are no task runs of ours
    }
    async with get_client() as client:
        body = {"flow_runs": own_and_steps(run_flow_run().id), "task_runs": task_runs}
        response = await client.request("POST", "/task_runs/count", json=body)
    return int(response.json())


def forget_results() -> None:
    """Let go of what Prefect keeps of every task run until the flow run ends: the states of results, and assets.

    By them it draws which task had whose result as a parameter, and which assets came of it, which is so for none
    here. The states are 5 kB a step; the assets, an empty set for each task run, 0.3 kB each.
    """
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
        context.task_run_assets.clear()


class Recording:
    """Counts started task runs against those that the server has recorded as ended.

    The server's in-memory broker drops events beyond 10,000 queued ones, and a task run whose events are
    dropped stays "Running" for ever; so new rollouts are held back long before that.

    Args:
        config: how many may be ahead of the server, and how long to wait for it.
        count: says how many task runs that began after a time are recorded.
        warn: tells people something once.
    """

    def __init__(
        self,
        config: ObserveConfig,
        count: Callable[[datetime], Awaitable[int]] = count_recorded,
        warn: Callable[[str], None] = say,
    ) -> None:
        self.n_started = 0
        self._config, self._count, self._warn = config, count, warn
        self._since = datetime.now(UTC)
        self._recorded = 0
        self._waits_for_server = True
        self._asking = asyncio.Lock()

    def started(self) -> None:
        """Note that a task run begins."""
        self.n_started += 1

    async def hold_back(self) -> None:
        """Wait while too many task runs are not recorded; asks the server only when that can be so.

        When the server has recorded nothing for `observe.hold_back_timeout_s`, that is said once, and the run
        goes on: it loses a part of the picture, and nothing else.
        """
        if not self._is_too_far_ahead:
            return
        with span("recording", cause="unrecorded task runs"):
            await self._catch_up()

    async def _catch_up(self) -> None:
        async with self._asking:  # one asks, for all that wait
            deadline = time.monotonic() + self._config.hold_back_timeout_s
            while self._is_too_far_ahead:
                before = self._recorded
                problem = await self._refresh(deadline)
                if self._recorded > before:
                    deadline = time.monotonic() + self._config.hold_back_timeout_s
                elif time.monotonic() >= deadline:
                    self._go_on_without(problem)
                elif self._is_too_far_ahead:
                    await asyncio.sleep(CHECK_INTERVAL_S)

    @spanned("recording")
    async def wait_until_recorded(self) -> int:
        """Wait until the server has recorded every task run, for `observe.record_timeout_s` at most.

        A server that fails to answer is asked again.

        Returns:
            How many it has not recorded.
        """
        deadline = time.monotonic() + self._config.record_timeout_s
        while True:
            await self._refresh(deadline)
            left = max(0, self.n_started - self._recorded)
            if not left or time.monotonic() >= deadline:
                return left
            await asyncio.sleep(CHECK_INTERVAL_S)

    @property
    def _is_too_far_ahead(self) -> bool:
        return (
            self._waits_for_server and self.n_started - self._recorded > self._config.max_unrecorded_task_runs
        )

    def _go_on_without(self, problem: str) -> None:
        self._waits_for_server = False
        self._warn(
            f"Prefect has recorded {self._recorded} of {self.n_started} task runs and no more within "
            f"observe.hold_back_timeout_s = {self._config.hold_back_timeout_s:g}{problem}; the run goes on, and "
            "the UI may miss some of its task runs"
        )

    async def _refresh(self, deadline: float) -> str:
        """Ask the server; returns what was wrong, if anything."""
        try:
            async with asyncio.timeout(max(CHECK_INTERVAL_S, deadline - time.monotonic())):
                self._recorded = await self._count(self._since)
        except PREFECT_ERRORS as error:
            return f" ({type(error).__name__}: {error})"
        return ""

"""Requests to Prefect's server in the background, so that a run never waits for it."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from prefect import get_client
from prefect.client.orchestration import PrefectClient

from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.observe.spans import Lane, current_lane, span

# Longest wait for Prefect at the end of a run whose work is done.
RECORD_TIMEOUT_S = 60.0
# The same of a process that is to end at once.
EXIT_TIMEOUT_S = 3.0
# Most waiting requests; further ones are dropped.
MOST_WAITING = 200

Request = Callable[[PrefectClient], Awaitable[object]]


class BackgroundRequests:
    """Sends requests to Prefect's server one after another, in a separate task.

    The first failure is reported, with what the requests create: `what`, such as "the run's pages". The run continues without it.
    """

    def __init__(self, what: str) -> None:
        self.is_well, self._what = True, what
        self._requests: asyncio.Queue[Request | None] = asyncio.Queue()
        self._doing: Request | None = None
        self._has_warned = False
        self._tasks = asyncio.TaskGroup()

    async def start(self) -> None:
        """Start the task that sends requests."""
        await self._tasks.__aenter__()
        self._worker = self._tasks.create_task(self._work())

    async def close(self, last: Request, *, in_haste: bool) -> None:
        """Send the waiting requests and a last one, and end.

        Args:
            last: the last request.
            in_haste: wait at most EXIT_TIMEOUT_S seconds instead of RECORD_TIMEOUT_S, as after a failure of the server.
        """
        limit_s = EXIT_TIMEOUT_S if in_haste or not self.is_well else RECORD_TIMEOUT_S
        self._requests.put_nowait(last)
        self._requests.put_nowait(None)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wait([self._worker])
                if self._worker.cancelled():
                    # A signal cancels every task; what is left is made here.
                    await self._work()
        except TimeoutError:
            self.report_failure(f"its server did not handle all requests within {limit_s:g} s")
            self._worker.cancel()
        await self._tasks.__aexit__(None, None, None)

    def put(self, request: Request) -> None:
        """Queue a request, to be sent after those before it; dropped, with a warning, if too many are waiting."""
        outer = current_lane()
        lane = outer.sibling(f"recording {self._what}") if outer else None
        if self._requests.qsize() < MOST_WAITING:
            self._requests.put_nowait(partial(_send, request, lane))
        else:
            self.report_failure(
                f"its server is too slow: {MOST_WAITING} requests are waiting, newer ones are dropped"
            )

    def report_failure(self, why: str) -> None:
        """Print a warning that requests to Prefect's server fail, with the reason `why`; only the first time."""
        self.is_well = False
        if not self._has_warned:
            self._has_warned = True
            say(f"Prefect does not show all of {self._what}: {why}. The run's data sets are complete")

    async def _work(self) -> None:
        async with get_client() as client:
            while True:
                self._doing = self._doing or await self._requests.get()
                if self._doing is None:
                    return
                try:
                    await self._doing(client)
                    self.is_well = True
                except Exception as error:  # noqa: BLE001 - a picture for people ends no run, whatever fails
                    self.report_failure(f"{type(error).__name__}: {error}")
                self._doing = None


async def _send(request: Request, lane: Lane | None, client: PrefectClient) -> None:
    """Send a request, and record its seconds as a span in `lane`, a separate lane of the step that it was queued for."""
    recording = span("recording").begin(lane)
    try:
        await request(client)
    finally:
        recording.end()

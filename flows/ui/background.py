"""What Prefect's server is told in the background, so that nothing waits for it."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self

from prefect import get_client
from prefect.client.orchestration import PrefectClient

from flows.ui.progress import say
from tasks.observe.config import ObserveConfig
from tasks.observe.spans import Lane, current_lane, span

MOST_WAITING = 200
"""Requests that may wait; what comes on top is left out of the picture."""

Request = Callable[[PrefectClient], Awaitable[object]]


class Background:
    """Makes one request after the other to Prefect's server, in a task of its own.

    What fails, since the server refuses it, is gone or too slow, is said once, and the run goes on.

    Args:
        config: how long the end waits for what is left.
        what: is told to the server. Example: "the flow runs of steps".
        warn: tells people something once.
    """

    def __init__(self, config: ObserveConfig, what: str, warn: Callable[[str], None] = say) -> None:
        self.is_well, self.is_closing = True, False
        self._config, self._what, self._warn = config, what, warn
        self._requests: asyncio.Queue[Request | None] = asyncio.Queue()
        self._doing: Request | None = None
        self._has_warned = False
        self._tasks = asyncio.TaskGroup()

    async def start(self) -> Self:
        """Begin."""
        await self._tasks.__aenter__()
        self._worker = self._tasks.create_task(self._work())
        return self

    async def close(self, last: Request, *, in_haste: bool) -> None:
        """Make what is left, and a last request, and end.

        Args:
            last: the request.
            in_haste: wait for `observe.exit_timeout_s` at most, not for `observe.record_timeout_s`; so it is too when
                the server has failed before.
        """
        self.is_closing = True
        limit = "exit_timeout_s" if in_haste or not self.is_well else "record_timeout_s"
        limit_s: float = getattr(self._config, limit)
        self._requests.put_nowait(last)
        self._requests.put_nowait(None)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wait([self._worker])
                if self._worker.cancelled():  # a signal cancels every task; what is left is made here
                    await self._work()
        except TimeoutError:
            self.tell(
                f"its server left some of it undone for observe.{limit} = {limit_s:g} s, and it was given up"
            )
            self._worker.cancel()
        await self._tasks.__aexit__(None, None, None)

    def put(self, request: Request) -> None:
        """Make a request when those before it are made."""
        outer = current_lane()
        lane = outer.beside(f"recording {self._what}") if outer else None
        if self._requests.qsize() < MOST_WAITING:
            self._requests.put_nowait(partial(_recorded, request, lane))
        else:
            self.tell(f"its server is too slow, {MOST_WAITING} requests wait for it; newer ones are left out")

    def tell(self, why: str) -> None:
        """Say once that the server does not take what it is told."""
        self.is_well = False
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"Prefect does not show all of {self._what}: {why}. The run's data sets have everything"
            )

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
                    self.tell(f"{type(error).__name__}: {error}")
                self._doing = None


async def _recorded(request: Request, lane: Lane | None, client: PrefectClient) -> None:
    """Make a request; its seconds belong to what it was put for, beside of that."""
    recording = span("recording").begin(lane)
    try:
        await request(client)
    finally:
        recording.end()

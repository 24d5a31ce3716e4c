"""How far Prefect's server is behind with the task runs of this flow run."""

import asyncio
import time

from prefect import get_client
from prefect.runtime import flow_run

CHECK_INTERVAL_S = 0.5


class Recording:
    """Counts started task runs against those that the server has recorded as ended.

    The server's in-memory broker drops events beyond 10,000 queued ones, and a task run whose events are
    dropped stays "Running" for ever; so new rollouts are held back long before that.
    """

    def __init__(self, max_unrecorded: int) -> None:
        self._max_unrecorded = max_unrecorded
        self.n_started = 0
        self._recorded = 0

    def started(self) -> None:
        """Note that a task run begins."""
        self.n_started += 1

    async def hold_back(self) -> None:
        """Wait while too many task runs are not recorded; asks the server only when that can be so."""
        while self.n_started - self._recorded > self._max_unrecorded:
            await self._refresh()
            if self.n_started - self._recorded > self._max_unrecorded:
                await asyncio.sleep(CHECK_INTERVAL_S)

    async def wait_until_recorded(self, timeout_s: float) -> int:
        """Wait until the server has recorded every task run; returns how many it had not in `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        await self._refresh()
        while self._recorded < self.n_started and time.monotonic() < deadline:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self._refresh()
        return max(0, self.n_started - self._recorded)

    async def _refresh(self) -> None:
        body = {
            "flow_runs": {"id": {"any_": [flow_run.id]}},
            "task_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}},
        }
        async with get_client() as client:
            response = await client.request("POST", "/task_runs/count", json=body)
        self._recorded = int(response.json())

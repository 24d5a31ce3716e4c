"""A flow run that starts many task runs at once: `python -m tests.stubs.task_run_burst N` prints what Prefect's server recorded."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LOOK_AGAIN_S = 0.5
NO_MORE_S = 180.0
"""The server records no more when it has recorded nothing for this long."""


def burst(n_task_runs: int) -> dict[str, Any]:
    """A flow run of so many task runs; returns how many were recorded. Needs Prefect's settings in the environment."""
    from prefect import flow
    from prefect.runtime import flow_run

    from rollmill.flows.prefect_integration.recording import Recording
    from rollmill.flows.prefect_integration.task_runs import TaskRunRecorder
    from rollmill.tasks.observe.config import ObserveConfig
    from tests.stubs.empty_chunk import EmptyChunk

    @flow(name="burst", persist_result=False)
    async def burst_flow() -> dict[str, Any]:
        recording = Recording(max_unrecorded=9000)  # more than there are: none is held back
        recorder = TaskRunRecorder(ObserveConfig(), recording)

        async def pair(group: int) -> None:
            async with recorder.rollout(EmptyChunk(), 0, str(group)) as rolled:
                rolled.done(await rolled.work())
            async with recorder.score(EmptyChunk(), 0, str(group), after=[rolled]) as scored:
                scored.done(await scored.work())

        since, began, cpu = datetime.now(UTC), time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for number in range(n_task_runs // 2):
                group.create_task(pair(number))
                await asyncio.sleep(0)
        emitted_s = time.perf_counter() - began
        figures = {"emitted_s": emitted_s, "flow_cpu_s": time.process_time() - cpu}
        recorded, recorded_s = await all_that_is_recorded(recording.n_started, since)
        return figures | {"recorded": recorded, "recorded_s": recorded_s, "flow_run": str(flow_run.id)}

    return asyncio.run(burst_flow())


async def all_that_is_recorded(n_task_runs: int, since: datetime) -> tuple[int, float]:
    """How many are recorded when no more come, and how many seconds after `since` the last one was."""
    from rollmill.flows.prefect_integration.recording import count_recorded

    seen, seen_at = 0, time.time()
    while seen < n_task_runs and time.time() - seen_at < NO_MORE_S:
        recorded = await count_recorded(since)
        if recorded > seen:
            seen, seen_at = recorded, time.time()
        await asyncio.sleep(LOOK_AGAIN_S)
    return seen, seen_at - since.timestamp()


def burst_elsewhere(n_task_runs: int, client: Mapping[str, str]) -> dict[str, Any]:
    """Run `burst` in a separate process, against the server that a client's settings name."""
    from rollmill.flows.prefect_integration.prefect_api import QUIET_TERMINAL

    command = [sys.executable, "-m", "tests.stubs.task_run_burst", str(n_task_runs)]
    done = subprocess.run(
        command, env={**QUIET_TERMINAL, **os.environ, **client}, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stdout
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    print(json.dumps(burst(int(sys.argv[1]))))

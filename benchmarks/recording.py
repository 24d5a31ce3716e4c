"""How many task runs of a burst does Prefect's server record, and at what cost? The local server beside a scaled one.

One flow run starts all of them at once through the picture that flows use (`flows/ui/picture.py`), with bodies that do
nothing and nothing held back. Local: as `rollmill up` starts it, SQLite and a queue in memory; default: the same with
Prefect's own settings. Scaled: two API servers and background services on Postgres and Redis, with the settings of
deploy/kubernetes. CPU is that of all processes of a server, from the first start until no more is recorded.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.fanout import Part, server_cpu_s
from benchmarks.stubs.prefect_cluster import prefect_cluster
from tasks.serve.process import free_port

N_TASK_RUNS = 5000
LOOK_AGAIN_S = 0.5
NO_MORE_S = 60.0
"""When nothing has been recorded for so long, no more will be."""
PREFECTS_OWN = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "5",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "20",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "5",
}
COLUMNS = ("server", "recorded", "emitted after s", "recorded after s", "flow CPU s", "server CPU s")


def burst(n_task_runs: int) -> dict[str, Any]:
    """A flow run of so many task runs; returns how many were recorded. Needs Prefect's settings in the environment."""
    from prefect import flow
    from prefect.runtime import flow_run

    from flows.ui.picture import picture_of
    from flows.ui.recording import Recording
    from tasks.observe.config import ObserveConfig

    @flow(name="burst", persist_result=False)
    async def burst_flow() -> dict[str, Any]:
        recording = Recording(
            ObserveConfig(max_unrecorded_task_runs=9000)
        )  # more than there are: none is held back
        picture = picture_of("all", recording)

        async def pair(group: int) -> None:
            await picture.rollout(Part(), 0, group)
            await picture.score(Part(), 0, group)

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
    from flows.ui.recording import count_recorded

    seen, seen_at = 0, time.time()
    while seen < n_task_runs and time.time() - seen_at < NO_MORE_S:
        recorded = await count_recorded(since)
        if recorded > seen:
            seen, seen_at = recorded, time.time()
        await asyncio.sleep(LOOK_AGAIN_S)
    return seen, seen_at - since.timestamp()


def burst_elsewhere(n_task_runs: int, client: Mapping[str, str]) -> dict[str, Any]:
    """`burst` in a process of its own, against the server that a client's settings name."""
    from flows.deploying.prefect_api import QUIET_TERMINAL

    command = [sys.executable, "-m", "benchmarks.recording", str(n_task_runs)]
    done = subprocess.run(
        command, env=QUIET_TERMINAL | os.environ | client, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stdout
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measured(
    name: str, processes: Mapping[str, int], client: Mapping[str, str], n_task_runs: int
) -> dict[str, Any]:
    """A burst against a server whose processes these are."""
    before = {each: server_cpu_s(pid) for each, pid in processes.items()}
    figures = burst_elsewhere(n_task_runs, client)
    cpu = {each: round(server_cpu_s(pid) - before[each], 1) for each, pid in processes.items()}
    return figures | {"server": name, "server_cpu_s": round(sum(cpu.values()), 1), "cpu_s": cpu}


def measured_local(name: str, settings: Mapping[str, str], n_task_runs: int) -> dict[str, Any]:
    """A burst against a server that `rollmill up` would start, with some settings changed."""
    from flows.deploying import server

    with tempfile.TemporaryDirectory() as home, changed_environment(settings):
        try:
            api_url = f"{server.up(Path(home), free_port())}/api"
            running = server.status(Path(home))
            assert running is not None
            return measured(name, {"server": running.pid}, {"PREFECT_API_URL": api_url}, n_task_runs)
        finally:
            server.down(Path(home))


@contextmanager
def changed_environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= settings
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name)
        os.environ |= before


def measured_scaled(n_task_runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, prefect_cluster(Path(folder)) as cluster:
        pids = {name: process.pid for name, process in cluster.processes.items()}
        return measured("scaled", pids, cluster.client, n_task_runs)


def row(figures: dict[str, Any]) -> str:
    shown = [figures["server"], figures["recorded"]]
    shown += [f"{figures[name]:.1f}" for name in ("emitted_s", "recorded_s", "flow_cpu_s", "server_cpu_s")]
    return " | ".join(f"{each!s:>16}" for each in shown)


def main() -> None:
    print(" | ".join(f"{name:>16}" for name in COLUMNS))
    rows = []
    for measure in (
        lambda: measured_local("Prefect's default", PREFECTS_OWN, N_TASK_RUNS),
        lambda: measured_local("rollmill up", {}, N_TASK_RUNS),
        lambda: measured_scaled(N_TASK_RUNS),
    ):
        rows.append(measure())
        print(row(rows[-1]), flush=True)
    shares = {each["server"]: each["recorded"] / N_TASK_RUNS for each in rows}
    figures = {"recorded_share": shares["scaled"], "recorded_share_default": shares["Prefect's default"]}
    print(json.dumps({"benchmark": "recording", "task_runs": N_TASK_RUNS} | figures | {"rows": rows}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(burst(int(sys.argv[1]))))
    else:
        main()

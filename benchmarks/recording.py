"""How many task runs of a burst does Prefect's server record, and at what cost? The local server and a scaled one.

One flow run starts all of them at once as a step does (`flows/prefect_integration/task_runs.py`), with bodies that do nothing,
and none is held back. Local: as `rollmill up` starts it, SQLite and a queue in memory; default: the same with
Prefect's own settings. Scaled: two API servers and background services on Postgres and Redis, with the settings of
deploy/kubernetes. CPU is that of all processes of a server, from the first start until no more is recorded.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fanout import server_cpu_s
from rollmill.tasks.processes.launched_process import free_port
from tests.stubs.prefect_cluster import prefect_cluster
from tests.stubs.task_run_burst import burst_elsewhere

N_TASK_RUNS = 5000
PREFECTS_OWN = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "1",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "5",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "20",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "5",
}
COLUMNS = ("server", "recorded", "emitted after s", "recorded after s", "flow CPU s", "server CPU s")


def measure_burst(
    name: str, processes: Mapping[str, int], client: Mapping[str, str], n_task_runs: int
) -> dict[str, Any]:
    """A burst against a server whose processes these are."""
    before = {each: server_cpu_s(pid) for each, pid in processes.items()}
    figures = burst_elsewhere(n_task_runs, client)
    cpu = {each: round(server_cpu_s(pid) - before[each], 1) for each, pid in processes.items()}
    return figures | {"server": name, "server_cpu_s": round(sum(cpu.values()), 1), "cpu_s": cpu}


def measure_local(name: str, settings: Mapping[str, str], n_task_runs: int) -> dict[str, Any]:
    """A burst against a server that `rollmill up` would start, with some settings changed."""
    from rollmill.flows.prefect_integration import local_server

    with tempfile.TemporaryDirectory() as home, change_environment(settings):
        try:
            api_url = f"{local_server.up(Path(home), free_port())}/api"
            running = local_server.status(Path(home))
            assert running is not None
            return measure_burst(name, {"server": running.pid}, {"PREFECT_API_URL": api_url}, n_task_runs)
        finally:
            local_server.down(Path(home))


@contextmanager
def change_environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= settings
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name)
        os.environ |= before


def measure_scaled(n_task_runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, prefect_cluster(Path(folder)) as cluster:
        pids = {name: process.pid for name, process in cluster.processes.items()}
        return measure_burst("scaled", pids, cluster.client, n_task_runs)


def row(figures: dict[str, Any]) -> str:
    shown = [figures["server"], figures["recorded"]]
    shown += [f"{figures[name]:.1f}" for name in ("emitted_s", "recorded_s", "flow_cpu_s", "server_cpu_s")]
    return " | ".join(f"{each!s:>16}" for each in shown)


def main() -> None:
    print(" | ".join(f"{name:>16}" for name in COLUMNS))
    rows = []
    measures: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: measure_local("Prefect's default", PREFECTS_OWN, N_TASK_RUNS),
        lambda: measure_local("rollmill up", {}, N_TASK_RUNS),
        lambda: measure_scaled(N_TASK_RUNS),
    )
    for measure in measures:
        rows.append(measure())
        print(row(rows[-1]), flush=True)
    shares = {each["server"]: each["recorded"] / N_TASK_RUNS for each in rows}
    figures = {"recorded_share": shares["scaled"], "recorded_share_default": shares["Prefect's default"]}
    print(json.dumps({"benchmark": "recording", "task_runs": N_TASK_RUNS} | figures | {"rows": rows}))


if __name__ == "__main__":
    main()

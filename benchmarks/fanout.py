"""What does it cost to record the fan-out in Prefect? 64, 256 and 1024 pairs of rollout and score, compared with bare asyncio.

Each pair is recorded as in a step (`flows/prefect_integration/task_runs.py`): the score follows its rollout, and both are
inside of the step's task run. Their bodies do nothing. The server is started as `rollmill up` starts it. The flow runs
in a separate process, with the logging of `rollmill run`. CPU is that of all threads of the flow's process, and of the
server's process tree, from the first start until the server has recorded everything. Lag is how much later than
requested a sleep of 1 ms ends on the flow's event loop.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.prefect_integration.task_runs import TaskRunRecorder
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.observe.process_memory import keep_for_good
from tests.stubs.empty_chunk import EmptyChunk

SIZES = (64, 256, 1024)
REPORTED = 256
TICK_S = 0.001
SETTLE_S = 3.0
"""The server's event persister flushes every 2 s: its work belongs to the fan-out."""
TARGETS = {"flow_cpu_ms_per_task": 4.0, "lag_p99_ms": 60.0}
COLUMNS = ("pairs", "recorded by", "task runs", "recorded", "seconds", "recorded after s")
HEADINGS = ("flow CPU ms/task", "server ms/task", "lag p50 ms", "lag p99 ms", "lag max ms")
FIGURES = ("flow_cpu_ms_per_task", "server_cpu_ms_per_task", "lag_p50_ms", "lag_p99_ms", "lag_max_ms")


Pair = Callable[[int], Coroutine[Any, Any, None]]


async def bare_pair(group: int) -> None:
    await EmptyChunk().sample()
    await EmptyChunk().score()


async def fan_out(pair: Pair, n_pairs: int) -> dict[str, float]:
    """All pairs side by side, each begun one turn of the loop after the one before."""
    lags: list[float] = []

    async def sample_lag() -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags.append(time.perf_counter() - asked - TICK_S)

    sampler = asyncio.create_task(sample_lag())
    await asyncio.sleep(0.05)
    lags.clear()
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(n_pairs):
            group.create_task(pair(number))
            await asyncio.sleep(0)
    seconds = time.perf_counter() - started
    await asyncio.sleep(2 * TICK_S)
    sampler.cancel()
    p50, p99, highest = np.percentile(1000 * np.asarray(lags), (50, 99, 100))
    return {"seconds": seconds, "lag_p50_ms": p50, "lag_p99_ms": p99, "lag_max_ms": highest}


def server_cpu_s(pid: int) -> float:
    """CPU seconds of a process and all below it, ended ones included."""
    from rollmill.tasks.processes.supervisor import descendants

    total = 0.0
    for each in (pid, *descendants(pid)):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


class Fanout:
    """Records pairs as `observe.task_runs` asks; not a dataclass, since Prefect searches those among a task's parameters."""

    def __init__(self, task_runs: Literal["all", "groups", "events"]) -> None:
        config = ObserveConfig(task_runs=task_runs)
        self.recording = Recording()
        self._recorder = TaskRunRecorder(config, self.recording)

    async def pair(self, group: int) -> None:
        recorder, label, summaries = self._recorder, str(group), dict[str, str]()
        await self.recording.hold_back()
        async with recorder.watch_group(0, group, summaries):
            async with recorder.rollout(EmptyChunk(), 0, label) as rolled:
                summaries["rollout"] = rolled.done(await rolled.work()).summary
            async with recorder.score(EmptyChunk(), 0, label, after=[rolled]) as scored:
                summaries["score"] = scored.done(await scored.work()).summary


@task(name="step", task_run_name="step {step}", cache_policy=NO_CACHE, persist_result=False)
async def fan_out_step(fanout: Fanout, n_pairs: int, step: int) -> dict[str, float]:
    """The fan-out as a nested task, as a step is."""
    return await fan_out(fanout.pair, n_pairs)


def measure(n_pairs: int, task_runs: Literal["all", "groups", "events"], server_pid: int) -> dict[str, Any]:
    """Measure one fan-out in a new flow run; needs Prefect's settings in the environment."""

    @flow(name="fanout", persist_result=False)
    async def fanout_flow() -> dict[str, Any]:
        fanout = Fanout(task_runs)
        recording = fanout.recording
        await recording.wait_until_recorded()  # opens the connections that a run has open by then
        await fanout.pair(-1)
        keep_for_good()  # as when a run is open
        await asyncio.sleep(SETTLE_S)
        n_before = recording.n_started
        flow_cpu, server_cpu = time.process_time(), server_cpu_s(server_pid)
        recording.count_start()
        figures = dict(await fan_out_step(fanout, n_pairs, 0))
        ended = time.perf_counter()
        left = await recording.wait_until_recorded()
        figures["recorded_after_s"] = time.perf_counter() - ended
        figures["flow_cpu_s"] = time.process_time() - flow_cpu
        await asyncio.sleep(SETTLE_S)
        figures["server_cpu_s"] = server_cpu_s(server_pid) - server_cpu
        n_expected = recording.n_started - n_before
        return figures | {"expected": n_expected, "recorded": n_expected - left}

    return asyncio.run(fanout_flow())


def measure_bare(n_pairs: int) -> dict[str, Any]:
    cpu = time.process_time()
    figures = asyncio.run(fan_out(bare_pair, n_pairs))
    return figures | {"flow_cpu_s": time.process_time() - cpu, "expected": 0, "recorded": 0}


def measure_apart(n_pairs: int, task_runs: str, api_url: str, server_pid: int) -> dict[str, Any]:
    """Run `measure` in a separate process; figures are by task run, or by pair where there are none."""
    from rollmill.flows.prefect_integration.prefect_api import QUIET_TERMINAL

    if task_runs == "none":
        figures = measure_bare(n_pairs)
    else:
        command = [
            sys.executable,
            "-m",
            "benchmarks.fanout",
            "--measure",
            str(n_pairs),
            task_runs,
            str(server_pid),
        ]
        environment = QUIET_TERMINAL | os.environ | {"PREFECT_API_URL": api_url}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(done.stdout.splitlines()[-1])
    n_tasks = 2 * n_pairs if task_runs in ("all", "none") else n_pairs
    for side in ("flow", "server"):
        figures[f"{side}_cpu_ms_per_task"] = 1000 * figures.get(f"{side}_cpu_s", 0.0) / n_tasks
    return figures | {"pairs": n_pairs, "recorded by": task_runs}


def row(figures: dict[str, Any]) -> str:
    shown = [
        figures["pairs"],
        {"all": "task run a part", "groups": "task run a group", "events": "event a group"}.get(
            figures["recorded by"], "bare asyncio"
        ),
        figures["expected"],
        figures["recorded"],
        f"{figures['seconds']:.2f}",
        f"{figures.get('recorded_after_s', 0.0):.1f}",
        *(f"{figures[name]:.2f}" for name in FIGURES),
    ]
    return " | ".join(f"{each!s:>16}" for each in shown)


def compare(sizes: tuple[int, ...]) -> None:
    """Prints the table and the JSON object."""
    from rollmill.flows.prefect_integration import local_server
    from rollmill.tasks.processes.launched_process import free_port

    rows: list[dict[str, Any]] = []
    print(" | ".join(f"{name:>16}" for name in (*COLUMNS, *HEADINGS)))
    with tempfile.TemporaryDirectory() as home:
        try:
            api_url = f"{local_server.up(Path(home), free_port())}/api"
            running = local_server.status(Path(home))
            assert running is not None
            kinds = [(size, kind) for size in sizes for kind in ("none", "all")]
            for size, kind in [*kinds, (REPORTED, "groups"), (REPORTED, "events")]:
                rows.append(measure_apart(size, kind, api_url, running.pid))
                print(row(rows[-1]), flush=True)
        finally:
            local_server.down(Path(home))
    by_task = [each for each in rows if each["recorded by"] == "all"]
    (reported,) = [each for each in by_task if each["pairs"] == REPORTED]
    for name, target in TARGETS.items():
        verdict = "reached" if reported[name] <= target else "MISSED"
        print(f"{name}: {reported[name]:.2f}, target {target:g}: {verdict}")
    sums = {name: sum(each[name] for each in by_task) for name in ("recorded", "expected")}
    share = {"recorded_share": sums["recorded"] / sums["expected"]}
    by_size = {
        f"{side}_cpu_s": {each["pairs"]: each[f"{side}_cpu_s"] for each in by_task}
        for side in ("flow", "server")
    }
    figures = {name: reported[name] for name in FIGURES}
    print(json.dumps({"benchmark": "fanout"} | figures | sums | share | by_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="without the largest fan-out")
    parser.add_argument("--measure", nargs=3, metavar=("PAIRS", "KIND", "SERVER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        n_pairs, kind, server_pid = given.measure
        print(json.dumps(measure(int(n_pairs), kind, int(server_pid))))
    else:
        compare(SIZES[:-1] if given.few else SIZES)


if __name__ == "__main__":
    main()

"""What does the flow's process pay for a trajectory when Ray actors sample and score? One process, and 1, 2 and 4 actors.

Each way collects the same groups of the addition environment from a stub server (tests/stubs/vllm_server.py, another process), by the
functions of a real step (`flows/step/step_collection.py`): requests, rows, scores, shards, advantages. Prefect records nothing. CPU is
that of all threads of the flow's process, Ray's included, from the first group to the last; before that a few groups warm up. Throughput is
bound by the cores that flow, actors and stub share. At the end an actor is killed in the middle of a step: `lost` and `doubled` count
trajectories that are then missing, or stored twice, among rollouts and scores.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.prefect_integration.artifacts import RunArtifacts
from rollmill.flows.prefect_integration.progress import RunProgress
from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.prefect_integration.task_runs import TaskRunRecorder
from rollmill.flows.run.executor.ray_executor import SharedRun, count_slots, open_ray_executor
from rollmill.flows.run.live_run import Run
from rollmill.flows.run.run_environment import open_environments
from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.flows.step.step_collection import GroupCollection, StepCollection
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.admission import Admission
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.step_plan import plan_new_group
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.shards.compactor import Compactor
from tests.stubs.toy_settings import toy_config
from tests.stubs.vllm_server import StubVllmServer

GROUP_SIZE, WARM_UP, ROLLOUT_S, MAX_IN_FLIGHT = 16, 8, 0.02, 128
ACTORS = (0, 1, 2, 4)
"""0: no actor, the executor `local`."""
TARGET = 0.2
HEADINGS = ("executor", "flow CPU ms/trajectory", "actors' CPU ms/trajectory", "trajectories/s")


class Unrecorded(TaskRunRecorder):
    """Runs tasks without Prefect."""

    records_steps = False

    def __init__(self) -> None:
        super().__init__(ObserveConfig(task_runs="events"), Recording())

    @asynccontextmanager
    async def watch_group(self, step: int, group: int, summaries: Mapping[str, str]) -> AsyncIterator[None]:
        yield


@contextmanager
def serve(model: Path) -> Iterator[str]:
    """The stub server in a separate process; gives its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.executor", "--serve", str(port), str(model)]
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def open_collected_run(root: Path, model: Path, url: str, n_actors: int) -> AsyncIterator[Run]:
    """A run without a trainer and without Prefect, of `n_actors` actors."""
    executor = {"kind": "ray", "actors": n_actors} if n_actors else {}
    config = toy_config(
        {
            "rollout": {"group_size": GROUP_SIZE, "max_in_flight": MAX_IN_FLIGHT},
            "serve": {"urls": [url]},
            "store": {"root": str(root)},
            "executor": executor,
        }
    )
    folder = RunFolder(root / f"actors-{n_actors}")
    opened = OpenRun.open(
        folder,
        config=config.model_dump(mode="json"),
        fixed={},
        versions={},
        git_commit="",
        config_of=config.store,
        trains=False,
    )
    pool = ServerPool()
    async with AsyncExitStack() as stack:
        stack.callback(opened.close)
        await stack.enter_async_context(opened.writer)
        server = await stack.enter_async_context(VllmClient(url, config.serve))
        await server.wait_until_healthy(60.0)
        await server.set_version(str(PolicyVersion(opened.manifest.run, 1, 0)))
        pool.admit(server)
        yield await open_shared(config, opened, model, pool, stack)


async def open_shared(
    config: RunConfig, opened: OpenRun, model: Path, pool: ServerPool, stack: AsyncExitStack
) -> Run:
    """The run, with its environment, and the actors that the settings ask for."""
    tokenizer = ChatTokenizer.load(model)
    environments = await open_environments(config, opened.manifest.run, opened.folder, tokenizer, pool, stack)
    admission, remote = Admission(count_slots(config)), None
    if config.executor.kind == "ray":
        shared = SharedRun(config, opened, pool, admission, environments[0].scoring.key, warn=print)
        remote = await stack.enter_async_context(open_ray_executor(shared, model))
    compactor = Compactor(open_files(opened.folder), opened.writer, config.store, print)
    return Run(
        config=config,
        model=model,
        store=opened,
        compactor=await stack.enter_async_context(compactor),
        recording=Recording(),
        progress=RunProgress("run", 1),
        artifacts=RunArtifacts(config.observe, opened.folder, 1),
        environments=environments,
        admission=admission,
        held_out_admission=admission,
        pool=pool,
        task_runs=Unrecorded(),
        remote=remote,
    )


async def collect(run: Run, step: int, n_groups: int) -> None:
    """Collect groups of a step that has nothing stored."""
    failures = FailureWatch(step, n_groups * GROUP_SIZE, 0.0, lambda: logging.getLogger("benchmark"))
    collection = StepCollection(run, step, failures)
    async with asyncio.TaskGroup() as fan_out:
        for number in range(n_groups):
            plan = plan_new_group(step * 100_000 + number, GROUP_SIZE)
            fan_out.create_task(GroupCollection(collection, plan).collect())
            await asyncio.sleep(0)


def actor_pids(run: Run) -> list[int]:
    """The process ids of the run's actors, from their locks."""
    writers = run.folder.writers
    found = sorted(writers.iterdir()) if writers.is_dir() else []
    return [json.loads(each.read_text())["pid"] for each in found]


def cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def measure(run: Run, n_groups: int) -> dict[str, float]:
    """What a trajectory of a step costs, after a step that warms up."""
    await collect(run, 0, WARM_UP)
    pids, n = actor_pids(run), n_groups * GROUP_SIZE
    started, own, theirs = time.perf_counter(), time.process_time(), cpu_s(pids)
    await collect(run, 1, n_groups)
    seconds = time.perf_counter() - started
    return {
        "flow_cpu_ms": (time.process_time() - own) * 1e3 / n,
        "actor_cpu_ms": (cpu_s(pids) - theirs) * 1e3 / n,
        "per_s": n / seconds,
    }


async def count_after_kill(run: Run, n_groups: int) -> dict[str, int]:
    """Kill an actor once a quarter of a step is stored; returns how many trajectories are missing then, and stored twice."""
    collecting = asyncio.create_task(collect(run, 2, n_groups))
    while len(read(run.folder, "rollouts", ["sample"], step=2)) < n_groups * GROUP_SIZE // 4:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.02)
    os.kill(actor_pids(run)[0], signal.SIGKILL)
    await collecting
    lost = doubled = 0
    for dataset in ("rollouts", "scores"):
        ids = Counter(read(run.folder, dataset, ["trajectory_id"], step=2)["trajectory_id"].to_pylist())
        lost += n_groups * GROUP_SIZE - len(ids)
        doubled += ids.total() - len(ids)
    return {"lost": lost, "doubled": doubled}


async def compare(n_groups: int) -> dict[str, Any]:
    """All ways, one after the other."""
    rows: dict[str, dict[str, float]] = {}
    after_kill: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = save_character_tokenizer(root / "model")
        with serve(model) as url:
            for n_actors in ACTORS:
                async with open_collected_run(root, model, url, n_actors) as run:
                    rows[str(n_actors)] = await measure(run, n_groups)
                    if n_actors == ACTORS[-1]:
                        after_kill = await count_after_kill(run, n_groups)
    local = rows["0"]["flow_cpu_ms"]
    shares = {f"flow_cpu_share_{n}": rows[str(n)]["flow_cpu_ms"] / local for n in ACTORS[1:]}
    return {"ways": rows, **shares, **after_kill}


def show(found: dict[str, Any]) -> None:
    print("".join(f"{heading:<28}" for heading in HEADINGS))
    for name, row in found["ways"].items():
        label = f"ray, {name} actors" if name != "0" else "local"
        numbers = (f"{row['flow_cpu_ms']:.3f}", f"{row['actor_cpu_ms']:.3f}", f"{row['per_s']:.0f}")
        print("".join(f"{each:<28}" for each in (label, *numbers)))
    print(f"killed actor: {found['lost']} trajectories lost, {found['doubled']} doubled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--groups", type=int, default=256, help=f"groups of {GROUP_SIZE} that each way collects"
    )
    parser.add_argument("--serve", nargs=2, metavar=("PORT", "MODEL"), help="be the stub server")
    options = parser.parse_args()
    if options.serve:
        StubVllmServer(Path(options.serve[1]), ROLLOUT_S).serve(int(options.serve[0]))
        signal.pause()
    found = asyncio.run(compare(options.groups))
    show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

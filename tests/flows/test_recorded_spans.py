"""Planted delays in steps that overlap: each is found under its own name, its own step and its own cause.

Real: the fan-out, admission, the pool and its client, the writer, the lock, what waits for Prefect's server; the server is
a stub, and environment, scorer and count of recorded task runs follow a plan.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import pytest
from planned_run import PlannedSampler, PlannedScoring, open_planned_run, with_sampler
from prefect.logging import disable_run_logger

from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.run.live_run import Run
from rollmill.flows.step.overlap import StepPipeline
from rollmill.flows.step.step_groups import store_batch
from rollmill.tasks.observe.span_waits import TimedLock
from rollmill.tasks.observe.spans import span, within
from rollmill.tasks.observe.step_clock import StepClock
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.completions import PoolSampler
from rollmill.tasks.rollout.environment import Episode, Example, Message
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.rollout.trajectory_requests import sampling_seed
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import Rows, column_values
from tests.stubs.vllm_server import StubVllmServer

# The planted delays last 20 s together.
pytestmark = pytest.mark.slow

T = TypeVar("T")
STEPS, GROUPS, GROUP_SIZE = 2, 3, 4
DELAY_S, STRAGGLER_S, SERVER_S = 2.0, 4.0, 1.0
SHARE = 0.1


class Plants:
    """What was planted, as it was: `seconds` by what they are to be found as, and `moments` by what happened then."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, int], float] = defaultdict(float)
        self.moments: dict[tuple[str, int], float] = {}

    def note(self, event: str, step: int) -> None:
        self.moments[event, step] = time.perf_counter()

    async def sleep(self, name: str, step: int, seconds: float) -> None:
        started = time.perf_counter()
        await asyncio.sleep(seconds)
        self.seconds[name, step] += time.perf_counter() - started

    def block(self, name: str, step: int, seconds: float) -> None:
        started = time.perf_counter()
        time.sleep(seconds)
        self.seconds[name, step] += time.perf_counter() - started


class SlowEpisode(Episode):
    """Takes its time before its first message."""

    def __init__(self, episode: Episode, plants: Plants, step: int, seconds: float) -> None:
        self._episode, self._plants, self._step, self._seconds = episode, plants, step, seconds

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not messages:
            await self._plants.sleep("environment", self._step, self._seconds)
        else:
            self._plants.note("the straggler is answered", self._step)
        return await self._episode.reply(messages)

    async def close(self) -> Mapping[str, object]:
        return await self._episode.close()


class SlowEnvironment(Addition):
    """The last trajectory of each step is a straggler."""

    def __init__(self, plants: Plants) -> None:
        super().__init__()
        self._plants = plants
        self._slow = {
            sampling_seed(0, (step + 1) * GROUPS - 1, GROUP_SIZE - 1): (step, STRAGGLER_S * (step + 1))
            for step in range(STEPS)
        }

    def episode(self, example: Example, seed: int) -> Episode:
        episode = super().episode(example, seed)
        if seed in self._slow:
            return SlowEpisode(episode, self._plants, *self._slow[seed])
        return episode


class SlowScoring(PlannedScoring):
    """The first group of each step takes its time."""

    def __init__(self, plants: Plants) -> None:
        super().__init__()
        self._plants = plants

    async def score(self, rollouts: Rows, *, step: int) -> Rows:
        if step * GROUPS in column_values(rollouts, "group"):
            await self._plants.sleep("scoring", step, DELAY_S)
            self._plants.note("the slow group is scored", step)
        return await super().score(rollouts, step=step)


def slow_recording(plants: Plants) -> Recording:
    """Holds groups back for Prefect's server, which has recorded everything a while after it was asked."""

    async def count(_: datetime) -> int:
        await plants.sleep("recording", 0, DELAY_S)
        return 5

    recording = Recording(count, max_unrecorded=1)
    for _ in range(5):
        recording.count_start()
    return recording


@asynccontextmanager
async def run_planted(folder: Path, plants: Plants) -> AsyncIterator[Run]:
    """A run of overlapping steps over a stub server, with delays planted, that records."""
    settings: dict[str, Any] = {
        "steps": STEPS,
        "rollout": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_staleness": 1},
        "evaluate": {"every": 0},
    }
    run_of = open_planned_run(
        folder, PlannedSampler(), SlowScoring(plants), SlowEnvironment(plants), **settings
    )
    port = free_port()
    async with (
        run_of as run,
        run.store.spans,
        VllmClient(f"http://127.0.0.1:{port}", ServeConfig()) as client,
    ):
        (folder / "model" / "config.json").write_text("{}")
        control = StubVllmServer(folder / "model", SERVER_S).serve(port)
        await client.wait_until_healthy(30.0)
        await client.set_version(f"{run.id}:0:0")
        run.pool.admit(client)
        sampler = PoolSampler(run.pool, run.config.rollout, run.id, 30.0)
        try:
            yield replace(with_sampler(run, sampler), recording=slow_recording(plants))
        finally:
            control.stop()


def slow_store(run: Run, plants: Plants) -> None:
    """Have the commit of a step's batch take its time."""
    publish = run.store.files.publish

    def slow(folder: str, write: Any) -> str:
        if folder.startswith("batches/"):
            plants.block("storing", int(folder[-6:]), DELAY_S)
        return publish(folder, write)

    run.store.files.publish = slow  # type: ignore[method-assign]


async def hold(lock: TimedLock, plants: Plants, step: int) -> None:
    """Hold a lock during a named span."""
    with within(lane="holder"), span("rejoin"):
        async with lock:
            await plants.sleep("waiting_for_lock", step, DELAY_S)


async def steps(run: Run, plants: Plants) -> None:
    """The flow's steps: the train step waits for a lock, and then for a trainer."""
    lock = TimedLock()
    slow_store(run, plants)
    async with StepPipeline(run) as pipeline, asyncio.TaskGroup() as others:
        pipeline.begin(0)
        for step in range(STEPS):
            with StepClock(step) as clock:
                with clock.span("collect"):
                    collected = await pipeline.collect(step)
                with clock.span("train"):
                    await store_batch(run, step, collected.outcomes)
                    others.create_task(hold(lock, plants, step))
                    await asyncio.sleep(0)
                    async with lock:
                        await plants.sleep("train", step, DELAY_S)
                await pipeline.finish_evaluation(step)
                pipeline.begin(step + 1)
            await run.store.spans.store(step)
        await pipeline.finish_evaluation(STEPS)


async def run_of_steps(folder: Path, plants: Plants) -> RunFolder:
    with disable_run_logger():
        async with run_planted(folder, plants) as run:
            await steps(run, plants)
    return run.folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[pl.DataFrame, Plants]:
    """The spans of a run, and what was planted in it."""
    plants = Plants()
    folder = asyncio.run(run_of_steps(tmp_path_factory.mktemp("planted"), plants))
    rows = pl.from_arrow(read(folder, "spans", None))
    assert isinstance(rows, pl.DataFrame)
    generate_s = read(folder, "rollouts", ["generate_s"])["generate_s"].to_pylist()
    # by the trajectories' own stopwatch, a busy machine's delays included
    plants.seconds["generating", 0] = sum(generate_s)
    return rows, plants


def own_s(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the spans with `own_s`: their seconds without those of the spans within them, in their lanes."""
    spans = rows.with_columns(
        pl.col("started_at").dt.epoch("us").alias("start"),
        (pl.col("started_at").dt.epoch("us") + (pl.col("duration_s") * 1e6).round().cast(pl.Int64)).alias(
            "end"
        ),
    ).sort("process", "lane", "start", pl.col("end"), descending=[False, False, False, True])
    own: list[float] = []
    stack: list[tuple[tuple[str, str], int, int]] = []
    for at, row in enumerate(spans.iter_rows(named=True)):
        place = row["process"], row["lane"]
        while stack and (stack[-1][0] != place or stack[-1][1] <= row["start"]):
            stack.pop()
        own.append(row["duration_s"])
        if stack:
            assert row["end"] <= stack[-1][1], f"spans cross: {row}"
            own[stack[-1][2]] -= row["duration_s"]
        stack.append((place, row["end"], at))
    return spans.with_columns(pl.Series("own_s", own))


def find_seconds(rows: pl.DataFrame, name: str, step: int, **columns: str) -> float:
    asked = [pl.col("name") == name, pl.col("step") == step]
    asked += [pl.col(column) == value for column, value in columns.items()]
    return float(own_s(rows).filter(*asked)["own_s"].sum())


@pytest.mark.parametrize("step", range(STEPS))
def test_each_planted_delay_is_found_in_its_own_step(
    recorded: tuple[pl.DataFrame, Plants], step: int
) -> None:
    rows, plants = recorded
    straggler = f"{(step + 1) * GROUPS - 1}.{GROUP_SIZE - 1}"
    found_s = {
        "environment": find_seconds(rows, "environment", step, lane=straggler),
        "scoring": find_seconds(rows, "scoring", step, lane=str(step * GROUPS)),
        "storing": find_seconds(rows, "storing", step, lane="step"),
        "waiting_for_lock": find_seconds(rows, "waiting_for_lock", step, cause="rejoin"),
        "train": find_seconds(rows, "train", step),
    }
    for name, seconds in found_s.items():
        assert seconds == pytest.approx(plants.seconds[name, step], rel=SHARE), name


def test_a_slow_server_is_each_trajectorys_generating_and_the_servers_own(
    recorded: tuple[pl.DataFrame, Plants],
) -> None:
    rows, plants = recorded
    flow, server = (rows.filter((pl.col("process") == "flow") == is_flow) for is_flow in (True, False))
    generating = flow.filter(pl.col("name") == "generating")
    assert len(generating) == STEPS * GROUPS * GROUP_SIZE
    (address,) = server["process"].unique()
    assert set(generating["cause"]) == {address}
    assert generating["duration_s"].min() >= SERVER_S
    assert generating["duration_s"].sum() == pytest.approx(plants.seconds["generating", 0], rel=SHARE)
    busy = server.filter(pl.col("name") == "generating")["duration_s"].sum()
    assert SERVER_S <= busy < float(generating["duration_s"].sum())
    assert busy + server.filter(pl.col("name") == "idle")["duration_s"].sum() == pytest.approx(
        (server["started_at"].max() - server["started_at"].min()).total_seconds(), rel=SHARE
    )


def test_a_wait_for_prefect_is_recording_with_its_cause(recorded: tuple[pl.DataFrame, Plants]) -> None:
    rows, plants = recorded
    waits = rows.filter(pl.col("cause") == "unrecorded task runs")
    assert set(waits["name"]) == {"recording"}
    assert waits["duration_s"].max() == pytest.approx(plants.seconds["recording", 0], rel=SHARE)


def test_a_step_waits_for_stragglers_only_while_it_is_open(recorded: tuple[pl.DataFrame, Plants]) -> None:
    rows, plants = recorded
    line = rows.filter(pl.col("lane") == "step")
    waits = line.filter(pl.col("name") == "waiting_for_stragglers").sort("step")["duration_s"]
    waited_s = plants.moments["the straggler is answered", 0] - plants.moments["the slow group is scored", 0]
    assert waits[0] == pytest.approx(waited_s, rel=SHARE)
    in_hand = line.filter(pl.col("name") == "collect", pl.col("step") == 1)["duration_s"].item()
    assert waits[1] <= in_hand < plants.seconds["environment", 1]


def test_almost_no_time_of_a_step_is_unattributed(recorded: tuple[pl.DataFrame, Plants]) -> None:
    rows, _ = recorded
    for step in range(STEPS):
        whole = rows.filter(pl.col("lane") == "step", pl.col("name") == "step", pl.col("step") == step)
        assert find_seconds(rows, "step", step) <= 0.02 * whole["duration_s"].item()

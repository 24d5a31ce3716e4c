"""A run without services, whose sampler and scorer follow a plan."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.flows.configuration.environments import environment_configs
from rollmill.flows.configuration.settings import SETTINGS_BY_STEP
from rollmill.flows.prefect_integration.artifacts import RunArtifacts
from rollmill.flows.prefect_integration.progress import RunProgress
from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.prefect_integration.task_runs import RecordedWork, Result, TaskRunRecorder
from rollmill.flows.run.live_run import Run
from rollmill.flows.run.run_environment import RunEnvironment
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.rollout.admission import Admission
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.environment import Environment
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.prompt_limit import PromptLimit
from rollmill.tasks.rollout.task import RolloutWork, SampledChunk
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.score.task import ScoredChunk, ScoreWork
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import Rows, column_values
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.compactor import Compactor
from tests.stubs.toy_settings import toy_config

GROUP_SIZE = 4
HAPPENS_WITHIN_S = 60.0


Act = float | asyncio.Event | Exception


class PlannedSampler:
    """Answers after a sample's seconds, or once something has happened, or raises its error; by its policy version, 0 by default."""

    def __init__(self, plan: dict[int, Act] | None = None) -> None:
        self.plan = plan or {}
        self.versions: dict[int, int] = {}
        self.sampled: list[int] = []

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        self.sampled.append(work.sample)
        act = self.plan.get(work.sample, 0.0)
        if isinstance(act, Exception):
            raise act
        if isinstance(act, asyncio.Event):
            await asyncio.wait_for(act.wait(), HAPPENS_WITHIN_S)
        else:
            await asyncio.sleep(act)
        ids = np.array([9, 1], np.int32)
        spans = [(0, self.versions.get(work.sample, 0))]
        return SampledTokens(ids, np.array([-0.5, -0.25], np.float32), spans, "stop", "http://server")


class PlannedScoring:
    """Gives each sample its own number as reward, or the status of its plan; counts whom it saw together.

    Attributes:
        has_scored: set once it has given scores.
    """

    key = "planned@1"

    def __init__(self, *, by_group: bool = False, statuses: dict[int, str] | None = None) -> None:
        self.by_group, self.statuses = by_group, statuses or {}
        self.calls: list[list[int]] = []
        self.has_scored = asyncio.Event()

    async def score(self, rollouts: Rows, *, step: int) -> Rows:
        samples = [int(str(each)) for each in column_values(rollouts, "sample")]
        self.calls.append(samples)
        n = len(samples)
        groups = [int(str(each)) for each in column_values(rollouts, "group")]
        rewards = [self.reward(*each) for each in zip(groups, samples, strict=True)]
        statuses = [self.statuses.get(sample, "scored") for sample in samples]
        is_scored = [status == "scored" for status in statuses]
        self.has_scored.set()
        return make_batch(
            "scores",
            {
                **{
                    name: column_values(rollouts, name)
                    for name in ("run", "step", "group", "sample", "trajectory_id")
                },
                "scorer": ["planned"] * n,
                "version": ["1"] * n,
                "status": statuses,
                "error_type": ["" if scored else "ScoreError" for scored in is_scored],
                "error": ["" if scored else "it would not" for scored in is_scored],
                "reward": [each if ok else math.nan for each, ok in zip(rewards, is_scored, strict=True)],
                "turn_rewards": [[]] * n,
                "token_rewards": [[]] * n,
                "components": ["{}"] * n,
                "subgroup": [0] * n,
                "duration_s": [0.0] * n,
            },
        )

    def reward(self, group: int, sample: int) -> float:
        return float(sample)

    def metrics(self) -> list[Metric]:
        return []


class Diary(TaskRunRecorder):
    """Runs tasks without Prefect, and writes down when each begins and ends."""

    records_steps = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def rollout(
        self, chunk: RolloutWork, step: int, label: str, recordings: asyncio.TaskGroup | None = None
    ) -> RecordedWork[SampledChunk]:
        return self._write_down(f"rollout {label}", chunk.sample)

    def score(
        self,
        chunk: ScoreWork,
        step: int,
        label: str,
        recordings: asyncio.TaskGroup | None = None,
        after: Sequence[RecordedWork[Any]] = (),
    ) -> RecordedWork[ScoredChunk]:
        return self._write_down(f"score {label}", chunk.score)

    def _write_down(self, name: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> RecordedWork[Result]:
        async def run() -> Result:
            self.lines.append(name)
            result = await work()
            self.lines.append(f"{name} done")
            return result

        return RecordedWork(run)

    @asynccontextmanager
    async def watch_group(self, step: int, group: int, summaries: Mapping[str, str]) -> AsyncIterator[None]:
        self.lines.append("group")
        yield


@asynccontextmanager
async def open_planned_run(
    folder: Path,
    sampler: PlannedSampler,
    scoring: Any,
    environment: Environment | Mapping[str, Environment] | None = None,
    **settings: Any,
) -> AsyncIterator[Run]:
    """A run without services."""
    rollout = {"group_size": GROUP_SIZE, "groups_per_step": 1} | settings.pop("rollout", {})
    config = toy_config({"rollout": rollout} | settings)
    store = OpenRun.open(
        RunFolder(folder / "run"),
        config=config.model_dump(mode="json"),
        fixed={},
        versions={},
        git_commit="",
        config_of=StoreConfig(),
        by_step=SETTINGS_BY_STEP,
    )
    tokenizer = ChatTokenizer.load(save_character_tokenizer(folder / "model"))
    recording = Recording()
    made = {name: _choose(environment, name) for name in environment_configs(config)}
    try:
        async with (
            store.writer,
            Compactor(open_files(store.folder), store.writer, config.store, print) as compactor,
        ):
            yield Run(
                config=config,
                model=folder / "model",
                store=store,
                compactor=compactor,
                environments=tuple(
                    RunEnvironment(
                        name=name or made[name].name,
                        config=own,
                        environment=made[name],
                        scoring=scoring,
                        held_out_scoring=scoring,
                        player=EpisodePlayer(
                            made[name],
                            tokenizer,
                            sampler,
                            max_tokens=256,
                            timeout_s=own.rollout.trajectory_timeout_s,
                            cut_grace_s=0.1,
                            prompt_limit=PromptLimit.from_config(own.rollout, 256),
                        ),
                    )
                    for name, own in environment_configs(config).items()
                ),
                admission=(admission := Admission(config.rollout.max_in_flight)),
                held_out_admission=admission,
                pool=ServerPool(),
                recording=recording,
                task_runs=Diary(),
                progress=RunProgress("run", 1),
                artifacts=RunArtifacts(ObserveConfig(), store.folder, 1),
            )
    finally:
        store.close()


def _choose(environment: Environment | Mapping[str, Environment] | None, name: str) -> Environment:
    return environment[name] if isinstance(environment, Mapping) else environment or Addition()


def with_sampler(run: Run, sampler: Any) -> Run:
    """The run, whose environments' requests go to another sampler."""
    environments = [replace(each, player=replace(each.player, sampler=sampler)) for each in run.environments]
    return replace(run, environments=tuple(environments))


def diary(run: Run) -> list[str]:
    assert isinstance(run.task_runs, Diary)
    return run.task_runs.lines


def read_stored(run: Run, dataset: str) -> list[dict[str, Any]]:
    partition = {"scorer": "planned@1"} if dataset == "scores" else {}
    rows: list[dict[str, Any]] = read(run.folder, dataset, step=0, **partition).to_pylist()
    return sorted(rows, key=lambda row: row.get("sample", 0))

"""A run without services, whose sampler and scorer do as they are told."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flows.config import RunConfig
from flows.running.run import Run
from flows.ui.artifacts import RunArtifacts
from flows.ui.progress import RunProgress
from flows.ui.recording import Recording
from flows.ui.step_runs import StepRuns
from flows.ui.turns import SampledPart, ScoredPart
from tasks.observe.config import ObserveConfig
from tasks.observe.metrics import Metric
from tasks.rollout.addition import Addition
from tasks.rollout.admission import Admission
from tasks.rollout.environment import Environment
from tasks.rollout.sampling import Player, Sampled
from tasks.rollout.tokens import ChatTokenizer, save_character_tokenizer
from tasks.rollout.trajectory import Work
from tasks.serve.pool import ServerPool
from tasks.store.compactor import Compactor
from tasks.store.config import StoreConfig
from tasks.store.filesystem import files_of
from tasks.store.layout import RunFolder
from tasks.store.reader import read
from tasks.store.rows import Rows, values
from tasks.store.run import OpenRun
from tasks.store.schemas import batch_of

T = TypeVar("T")
GROUP_SIZE = 4
HAPPENS_WITHIN_S = 60.0


Act = float | asyncio.Event | Exception


class PlannedSampler:
    """Answers after a sample's seconds, or once something has happened, or raises its error."""

    def __init__(self, plan: dict[int, Act] | None = None) -> None:
        self.plan = plan or {}
        self.sampled: list[int] = []

    async def sample(self, work: Work, token_ids: np.ndarray, until: float) -> Sampled:
        self.sampled.append(work.sample)
        act = self.plan.get(work.sample, 0.0)
        if isinstance(act, Exception):
            raise act
        if isinstance(act, asyncio.Event):
            await asyncio.wait_for(act.wait(), HAPPENS_WITHIN_S)
        else:
            await asyncio.sleep(act)
        ids = np.array([9, 1], np.int32)
        return Sampled(ids, np.array([-0.5, -0.25], np.float32), [(0, 0)], "stop", "http://server")


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
        samples = [int(str(each)) for each in values(rollouts, "sample")]
        self.calls.append(samples)
        n = len(samples)
        groups = [int(str(each)) for each in values(rollouts, "group")]
        rewards = [self.reward(*each) for each in zip(groups, samples, strict=True)]
        statuses = [self.statuses.get(sample, "scored") for sample in samples]
        is_scored = [status == "scored" for status in statuses]
        self.has_scored.set()
        return batch_of(
            "scores",
            {
                **{
                    name: values(rollouts, name)
                    for name in ("run", "step", "group", "sample", "trajectory_id")
                },
                "scorer": ["planned"] * n,
                "version": ["1"] * n,
                "status": statuses,
                "error_type": ["" if scored else "ScoreError" for scored in is_scored],
                "error": ["" if scored else "it would not" for scored in is_scored],
                "reward": [each if ok else math.nan for each, ok in zip(rewards, is_scored, strict=True)],
                "components": ["{}"] * n,
                "subgroup": [0] * n,
                "duration_s": [0.0] * n,
            },
        )

    def reward(self, group: int, sample: int) -> float:
        return float(sample)

    def metrics(self) -> list[Metric]:
        return []


class Diary:
    """A picture that writes down when each part begins and ends."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def rollout(self, part: SampledPart, step: int, group: int, number: int | None = None) -> str:
        self.lines.append(f"rollout {number}")
        how = await part.sample()
        self.lines.append(f"rollout {number} done")
        return how

    async def score(self, part: ScoredPart, step: int, group: int, number: int | None = None) -> str:
        self.lines.append(f"score {number}")
        return await part.score()

    async def group(self, work: Callable[[], Awaitable[T]], step: int, group: int) -> T:
        self.lines.append("group")
        return await work()


@asynccontextmanager
async def opened(
    folder: Path,
    sampler: PlannedSampler,
    scoring: Any,
    environment: Environment | None = None,
    **settings: Any,
) -> AsyncIterator[Run]:
    """A run without services."""
    rollout = {"group_size": GROUP_SIZE, "groups_per_step": 1} | settings.pop("rollout", {})
    config = RunConfig.model_validate({"start_model": {"enabled": True}, "rollout": rollout} | settings)
    store = OpenRun.open(
        RunFolder(folder / "run"),
        config=config.model_dump(mode="json"),
        fixed={},
        versions={},
        git_commit="",
        config_of=StoreConfig(flush_s=0.0),
    )
    tokenizer = ChatTokenizer.load(save_character_tokenizer(folder / "model"))
    environment, recording = environment or Addition(), Recording(1000)
    try:
        async with (
            store.writer,
            Compactor(files_of(store.folder), store.writer, config.store, print) as compactor,
        ):
            yield Run(
                config=config,
                model=folder / "model",
                store=store,
                compactor=compactor,
                environment=environment,
                scoring=scoring,
                held_out_scoring=scoring,
                player=Player(environment, tokenizer, sampler, 256, config.rollout.trajectory_timeout_s, 0.1),
                admission=Admission(config.rollout.max_in_flight),
                pool=ServerPool(),
                recording=recording,
                picture=Diary(),
                progress=RunProgress("run", 1),
                step_runs=StepRuns(ObserveConfig(step_runs=False), "run"),
                artifacts=RunArtifacts(ObserveConfig(), store.folder, 1),
            )
    finally:
        store.close()


def diary(run: Run) -> list[str]:
    assert isinstance(run.picture, Diary)
    return run.picture.lines


def stored(run: Run, dataset: str) -> list[dict[str, Any]]:
    partition = {"scorer": "planned@1"} if dataset == "scores" else {}
    rows: list[dict[str, Any]] = read(run.folder, dataset, step=0, **partition).to_pylist()
    return sorted(rows, key=lambda row: row.get("sample", 0))

"""An open run: its folder, locked, and everything its steps share."""

import asyncio
import importlib.metadata
import subprocess
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from flows.config import RunConfig, fixed_settings
from flows.folder import run_folder
from flows.progress import RunProgress
from flows.recording import Recording
from tasks.rollout.environment import Environment, environment_of
from tasks.rollout.pool_sampler import PoolSampler
from tasks.rollout.sampling import Player
from tasks.rollout.tokens import ChatTokenizer
from tasks.score.scorer import Scorer, scorer_of
from tasks.score.workers import score_workers
from tasks.serve.pool import ServerPool
from tasks.store.layout import RunFolder
from tasks.store.run import OpenRun

VERSIONED_PACKAGES = ("rollmill", "prefect", "torch", "deepspeed", "transformers", "pyarrow", "polars")


@dataclass(frozen=True, slots=True)
class Run:
    """Everything the steps of a run share.

    Attributes:
        model: folder of the start model.
        score_executor: worker processes of the scorer; None: a thread.
        admission: one slot for each trajectory in flight.
    """

    config: RunConfig
    model: Path
    store: OpenRun
    environment: Environment
    scorer: Scorer
    player: Player
    score_executor: Executor | None
    admission: asyncio.Semaphore
    pool: ServerPool
    recording: Recording
    progress: RunProgress

    @property
    def id(self) -> str:
        """Random id of the run, from run.json; never the folder's name."""
        return self.store.manifest.run

    @property
    def folder(self) -> RunFolder:
        """Where the data sets are."""
        return self.store.folder

    @property
    def scorer_key(self) -> str:
        """NAME@VERSION, as in the folder of the scores."""
        return f"{self.scorer.name}@{self.scorer.version}"


@asynccontextmanager
async def open_run(name: str, config: RunConfig, model: Path) -> AsyncIterator[Run]:
    """Lock the run's folder, made when it is not there, and open everything that needs no service.

    Raises:
        RunLockedError, RunMismatchError, RunFinishedError: the folder cannot be gone on with.
    """
    store = OpenRun.open(
        run_folder(name, config),
        config=config.model_dump(mode="json"),
        fixed=fixed_settings(),
        versions={package: importlib.metadata.version(package) for package in VERSIONED_PACKAGES},
        git_commit=_git_commit(),
        config_of=config.store,
    )
    executor = score_workers(config.score.workers)
    pool = ServerPool()
    environment = environment_of(config.rollout.environment)
    try:
        with RunProgress(name, config.steps) as progress:
            async with store.writer:
                yield Run(
                    config=config,
                    model=model,
                    store=store,
                    environment=environment,
                    scorer=scorer_of(config.score.scorer),
                    player=Player(
                        environment=environment,
                        tokenizer=ChatTokenizer.load(model),
                        sampler=PoolSampler(
                            pool, config.rollout, store.manifest.run, config.serve.request_timeout_s
                        ),
                        max_tokens=config.serve.max_model_len,
                        timeout_s=config.rollout.trajectory_timeout_s,
                    ),
                    score_executor=executor,
                    admission=asyncio.Semaphore(config.rollout.max_in_flight),
                    pool=pool,
                    recording=Recording(config.observe.max_unrecorded_task_runs),
                    progress=progress,
                )
    finally:
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        store.close()


def _git_commit() -> str:
    """The commit of the checkout this runs from; empty outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

"""An open run: its folder, locked, and everything its steps share."""

import asyncio
import importlib.metadata
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from flows.config import RunConfig
from flows.running.folder import run_folder
from flows.running.live_spans import sending_spans
from flows.running.recomputing import Recomputing
from flows.running.reference_deployment import ReferenceDeployment, open_reference
from flows.running.sinks import open_sinks
from flows.running.vitals import Vitals
from flows.settings import fixed_settings
from flows.ui.artifacts import RunArtifacts
from flows.ui.leftovers import mark_leftovers
from flows.ui.picture import Picture, picture_of
from flows.ui.progress import RunProgress, quiet_task_runs, say
from flows.ui.recording import Recording
from flows.ui.step_runs import StepRuns
from tasks.observe.memory import keep_for_good
from tasks.observe.sink_client import NoSinks, Sinks
from tasks.observe.spans import OpenSpan, current_lane, span
from tasks.rollout.admission import Admission
from tasks.rollout.env_client import open_environment
from tasks.rollout.environment import Environment
from tasks.rollout.pool_sampler import PoolSampler
from tasks.rollout.prompts import check_prompts
from tasks.rollout.sampling import Player
from tasks.rollout.state import states_of
from tasks.rollout.tokens import ChatTokenizer
from tasks.score.scoring import Scoring
from tasks.serve.pool import ServerPool
from tasks.store.compactor import Compactor
from tasks.store.fixed import check_fixed
from tasks.store.layout import RunFolder
from tasks.store.manifest import has_manifest, read_manifest
from tasks.store.run import OpenRun
from tasks.store.states import check_stored_columns
from tasks.store.writer import RunWriter

VERSIONED_PACKAGES = ("rollmill", "prefect", "torch", "deepspeed", "transformers", "pyarrow", "polars")


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What every run that trains has, whether it samples or not.

    Attributes:
        model: folder of the start model.
        step_runs: Prefect's flow runs of the steps.
        artifacts: what Prefect's UI shows beside.
        vitals: how this process is, by step.
        reference: the servers of the reference policy; None when it lies elsewhere, or nowhere.
    """

    config: RunConfig
    model: Path
    store: OpenRun
    compactor: Compactor
    recording: Recording
    progress: RunProgress
    step_runs: StepRuns
    artifacts: RunArtifacts
    sinks: Sinks = field(default_factory=NoSinks, kw_only=True)
    vitals: Vitals = field(default_factory=Vitals, kw_only=True)
    reference: ReferenceDeployment | None = field(default=None, kw_only=True)

    @property
    def id(self) -> str:
        """Random id of the run, from run.json; never the folder's name."""
        return self.store.manifest.run

    @property
    def writer(self) -> RunWriter:
        """Stores rows in the data sets."""
        return self.store.writer

    @property
    def folder(self) -> RunFolder:
        """Where the data sets are."""
        return self.store.folder


@dataclass(frozen=True, slots=True)
class Run(TrainingRun):
    """A run that samples: everything its steps share.

    Attributes:
        held_out_scoring: scores held-out trajectories; the same as `scoring` unless evaluate.scorer names another.
        admission: one slot for each trajectory in flight.
        redo_failed: True to sample failed trajectories of the open steps again.
        recomputing: hands rollouts to the trainer; None when it goes by the sampler's log-probabilities.
    """

    environment: Environment
    scoring: Scoring
    held_out_scoring: Scoring
    player: Player
    admission: Admission
    pool: ServerPool
    picture: Picture
    redo_failed: bool = False
    recomputing: Recomputing | None = None


def _open_store(name: str, config: RunConfig, *, adds: bool, trains: bool) -> OpenRun:
    folder, settings, fixed = run_folder(name, config), config.model_dump(mode="json"), fixed_settings()
    if adds and has_manifest(folder):
        check_fixed(folder.location, read_manifest(folder).config, settings, fixed)
        return OpenRun.extend(folder, config_of=config.store)
    return OpenRun.open(
        folder,
        config=settings,
        fixed=fixed,
        versions={package: importlib.metadata.version(package) for package in VERSIONED_PACKAGES},
        git_commit=_git_commit(),
        config_of=config.store,
        trains=trains,
    )


@asynccontextmanager
async def open_offline_run(
    name: str, config: RunConfig, model: Path, *, adds: bool = False, trains: bool = True
) -> AsyncIterator[TrainingRun]:
    """Lock the run's folder, made when it is not there, and open its data sets for writing.

    Args:
        name: of the folder below `store.root`.
        config: all settings.
        model: folder of the start model.
        adds: True to add to a run, finished or not, that stays what it is.
        trains: False for a run that is collected and no more.

    Raises:
        RunLockedError, RunMismatchError, RunFinishedError: the folder cannot be gone on with.
    """
    opening = OpenSpan("opening").begin(current_lane())
    store = await asyncio.to_thread(_open_store, name, config, adds=adds, trains=trains)
    recording = Recording(config.observe)
    try:
        await mark_leftovers(store.folder, store.files, config.observe.leftovers_timeout_s)
        quiet_task_runs()
        keep_for_good()
        vitals = Vitals(config.observe, waiting=store.waiting)
        with RunProgress(name, config.steps) as progress, vitals.watching():
            async with (
                # what is added to a run is no part of its steps
                nullcontext() if adds else sending_spans(config.observe, store),
                store.writer,
                nullcontext() if adds else store.spans,
                Compactor(store.files, store.writer, config.store, say) as compactor,
                open_sinks(config, store.folder, store.manifest.run) as sinks,
                open_reference(store, config) as reference,
                StepRuns(config.observe, name) as step_runs,
                RunArtifacts(config.observe, store.folder, config.steps) as artifacts,
            ):
                shared = (config, model, store, compactor, recording, progress, step_runs, artifacts)
                opening.end()
                try:
                    yield TrainingRun(*shared, sinks=sinks, vitals=vitals, reference=reference)
                finally:
                    store.spans.close()
    finally:
        await asyncio.to_thread(store.close)


@asynccontextmanager
async def open_run(
    name: str,
    config: RunConfig,
    model: Path,
    *,
    redo_failed: bool = False,
    adds: bool = False,
    trains: bool = True,
) -> AsyncIterator[Run]:
    """Open a run's folder, and everything else that sampling needs and that is no service; `adds` and `trains` as for an offline one.

    Raises:
        RunLockedError, RunMismatchError, RunFinishedError: the folder cannot be gone on with.
    """
    async with (
        open_offline_run(name, config, model, adds=adds, trains=trains) as opened,
        AsyncExitStack() as stack,
    ):
        opening = OpenSpan("opening").begin(current_lane())
        store = opened.store
        scorings = await stack.enter_async_context(_open_scorings(config, opened.id))
        environment = await stack.enter_async_context(
            open_environment(config.rollout, logs=store.folder.logs, stop_grace_s=config.serve.stop_grace_s)
        )
        check_stored_columns(store.folder, environment.name, states_of(environment))
        check_prompts(environment, config.rollout, config.evaluate.n_prompts)
        pool = ServerPool()
        run = Run(
            config=config,
            model=model,
            store=store,
            compactor=opened.compactor,
            environment=environment,
            scoring=scorings[0],
            held_out_scoring=scorings[-1],
            player=_player(opened, environment, pool),
            admission=Admission(config.rollout.max_in_flight),
            pool=pool,
            recording=opened.recording,
            picture=picture_of(config.observe.task_runs, opened.recording),
            progress=opened.progress,
            step_runs=opened.step_runs,
            artifacts=opened.artifacts,
            vitals=opened.vitals,
            sinks=opened.sinks,
            redo_failed=redo_failed,
            reference=opened.reference,
            recomputing=(
                Recomputing(config.train.recompute_rows) if config.train.behaviour == "recomputed" else None
            ),
        )
        opening.end()
        try:
            yield run
        finally:
            with span("closing"):
                await stack.aclose()


def _player(run: TrainingRun, environment: Environment, pool: ServerPool) -> Player:
    """Plays the environment's episodes with what the pool's servers sample."""
    config, tokenizer = run.config, ChatTokenizer.load(run.model)
    stop = tokenizer.stop_ids(environment.stop)
    return Player(
        environment=environment,
        tokenizer=tokenizer,
        sampler=PoolSampler(
            pool, config.rollout, run.id, config.serve.request_timeout_s, stop_token_ids=stop
        ),
        max_tokens=config.serve.max_model_len,
        timeout_s=config.rollout.trajectory_timeout_s,
    )


@asynccontextmanager
async def _open_scorings(config: RunConfig, run: str) -> AsyncIterator[list[Scoring]]:
    """The scorer of the steps, and that of held-out trajectories when it is another."""
    scorers = ["", config.evaluate.scorer] if config.evaluate.scorer else [""]
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Scoring(config.score, run, scorer=scorer)) for scorer in scorers
        ]


def _git_commit() -> str:
    """The commit of the checkout this runs from; empty outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

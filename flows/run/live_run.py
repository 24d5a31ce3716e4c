"""An open run: its locked folder, and everything that its steps share."""

import asyncio
import importlib.metadata
import json
import subprocess
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path

from prefect.runtime import deployment, flow_run

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import group_shares, list_altered
from rollmill.flows.configuration.rules import describe_altered
from rollmill.flows.configuration.settings import SETTINGS_BY_STEP, UNREAD_BY_COLLECT, find_fixed_settings
from rollmill.flows.prefect_integration.artifacts import RunArtifacts
from rollmill.flows.prefect_integration.leftovers import mark_leftovers
from rollmill.flows.prefect_integration.links import flow_run_page
from rollmill.flows.prefect_integration.progress import RunProgress, quiet_task_runs, say
from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.prefect_integration.task_runs import TaskRunRecorder, choose_task_runs
from rollmill.flows.run.executor.group_work import Executor
from rollmill.flows.run.executor.local_executor import LocalExecutor
from rollmill.flows.run.executor.ray_executor import SharedRun, count_slots, open_ray_executor
from rollmill.flows.run.folder import run_folder
from rollmill.flows.run.lineage_events import send_lineage_events
from rollmill.flows.run.problem_choice import ProblemChoice
from rollmill.flows.run.replay_choice import ReplayChoice
from rollmill.flows.run.rollout_logprobs import LogprobRecomputation, ReferenceDeployment, open_reference
from rollmill.flows.run.run_environment import RunEnvironment, open_environments
from rollmill.flows.run.run_sinks import open_sinks, open_span_sink
from rollmill.flows.run.vitals import Vitals
from rollmill.tasks.observe.process_memory import keep_for_good
from rollmill.tasks.observe.sinks.sink_client import SinkClient
from rollmill.tasks.observe.spans import OpenSpan, current_lane, span
from rollmill.tasks.rollout.admission import Admission
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.group_shares import GroupShares
from rollmill.tasks.store.run.immutable_settings import check_immutable
from rollmill.tasks.store.run.manifest import has_manifest, read_manifest
from rollmill.tasks.store.run.step_settings import describe_setting_changes
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.shards.compactor import Compactor
from rollmill.tasks.train.config import TrainConfig

# Of the settings that changed, in the line that says that a run is resumed.
SHOWN_CHANGES, SHOWN_CHARACTERS = 8, 80

VERSIONED_PACKAGES = ("rollmill", "prefect", "torch", "deepspeed", "transformers", "pyarrow", "polars")


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """An open run, with what its steps share; only the subclass Run has an environment and servers to sample from.

    Attributes:
        model: folder of the start model.
        compactor: merges small shards in the background.
        recording: how far Prefect is behind with task runs.
        progress: the bar on the terminal.
        artifacts: the run's pages in Prefect's UI.
        sinks: TensorBoard, MLflow and Weights & Biases; None without any.
        vitals: event loop lag and memory, by step.
        reference: servers of the reference policy; None without train.kl.reference: deployment.
    """

    config: RunConfig
    model: Path
    store: OpenRun
    compactor: Compactor
    recording: Recording
    progress: RunProgress
    artifacts: RunArtifacts
    sinks: SinkClient | None = field(default=None, kw_only=True)
    vitals: Vitals = field(default_factory=Vitals, kw_only=True)
    reference: ReferenceDeployment | None = field(default=None, kw_only=True)

    @property
    def id(self) -> str:
        """Random id of the run, from run.json; differs from the folder's name."""
        return self.store.manifest.run

    @property
    def folder(self) -> RunFolder:
        """Folder with the run's data sets, checkpoints and run.json."""
        return self.store.folder


@dataclass(frozen=True, slots=True)
class Run(TrainingRun):
    """An open run that samples and scores trajectories.

    Attributes:
        environments: one, or several in the order of their names.
        admission: limits the trajectories in flight.
        held_out_admission: limits those of evaluations, which this process plays; `admission` unless others play the groups.
        pool: the vLLM servers that may be asked.
        task_runs: runs rollout and score tasks, as task runs in Prefect or not.
        redo_failed: sample failed trajectories of unfinished steps again, and score again what the scorer failed on.
        recomputing: sends rollouts to the trainer for its log-probabilities; None with train.old_logprobs: sampler.
        remote: samples and scores groups in other processes; None: this one does.
        problems: chooses the problem of each group.
        replay: chooses stored groups that steps train on again.
    """

    environments: tuple[RunEnvironment, ...]
    admission: Admission
    held_out_admission: Admission
    pool: ServerPool
    task_runs: TaskRunRecorder
    redo_failed: bool = False
    recomputing: LogprobRecomputation | None = None
    remote: Executor | None = None
    problems: ProblemChoice = field(init=False)
    replay: ReplayChoice = field(init=False)

    def __post_init__(self) -> None:
        chosen = ProblemChoice(self.folder, self.config, self.shares, self.environments)
        # The only way to set a field of a frozen instance.
        object.__setattr__(self, "problems", chosen)
        score_of = {each.name: each.config.score for each in self.environments}
        replay = ReplayChoice(self.folder, self.config, self.scores_key, score_of)
        object.__setattr__(self, "replay", replay)

    @property
    def executor(self) -> Executor:
        """What samples and scores the run's groups."""
        return self.remote or LocalExecutor(
            self.id, self.config, self.environments, self.admission, self.store.writer
        )

    @property
    def shares(self) -> GroupShares:
        """Numbers the run's groups, and says which environment each belongs to."""
        return group_shares(self.config)

    @property
    def scores_key(self) -> str:
        """NAME@VERSION under which the scores of the run's steps are stored."""
        return self.environments[0].scoring.key

    def environment_of(self, group: int) -> RunEnvironment:
        """Return the environment that a group of a step belongs to."""
        return self.environments[self.shares.environment(group)]


def _open_store(name: str, config: RunConfig, *, adds: bool, trains: bool) -> OpenRun:
    folder = run_folder(name, config)
    # The start model of a collected run can be evaluated, and what is shown of that reads the record.
    unread = set(UNREAD_BY_COLLECT - {"evaluate"})
    settings = config.model_dump(mode="json", exclude=None if trains else unread)
    if adds and has_manifest(folder):
        manifest = read_manifest(folder)
        fixed = {
            setting: default
            for setting, default in find_fixed_settings().items()
            if setting.partition(".")[0] not in ({"retrain"} if manifest.trains else unread)
        }
        check_immutable(folder.location, manifest.config, settings, fixed)
        # The run may be finished, which `OpenRun.open` would refuse.
        return OpenRun.extend(folder, config_of=config.store)
    return OpenRun.open(
        folder,
        config=settings,
        fixed=find_fixed_settings(trains=trains),
        versions={package: importlib.metadata.version(package) for package in VERSIONED_PACKAGES},
        git_commit=_git_commit(),
        config_of=config.store,
        trains=trains,
        by_step=SETTINGS_BY_STEP if trains else {},
    )


def describe_resumption(location: str, changes: Sequence[str]) -> str:
    """Return the line that says that a run is resumed, with the settings that changed.

    Example: "resuming runs/quickstart with steps: 2 -> 40".
    """
    shown = ", ".join(
        textwrap.shorten(each, SHOWN_CHARACTERS, placeholder=" ...") for each in changes[:SHOWN_CHANGES]
    )
    more = f" and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
    return f"resuming {location}" + (f" with {shown}{more}" if changes else "")


def describe_missing_loss(model: Path, config: TrainConfig) -> str:
    """Return a warning if a model folder's config.json asks for a load-balancing loss that is not computed; else empty.

    transformers adds that loss where output_router_logits is set, with a coefficient that JetMoE and DBRX name otherwise.
    """
    path = model / "config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    parts = {
        name: part if isinstance(part := settings.get(name), dict) else {}
        for name in ("text_config", "ffn_config")
    }
    settings |= parts["text_config"]
    named = (
        settings.get("router_aux_loss_coef"),
        settings.get("aux_loss_coef"),
        parts["ffn_config"].get("moe_loss_weight"),
    )
    asked = next((each for each in named if each is not None), None)
    if not settings.get("output_router_logits") or asked == 0 or config.router_aux_loss_coef:
        return ""
    number = "" if asked is None else f" with coefficient {asked}"
    return f"{path} asks for a load-balancing loss of experts{number}: set train.router_aux_loss_coef to train with it"


@asynccontextmanager
async def open_offline_run(
    name: str, config: RunConfig, model: Path, *, adds: bool = False, trains: bool = True
) -> AsyncIterator[TrainingRun]:
    """Lock a run's folder, created if it is missing, and open its data sets for writing.

    Args:
        name: of the folder below `store.root`.
        config: all settings.
        model: folder of the start model.
        adds: True to add rows to a run, finished or not, without continuing it.
        trains: False for a run of the flow collect.

    Raises:
        RunLockedError: another process writes to the run.
        RunMismatchError, RunFinishedError: the run cannot be resumed with these settings.
    """
    opening = OpenSpan("opening").begin(current_lane())
    store = await asyncio.to_thread(_open_store, name, config, adds=adds, trains=trains)
    recording = Recording()
    try:
        # Only the holder of the run's lock knows that no earlier attempt is alive.
        await mark_leftovers(store.folder, store.files)
        if store.changes is not None:
            say(describe_resumption(store.folder.location, store.changes))
            for line in describe_setting_changes(
                store.manifest.earlier_settings, config.model_dump(mode="json")
            ):
                say(line)
        if trains and (warning := describe_missing_loss(model, config.train)):
            say(warning)
        if flow_run.id and not deployment.id:
            # Who triggered a deployment has the page already.
            say(f"flow run: {flow_run_page(flow_run.id)}")
        quiet_task_runs()
        # Modules imported so far live as long as the process; the garbage collector need not scan them.
        keep_for_good()
        vitals = Vitals(waiting=store.waiting, diagnostics=config.observe.diagnostics)
        with RunProgress(name, config.steps) as progress, vitals.watch():
            async with (
                # Rows that are added to a run belong to none of its steps, so no spans are stored.
                nullcontext() if adds else open_span_sink(config.observe, store),
                store.writer,
                nullcontext() if adds else store.spans,
                Compactor(store.files, store.writer, config.store, say) as compactor,
                open_sinks(config, store.folder, store.manifest.run) as sinks,
                open_reference(store, config) as reference,
                RunArtifacts(config.observe, store.folder, config.steps) as artifacts,
                send_lineage_events(store, model),
            ):
                shared = (config, model, store, compactor, recording, progress, artifacts)
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
    """Open a run with everything that sampling needs, except the servers.

    Args are those of `open_offline_run`, and:
        redo_failed: sample failed trajectories of unfinished steps again, and score again what the scorer failed on.

    Raises:
        RunLockedError, RunMismatchError, RunFinishedError: as for `open_offline_run`.
        ConfigError: the environment does not fit the run's stored states, or has too few prompts.
    """
    async with (
        open_offline_run(name, config, model, adds=adds, trains=trains) as opened,
        AsyncExitStack() as stack,
    ):
        opening = OpenSpan("opening").begin(current_lane())
        store, rollout, pool = opened.store, config.rollout, ServerPool()
        # In a thread: its import and files take a second, which would block the event loop.
        tokenizer = await asyncio.to_thread(
            ChatTokenizer.load, opened.model, rollout.chat_template, rollout.chat_template_kwargs
        )
        if not adds and (line := describe_altered(list_altered(config))):
            say(line)
        environments = await open_environments(
            config, store.manifest.run, store.folder, tokenizer, pool, stack
        )
        if not adds:
            own = environments[0].scoring
            await asyncio.to_thread(store.keep_scorer, own.key, own.description, is_own=True)
        remote, is_remote = None, config.executor.kind == "ray" and not adds
        admission = held_out_admission = Admission(rollout.max_in_flight)
        if is_remote:
            admission = Admission(count_slots(config))
            shared = SharedRun(config, store, pool, admission, environments[0].scoring.key)
            remote = await stack.enter_async_context(open_ray_executor(shared, opened.model))
        run = Run(
            **{each.name: getattr(opened, each.name) for each in fields(opened)},
            environments=environments,
            admission=admission,
            held_out_admission=held_out_admission,
            pool=pool,
            task_runs=TaskRunRecorder(
                choose_task_runs(config.observe, rollout.groups_per_step), opened.recording
            ),
            redo_failed=redo_failed,
            recomputing=(LogprobRecomputation() if config.train.old_logprobs == "trainer" else None),
            remote=remote,
        )
        opening.end()
        try:
            yield run
        finally:
            # Here, while the store can still record how long the worker processes take to end.
            with span("closing"):
                await stack.aclose()


def _git_commit() -> str:
    """Return the git commit of the checkout with this code; empty outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

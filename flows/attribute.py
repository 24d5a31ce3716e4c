"""The flow attribute: what each phase of a stored step after its rollouts costs, measured again one by one and together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from prefect import flow

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import validate
from rollmill.flows.failure import one_error
from rollmill.flows.offline.attribution_table import TOGETHER, TRAFFIC_ALONE, Attribution
from rollmill.flows.offline.phases import Phase, StepPhases
from rollmill.flows.offline.replay_trainer import (
    ReplayTrainer,
    make_scratch,
    open_replay_trainer,
    use_own_trainer,
)
from rollmill.flows.offline.stored_step import SampledStep, copy_step
from rollmill.flows.offline.traffic import synthetic_traffic
from rollmill.flows.prefect_integration.progress import RunProgress
from rollmill.flows.run.live_run import open_run
from rollmill.flows.start_model import ensure_start_model
from rollmill.tasks.observe.usage import Usage, UsageMeter
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import Manifest, read_manifest
from rollmill.tasks.store.run.resume import list_complete_checkpoints
from rollmill.tasks.store.stored_batch import read_batch_digest
from rollmill.tasks.train.service.trainer_client import TrainerClient

TRAFFIC_ALONE_S = 2.0


@flow(name="attribute", flow_run_name="{run} step {step}", persist_result=False)
async def attribute(run: str, step: int, n_traffic: int = 0, with_trainer: bool = True) -> Attribution:
    """Run what follows the rollouts of a stored step again, and measure the cost of each phase, from storing to reporting.

    The phases run in temporary runs; nothing is written to the stored one.

    Args:
        run: the run's folder, or s3://bucket/prefix.
        step: a finished step.
        n_traffic: tasks on the event loop that take the place of live generation; 0: none.
        with_trainer: launch a trainer with the run's settings for the phases that need one; not for a run without.

    Raises:
        ConfigError: the run has no such step, or it is not finished.
        ShardError: rows of it are missing or unreadable.
    """
    folder = RunFolder(run)
    manifest = await asyncio.to_thread(read_manifest, folder)
    with one_error(), make_scratch(folder) as scratch:
        config = _isolate_config(validate(manifest.config), scratch)
        sampled = await asyncio.to_thread(SampledStep.read, folder, manifest, config, step)
        rollout = config.rollout.model_copy(update={"group_size": sampled.group_size})
        config = config.model_copy(update={"rollout": rollout})
        model = await ensure_start_model(config)
        async with AsyncExitStack() as stack:
            trainer = None
            if with_trainer and manifest.trains:
                opened = open_replay_trainer(folder, manifest, config, model, scratch)
                trainer = await stack.enter_async_context(opened)
            attribution = StepAttribution(folder, manifest, config, sampled, model, trainer)
            return await attribution.measure(n_traffic, scratch)


def _isolate_config(config: RunConfig, root: Path) -> RunConfig:
    """Return the settings with `root` as store.root, no TensorBoard, MLflow or OTLP output, and a launched trainer."""
    store = config.store.model_copy(update={"root": str(root)})
    observe = config.observe.model_copy(
        update={
            "tensorboard": False,
            "mlflow_uri": "",
            "wandb": False,
            "prometheus_port": 0,
            "otlp_endpoint": "",
        }
    )
    return use_own_trainer(config).model_copy(update={"store": store, "observe": observe})


class StepAttribution:
    """Measures the seconds, CPU and memory that the phases of one step take, in temporary runs below `config.store.root`.

    Args:
        folder: of the stored run.
        manifest: of the stored run.
        config: settings of the temporary runs.
        sampled: the step.
        model: folder of the start model.
        trainer: None to leave out the phases that need one.
    """

    def __init__(
        self,
        folder: RunFolder,
        manifest: Manifest,
        config: RunConfig,
        sampled: SampledStep,
        model: Path,
        trainer: ReplayTrainer | None,
    ) -> None:
        self._folder, self._manifest, self._config = folder, manifest, config
        self._sampled, self._model, self._trainer = sampled, model, trainer
        self._usages: dict[str, Usage] = {}

    async def measure(self, n_traffic: int, logs: Path) -> Attribution:
        """Measure the phases of the step one by one, then all together, after a run for warm-up that is not measured.

        Args:
            n_traffic: tasks of synthetic traffic during the measurements; 0: none.
            logs: folder for the log of the traffic's server.
        """
        sampled = self._sampled
        # Imports and first uses are slow: a run that is not measured pays for them.
        async with self._open_phases("warm-up", None) as phases:
            await phases.run_together()
        traffic = synthetic_traffic(self._config.serve, n_traffic, round(sampled.n_tokens), logs)
        async with traffic as servers:
            if n_traffic:
                await self._measure_phase(TRAFFIC_ALONE, lambda: asyncio.sleep(TRAFFIC_ALONE_S), servers)
            async with self._open_phases("one-by-one", self._trainer) as phases:
                for name, phase in phases.list_phases().items():
                    await self._measure_phase(name, phase, servers)
            async with self._open_phases("together", self._trainer) as phases:
                await self._measure_phase(TOGETHER, phases.run_together, servers)
        trains = self._manifest.trains
        stored = await asyncio.to_thread(read_batch_digest, self._folder, sampled.step) if trains else ""
        return Attribution(
            run=self._folder.location,
            step=sampled.step,
            n_trajectories=sum(group.rollouts.num_rows for group in sampled.groups),
            synthetic_traffic=n_traffic,
            phases=self._usages,
            read_s=phases.read_s,
            same_batch=phases.digest == stored if trains else None,
        )

    async def _measure_phase(self, name: str, phase: Phase, servers: Sequence[int]) -> None:
        """Run a phase and store its cost under `name`; the CPU of the processes with the ids `servers` is left out."""
        measuring = UsageMeter(servers)
        async with measuring.measure():
            await phase()
        self._usages[name] = measuring.usage

    @asynccontextmanager
    async def _open_phases(self, name: str, trainer: ReplayTrainer | None) -> AsyncIterator[StepPhases]:
        """Create a temporary run that has stored nothing of the step, and yield the step's phases to execute in it.

        Args:
            name: end of the new run's name.
            trainer: brought to the step's version first; None leaves out the phases that need one.
        """
        # Each measurement stores the step again, so it needs a run that has stored nothing of it.
        run_name = f"{self._folder.name}-{name}"
        source = self._folder, self._manifest
        await asyncio.to_thread(copy_step, *source, self._config, self._sampled.step, run_name)
        client = await self._load_step(trainer) if trainer else None
        async with open_run(run_name, self._config, self._model, adds=True) as run:
            hidden = RunProgress(run_name, self._config.steps, is_shown=False)
            yield StepPhases(replace(run, progress=hidden), self._sampled, client)

    async def _load_step(self, trainer: ReplayTrainer) -> TrainerClient:
        """Load the last checkpoint before the step, and train again on the stored batches since; returns the trainer's client."""
        step = self._sampled.step
        checkpoints = await asyncio.to_thread(list_complete_checkpoints, self._folder)
        await trainer.replay(max((each for each in checkpoints if each <= step), default=0), step)
        return trainer.client

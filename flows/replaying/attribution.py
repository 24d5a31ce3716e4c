"""What each phase of a stored step after its generation takes, measured again: one by one, and together."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prefect import flow

from flows.config import RunConfig
from flows.failure import one_error
from flows.policies.services import open_services
from flows.replay import Replaying, launched_here, workplace
from flows.replaying.phases import AfterGeneration, Phase
from flows.replaying.stored_step import SampledStep, copy_for
from flows.replaying.traffic import synthetic_traffic
from flows.running.run import open_run
from flows.settings import validate
from flows.start_model import ensure_start_model
from flows.ui.progress import RunProgress
from tasks.observe.usage import Measuring, Usage
from tasks.store.batch import stored_digest
from tasks.store.layout import SCRATCH_ENV, RunFolder
from tasks.store.manifest import Manifest, read_manifest
from tasks.store.resume import complete_checkpoints
from tasks.train.client import TrainerClient

TRAFFIC_ALONE_S = 2.0
TRAFFIC_ALONE, TOGETHER = "traffic alone", "together"


@dataclass(frozen=True, slots=True)
class Attribution:
    """What the phases of a step took.

    Attributes:
        phases: by name, in order; the last is all of them together.
        read_s: seconds of the training in which the trainer read the batch's rows; None without a trainer.
        same_batch: True when the batch that was made is the stored one; None for a run that stores none.
    """

    run: str
    step: int
    n_trajectories: int
    synthetic_traffic: int
    phases: Mapping[str, Usage]
    read_s: float | None
    same_batch: bool | None

    def values(self) -> dict[str, Any]:
        """All of it, for programs."""
        return asdict(self)


@flow(name="attribute", flow_run_name="{run} step {step}", persist_result=False)
async def attribute(run: str, step: int, n_traffic: int = 0, with_trainer: bool = True) -> Attribution:
    """Run what came after a stored step's generation again, and measure it; nothing is written into the run.

    Args:
        run: the run's folder, or s3://bucket/prefix.
        step: one that is done.
        n_traffic: tasks on the event loop that stand for the traffic of live generation; 0: none.
        with_trainer: launch a trainer with the run's settings for the phases that need one; not for a run without.

    Raises:
        ConfigError: the run has no such step, or it is not done.
        ShardError: rows of it are gone, or cannot be read.
    """
    folder = RunFolder(run)
    manifest = await asyncio.to_thread(read_manifest, folder)
    with one_error(), workplace(folder) as place:
        config = _apart(validate(manifest.config), Path(place))
        sampled = await asyncio.to_thread(SampledStep.read, folder, manifest, config, step)
        rollout = config.rollout.model_copy(update={"group_size": sampled.group_size})
        config = config.model_copy(update={"rollout": rollout})
        attributing = Attributing(folder, manifest, config, sampled, Path(place))
        model = await ensure_start_model(config)
        async with attributing.trainer(model, with_trainer=with_trainer and manifest.trains) as trainer:
            return await attributing.measure(model, trainer, n_traffic)


def _apart(config: RunConfig, place: Path) -> RunConfig:
    """The settings, for runs below another root that tell nobody but Prefect what they do."""
    store = config.store.model_copy(update={"root": str(place)})
    observe = config.observe.model_copy(update={"tensorboard": False, "mlflow_uri": "", "otlp_endpoint": ""})
    return launched_here(config).model_copy(update={"store": store, "observe": observe})


class Attributing:
    """Measures the phases of one step, in runs of their own below `place`."""

    def __init__(
        self, folder: RunFolder, manifest: Manifest, config: RunConfig, sampled: SampledStep, place: Path
    ) -> None:
        self._folder, self._manifest, self._config = folder, manifest, config
        self._sampled, self._place = sampled, place
        self._usages: dict[str, Usage] = {}

    @asynccontextmanager
    async def trainer(self, model: Path, *, with_trainer: bool) -> AsyncIterator[Replaying | None]:
        """A trainer of our own; None without."""
        if not with_trainer:
            yield None
            return
        variables = {SCRATCH_ENV: str(self._place / "scratch")}
        services = open_services(self._config, model, self._place, with_servers=False, variables=variables)
        async with services as (trainer, _):
            yield Replaying(self._folder, self._manifest.run, trainer.client, model)

    async def measure(self, model: Path, trainer: Replaying | None, n_traffic: int) -> Attribution:
        """Measure the phases one by one in one run, and together in another."""
        config, sampled = self._config, self._sampled
        traffic = synthetic_traffic(config.serve, n_traffic, round(sampled.n_tokens), self._place)
        async with self._opened("warm-up", model, None) as phases:
            await phases.together()  # much is imported, and opened, at the first use
        async with traffic as apart:
            if n_traffic:
                await self._measured(TRAFFIC_ALONE, lambda: asyncio.sleep(TRAFFIC_ALONE_S), apart)
            async with self._opened("one-by-one", model, trainer) as phases:
                for name, phase in phases.one_by_one().items():
                    await self._measured(name, phase, apart)
            async with self._opened("together", model, trainer) as phases:
                await self._measured(TOGETHER, phases.together, apart)
        trains = self._manifest.trains
        stored = await asyncio.to_thread(stored_digest, self._folder, sampled.step) if trains else ""
        return Attribution(
            run=self._folder.location,
            step=sampled.step,
            n_trajectories=sum(group.rollouts.num_rows for group in sampled.groups),
            synthetic_traffic=n_traffic,
            phases=self._usages,
            read_s=phases.read_s,
            same_batch=phases.digest == stored if trains else None,
        )

    async def _measured(self, name: str, phase: Phase, apart: Sequence[int]) -> None:
        measuring = Measuring(apart)
        async with measuring.measured():
            await phase()
        self._usages[name] = measuring.usage

    @asynccontextmanager
    async def _opened(
        self, name: str, model: Path, trainer: Replaying | None
    ) -> AsyncIterator[AfterGeneration]:
        """The step in a new run, with the trainer at it."""
        run_name, step = f"{self._folder.name}-{name}", self._sampled.step
        source = self._folder, self._manifest
        await asyncio.to_thread(copy_for, *source, self._config, step, run_name)
        client = await self._at_step(trainer) if trainer else None
        async with open_run(run_name, self._config, model, adds=True) as run:
            unseen = RunProgress(run_name, self._config.steps, is_shown=False)
            yield AfterGeneration(replace(run, progress=unseen), self._sampled, client)

    async def _at_step(self, trainer: Replaying) -> TrainerClient:
        """Bring the trainer to the step: from the last checkpoint before it, by the stored batches since."""
        step = self._sampled.step
        checkpoints = await asyncio.to_thread(complete_checkpoints, self._folder)
        version = max((each for each in checkpoints if each <= step), default=0)
        await trainer.load(version)
        for each in range(version, step):
            await trainer.step(each)
        return trainer.client

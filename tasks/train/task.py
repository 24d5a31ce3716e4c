"""The train task, as Prefect sees it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.train.client import TrainerClient
from tasks.train.protocol import StepResult


class TrainPart:
    """One step's batch on its way through the trainer, and the result when it is there.

    Not a dataclass: Prefect looks into dataclasses among a task's parameters, and this one is only handed on.
    """

    __slots__ = ("digest", "folder", "result", "run", "trainer")

    def __init__(self, trainer: TrainerClient, folder: str, run: str, digest: str) -> None:
        self.trainer, self.folder, self.run, self.digest = trainer, folder, run, digest
        self.result: StepResult | None = None


@task(name="train", task_run_name="step {step} / train", cache_policy=NO_CACHE, persist_result=False)
async def train_step(part: TrainPart, step: int) -> str:
    """Apply a stored batch; the result stays in `part`, what is returned says how it went."""
    result = part.result = await part.trainer.train_step(
        folder=part.folder, run=part.run, step=step, digest=part.digest
    )
    return (
        f"version {result.version}"
        if result.updated
        else f"version {result.version}, no update: {result.reason}"
    )

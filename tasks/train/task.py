"""The train task, as Prefect sees it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.train.client import TrainerClient
from tasks.train.protocol import StepResult


@task(name="train", task_run_name="step {step} / train", cache_policy=NO_CACHE, persist_result=False)
async def train_step(
    trainer: TrainerClient, folder: str, run: str, step: int, digest: str, *, hands_over: bool = True
) -> StepResult:
    """Apply the stored batch of a step."""
    return await trainer.train_step(folder=folder, run=run, step=step, digest=digest, hands_over=hands_over)

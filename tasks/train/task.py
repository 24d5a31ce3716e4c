"""The train task, as Prefect records it."""

from typing import Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollmill.tasks.train.service.answers import StepResult


class TrainsSteps(Protocol):
    """A policy whose trainer applies stored batches.

    No implementation is a dataclass: Prefect searches the fields of dataclasses among a task's parameters.
    """

    async def train(self, step: int, digest: str) -> StepResult:
        """Train on the stored batch of a step, whose digest must be `digest`."""


class TrainedStep:
    """Holds the StepResult of a train task.

    An ordinary class, since Prefect finds the task run that a later task depends on by a weak reference to its result.
    """

    __slots__ = ("__weakref__", "result")

    def __init__(self, result: StepResult) -> None:
        self.result = result


# No retries, whatever PREFECT_TASKS_DEFAULT_RETRIES says: a batch is applied exactly once, and a trainer that dies is restarted
# and brought back to the step by the policy (max_restarts).
@task(
    name="train", task_run_name="step {step} / train", cache_policy=NO_CACHE, persist_result=False, retries=0
)
async def train_step(policy: TrainsSteps, step: int, digest: str) -> TrainedStep:
    """Train the policy on the stored batch of a step, as a Prefect task; returns a holder of the step's result.

    Args:
        policy: the policy.
        step: the step.
        digest: digest of the stored batch, which the trainer compares with what it reads.
    """
    return TrainedStep(await policy.train(step, digest))

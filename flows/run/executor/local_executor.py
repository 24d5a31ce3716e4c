"""The executor `local`: samples and scores groups in this process. Each Ray actor has one too."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import group_shares
from rollmill.flows.run.executor.group_work import GroupTask, SeeRows
from rollmill.flows.run.run_environment import RunEnvironment
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.spans import span
from rollmill.tasks.rollout.admission import Admission, SlotTicket
from rollmill.tasks.rollout.episode import Deadline
from rollmill.tasks.rollout.task import RolloutChunk, StepSampler
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.rollout.trajectory_requests import plan_group_requests
from rollmill.tasks.score.task import ScoreChunk
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.run.step_plan import Attempt
from rollmill.tasks.store.shards.writer import RunWriter


@dataclass(frozen=True, slots=True)
class LocalExecutor:
    """Samples and scores groups with environments of this process.

    Attributes:
        run: id of the run.
        writer: of the run; stores the rows.
    """

    run: str
    config: RunConfig
    environments: Sequence[RunEnvironment]
    admission: Admission
    writer: RunWriter

    def begin_step(self, step: int, see: SeeRows) -> "LocalStep":
        return LocalStep(self, step, see)

    async def end_step(self, step: int) -> Sequence[Metric]:
        return ()

    def environment_of(self, group: int) -> RunEnvironment:
        """Return the environment that a group belongs to."""
        return self.environments[group_shares(self.config).environment(group)]


class LocalStep:
    """What the groups of one step share: a sampler for each environment, and where their rows go."""

    def __init__(self, executor: LocalExecutor, step: int, see: SeeRows) -> None:
        self.executor, self.step, self._see = executor, step, see
        self._samplers = {
            each.name: StepSampler(
                player=each.player,
                admission=executor.admission,
                run=executor.run,
                step=step,
                store_rollouts=self.store_rollouts,
                store_related=partial(self.store_related, each.name),
                keeps_routing=executor.config.rollout.keep_routing,
                on_lost=see,
                env=each.name,
            )
            for each in executor.environments
        }

    async def open_group(self, task: GroupTask) -> "LocalGroup":
        """Fetch the group's problem from the environment, if there is something to sample."""
        environment = self.executor.environment_of(task.group)
        requests: Sequence[TrajectoryRequest] = ()
        if task.attempts:
            with span("environment"):
                requests = await plan_group_requests(
                    environment.environment,
                    run=self.executor.run,
                    seed=environment.config.seed,
                    group=task.group,
                    index=task.index,
                    attempts=task.attempts,
                    temperature=environment.config.rollout.temperature,
                    timeout_s=environment.config.rollout.trajectory_timeout_s,
                )
        by_attempt = dict(zip(task.attempts, requests, strict=True))
        return LocalGroup(self, environment, self._samplers[environment.name], by_attempt)

    def store_rollouts(self, rows: Rows) -> Awaitable[None]:
        """Store rollouts; the result is done once they are stored."""
        return self.executor.writer.append("rollouts", rows, step=self.step)

    def store_related(self, env: str, dataset: str, rows: Rows) -> Awaitable[None]:
        """Store rows of another data set that belong to rollouts of an environment, such as `states`.

        The result is done once they are stored.
        """
        partition = {"env": env} if dataset == "states" else {}
        return self.executor.writer.append(dataset, rows, **partition, step=self.step)

    def store_scores(self, rows: Rows) -> Awaitable[None]:
        """Store scores, and count the failures among them; the result is done once they are stored."""
        key = self.executor.environments[0].scoring.key
        stored = self.executor.writer.append("scores", rows, scorer=key, step=self.step)
        self._see(rows)
        return stored


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """The work of one group in this process."""

    step: LocalStep
    environment: RunEnvironment
    sampler: StepSampler
    requests: dict[Attempt, TrajectoryRequest]

    def trim(self, rows: Rows) -> Rows:
        return rows

    def rollout(
        self, attempts: Sequence[Attempt], tickets: Sequence[SlotTicket], deadline: Deadline
    ) -> RolloutChunk:
        return RolloutChunk(self.sampler, [self.requests[each] for each in attempts], tickets, deadline)

    def score(self, rollouts: Rows) -> ScoreChunk:
        return ScoreChunk(self.environment.scoring, [rollouts], self.step.step, self.step.store_scores)

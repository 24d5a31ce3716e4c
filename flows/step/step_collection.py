"""One step's groups: each is sampled, scored the moment its rollouts are there, and stored.

collect_step                    Prefect task "step": plans the groups, and starts all of them
GroupCollection.collect         one per group: waits for a slot, then for the group's chunks
rollout_then_score              one per chunk: Prefect tasks "rollout" -> "score"
Refills.next_group              a further group in place of one that cannot be trained on
"""

import asyncio
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import task_run

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.failure import one_error
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.prefect_integration.task_runs import RecordedWork
from rollmill.flows.run.executor.group_work import GroupTask, GroupWork
from rollmill.flows.run.live_run import Run
from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.flows.step.step_groups import Refills, plan_groups, plan_ranges, store_group_outcomes
from rollmill.tasks.errors import LongPromptError
from rollmill.tasks.observe.spans import span, within
from rollmill.tasks.rollout.admission import ROLLOUT, SlotTicket
from rollmill.tasks.rollout.episode import Deadline
from rollmill.tasks.rollout.task import RolloutWork, SampledChunk, StoredChunk
from rollmill.tasks.rollout.trajectory_requests import GROUP_TIMEOUT_RATIO, group_deadline, split_chunks
from rollmill.tasks.score.group_outcomes import GroupOutcome
from rollmill.tasks.score.scoring import select_scorable
from rollmill.tasks.score.task import ScoreWork
from rollmill.tasks.store.rows import Rows, column_values, concat_rows, sort_rows
from rollmill.tasks.store.run.group_ranges import group_numbers
from rollmill.tasks.store.run.step_plan import Attempt, GroupPlan, plan_new_group


class CollectedStep:
    """Result of collecting a step, all of whose groups are stored: the outcomes of its groups, and times.

    Prefect keeps a weak reference to a task's result, and draws an edge to each task that takes it. A tuple or a dataclass with slots
    allows no such reference.

    Attributes:
        step: number of the step.
        outcomes: of its groups, ordered by group and subgroup.
        seconds: from the start of its first group to the end of its last one.
        few_left_ns: time from which servers had few requests; see StepCollection.
        task_run_id: of the step's task run in Prefect; empty if it has none.
        stored_tokens: sampled tokens of its rollouts that an earlier process stored.
    """

    __slots__ = ("__weakref__", "few_left_ns", "outcomes", "seconds", "step", "stored_tokens", "task_run_id")

    def __init__(
        self,
        step: int,
        outcomes: Sequence[GroupOutcome],
        seconds: float,
        few_left_ns: int,
        task_run_id: str = "",
        stored_tokens: int = 0,
    ) -> None:
        self.step, self.outcomes, self.seconds, self.stored_tokens = step, outcomes, seconds, stored_tokens
        self.few_left_ns, self.task_run_id = few_left_ns, task_run_id


@task(name="step", task_run_name="step {step}", cache_policy=NO_CACHE, persist_result=False, retries=0)
async def collect_step(run: Run, step: int) -> CollectedStep:
    """Sample, score and store the groups of a step, as far as they are not stored yet.

    Raises:
        FailedShareError: more trajectories failed than rollout.max_failed_share allows.
        ShardError: rows that were stored are gone, or cannot be read.
    """
    started = time.perf_counter()
    with span("planning"):
        ranges = await plan_ranges(run, step)
        plan = await plan_groups(run, step, group_numbers(ranges))
    if plan.redone:
        n_trajectories = sum(each.n_sampled_again for each in plan.groups)
        n_scores = sum(each.n_scores_redone for each in plan.groups)
        say(f"step {step}: {n_trajectories} failed trajectories and {n_scores} failed scores are redone")
    rollout = run.config.rollout
    n_planned = len(plan.groups) * rollout.group_size
    failures = FailureWatch(
        step,
        n_planned,
        rollout.max_failed_share,
        logger=get_run_logger,
        uncounted=partial(_list_uncounted, run),
    )
    for group in plan.groups:
        for rows in (group.rollouts, group.scores):
            failures.see(rows, is_new=False)
    refills = Refills(run, step, ranges, is_closed=plan.has_batch)
    with one_error():
        async with asyncio.TaskGroup() as recordings, asyncio.TaskGroup() as fan_out:
            collection = StepCollection(run, step, failures, refills, fan_out, recordings)
            by_number = {each.group: each for each in plan.groups}
            for number in await run.problems.order(step, list(by_number), refills.drawn):
                fan_out.create_task(GroupCollection(collection, by_number[number]).collect())
                # Starting hundreds of groups at once would hold the event loop, and with it running requests.
                await asyncio.sleep(0)
    # In one order, whichever group ended first: the batch must not depend on timing.
    outcomes = sorted(collection.outcomes, key=lambda outcome: (outcome.group, outcome.subgroup))
    if lacking := refills.lacking(outcomes):
        say(lacking)
    seconds = time.perf_counter() - started
    n_stored = sum(sum(each.rollouts.column("n_completion_tokens").to_pylist()) for each in plan.groups)
    return CollectedStep(step, outcomes, seconds, collection.few_left_ns, task_run.id or "", n_stored)


def _list_uncounted(run: Run, group: int) -> Collection[str]:
    """Return the types of errors of a group that do not count for rollout.max_failed_share."""
    drops = run.environment_of(group).config.rollout.long_prompts == "drop"
    return (LongPromptError.__name__,) if drops else ()


class StepCollection:
    """What the groups of one step share while they are collected: sampler, failures, further groups and outcomes.

    Args:
        run: the run.
        step: the step.
        failures: counts the step's failed trajectories.
        refills: plans further groups; None: there are none.
        fan_out: runs the groups; None: there are no further ones.
        recordings: waits for the groups' task runs in Prefect; None: each group waits for its own.

    Attributes:
        work: what samples and scores the step's groups.
        outcomes: of the groups that are done, in the order in which they ended.
        begun_ns: when the last of its trajectories so far got its slot, by `time.perf_counter_ns`.
        ended_ns: when each group ended.
    """

    def __init__(
        self,
        run: Run,
        step: int,
        failures: FailureWatch,
        refills: Refills | None = None,
        fan_out: asyncio.TaskGroup | None = None,
        recordings: asyncio.TaskGroup | None = None,
    ) -> None:
        self.run, self.step, self.failures, self.recordings = run, step, failures, recordings
        self._refills, self._fan_out = refills, fan_out
        self.outcomes: list[GroupOutcome] = []
        self.begun_ns = 0
        self.ended_ns: list[int] = []
        self.work = run.executor.begin_step(step, failures.see)

    @property
    def drawn(self) -> Mapping[int, int]:
        """Index of each group's problem, by the group's number, of those groups whose problem was drawn by weight."""
        return self._refills.drawn if self._refills else {}

    def note_end(self, tickets: Sequence[SlotTicket]) -> None:
        """Record that a group has ended now, and when its trajectories got their slots."""
        self.begun_ns = max(self.begun_ns, *(ticket.granted_ns for ticket in tickets), 0)
        self.ended_ns.append(time.perf_counter_ns())

    async def add_outcomes(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Keep the outcomes of a group, and start a refill if none of them can be trained on."""
        self.outcomes.extend(outcomes)
        if self._refills is None or self._fan_out is None:
            return
        if (group := await self._refills.next_group(outcomes)) is not None:
            group_size = self.run.config.rollout.group_size
            self.failures.plan_more(group_size)
            self._fan_out.create_task(GroupCollection(self, plan_new_group(group, group_size)).collect())

    @property
    def few_left_ns(self) -> int:
        """Time from which servers had few requests: half of the groups had ended, and no trajectory waited for a slot.

        In nanoseconds, by `time.perf_counter_ns`; known when all groups have ended.
        """
        ended = sorted(self.ended_ns)
        return max(self.begun_ns, ended[len(ended) // 2]) if ended else 0


class GroupCollection:
    """Samples, scores and stores one group of a step, without repeating what its plan says is stored."""

    def __init__(self, collection: StepCollection, plan: GroupPlan) -> None:
        self._run, self._step, self._group = collection.run, collection.step, plan.group
        self._collection, self._plan = collection, plan
        self._environment = collection.run.environment_of(plan.group)
        # Rows of the group, in the columns that its executor returns.
        self._rollouts: list[Rows] = []
        self._scores: list[Rows] = []
        # The rollouts that are done, which a group's score follows in Prefect's graph.
        self._rolled: list[RecordedWork[SampledChunk]] = []
        self._acknowledgements: list[Awaitable[None]] = []
        # How each task of the group ended, by "rollout 384" or "score 384".
        self._summaries: dict[str, str] = {}

    async def collect(self) -> None:
        """Sample and score what is missing of the group, wait until it is stored, and compute its advantages."""
        run, by_group = self._run, self._environment.scoring.by_group
        with within(lane=str(self._group)):
            work = await self._collection.work.open_group(self._task)
            self._rollouts, self._scores = [work.trim(self._plan.rollouts)], [work.trim(self._plan.scores)]
            self._recompute_logprobs(self._plan.rollouts)
            unscored = select_scorable(self._plan.to_score).num_rows
            stored = select_scorable(self._plan.rollouts if by_group else self._plan.to_score)
            attempts = self._plan.to_sample
            with run.admission.request_slots(len(attempts), (self._step, ROLLOUT)) as tickets:
                if tickets:
                    await tickets[0].wait()
                if attempts or unscored:
                    # Before the group's time limit starts.
                    await run.recording.hold_back()
                started, chunks = time.perf_counter(), self._split(work, tickets)
                if stored.num_rows:
                    # Prefect draws no edge from another flow run's task, so a resumed run has a rollout task for stored rollouts.
                    chunks.append(GroupChunk(StoredChunk(work.trim(stored))))
                try:
                    if attempts or unscored:
                        async with run.task_runs.watch_group(self._step, self._group, self._summaries):
                            async with asyncio.TaskGroup() as fan_out:
                                for number, chunk in enumerate(chunks):
                                    label = f"{self._group}.{number}" if len(chunks) > 1 else str(self._group)
                                    fan_out.create_task(self.rollout_then_score(work, chunk, label))
                                    # Prefect's work for a task run blocks the event loop: others run in between.
                                    await asyncio.sleep(0)
                            if by_group:
                                await self._score_group(work)
                            with span("storing"):
                                await asyncio.gather(*self._acknowledgements)
                    outcomes = await self._store_outcomes(time.perf_counter() - started)
                finally:
                    self._collection.note_end(tickets)
            await self._collection.add_outcomes(outcomes)

    @property
    def _task(self) -> GroupTask:
        attempts = tuple(self._plan.to_sample)
        index = self._run.problems.index(self._group, self._collection.drawn) if attempts else None
        return GroupTask(self._step, self._group, index, attempts)

    def _split(self, work: GroupWork, tickets: Sequence[SlotTicket]) -> list["GroupChunk"]:
        """Split what is to be sampled, and the slots, into one chunk for each rollout task, and start the group's time limit."""
        config = self._environment.config.rollout
        timeout_s = GROUP_TIMEOUT_RATIO * config.trajectory_timeout_s
        deadline, size = group_deadline(timeout_s), config.trajectories_per_task
        parts = zip(split_chunks(self._plan.to_sample, size), split_chunks(tickets, size), strict=True)
        return [
            GroupChunk(
                TaggedChunk(work, attempts, granted, timeout_s)
                if self._run.config.observe.rollout_tags
                else work.rollout(attempts, granted, deadline),
                granted[0],
                deadline,
            )
            for attempts, granted in parts
        ]

    async def rollout_then_score(self, work: GroupWork, chunk: "GroupChunk", label: str) -> None:
        """Sample a chunk of the group once its first trajectory has a slot, and score it as soon as it is sampled.

        A scorer of whole groups is left to `_score_group`.
        """
        run, recorder = self._run, self._run.task_runs
        with within(lane=label.replace(".", "/")):
            if chunk.ticket is not None and chunk.deadline is not None:
                # A chunk whose group ends before it has a slot is sampled all the same: its rows are stored as cancelled.
                with suppress(TimeoutError):
                    await chunk.ticket.wait(chunk.deadline.at)
            async with recorder.rollout(chunk.work, self._step, label, self._collection.recordings) as rolled:
                with run.store.writer.expect_rows():
                    sampled = rolled.done(await rolled.work())
            self._rolled.append(rolled)
            self._summaries[f"rollout {label}"] = sampled.summary
            rollouts = select_scorable(sampled.rows)
            async with asyncio.TaskGroup() as concurrent:
                if chunk.ticket is not None:
                    self._rollouts.append(sampled.rows)
                    self._acknowledgements += sampled.acknowledgements
                    if run.reference is not None:
                        concurrent.create_task(run.reference.ask(self._step, rollouts))
                    if run.recomputing is not None:
                        concurrent.create_task(self._recompute_once_stored(sampled))
                if rollouts.num_rows and not self._environment.scoring.by_group:
                    await self._score(work.score(rollouts), label, after=[rolled])

    async def _score_group(self, work: GroupWork) -> None:
        """Score the group's survivors in one call, in the order of their sample numbers.

        Nothing is scored if the group has scores, or if it is incomplete and the scorer needs whole groups.
        """
        # A scorer of groups may depend on the order of candidates, and a resumed step must get the same scores.
        survivors = sort_rows(select_scorable(concat_rows(*self._rollouts)), "sample")
        if concat_rows(*self._scores).num_rows or not survivors.num_rows:
            return
        if is_scorable_group(self._run.config, survivors):
            await self._score(work.score(survivors), str(self._group), after=self._rolled)

    async def _score(self, chunk: ScoreWork, label: str, after: Sequence[RecordedWork[SampledChunk]]) -> None:
        """Score rollouts in one score task, which follows the rollout tasks `after`."""
        recorder, recordings = self._run.task_runs, self._collection.recordings
        async with recorder.score(chunk, self._step, label, recordings, after) as scoring:
            with self._run.store.writer.expect_rows():
                scored = scoring.done(await scoring.work())
        self._summaries[f"score {label}"] = scored.summary
        self._scores.append(scored.rows)
        self._acknowledgements += scored.acknowledgements

    async def _recompute_once_stored(self, sampled: SampledChunk) -> None:
        """Wait until a chunk is stored, then queue its trajectories for log-probabilities by the trainer."""
        await asyncio.gather(*sampled.acknowledgements)
        self._recompute_logprobs(sampled.rows)

    def _recompute_logprobs(self, stored: Rows) -> None:
        if self._run.recomputing is not None:
            ids = column_values(select_scorable(stored), "trajectory_id")
            self._run.recomputing.add(self._step, [str(each) for each in ids])

    async def _store_outcomes(self, duration_s: float) -> tuple[GroupOutcome, ...]:
        # The pool remembers which server has a group's prefix in its cache.
        self._run.pool.forget(self._group)
        rows = concat_rows(*self._rollouts), concat_rows(*self._scores)
        return await store_group_outcomes(self._run, self._step, self._plan, *rows, duration_s)


# Not a dataclass: Prefect searches the fields of dataclasses among a task's parameters.
class TaggedChunk:
    """Trajectories whose time limit starts with their task run, which may wait in Prefect for others with its tag."""

    __slots__ = ("_attempts", "_group", "_tickets", "_timeout_s")

    def __init__(
        self, group: GroupWork, attempts: Sequence[Attempt], tickets: Sequence[SlotTicket], timeout_s: float
    ) -> None:
        self._group, self._attempts, self._tickets, self._timeout_s = group, attempts, tickets, timeout_s

    async def sample(self) -> SampledChunk:
        deadline = group_deadline(self._timeout_s)
        return await self._group.rollout(self._attempts, self._tickets, deadline).sample()


@dataclass(frozen=True, slots=True)
class GroupChunk:
    """A chunk of a group: its rollout work, with the ticket of its first trajectory and the group's deadline if it is to be sampled."""

    work: RolloutWork
    ticket: SlotTicket | None = None
    deadline: Deadline | None = None


def is_scorable_group(config: RunConfig, survivors: Rows) -> bool:
    """Return True if the scorer is given these survivors: the group is whole, or the scorer accepts partial groups."""
    return survivors.num_rows >= config.rollout.group_size or not config.score.needs_full_group

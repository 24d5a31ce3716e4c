"""The collection of a group, with a sampler and a scorer that follow a plan."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planned_run import (
    GROUP_SIZE,
    Act,
    Diary,
    PlannedSampler,
    PlannedScoring,
    diary,
    open_planned_run,
    read_stored,
)

from rollmill.flows.policies.checkpointing import drop_old_routing
from rollmill.flows.prefect_integration.recording import Recording
from rollmill.flows.prefect_integration.task_runs import RecordedWork
from rollmill.flows.run.live_run import Run
from rollmill.flows.step import step_collection
from rollmill.flows.step.lost_trajectories import (
    FailureWatch,
    StoredStepRows,
    drop_line,
    drop_metrics,
    find_drops,
)
from rollmill.flows.step.step_collection import GroupCollection, StepCollection
from rollmill.flows.step.step_groups import plan_groups
from rollmill.tasks.errors import FailedShareError, RequestError
from rollmill.tasks.rollout.environments.guess import Guess
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.task import RolloutWork, SampledChunk
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.score.group_outcomes import NOT_WHOLE, GroupOutcome
from rollmill.tasks.store.expert_routing import read_routing
from rollmill.tasks.store.folders import CHECKPOINT_MARKER
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import Rows


async def collect_group(run: Run, max_share: float = 1.0) -> tuple[GroupOutcome, ...]:
    """Collect group 0 of step 0 as a process that has just opened the run does."""
    plan = await plan_groups(run, 0, [0])
    failures = FailureWatch(0, GROUP_SIZE, max_share, lambda: logging.getLogger("test"))
    collection = StepCollection(run, 0, failures)
    await GroupCollection(collection, plan.groups[0]).collect()
    return tuple(collection.outcomes)


async def test_a_chunk_of_a_group_is_scored_while_another_is_still_sampled(tmp_path: Path) -> None:
    scoring = PlannedScoring()
    sampler = PlannedSampler({3: scoring.has_scored})
    async with open_planned_run(tmp_path, sampler, scoring, rollout={"trajectories_per_task": 1}) as run:
        (outcome,) = await collect_group(run)
    lines = diary(run)
    assert lines.index("score 0.0") < lines.index("rollout 0.3 done")
    assert scoring.calls[-1] == [3]
    assert outcome.advantages.tolist() == [-1.5, -0.5, 0.5, 1.5]


async def test_the_chunks_of_a_group_have_the_configured_number_of_trajectories(tmp_path: Path) -> None:
    scoring = PlannedScoring()
    async with open_planned_run(
        tmp_path, PlannedSampler(), scoring, rollout={"trajectories_per_task": 3}
    ) as run:
        await collect_group(run)
    assert sorted(scoring.calls) == [[0, 1, 2], [3]]


async def test_survivors_of_a_partial_group_are_trained_on_and_failures_are_rows(tmp_path: Path) -> None:
    sampler = PlannedSampler({1: RequestError("status 400: no")})
    async with open_planned_run(tmp_path, sampler, PlannedScoring(statuses={2: "failed"})) as run:
        (outcome,) = await collect_group(run)
        assert [row["status"] for row in read_stored(run, "rollouts")] == [
            "complete",
            "failed",
            "complete",
            "complete",
        ]
        assert [row["status"] for row in read_stored(run, "scores")] == ["scored", "failed", "scored"]
    assert (outcome.reason, [survivor.sample for survivor in outcome.survivors]) == ("", [0, 3])


async def test_a_groups_scorer_sees_all_survivors_at_once_in_their_order_whoever_was_first(
    tmp_path: Path,
) -> None:
    sampler, scoring = PlannedSampler({0: 0.2, 1: RequestError("no")}), PlannedScoring(by_group=True)
    async with open_planned_run(tmp_path, sampler, scoring, rollout={"trajectories_per_task": 1}) as run:
        await collect_group(run)
    assert scoring.calls == [[0, 2, 3]]


async def test_a_group_that_must_be_whole_is_not_scored_when_it_is_not(tmp_path: Path) -> None:
    sampler, scoring = PlannedSampler({1: RequestError("no")}), PlannedScoring(by_group=True)
    async with open_planned_run(tmp_path, sampler, scoring, score={"min_group_size": 0}) as run:
        (outcome,) = await collect_group(run)
    assert not scoring.calls
    assert outcome.reason == NOT_WHOLE


async def test_a_straggler_is_cancelled_and_the_group_continues_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_collection, "GROUP_TIMEOUT_RATIO", 0.01)
    settings = {"trajectory_timeout_s": 100.0, "trajectories_per_task": 1}
    async with open_planned_run(
        tmp_path, PlannedSampler({0: 60.0}), PlannedScoring(), rollout=settings
    ) as run:
        (outcome,) = await collect_group(run)
        first, *rest = read_stored(run, "rollouts")
    assert (first["status"], first["error_type"]) == ("cancelled", "Deadline")
    assert {row["status"] for row in rest} == {"complete"}
    assert [survivor.sample for survivor in outcome.survivors] == [1, 2, 3]


@pytest.mark.parametrize("tags", [(), ("gpu",)])
async def test_what_a_group_waits_for_in_prefect_is_no_part_of_its_time_limit(
    tmp_path: Path, tags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Diary):
        """Prefect lets a task run with a tag wait for others."""

        def rollout(self, chunk: RolloutWork, *others: Any) -> RecordedWork[SampledChunk]:
            async def wait() -> SampledChunk:
                await asyncio.sleep(0.5 if tags else 0.0)
                return await chunk.sample()

            return self._write_down("rollout", wait)

    async def hold_back(_: Recording) -> None:
        await asyncio.sleep(0.5)

    monkeypatch.setattr(step_collection, "GROUP_TIMEOUT_RATIO", 0.003)
    monkeypatch.setattr(Recording, "hold_back", hold_back)
    settings = {"rollout": {"trajectory_timeout_s": 100.0}, "observe": {"rollout_tags": tags}}
    async with open_planned_run(tmp_path, PlannedSampler(), PlannedScoring(), **settings) as run:
        await collect_group(replace(run, task_runs=Slow()))
        assert {row["status"] for row in read_stored(run, "rollouts")} == {"complete"}


async def test_only_missing_trajectories_are_sampled_and_only_unscored_ones_are_scored(
    tmp_path: Path,
) -> None:
    class Dying(PlannedScoring):
        async def score(self, rollouts: Rows, *, step: int) -> Rows:
            if self.calls:
                raise RuntimeError  # as when the process is ended between a rollout and its score
            return await super().score(rollouts, step=step)

    settings = {"trajectories_per_task": 2}
    dying = Dying()
    first = PlannedSampler(dict.fromkeys((2, 3), dying.has_scored))
    with pytest.raises(ExceptionGroup):
        async with open_planned_run(tmp_path, first, dying, rollout=settings) as run:
            await collect_group(run)
    second, scoring = PlannedSampler(), PlannedScoring()
    async with open_planned_run(tmp_path, second, scoring, rollout=settings) as run:
        (outcome,) = await collect_group(run)
        assert len(read_stored(run, "rollouts")) == len(read_stored(run, "scores")) == GROUP_SIZE
    assert not second.sampled
    assert scoring.calls == [[2, 3]]
    assert len(outcome.survivors) == GROUP_SIZE


@pytest.mark.parametrize("by_group", [False, True])
async def test_failures_are_attempted_again_on_request_and_the_advantages_of_their_group_are_recomputed(
    tmp_path: Path, by_group: bool
) -> None:
    failing = PlannedSampler({1: RequestError("status 400: no")})
    async with open_planned_run(tmp_path, failing, PlannedScoring(by_group=by_group)) as run:
        await collect_group(run)
    sampler, scoring = PlannedSampler(), PlannedScoring(by_group=by_group)
    async with open_planned_run(tmp_path, sampler, scoring) as run:
        (outcome,) = await collect_group(replace(run, redo_failed=True))
        attempts = [(row["sample"], row["attempt"], row["status"]) for row in read_stored(run, "rollouts")]
        (group,) = read_stored(run, "groups")
        assert len(read_stored(run, "scores")) == GROUP_SIZE
        assert drop_line(find_drops(StoredStepRows.read(run.folder, 0, scoring.key))) == ""
    assert sampler.sampled == [1]
    assert [sorted(call) for call in scoring.calls] == ([[0, 1, 2, 3]] if by_group else [[1]])
    assert attempts[1:3] == [(1, 0, "failed"), (1, 1, "complete")]
    assert len(outcome.survivors) == group["survived"] == GROUP_SIZE


@pytest.mark.parametrize("by_group", [False, True])
async def test_failed_scores_are_computed_again_on_request_and_nothing_is_sampled(
    tmp_path: Path, by_group: bool
) -> None:
    broken = PlannedScoring(by_group=by_group, statuses={1: "failed", 2: "dropped"})
    async with open_planned_run(tmp_path, PlannedSampler(), broken) as run:
        await collect_group(run)
    sampler, scoring = PlannedSampler(), PlannedScoring(by_group=by_group)
    async with open_planned_run(tmp_path, sampler, scoring) as run:
        await collect_group(run)
        assert not scoring.calls
        (outcome,) = await collect_group(replace(run, redo_failed=True))
        (group,) = read_stored(run, "groups")
        statuses = [row["status"] for row in read_stored(run, "scores")]
    assert not sampler.sampled
    assert [sorted(call) for call in scoring.calls] == ([[0, 1, 2, 3]] if by_group else [[1]])
    assert sorted(statuses) == ["scored"] * 4 if by_group else ["dropped", *["scored"] * 3]
    assert len(outcome.survivors) == group["survived"] == (4 if by_group else 3)


async def test_too_many_failures_end_the_run_at_once_and_name_the_most_frequent(tmp_path: Path) -> None:
    plan: dict[int, Act] = {0: RequestError("status 400: no"), 1: RequestError("no"), 2: 60.0}
    async with open_planned_run(tmp_path, PlannedSampler(plan), PlannedScoring()) as run:
        with pytest.raises(ExceptionGroup) as raised:
            await collect_group(run, max_share=0.25)
        await run.store.writer.flush()
        assert len(read_stored(run, "rollouts")) >= 2
    (error,) = leaves(raised.value)
    assert isinstance(error, FailedShareError)
    assert "2 of 4 trajectories failed, rollout.max_failed_share allows 0.25; 2 times RequestError" in str(
        error
    )
    for remedy in ("rollmill inspect RUN --status failed,unscored", "same command with --redo-failed"):
        assert remedy in str(error)


class RoutingSampler(PlannedSampler):
    """Returns with every completion the routed experts of all tokens that were asked for: their places."""

    async def sample(
        self, work: TrajectoryRequest, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> SampledTokens:
        sampled = await super().sample(work, token_ids, until)
        assert routing_from is not None
        n_tokens = len(token_ids) + len(sampled.token_ids)
        return replace(sampled, routed_experts=experts_of(n_tokens - 1)[routing_from:])


def experts_of(n_tokens: int) -> np.ndarray:
    return np.arange(n_tokens * 6, dtype=np.uint16).reshape(n_tokens, 3, 2)


async def test_the_routed_experts_of_a_group_are_stored_with_its_rollouts(tmp_path: Path) -> None:
    settings = {"keep_routing": True}
    async with open_planned_run(tmp_path, RoutingSampler(), PlannedScoring(), rollout=settings) as run:
        await collect_group(run)
        rollouts = read_stored(run, "rollouts")
        found = read_routing(run.folder, 0, [row["trajectory_id"] for row in rollouts])
    assert len(found) == GROUP_SIZE
    for row, experts in zip(rollouts, found, strict=True):
        np.testing.assert_array_equal(experts, experts_of(len(row["token_ids"]) - 1))


async def test_the_state_of_the_environment_is_stored_for_every_trajectory_also_failed_ones(
    tmp_path: Path,
) -> None:
    sampler = PlannedSampler({1: RequestError("status 400: no")})
    async with open_planned_run(tmp_path, sampler, PlannedScoring(), Guess()) as run:
        await collect_group(run)
        states = sorted(read(run.folder, "states", env="guess").to_pylist(), key=lambda row: row["sample"])
        ids = [row["trajectory_id"] for row in read_stored(run, "rollouts")]
    assert [row["trajectory_id"] for row in states] == ids
    assert [(row["guesses"], row["won"], row["error"]) for row in states] == [([], False, "")] * GROUP_SIZE


def leaves(group: ExceptionGroup[Exception]) -> Sequence[Exception]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (leaves(error) if isinstance(error, ExceptionGroup) else [error])
    ]


async def test_each_failure_is_logged_once_with_its_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = PlannedSampler({1: RequestError("status 400: no")})
    async with open_planned_run(tmp_path, sampler, PlannedScoring(statuses={2: "dropped"})) as run:
        await collect_group(run)
        await collect_group(run)
    messages = [record.getMessage() for record in caplog.records if record.name == "test"]
    assert len(messages) == 2
    assert "failed: RequestError: status 400: no" in messages[0]
    assert "dropped: ScoreError: it would not" in messages[1]


async def test_a_step_reports_its_lost_trajectories_by_cause_and_by_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_collection, "GROUP_TIMEOUT_RATIO", 0.01)
    settings = {"trajectory_timeout_s": 100.0, "trajectories_per_task": 1}
    sampler = PlannedSampler({0: 60.0, 1: RequestError("no")})
    scoring = PlannedScoring(statuses={2: "dropped"})
    async with open_planned_run(
        tmp_path, sampler, scoring, rollout=settings, score={"min_group_size": 2}
    ) as run:
        await collect_group(run)
        await run.store.writer.flush()
        fates = find_drops(StoredStepRows.read(run.folder, 0, scoring.key))
    causes = sorted(fates["cause"].to_list())
    assert causes == ["Deadline", "RequestError", "dropped_by_scorer", "too_few_survivors"]
    assert drop_line(fates).startswith("4 lost (")
    metrics = {metric.name: metric.value for metric in drop_metrics(fates)}
    assert (metrics["drops/trajectories"], metrics["drops/share"]) == (4.0, 1.0)
    assert metrics["drops/cause_Deadline"] == 1.0
    assert metrics["drops/lost_up_to_16_tokens"] == 4.0
    assert "drops/kept_tokens" not in metrics


class TruncatedSampler(PlannedSampler):
    """Cuts the answers of some samples for their length."""

    def __init__(self, *samples: int) -> None:
        super().__init__()
        self.samples = samples

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        sampled = await super().sample(work, token_ids, until)
        return replace(sampled, finish_reason="length") if work.sample in self.samples else sampled


async def test_truncated_trajectories_that_are_not_trained_on_are_lost_with_that_cause(
    tmp_path: Path,
) -> None:
    score = {"train_truncated": False}
    async with open_planned_run(tmp_path, TruncatedSampler(1, 2), PlannedScoring(), score=score) as run:
        (outcome,) = await collect_group(run)
        fates = find_drops(StoredStepRows.read(run.folder, 0, run.scores_key), train_truncated=False)
        assert drop_line(find_drops(StoredStepRows.read(run.folder, 0, run.scores_key))) == ""
    assert [survivor.sample for survivor, *_ in outcome.trained] == [0, 3]
    assert drop_line(fates) == "2 lost (2 truncated)"


async def test_a_step_without_lost_trajectories_reports_none(tmp_path: Path) -> None:
    async with open_planned_run(tmp_path, PlannedSampler(), PlannedScoring()) as run:
        await collect_group(run)
        fates = find_drops(StoredStepRows.read(run.folder, 0, run.scores_key))
    assert drop_line(fates) == ""
    assert {metric.name: metric.value for metric in drop_metrics(fates)}["drops/kept_tokens"] == 2.0


async def test_experts_of_old_steps_go_once_a_checkpoint_is_past_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rollout": {"keep_routing": True}, "store": {"keep_routing_steps": 1}}
    async with open_planned_run(tmp_path, RoutingSampler(), PlannedScoring(), **settings) as run:
        await collect_group(run)
        await drop_old_routing(run, done=2)
        assert read(run.folder, "routing").num_rows == GROUP_SIZE
        marker = run.folder.checkpoint(1) / CHECKPOINT_MARKER
        marker.parent.mkdir(parents=True)
        marker.touch()
        await drop_old_routing(run, done=2)
        assert read(run.folder, "routing").num_rows == 0
        assert read(run.folder, "rollouts").num_rows == GROUP_SIZE

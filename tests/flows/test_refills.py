"""Dynamic sampling: groups that cannot be trained on give their place to further ones."""

import asyncio
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planned_run import GROUP_SIZE, PlannedSampler, PlannedScoring, open_planned_run, read_stored
from prefect.logging import disable_run_logger

from rollmill.flows.run.live_run import Run
from rollmill.flows.step.lost_trajectories import StoredStepRows, drop_line, drop_metrics, find_drops
from rollmill.flows.step.step_collection import CollectedStep, collect_step
from rollmill.flows.step.step_groups import store_batch
from rollmill.tasks.errors import FailedShareError, RequestError
from rollmill.tasks.rollout.environment import Example, Message, SingleTurn
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.group_ranges import GroupRange, group_numbers, read_plan
from rollmill.tasks.store.verify.run_verification import verify_run

N_GROUPS, N_REFILLS = 3, 4


class GroupSampler(PlannedSampler):
    """Holds a group until another has begun, as `held` says; writes down what begins, and whether the stored plan had it."""

    def __init__(self, folder: Path, held: dict[int, int] | None = None) -> None:
        super().__init__()
        self.folder, self.held = RunFolder(folder / "run"), held or {}
        self.has_begun: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.begun: Counter[str] = Counter()
        self.unplanned: set[int] = set()

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        self.has_begun[work.group].set()
        self.begun[work.trajectory_id] += 1
        if work.group not in group_numbers(read_plan(self.folder, 0)):
            self.unplanned.add(work.group)
        if other := self.held.get(work.group):
            async with asyncio.timeout(60.0):
                await self.has_begun[other].wait()
        return await super().sample(work, token_ids, until)


class FlatGroups(PlannedScoring):
    """Gives all samples of some groups the same reward."""

    def __init__(self, *flat: int) -> None:
        super().__init__()
        self.flat = flat

    def reward(self, group: int, sample: int) -> float:
        return 0.5 if group in self.flat else float(sample)


def allow_refills(**rollout: Any) -> dict[str, Any]:
    return {"rollout": {"groups_per_step": N_GROUPS, "max_refill_groups": N_REFILLS} | rollout}


async def collect(run: Run) -> CollectedStep:
    with disable_run_logger():
        return await collect_step.fn(run, 0)


def list_trained(found: CollectedStep) -> list[int]:
    return [outcome.group for outcome in found.outcomes if not outcome.reason]


async def test_a_refill_begins_while_other_groups_are_sampled_and_not_before_its_plan_is_stored(
    tmp_path: Path,
) -> None:
    sampler = GroupSampler(tmp_path, {2: 4})
    async with open_planned_run(tmp_path, sampler, FlatGroups(0, 3), **allow_refills()) as run:
        found = await collect(run)
        plan = read_plan(run.folder, 0)
    assert plan == (GroupRange(0, 3), GroupRange(3, 1, "refill"), GroupRange(4, 1, "refill"))
    assert list_trained(found) == [1, 2, 4]
    assert not sampler.unplanned


async def test_a_step_has_no_more_refills_than_allowed_and_trains_on_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_planned_run(
        tmp_path, GroupSampler(tmp_path), FlatGroups(*range(1, 99)), **allow_refills()
    ) as run:
        found = await collect(run)
        await store_batch(run, 0, found.outcomes)
        assert {row["group"] for row in read_stored(run, "batches")} == {0}
    assert [outcome.group for outcome in found.outcomes] == list(range(N_GROUPS + N_REFILLS))
    warning = "step 0: after 4 refills, of rollout.max_refill_groups = 4, 1 of 3 groups can be trained on"
    assert warning in capsys.readouterr().err


async def test_without_refills_an_untrainable_group_keeps_its_place(tmp_path: Path) -> None:
    async with open_planned_run(
        tmp_path, GroupSampler(tmp_path), FlatGroups(0, 1), **allow_refills(max_refill_groups=0)
    ) as run:
        found = await collect(run)
    assert (len(found.outcomes), list_trained(found)) == (N_GROUPS, [2])


async def test_a_step_whose_batch_is_stored_gets_no_more_refills(tmp_path: Path) -> None:
    scoring = FlatGroups(0)
    async with open_planned_run(
        tmp_path, GroupSampler(tmp_path), scoring, **allow_refills(max_refill_groups=0)
    ) as run:
        await store_batch(run, 0, (await collect(run)).outcomes)
    sampler = GroupSampler(tmp_path)
    async with open_planned_run(tmp_path, sampler, scoring, **allow_refills()) as run:
        await collect(run)
    assert not sampler.begun


@pytest.mark.parametrize("n_before_the_end", range(1, 28, 3))
async def test_a_step_ended_anywhere_resumes_with_its_plan_and_samples_nothing_twice(
    tmp_path: Path, n_before_the_end: int
) -> None:
    scoring, limits = FlatGroups(0, 2, 3, 5), allow_refills(max_in_flight=GROUP_SIZE)

    class Ending(GroupSampler):
        async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
            if sum(self.begun.values()) == n_before_the_end:
                whole.cancel()
            return await super().sample(work, token_ids, until)

    first = Ending(tmp_path)
    async with open_planned_run(tmp_path, first, scoring, **limits) as run:
        whole = asyncio.ensure_future(collect(run))
        with suppress(asyncio.CancelledError):
            await whole
    async with open_planned_run(tmp_path, PlannedSampler(), scoring, **limits) as run:
        kept = {row["trajectory_id"] for row in read_stored(run, "rollouts")}
    second = GroupSampler(tmp_path)
    async with open_planned_run(tmp_path, second, scoring, **limits) as run:
        found = await collect(run)
        await store_batch(run, 0, found.outcomes)
        plan = group_numbers(read_plan(run.folder, 0))
        rows = [row["trajectory_id"] for row in read_stored(run, "rollouts")]
    assert plan == tuple(range(7))
    assert list_trained(found) == [1, 4, 6]
    assert not kept & set(second.begun)
    assert len(rows) == len(set(rows)) == 7 * GROUP_SIZE
    assert not verify_run(second.folder).findings


async def test_a_broken_environment_ends_the_run_and_not_its_refills(tmp_path: Path) -> None:
    error = RequestError("status 400: no")
    sampler = PlannedSampler(dict.fromkeys(range(GROUP_SIZE), error))
    async with open_planned_run(
        tmp_path, sampler, PlannedScoring(), **allow_refills(max_failed_share=0.4)
    ) as run:
        with pytest.raises(FailedShareError):
            await collect(run)
        assert read_plan(run.folder, 0) == (GroupRange(0, 3),)


class Lengthy(Addition):
    """Every second problem has a prompt of 6 tokens, the others of 4."""

    def episode(self, example: Example, seed: int) -> SingleTurn:
        is_long = sum(map(int, example.example_id.split("+"))) % 2
        return SingleTurn((Message("user", "11+22=" if is_long else "1+2="),))


async def test_a_group_whose_long_prompt_is_dropped_gets_a_refill_and_is_counted_as_lost_not_as_a_failure(
    tmp_path: Path,
) -> None:
    limits = {"max_prompt_tokens": 5, "max_failed_share": 0.0, "max_refill_groups": 20}
    async with open_planned_run(
        tmp_path,
        GroupSampler(tmp_path),
        PlannedScoring(),
        Lengthy(),
        **allow_refills(long_prompts="drop", **limits),
    ) as run:
        found = await collect(run)
        rows = read_stored(run, "rollouts")
        fates = find_drops(StoredStepRows.read(run.folder, 0, "planned@1"))
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["error_type"] for row in failed} == {"LongPromptError"}
    n_dropped = len(failed) // GROUP_SIZE
    assert n_dropped
    assert len(list_trained(found)) == N_GROUPS
    assert len(found.outcomes) == N_GROUPS + n_dropped
    lost = {each.name: each.value for each in drop_metrics(fates)}
    assert lost["drops/cause_LongPromptError"] == len(failed)
    assert drop_line(fates) == f"{len(failed)} lost ({len(failed)} LongPromptError)"


async def test_long_prompts_that_may_not_be_dropped_are_failures(tmp_path: Path) -> None:
    limits = {"max_prompt_tokens": 5, "max_failed_share": 0.0, "max_refill_groups": 20}
    async with open_planned_run(
        tmp_path, GroupSampler(tmp_path), PlannedScoring(), Lengthy(), **allow_refills(**limits)
    ) as run:
        with pytest.raises(FailedShareError, match="LongPromptError, for example: the opening has 6 tokens"):
            await collect(run)

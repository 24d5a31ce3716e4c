"""Stored groups in live steps: exact after a kill, corrected, reported and verified; with one advantage for each trajectory."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from planned_run import PlannedSampler, PlannedScoring, open_planned_run
from prefect.logging import disable_run_logger

import rollmill
from rollmill.flows.checks.preflight import check_choice
from rollmill.flows.configuration.rules import check_sampling
from rollmill.flows.offline.retrain_sources import check_replay_sources
from rollmill.flows.run.live_run import Run
from rollmill.flows.step.report import _measure, store_metrics
from rollmill.flows.step.step_collection import collect_step
from rollmill.flows.step.step_groups import plan_ranges, store_batch
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_tables import make_run_view
from rollmill.tasks.look.tables.selection import Selection
from rollmill.tasks.look.tables.trajectory_table import find_step, make_trajectories_view
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.group_draw import StoredGroup
from rollmill.tasks.store.lineage.trained_rows import read_trained_rows
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.fork_copy import fork_run
from rollmill.tasks.store.run.group_ranges import GroupRange, group_numbers, read_plan, replayed_groups
from rollmill.tasks.store.verify.run_verification import verify_run
from rollmill.tasks.train.samples import read_samples
from tests.stubs.toy_settings import toy_config, validate_toy

N_GROUPS, GROUP_SIZE, STEPS = 4, 2, 3
REPOSITORY = Path(__file__).parents[2]


class SampledBy(PlannedSampler):
    """Answers by a policy version; kills its process when it has answered a number of times."""

    def __init__(self, version: int = 0, dies_at: int = -1) -> None:
        super().__init__()
        self.version, self.left = version, dies_at

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        ids, logprobs = np.array([9, 1], np.int32), np.array([-0.5, -0.25], np.float32)
        return SampledTokens(ids, logprobs, [(0, self.version)], "stop", "http://server")


class FlatGroups(PlannedScoring):
    """Gives all samples of some groups the same reward."""

    def __init__(self, *flat: int) -> None:
        super().__init__()
        self.flat = flat

    def reward(self, group: int, sample: int) -> float:
        return 0.5 if group in self.flat else float(sample + group)


@asynccontextmanager
async def open_replaying(
    folder: Path, sampler: Any = None, scoring: Any = None, **replay: Any
) -> AsyncIterator[Run]:
    rollout = {"groups_per_step": N_GROUPS, "group_size": GROUP_SIZE, "replay": {"share": 0.5} | replay}
    async with open_planned_run(
        folder, sampler or SampledBy(), scoring or FlatGroups(), rollout=rollout, steps=STEPS, seed=7
    ) as run:
        yield run


async def run_step(run: Run, step: int) -> None:
    """A step as the flow makes it, without a trainer."""
    for each in run.environments:
        sampler = each.player.sampler
        assert isinstance(sampler, SampledBy)
        sampler.version = step
    with disable_run_logger():
        collected = await collect_step.fn(run, step)
    await store_batch(run, step, collected.outcomes)
    metrics, _ = _measure(run, step)
    await store_metrics(run, step, [*metrics, Metric("train/updated", "all", "value", 1.0)])
    await run.store.writer.note()


async def run_steps(run: Run, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        await run_step(run, step)


def drawn(run: Run | RunFolder) -> list[dict[int, StoredGroup]]:
    folder = run.folder if isinstance(run, Run) else run
    return [replayed_groups(read_plan(folder, step)) for step in range(STEPS)]


async def test_stored_groups_take_the_place_of_planned_ones_with_the_advantages_that_they_had(
    tmp_path: Path,
) -> None:
    async with open_replaying(tmp_path) as run:
        await run_steps(run)
    before = {row["trajectory_id"]: row for row in read(run.folder, "batches", step=0).to_pylist()}
    assert len(before) == N_GROUPS * GROUP_SIZE
    for step in range(1, STEPS):
        replayed = replayed_groups(read_plan(run.folder, step))
        batch = read(run.folder, "batches", step=step).to_pylist()
        assert len(replayed) == N_GROUPS // 2
        assert sorted(batch, key=lambda row: row["order"]) == sorted(batch, key=lambda row: row["group"])
        for row in batch:
            assert row["source"] == ""
            stored = replayed.get(row["group"])
            assert row["source_step"] == (stored.step if stored else step)
            if row["trajectory_id"] in before:
                assert row["advantage"] == before[row["trajectory_id"]]["advantage"]
        # Nothing is sampled for their numbers, and the trainer reads every row where it is stored.
        sampled = set(read(run.folder, "rollouts", step=step)["group"].to_pylist())
        assert (
            sampled
            == set(group_numbers(read_plan(run.folder, step)))
            == {*range(step * 4, step * 4 + 4)} - {*replayed}
        )
        _, samples = read_samples(run.folder.location, step)
        assert samples.n_trained(range(len(batch))) == 2 * N_GROUPS * GROUP_SIZE
    plans = [run.replay.plan(step, GroupRange(0, N_GROUPS)) for step in range(STEPS, STEPS + 20)]
    assert {each.first for plan in plans for each in plan} == set(range(N_GROUPS))


async def test_a_run_with_stored_groups_verifies_and_every_trained_row_is_traced(tmp_path: Path) -> None:
    async with open_replaying(tmp_path) as run:
        await run_steps(run)
    assert verify_run(run.folder).findings == []
    rows = read_trained_rows(run.folder, read(run.folder, "batches", step=2))
    assert {row.step for row in rows} > {2}
    assert len({row.digest for row in rows}) == N_GROUPS * GROUP_SIZE


async def test_a_trajectory_in_several_batches_is_one_row_with_the_advantage_of_the_step_that_sampled_it(
    tmp_path: Path,
) -> None:
    async with open_replaying(tmp_path, share=0.75) as run:
        await run_steps(run)
    frame = rollmill.open_run(run.folder.location).trajectories.collect()
    n_sampled = read(run.folder, "rollouts").num_rows
    assert len(frame) == frame["trajectory_id"].n_unique() == n_sampled < STEPS * N_GROUPS * GROUP_SIZE
    assert frame["advantage"].null_count() == 0
    view = make_trajectories_view(run.folder, Selection(level="trajectories", limit=0))
    assert len(view.rows) == n_sampled
    assert view.values["n"] == n_sampled


async def test_the_share_of_stored_groups_is_a_metric_and_a_column_of_the_steps(tmp_path: Path) -> None:
    async with open_replaying(tmp_path) as run:
        await run_steps(run)
    metrics = pl.from_arrow(read(run.folder, "metrics", step=1))
    assert isinstance(metrics, pl.DataFrame)
    found = dict(metrics.select("name", "value").iter_rows())
    assert (found["rollout/replayed_groups"], found["rollout/replayed_share"]) == (2.0, 0.5)
    assert (found["rollout/groups"], found["rollout/replayed_steps_ago"]) == (2.0, 1.0)
    view = make_run_view(run.folder)
    assert [row["replayed"] for row in view.rows] == [None, 2, 2]
    assert "stored" in [column.heading for column in view.columns]
    for number, stored in drawn(run)[1].items():
        assert find_step(run.folder, stored.group) == 0
        where = f"step 1 trained on a stored group in its place: group {stored.group} of step 0 of this run"
        with pytest.raises(ConfigError, match=where):
            find_step(run.folder, number)


async def test_groups_without_spread_are_not_drawn_and_missing_ones_are_sampled(tmp_path: Path) -> None:
    async with open_replaying(tmp_path, scoring=FlatGroups(0, 1, 2), share=0.75) as run:
        await run_steps(run, last=2)
        assert drawn(run)[:2] == [{}, drawn(run)[1]]
        # Of step 0 one group can be trained on, so three are sampled.
        assert [each.group for each in drawn(run)[1].values()] == [3]
        assert len(group_numbers(read_plan(run.folder, 1))) == 3


async def test_a_condition_and_an_order_choose_with_the_number_of_replays(tmp_path: Path) -> None:
    async with open_replaying(tmp_path, where="replays = 0 and steps_ago <= 2", order_by="reward") as run:
        await run_steps(run)
    # The later a group, the larger are its rewards.
    steps = [sorted((each.step, each.group) for each in step.values()) for step in drawn(run)]
    assert steps == [[], [(0, 0), (0, 1)], [(0, 2), (0, 3)]]


async def test_a_resumed_step_has_the_groups_of_its_plan_whatever_the_settings_are_now(
    tmp_path: Path,
) -> None:
    async with open_replaying(tmp_path) as run:
        await run_steps(run, last=2)
        await plan_ranges(run, 2)
        planned = drawn(run)[2]
    async with open_replaying(tmp_path, share=0.25, where="reward > 100") as run:
        await run_steps(run, first=2)
    assert drawn(run)[2] == planned
    rows = read(run.folder, "batches", step=2).to_pylist()
    assert {row["group"] for row in rows if row["source_step"] != 2} == set(planned)


CHILD = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = ["tests/flows", "tests/servers"]
from test_replayed_groups import SampledBy, open_replaying, run_steps

async def main(folder, dies_at):
    async with open_replaying(Path(folder), SampledBy(dies_at=dies_at)) as run:
        await run_steps(run)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.slow
async def test_a_killed_run_draws_the_same_groups_when_it_is_resumed(tmp_path: Path) -> None:
    async with open_replaying(tmp_path / "whole") as run:
        await run_steps(run)
    # The first step samples 8 trajectories, the second one 4, of which it gets one.
    command = [sys.executable, "-c", CHILD, str(tmp_path / "killed"), "9"]
    child = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY)
    assert await child.wait() == -signal.SIGKILL
    async with open_replaying(tmp_path / "killed") as run:
        await run_steps(run, first=1)
    whole, killed = (RunFolder(tmp_path / name / "run") for name in ("whole", "killed"))
    assert drawn(killed) == drawn(whole)
    assert all(len(each) == 2 for each in drawn(whole)[1:])
    names = ["order", "group", "sample", "source_step", "advantage"]
    for step in range(STEPS):
        assert read(killed, "batches", names, step=step).equals(read(whole, "batches", names, step=step))
    assert verify_run(killed).findings == []


async def test_groups_of_another_run_are_drawn_and_those_that_runs_share_count_once(tmp_path: Path) -> None:
    async with open_replaying(tmp_path / "first", share=0.0) as run:
        await run_steps(run)
    source, fork = run.folder, RunFolder(tmp_path / "fork")
    fork_run(source, 2, fork, {}, StoreConfig(), {})
    async with open_replaying(
        tmp_path / "second", share=0.75, sources=[source.location, fork.location]
    ) as run:
        await run_steps(run, last=2)
    first, second, _ = drawn(run)
    assert len(first) == len(second) == 3
    assert {each.source for each in first.values()} == {source.absolute}
    chosen = [(each.source, each.step, each.group) for each in first.values()]
    assert len(set(chosen)) == 3
    rows = read(run.folder, "batches", step=0).to_pylist()
    assert {row["source"] for row in rows} == {"", source.absolute}
    assert verify_run(run.folder).findings == []
    groups = run.replay._describe(pl.concat(run.replay._groups), 2)
    of_source = groups.filter(pl.col("location") != run.folder.location)
    assert len(of_source) == STEPS * N_GROUPS
    assert of_source["steps_ago"].null_count() == len(of_source)


async def test_sources_that_cannot_be_trained_on_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_replaying(tmp_path / "first", share=0.0) as run:
        await run_steps(run, last=1)

    def check(source: str, share: float = 0.5) -> Callable[[], Any]:
        config = toy_config({"rollout": {"replay": {"share": share, "sources": [source]}}})
        return lambda: check_replay_sources(RunFolder(tmp_path / "new"), config)

    assert check("nowhere", share=0.0)() == ()
    for source, why in (
        (str(tmp_path / "nowhere"), "there is no run"),
        (run.folder.location, r"scores by the run's scorer, addition@1, and it has those of planned@1"),
        (str(tmp_path / "new"), "there is no run"),
    ):
        with pytest.raises(ConfigError, match=why) as refused:
            check(source)()
        assert refused.value.field == "rollout.replay.sources"
    scores = run.folder.local / "scores"
    shutil.move(scores / "scorer=planned@1", scores / "scorer=addition@1")
    (found,) = check(run.folder.location)()
    assert found.folder == run.folder.absolute
    own = toy_config({"rollout": {"replay": {"share": 0.5, "sources": [run.folder.location]}}})
    with pytest.raises(ConfigError, match="its own earlier steps anyway"):
        check_replay_sources(run.folder, own)


async def test_imported_groups_are_refused_since_nothing_corrects_for_their_sampler(tmp_path: Path) -> None:
    async with open_replaying(tmp_path, SampledBy(-1), share=0.0) as run:
        with disable_run_logger():
            collected = await collect_step.fn(run, 0)
        await store_batch(run, 0, collected.outcomes)
    scores = run.folder.local / "scores"
    shutil.move(scores / "scorer=planned@1", scores / "scorer=addition@1")
    config = toy_config({"rollout": {"replay": {"share": 0.5, "sources": [run.folder.location]}}})
    with pytest.raises(ConfigError, match="without the log-probabilities of their sampler"):
        check_replay_sources(RunFolder(tmp_path / "new"), config)


@pytest.mark.parametrize(
    ("where", "order_by", "field", "message"),
    [
        ("spread > 1", "", "where", 'Referenced column "spread" not found'),
        ("", "random()", "order_by", r"random would give other values.*, such as hash\(step, \"group\"\)$"),
        ("true)) or ((true", "", "where", "syntax error|Parser|give an expression"),
        ("", "reward desc nulls", "order_by", "syntax error|Parser"),
    ],
)
def test_a_wrong_choice_is_refused_before_the_run(
    where: str, order_by: str, field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_choice(where, order_by)
    assert refused.value.field == f"rollout.replay.{field}"


@pytest.mark.parametrize(
    ("train", "is_right"),
    [
        ({}, True),
        ({"old_logprobs": "trainer"}, False),
        ({"old_logprobs": "trainer", "importance": {"mode": "truncated"}}, True),
        ({"importance": {"mode": "masked"}}, True),
        ({"loss": "reinforce"}, False),
        ({"loss": "reinforce", "importance": {"mode": "truncated"}}, True),
    ],
)
def test_stored_groups_need_a_ratio_to_the_policy_that_sampled_them(
    train: dict[str, object], is_right: bool
) -> None:
    config = validate_toy({"rollout": {"replay": {"share": 0.25}}, "train": train})
    if is_right:
        check_sampling(config)
    else:
        with pytest.raises(ConfigError, match=r"rollout\.replay\.share = 0\.25") as refused:
            check_sampling(config)
        assert refused.value.field == "train.importance.mode"


def test_routing_is_not_replayed_with_stored_groups() -> None:
    config = toy_config({"rollout": {"replay": {"share": 0.25}}, "train": {"replay_routing": True}})
    with pytest.raises(ConfigError, match="no routed experts any more"):
        check_sampling(config)

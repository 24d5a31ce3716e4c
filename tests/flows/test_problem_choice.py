"""Problems drawn by weight and groups in the order of their length: exact when a run is resumed, and distributed as they should be."""

import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_run import PlannedSampler, PlannedScoring, open_planned_run
from prefect.logging import disable_run_logger

from rollmill.flows.checks.preflight import preflight
from rollmill.flows.run.live_run import Run
from rollmill.flows.step.step_collection import CollectedStep, collect_step
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.problem_weights import check_problem_weight
from rollmill.tasks.rollout.environment import Example, Message, SingleTurn, Split
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.rollout.trajectory_requests import example_index
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.group_ranges import drawn_problems, make_plan_rows, read_plan
from rollmill.tasks.store.run.problem_history import draw_problems
from rollmill.tasks.store.schemas import make_batch
from tests.stubs.toy_settings import toy_config

N_PROBLEMS, N_GROUPS = 12, 4
SEED = 3


class Numbered:
    """Twelve problems; each is its number."""

    name = "numbered"
    tools: tuple[Mapping[str, object], ...] = ()
    stop: tuple[str, ...] = ()

    def size(self, split: Split) -> int:
        return N_PROBLEMS

    async def example(self, split: Split, index: int) -> Example:
        return Example(str(index), {"problem": index})

    def episode(self, example: Example, seed: int) -> SingleTurn:
        return SingleTurn((Message("user", example.example_id),))


class Lengths(PlannedSampler):
    """Answers with as many tokens as the problem's number says; writes down which groups begin."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        if work.group not in self.begun:
            self.begun.append(work.group)
        n = 2 + int(work.example.example_id)
        ids = np.full(n, 9, np.int32)
        return SampledTokens(ids, np.full(n, -0.5, np.float32), [(0, 0)], "stop", "http://server")


class SpreadByProblem(PlannedScoring):
    """Rewards of a group differ only for the problems in `wide`."""

    def __init__(self, wide: set[int]) -> None:
        super().__init__()
        self.wide, self.problems = wide, dict[int, int]()

    async def score(self, rollouts: Any, *, step: int) -> Any:
        ids = zip(
            rollouts.column("group").to_pylist(), rollouts.column("example_id").to_pylist(), strict=True
        )
        self.problems |= {group: int(problem) for group, problem in ids}
        return await super().score(rollouts, step=step)

    def reward(self, group: int, sample: int) -> float:
        return float(sample) if self.problems[group] in self.wide else 0.5


@asynccontextmanager
async def open_choosing(
    folder: Path, sampler: Any = None, scoring: Any = None, **rollout: Any
) -> AsyncIterator[Run]:
    settings = {"groups_per_step": N_GROUPS, "group_size": 2} | rollout
    async with open_planned_run(
        folder,
        sampler or Lengths(),
        scoring or SpreadByProblem(set()),
        Numbered(),
        seed=SEED,
        rollout=settings,
        steps=9,
    ) as run:
        yield run


async def collect(run: Run, step: int) -> CollectedStep:
    with disable_run_logger():
        return await collect_step.fn(run, step)


def sampled_problems(run: Run, step: int) -> dict[int, int]:
    rows = read(run.folder, "rollouts", ["group", "example_id"], step=step).to_pylist()
    return {row["group"]: int(row["example_id"]) for row in rows}


async def test_without_a_weight_the_plan_names_no_problem_and_each_comes_once_an_epoch(
    tmp_path: Path,
) -> None:
    async with open_choosing(tmp_path) as run:
        for step in range(3):
            await collect(run, step)
            assert drawn_problems(read_plan(run.folder, step)) == {}
        met = [problem for step in range(3) for problem in sampled_problems(run, step).values()]
    assert sorted(met) == list(range(N_PROBLEMS))


async def test_a_weight_is_of_the_earlier_visits_and_decides_what_is_sampled(tmp_path: Path) -> None:
    wide = {2, 5, 7, 11}
    async with open_choosing(
        tmp_path, scoring=SpreadByProblem(wide), problem_weight="coalesce(reward_std, 1)"
    ) as run:
        for step in range(8):
            await collect(run, step)
            plan = read_plan(run.folder, step)
            assert sampled_problems(run, step) == drawn_problems(plan)
            assert len(set(drawn_problems(plan).values())) == N_GROUPS
        history = run.problems._history
        history.read_until(8)
        frame = history.frame(0, 8)
        # By now every problem without spread has been tried, and has weight 0.
        assert set(sampled_problems(run, 7).values()) == wide
    assert frame["visits"].sum() == 8 * N_GROUPS
    assert set(frame.filter(pl.col("reward_std") > 0)["problem"]) == wide
    # Rewards 0 and 1 of two samples; others have 0.5 twice.
    assert set(frame["reward"]) == {0.5}
    assert frame.filter(problem=7)["tokens"].item() == 9.0


async def test_a_resumed_run_has_the_stored_problems_also_with_another_weight(tmp_path: Path) -> None:
    async with open_choosing(tmp_path, problem_weight="1 + problem") as run:
        await collect(run, 0)
        # The process ends after the plan of step 1 is stored, and before anything of it is sampled.
        planned = run.problems.plan(1)
        await run.store.writer.append("plans", make_plan_rows(run.id, 1, [planned]), step=1)
    async with open_choosing(tmp_path, problem_weight="case when problem < 6 then 1 else 0 end") as run:
        await collect(run, 1)
        assert sampled_problems(run, 1) == drawn_problems([planned])
        await collect(run, 2)
        assert max(sampled_problems(run, 2).values()) < 6
    async with open_choosing(tmp_path) as run:
        await collect(run, 3)
        numbers = range(3 * N_GROUPS, 4 * N_GROUPS)
        assert sampled_problems(run, 3) == {n: example_index(SEED, n, N_PROBLEMS) for n in numbers}


async def test_the_same_history_gives_the_same_problems(tmp_path: Path) -> None:
    plans = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        async with open_choosing(folder, problem_weight="1 + visits") as run:
            for step in range(3):
                await collect(run, step)
            plans.append([read_plan(run.folder, step) for step in range(3)])
    assert plans[0] == plans[1]


async def test_a_refill_is_a_problem_that_the_step_does_not_have(tmp_path: Path) -> None:
    async with open_choosing(tmp_path, problem_weight="1", max_refill_groups=5) as run:
        await collect(run, 0)
        drawn = drawn_problems(read_plan(run.folder, 0))
        assert len(drawn) == len(set(drawn.values())) == N_GROUPS + 5
        assert sampled_problems(run, 0) == drawn


async def test_a_step_that_is_not_stored_whole_is_no_history_yet(tmp_path: Path) -> None:
    async with open_choosing(tmp_path, problem_weight="1") as run:
        await collect(run, 0)
        await run.store.writer.append("plans", make_plan_rows(run.id, 1, [run.problems.plan(1)]), step=1)
        history = run.problems._history
        # One group of step 1 is stored, three are not.
        outcome = read(run.folder, "groups", step=0).to_pylist()[0] | {"step": 1, "group": N_GROUPS}
        rows = make_batch("groups", {name: [value] for name, value in outcome.items()})
        await run.store.writer.append("groups", rows, step=1)
        history.read_until(2)
        assert history.frame(0, 2)["visits"].sum() == N_GROUPS


async def store_groups(run: Run, step: int, *groups: int) -> None:
    """Store groups of a step, as if they had been sampled; step 0 is collected."""
    outcome = read(run.folder, "groups", step=0).to_pylist()[0] | {"step": step}
    for group in groups:
        columns = {name: [value] for name, value in (outcome | {"group": group}).items()}
        await run.store.writer.store("groups", make_batch("groups", columns), step=step)


async def test_a_refill_that_is_planned_after_all_groups_were_stored_is_history_too(tmp_path: Path) -> None:
    async with open_choosing(tmp_path, problem_weight="1", max_refill_groups=2) as run:
        await collect(run, 0)
        history = run.problems._history
        planned = run.problems.plan(1)
        await run.store.writer.store("plans", make_plan_rows(run.id, 1, [planned]), step=1)
        await store_groups(run, 1, *range(planned.first, planned.first + N_GROUPS))
        # Another step is planned now, before a refill takes the place of the last of these groups.
        history.read_until(2)
        before = history.frame(0, 2)["visits"].sum()
        refill = run.problems.plan_refill(1, [planned], planned.first)
        await run.store.writer.store("plans", make_plan_rows(run.id, 1, [refill]), step=1)
        await store_groups(run, 1, refill.first)
        history.read_until(3)
        assert history.frame(0, 3)["visits"].sum() == before + 1


async def test_a_step_that_ends_after_a_later_one_is_not_the_last_visit(tmp_path: Path) -> None:
    async with open_choosing(tmp_path, problem_weight="1") as run:
        await collect(run, 0)
        history = run.problems._history
        plans = {step: replace(run.problems.plan(step), problems=(0, 1, 2, 3)) for step in (1, 2)}
        for step in (2, 1):
            await run.store.writer.store("plans", make_plan_rows(run.id, step, [plans[step]]), step=step)
            await store_groups(run, step, *range(plans[step].first, plans[step].first + N_GROUPS))
            history.read_until(3)
        assert history.frame(0, 3)["steps_ago"].to_list()[:4] == [1] * 4


async def test_the_longest_groups_begin_first(tmp_path: Path) -> None:
    sampler = Lengths()
    async with open_choosing(tmp_path, sampler, longest_first=True, max_in_flight=2) as run:
        # Two steps show 8 of the 12 problems; of the next ones some are new, and count as the mean.
        for step in range(5):
            sampler.begun.clear()
            known = {
                problem: problem + 2
                for each in range(step)
                for problem in sampled_problems(run, each).values()
            }
            mean = sum(known.values()) / max(1, len(known))
            await collect(run, step)
            problems = sampled_problems(run, step)
            expected = sorted(problems, key=lambda group: -known.get(problems[group], mean))
            assert sampler.begun == expected
    assert len(known) == N_PROBLEMS


async def test_without_it_groups_begin_by_number(tmp_path: Path) -> None:
    sampler = Lengths()
    async with open_choosing(tmp_path, sampler, max_in_flight=2) as run:
        for step in range(4):
            await collect(run, step)
    assert sampler.begun == list(range(4 * N_GROUPS))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0, 1e6), min_size=4, max_size=20),
    st.integers(1, 4),
    st.sets(st.integers(0, 19), max_size=3),
)
def test_a_draw_has_no_problem_twice_and_those_of_weight_0_last(
    weights: list[float], n: int, without: set[int]
) -> None:
    n = min(n, len(weights) - len(without & set(range(len(weights)))))
    drawn = draw_problems(np.array(weights), n, [1, 2], frozenset(without & set(range(len(weights)))))
    assert len(set(drawn)) == len(drawn) == n
    assert not set(drawn) & without
    n_positive = sum(weight > 0 for at, weight in enumerate(weights) if at not in without)
    assert sum(weights[each] > 0 for each in drawn) == min(n, n_positive)
    assert drawn == draw_problems(np.array(weights), n, [1, 2], frozenset(without & set(range(len(weights)))))


@pytest.mark.parametrize("weights", [[1e308] * 4, [1e10, 1e-320, 1e-320, 0.0], [0.0] * 4, [1e-310] * 4])
def test_weights_of_any_size_draw_as_many_as_asked(weights: list[float]) -> None:
    drawn = draw_problems(np.array(weights), 3, [1])
    assert len(set(drawn)) == 3
    assert set(drawn) <= set(range(4))
    assert weights[drawn[0]] == max(weights)


def test_the_chance_of_the_first_problem_is_its_weight() -> None:
    weights = np.array([1.0, 2.0, 0.0, 5.0])
    counts = Counter(draw_problems(weights, 2, [seed])[0] for seed in range(4_000))
    observed = np.array([counts[each] for each in (0, 1, 3)])
    expected = 4_000 * weights[[0, 1, 3]] / 8
    # The quantile 0.999 of chi-squared with two degrees of freedom.
    assert ((observed - expected) ** 2 / expected).sum() < 13.8


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("reward_std", "it is None for problem 0, which has 0 visits so far; give a number of at least 0"),
        ("coalesce(reward_std, -1)", "it is -1.0 for problem 0"),
        ("coalesce(reward_std, 1e999)", "infin|inf for problem|out of range"),
        ("1) as weight, (2", "give one number"),
        (
            "random()",
            r"random would give other values each time the run is resumed.*, such as coalesce\(reward_std, 0\)$",
        ),
        ("spread", 'Referenced column "spread" not found'),
        ("1)) from problems --", "syntax error|Parser Error"),
        ("(select count(*) from read_csv('/etc/passwd'))", "disabled|Permission"),
    ],
)
def test_a_wrong_weight_is_refused_before_the_run(weight: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        check_problem_weight(weight)
    assert raised.value.field == "rollout.problem_weight"


def test_of_several_environments_the_setting_that_is_wrong_is_named() -> None:
    config = toy_config(
        {"environments": {"add": {"rollout": {"environment": "addition", "problem_weight": "spread"}}}}
    )
    with pytest.raises(ConfigError) as raised:
        preflight(config)
    assert raised.value.field == "environments.add.rollout.problem_weight"


def test_a_process_that_weighed_problems_ends_without_a_warning() -> None:
    """DuckDB's binding prints objects that the garbage collector is kept from as leaks."""
    code = (
        "from rollmill.tasks.look.tables.sql_query import run_query\n"
        "from rollmill.tasks.observe.process_memory import keep_for_good\n"
        "run_query('field', '1', 'select 1', {})\n"
        "keep_for_good()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("", "")

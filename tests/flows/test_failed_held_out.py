"""Held-out answers whose score failed are scored again with --redo-failed, like those of a step."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planned_run import PlannedSampler, PlannedScoring, open_planned_run
from prefect.logging import disable_run_logger

from rollmill.flows.run.live_run import Run
from rollmill.flows.step.held_out import (
    evaluate_prompts,
    finish_evaluation,
    is_evaluated,
    plan_held_out,
    redo_failed_scores,
)
from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.tasks.errors import RequestError
from rollmill.tasks.observe.sinks.metric_sinks import Point, RunEnd
from rollmill.tasks.observe.sinks.sink_process import Feed
from rollmill.tasks.rollout.admission import EVALUATION
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.verify.run_verification import verify_run

GREEDY, SAMPLED, LOST = 0, 1, 2
"""Numbers of a held-out prompt's answers: the last one's rollout fails."""
SETTINGS: dict[str, Any] = {"evaluate": {"n_prompts": 3, "samples": 2}, "steps": 1}


async def test_failed_scores_of_held_out_answers_are_redone_and_nothing_is_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = PlannedScoring(statuses={GREEDY: "failed", SAMPLED: "failed"})
    failing = PlannedSampler({LOST: RequestError("no")})
    async with open_planned_run(tmp_path, failing, broken, **SETTINGS) as run:
        await evaluate_start_model(run)
        before = read(run.folder, "evaluations", version=0)
    assert set(before["error_type"].to_pylist()) == {"ScoreError", "RequestError"}

    sampler, still_broken = PlannedSampler(), PlannedScoring(statuses={GREEDY: "failed"})
    for scoring, failed in ((still_broken, {GREEDY, LOST}), (PlannedScoring(), {LOST}), (broken, {LOST})):
        async with open_planned_run(tmp_path, sampler, scoring, **SETTINGS) as run:
            with disable_run_logger():
                await redo_failed_scores(run)
            rows = read(run.folder, "evaluations", version=0)
            by_sample = [(row["sample"], row["reward"], row["error_type"]) for row in rows.to_pylist()]
        assert len(rows) == len(before) == 9
        assert {sample for sample, _, error_type in by_sample if error_type} == failed
        assert all(reward == sample for sample, reward, _ in by_sample if sample not in failed)
        own = ["trajectory_id", "messages", "token_ids", "sampling_seed", "greedy"]
        assert same(rows.select(own)) == same(before.select(own))
    assert not sampler.sampled
    said = " ".join(capsys.readouterr().err.split())
    assert "version 0: 3 of 6 trajectories failed, which count as reward 0; see rollmill inspect" in said
    assert "--evaluations --status failed,unscored" in said
    assert not [each for each in verify_run(run.folder).findings if "evaluations" in str(each)]


async def test_answers_that_another_version_sampled_are_not_stored(tmp_path: Path) -> None:
    """As those of a server that failed and came back with the next version while an evaluation ran."""
    sampler = PlannedSampler({LOST: RequestError("no")})
    sampler.versions = {GREEDY: 0, SAMPLED: 1}
    async with open_planned_run(tmp_path, sampler, PlannedScoring(), **SETTINGS) as run:
        await evaluate_start_model(run)
        rows = read(run.folder, "evaluations", version=0)
        assert set(rows["sample"].to_pylist()) == {GREEDY, LOST}
        assert not is_evaluated(run, 0)


class Sink:
    """Has every point, as one that a run sent before."""

    def __init__(self) -> None:
        self.written: list[Point] = []

    def has(self, marker: str, step: int) -> bool:
        return True

    def write(self, point: Point) -> None:
        self.written.append(point)

    def end(self, how: RunEnd) -> None:
        pass


async def test_sinks_get_the_figures_of_redone_scores_although_they_have_earlier_ones(tmp_path: Path) -> None:
    sink = Sink()
    feed = Feed("sink", lambda: sink, lambda *failure: pytest.fail(str(failure)))
    sinks = SimpleNamespace(put=lambda point: feed.add([point]))
    broken = PlannedScoring(statuses={SAMPLED: "failed"})
    async with open_planned_run(tmp_path, PlannedSampler(), broken, **SETTINGS) as run:
        await evaluate_start_model(run)
    async with open_planned_run(tmp_path, PlannedSampler(), PlannedScoring(), **SETTINGS) as run:
        followed = replace(run, sinks=sinks)  # type: ignore[arg-type]
        with disable_run_logger():
            await finish_evaluation(followed, 0)
            assert not sink.written
            await redo_failed_scores(followed)
    (point,) = sink.written
    assert (point.step, point.values["evaluation/reward"]) == (0, 1.5)


async def test_failed_scores_of_an_environment_that_a_fork_no_longer_has_stay(tmp_path: Path) -> None:
    broken = PlannedScoring(statuses={GREEDY: "failed"})
    async with open_planned_run(tmp_path, PlannedSampler(), broken, **SETTINGS) as run:
        await evaluate_start_model(run)
        before = read(run.folder, "evaluations", version=0)
    async with open_planned_run(tmp_path, PlannedSampler(), PlannedScoring(), **SETTINGS) as run:
        (environment,) = run.environments
        with disable_run_logger():
            await redo_failed_scores(replace(run, environments=(replace(environment, name="another"),)))
        # By repr, because a reward that is not a number is unequal to itself.
        assert repr(same(read(run.folder, "evaluations", version=0))) == repr(same(before))


async def evaluate_start_model(run: Run) -> None:
    requests = await plan_held_out(run, 0)
    watch = FailureWatch(0, len(requests), 1.0, lambda: logging.getLogger("test"))
    with run.held_out_admission.request_slots(len(requests), (0, EVALUATION)) as tickets:
        await evaluate_prompts.fn((run, requests, tickets, watch), 0, 0)


def same(table: Any) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: str(row["trajectory_id"]))


@pytest.mark.long
@pytest.mark.service
@pytest.mark.slow
def test_a_repaired_scorer_scores_the_start_model_too(workplace: Any) -> None:
    scorer = workplace.folder / "broken.py"
    scorer.write_text("def always(candidate):\n    return candidate.example['nothing']\n")
    words = ("run", "small", "--set", "score.scorer=broken:always", "--set", "steps=1")
    failed = workplace.run(*words)
    assert failed.returncode == 1, failed.stdout
    assert "--redo-failed" in failed.stdout
    scorer.write_text("def always(candidate):\n    return 1.0\n")
    evaluated = workplace.run("evaluate", "small", "--version", "0", "--redo-failed")
    assert evaluated.returncode == 0, evaluated.stdout
    folder = RunFolder(workplace.folder / "runs" / "small")
    assert set(read(folder, "evaluations", ["reward"], version=0)["reward"].to_pylist()) == {1.0}
    done = workplace.run(*words, "--redo-failed")
    assert done.returncode == 0, done.stdout
    for version in (0, 1):
        assert set(read(folder, "evaluations", ["reward"], version=version)["reward"].to_pylist()) == {1.0}
    assert verify_run(folder).findings == []
    assert "turned right" not in done.stdout

"""Stored groups judged by the scores of another scorer."""

from pathlib import Path

import pyarrow as pa
import pytest

from rollmill.tasks.errors import ConfigError, ScoreError
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.group_outcomes import RolloutOrigin, batch_rows
from rollmill.tasks.score.stored_scores import recompute_advantages
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema

SCORER = "short@1"


def make_rows(dataset: str, rows: list[dict[str, object]]) -> pa.RecordBatch:
    """Rows of a data set; 0, "" or [] in every column that is not given."""
    plain = {
        field.name: [] if pa.types.is_large_list(field.type) else pa.scalar(0).cast(field.type).as_py()
        for field in dataset_schema(dataset)
    }
    return pa.RecordBatch.from_pylist([plain | row for row in rows], schema=dataset_schema(dataset))


async def store_run(folder: Path, rewards: dict[int, list[float | None]], n_scored: int) -> RunFolder:
    """A run with one step of these groups; None for a rollout that failed; the first `n_scored` survivors are scored."""
    ids = [
        {"group": group, "sample": sample, "trajectory_id": f"{group}.{sample}"}
        for group, of_group in rewards.items()
        for sample in range(len(of_group))
    ]
    values = [reward for of_group in rewards.values() for reward in of_group]
    rollouts = [
        each
        | {"status": "failed" if reward is None else "complete", "env": "addition", "n_completion_tokens": 3}
        for each, reward in zip(ids, values, strict=True)
    ]
    scored = [(each, reward) for each, reward in zip(ids, values, strict=True) if reward is not None]
    scores = [each | {"status": "scored", "reward": reward} for each, reward in scored[:n_scored]]
    groups = [{"group": group, "expected": len(of_group)} for group, of_group in rewards.items()]
    opened = OpenRun.open(
        RunFolder(folder), config={}, fixed={}, versions={}, git_commit="", config_of=StoreConfig()
    )
    with opened as run:
        async with run.writer:
            await run.writer.append("rollouts", make_rows("rollouts", rollouts), step=0)
            await run.writer.append("groups", make_rows("groups", groups), step=0)
            await run.writer.append("scores", make_rows("scores", scores), scorer=SCORER, step=0)
    return RunFolder(folder)


async def test_survivors_get_the_advantages_of_the_scores_that_were_chosen(tmp_path: Path) -> None:
    folder = await store_run(tmp_path, {4: [1.0, 0.0, None], 5: [0.5, 0.5, 0.5]}, 9)

    judged = recompute_advantages(folder, 0, SCORER, ScoreConfig())

    (trained,), (left_out,) = judged[4], judged[5]
    assert trained.advantages.tolist() == [0.5, -0.5]
    assert [survivor.trajectory_id for survivor in trained.survivors] == ["4.0", "4.1"]
    assert left_out.reason == "no_reward_spread"
    assert recompute_advantages(folder, 0, SCORER, ScoreConfig(), only={5}).keys() == {5}


async def test_stored_rollouts_without_their_turns_have_no_credit_by_turn(tmp_path: Path) -> None:
    folder = await store_run(tmp_path, {4: [1.0, 0.0]}, 2)
    with pytest.raises(ScoreError, match=r"an older Rollmill stored it without its turns; set score\.credit"):
        recompute_advantages(folder, 0, SCORER, ScoreConfig(credit="turn"))


async def test_a_group_that_is_scored_in_part_is_refused_and_one_without_any_score_is_left_out(
    tmp_path: Path,
) -> None:
    rewards: dict[int, list[float | None]] = {4: [1.0, 0.0], 5: [1.0, 0.0]}
    partly = await store_run(tmp_path / "partly", rewards, 3)
    half = await store_run(tmp_path / "half", rewards, 2)

    with pytest.raises(ConfigError, match=r"1 trajectories of step 0 .* have no score"):
        recompute_advantages(partly, 0, SCORER, ScoreConfig())
    assert recompute_advantages(half, 0, SCORER, ScoreConfig()).keys() == {4}


async def test_rows_of_a_batch_have_the_location_of_their_rollouts(tmp_path: Path) -> None:
    folder = await store_run(tmp_path, {4: [1.0, 0.0], 5: [1.0, 0.0]}, 9)
    judged = recompute_advantages(folder, 0, SCORER, ScoreConfig())
    outcomes = [outcome for each in judged.values() for outcome in each]

    rows = batch_rows("r", 7, outcomes, SCORER, {5: RolloutOrigin(folder.absolute, 0)}).to_pylist()

    assert [(row["source"], row["source_step"]) for row in rows] == [("", 7), ("", 7)] + [
        (folder.absolute, 0)
    ] * 2
    assert {row["scorer"] for row in rows} == {SCORER}


async def test_a_group_is_whole_by_the_size_that_is_stored_with_it(tmp_path: Path) -> None:
    folder = await store_run(tmp_path, {4: [1.0, 0.0], 5: [1.0, 0.0, None]}, 9)

    judged = recompute_advantages(folder, 0, SCORER, ScoreConfig(min_group_size=0))

    assert [judged[group][0].reason for group in (4, 5)] == ["", "not_whole"]

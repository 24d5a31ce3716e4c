"""What is done and what is to do in a step."""

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.rows import column_values, no_rows
from rollmill.tasks.store.run.step_plan import Attempt, StepPlan, StoredStep, plan_step, select_unscored
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]
KEYS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), unique=True, max_size=30)


def make_rows(rows: RowMaker, dataset: str, keys: list[tuple[int, int]], **columns: object) -> pa.RecordBatch:
    """Rows of these groups and samples, with the ids that a run gives them."""
    if not keys:
        return no_rows(dataset)
    groups, samples = (list(each) for each in zip(*keys, strict=True))
    ids = [f"r.{group}.{sample}.0" for group, sample in keys]
    if dataset == "rollouts":
        columns = {"attempt": 0, "status": "complete"} | columns
    return rows(dataset, len(keys), group=groups, sample=samples, trajectory_id=ids, **columns)


def without_outcome(plan: StepPlan) -> tuple[int, ...]:
    return tuple(each.group for each in plan.groups if not each.has_outcome)


@given(st.lists(st.integers(0, 9), unique=True), st.integers(1, 4), KEYS, st.data())
def test_planned_work_is_stored_or_to_be_done_and_never_both(
    rows: RowMaker, groups: list[int], group_size: int, finished: list[tuple[int, int]], data: st.DataObject
) -> None:
    scored = data.draw(st.lists(st.sampled_from(finished), unique=True)) if finished else []
    stored = StoredStep(make_rows(rows, "rollouts", finished), make_rows(rows, "scores", scored), frozenset())
    plan = plan_step(groups, group_size, stored)
    planned = [(group, sample) for group in groups for sample in range(group_size)]
    assert [each[:2] for each in plan.to_sample] == [key for key in planned if key not in finished]
    to_score = {id_ for group in plan.groups for id_ in column_values(group.to_score, "trajectory_id")}
    assert to_score == {f"r.{g}.{s}.0" for g, s in finished if (g, s) not in scored and g in groups}
    assert without_outcome(plan) == tuple(groups)
    done = StoredStep(
        make_rows(rows, "rollouts", sorted({*finished, *planned})),
        make_rows(rows, "scores", sorted({*finished, *planned})),
        frozenset(groups),
    )
    rest = plan_step(groups, group_size, done)
    assert (rest.to_sample, without_outcome(rest)) == ((), ())
    assert not any(each.to_score.num_rows for each in rest.groups)


def test_failed_and_cancelled_trajectories_are_final(rows: RowMaker) -> None:
    made = make_rows(rows, "rollouts", [(4, 0), (4, 1)], status=["failed", "cancelled"])
    plan = plan_step([4], 2, StoredStep(made, no_rows("scores"), frozenset()))
    assert plan.to_sample == ()


def test_failed_and_cancelled_ones_are_attempted_once_more_when_a_user_asks(rows: RowMaker) -> None:
    made = make_rows(rows, "rollouts", [(4, 0), (4, 1), (4, 2)], status=["failed", "cancelled", "complete"])
    stored = StoredStep(made, no_rows("scores"), frozenset({4}))
    plan = plan_step([4], 3, stored, redo_failed=True)
    assert plan.to_sample == (Attempt(4, 0, 1), Attempt(4, 1, 1))
    assert (column_values(plan.groups[0].rollouts, "sample"), without_outcome(plan)) == ([2], (4,))


def test_a_failed_score_counts_as_none_when_a_user_asks_and_the_step_has_no_batch(rows: RowMaker) -> None:
    keys = [(4, 0), (4, 1)]
    made, scores = (
        make_rows(rows, "rollouts", keys),
        make_rows(rows, "scores", keys, status=["failed", "scored"]),
    )

    def plan(redo_failed: bool, has_batch: bool) -> StepPlan:
        stored = StoredStep(made, scores, frozenset({4}), has_batch)
        return plan_step([4], 2, stored, redo_failed=redo_failed)

    redone = plan(redo_failed=True, has_batch=False)
    assert column_values(redone.groups[0].to_score, "trajectory_id") == ["r.4.0.0"]
    assert (redone.redone, redone.to_sample, without_outcome(redone)) == ((4,), (), (4,))
    for kept in (plan(redo_failed=False, has_batch=False), plan(redo_failed=True, has_batch=True)):
        assert not kept.groups[0].to_score.num_rows
        assert (kept.redone, without_outcome(kept)) == ((), ())


def test_of_several_attempts_the_last_one_counts(rows: RowMaker) -> None:
    ids = ["r.4.0.0", "r.4.0.1"]
    made = pa.concat_batches(
        [
            rows("rollouts", group=4, sample=0, trajectory_id=name, attempt=attempt, status=status)
            for name, attempt, status in zip(ids, (0, 1), ("failed", "complete"), strict=True)
        ]
    )
    (group,) = plan_step([4], 1, StoredStep(made, no_rows("scores"), frozenset())).groups
    assert column_values(group.to_score, "trajectory_id") == ["r.4.0.1"]
    assert group.to_sample == ()


def test_rows_that_were_stored_and_are_gone_are_named_and_not_sampled_again(rows: RowMaker) -> None:
    judged = StoredStep(make_rows(rows, "rollouts", [(4, 0)]), no_rows("scores"), frozenset({4}))
    with pytest.raises(ShardError, match=r"group 4: .*sample 1; its advantages are computed"):
        plan_step([4], 2, judged)
    scored = StoredStep(no_rows("rollouts"), make_rows(rows, "scores", [(4, 0)]), frozenset())
    with pytest.raises(ShardError, match=r"r\.4\.0\.0; they have scores"):
        plan_step([4], 1, scored)


async def test_only_the_scores_of_one_scorer_count(folder: RunFolder, rows: RowMaker) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        writer.append("rollouts", make_rows(rows, "rollouts", [(4, 1), (5, 0)], step=2), step=2)
        writer.append("scores", make_rows(rows, "scores", [(4, 1)], step=2), scorer="addition@1", step=2)
        writer.append("scores", make_rows(rows, "scores", [(5, 0)], step=2), scorer="addition@2", step=2)
        writer.append("groups", rows("groups", step=2, group=4), step=2)
    stored = StoredStep.read(folder, 2, "addition@1")
    assert column_values(select_unscored(stored.rollouts, stored.scores), "trajectory_id") == ["r.5.0.0"]
    assert (stored.outcomes, stored.has_batch) == (frozenset({4}), False)

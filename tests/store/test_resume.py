"""Plans, progress, and where a run goes on."""

import json
from collections.abc import Callable

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tasks.store.filesystem import files_of
from tasks.store.layout import RunFolder
from tasks.store.plan import GroupRange, group_numbers, plan_rows, read_plan, settled_plan, step_plan
from tasks.store.resume import (
    ResumePoint,
    complete_checkpoints,
    plan_resume,
    resume_point,
    step_progress,
    unfinished,
)
from tasks.store.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]
KEYS = st.frozensets(st.tuples(st.integers(0, 9), st.integers(0, 4)))


@given(st.integers(1, 100), st.integers(1, 64))
def test_the_plans_of_all_steps_number_the_groups_without_gap_or_overlap(
    steps: int, groups_per_step: int
) -> None:
    plans = [step_plan(step, groups_per_step) for step in range(steps)]
    assert group_numbers(plans) == tuple(range(steps * groups_per_step))


async def test_a_stored_plan_and_its_refills_are_gone_by_and_not_made_again(folder: RunFolder) -> None:
    assert read_plan(folder, 3) == ()
    async with RunWriter(files_of(folder), epoch=1, flush_s=0.0) as writer:
        first = await settled_plan(folder, writer, run="r", step=3, groups_per_step=2)
        assert first == (GroupRange(6, 2),)
        await writer.append("plans", plan_rows("r", 3, [GroupRange(100, 1, "refill")]), step=3)
        again = await settled_plan(folder, writer, run="r", step=3, groups_per_step=99)
    assert again == (GroupRange(6, 2), GroupRange(100, 1, "refill"))
    assert group_numbers(again) == (6, 7, 100)


def test_an_empty_folder_begins_at_step_0_without_a_checkpoint(folder: RunFolder) -> None:
    assert resume_point(folder) == ResumePoint(checkpoint_version=None, stored_batches=0, open_step=0)


async def test_a_run_goes_on_from_its_last_complete_checkpoint_and_its_stored_batches(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with RunWriter(files_of(folder), epoch=1, flush_s=0.0) as writer:
        for step in (0, 1, 2, 4):
            writer.append("batches", rows("batches", 0 if step == 1 else 2, step=step), step=step)
    for version, is_complete in ((0, True), (2, True), (3, False)):
        folder.checkpoint(version).mkdir(parents=True)
        if is_complete:
            folder.checkpoint_marker(version).write_text(json.dumps({}))
    assert complete_checkpoints(folder) == [0, 2]
    assert resume_point(folder) == ResumePoint(checkpoint_version=2, stored_batches=3, open_step=3)


@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)))
def test_the_batches_to_apply_again_lie_without_gap_between_checkpoint_and_open_step(
    checkpoints: set[int], steps: set[int]
) -> None:
    point = plan_resume(checkpoints, steps)
    assert point.open_step == point.stored_batches
    assert set(range(point.stored_batches)) <= steps
    assert point.stored_batches not in steps
    reachable = {version for version in checkpoints if version <= point.stored_batches}
    assert point.checkpoint_version == max(reachable, default=None)


@given(
    st.lists(st.integers(0, 9), unique=True), st.integers(1, 4), KEYS, KEYS, st.frozensets(st.integers(0, 9))
)
def test_planned_work_is_stored_or_to_be_done_and_never_both(
    plan: list[int],
    group_size: int,
    finished: frozenset[tuple[int, int]],
    scored: frozenset[tuple[int, int]],
    judged: frozenset[int],
) -> None:
    progress = step_progress(plan, group_size, finished=finished, scored=scored, judged=judged)
    planned = {(group, sample) for group in plan for sample in range(group_size)}
    assert set(progress.to_sample) == planned - finished
    assert set(progress.to_score) == (planned & finished) - scored
    assert set(progress.to_judge) == set(plan) - judged
    assert [group for group, _ in progress.to_sample] == sorted(
        (group for group, _ in progress.to_sample), key=plan.index
    )
    done = step_progress(
        plan,
        group_size,
        finished=finished | set(progress.to_sample),
        scored=scored | set(progress.to_score) | set(progress.to_sample),
        judged=judged | set(progress.to_judge),
    )
    assert (done.to_sample, done.to_score, done.to_judge) == ((), (), ())


async def test_failed_rollouts_are_finished_and_only_this_scorers_scores_count(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with RunWriter(files_of(folder), epoch=1, flush_s=0.0) as writer:
        made = rows(
            "rollouts",
            3,
            step=2,
            group=[4, 4, 5],
            sample=[0, 1, 0],
            status=["failed", "complete", "cancelled"],
        )
        writer.append("rollouts", made, step=2)
        writer.append("scores", rows("scores", step=2, group=4, sample=1), scorer="addition@1", step=2)
        writer.append("scores", rows("scores", step=2, group=5, sample=0), scorer="addition@2", step=2)
        writer.append("groups", rows("groups", step=2, group=4), step=2)
    progress = unfinished(folder, 2, (4, 5), 2, "addition@1")
    assert progress.to_sample == ((5, 1),)
    assert progress.to_score == ((4, 0), (5, 0))
    assert progress.to_judge == (5,)

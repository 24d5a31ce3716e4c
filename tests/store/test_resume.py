"""The plans of steps, and where a run resumes."""

from collections.abc import Callable

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.store.filesystem import open_files, publish_text
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder, checkpoint_key
from rollmill.tasks.store.run.group_ranges import (
    GroupRange,
    count_refills,
    ensure_plan,
    group_numbers,
    make_plan_rows,
    read_plan,
)
from rollmill.tasks.store.run.group_shares import GroupShares
from rollmill.tasks.store.run.resume import (
    ResumePoint,
    find_resume_point,
    list_complete_checkpoints,
    plan_resume,
)
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]


@given(st.integers(1, 100), st.integers(1, 64))
def test_the_plans_of_all_steps_number_the_groups_without_gap_or_overlap(
    steps: int, groups_per_step: int
) -> None:
    shares = GroupShares(groups_per_step=groups_per_step)
    plans = [shares.plan(step) for step in range(steps)]
    assert group_numbers(plans) == tuple(range(steps * groups_per_step))


@given(st.integers(1, 9), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_no_group_belongs_to_two_steps_for_any_number_of_refills(
    groups_per_step: int, max_refill_groups: int, taken: list[int]
) -> None:
    shares = GroupShares((1,), groups_per_step, max_refill_groups)
    every: list[int] = []
    for step, n in enumerate(taken):
        ranges = [shares.plan(step)]
        for _ in range(min(n, max_refill_groups)):
            ranges.append(shares.plan_refill(ranges, ranges[0].first))
        assert count_refills(ranges) == min(n, max_refill_groups)
        every += group_numbers(ranges)
    assert every == sorted(set(every))


async def test_a_stored_plan_and_its_refills_are_used_and_not_made_again(folder: RunFolder) -> None:
    assert read_plan(folder, 3) == ()
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        first = await ensure_plan(folder, writer, lambda _: (GroupRange(6, 2),), run="r", step=3)
        assert first == (GroupRange(6, 2),)
        await writer.append("plans", make_plan_rows("r", 3, [GroupRange(100, 1, "refill")]), step=3)
        again = await ensure_plan(folder, writer, lambda _: (GroupRange(297, 99),), run="r", step=3)
    assert again == (GroupRange(6, 2), GroupRange(100, 1, "refill"))
    assert group_numbers(again) == (6, 7, 100)


def test_an_empty_folder_starts_at_step_0_without_a_checkpoint(folder: RunFolder) -> None:
    assert find_resume_point(folder) == ResumePoint(checkpoint_version=None, stored_batches=0)


async def test_a_run_resumes_from_its_last_complete_checkpoint_and_its_stored_batches(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for step in (0, 1, 2, 4):
            writer.append("batches", rows("batches", 0 if step == 1 else 2, step=step), step=step)
    for version, is_complete in ((0, True), (2, True), (3, False)):
        publish_text(open_files(folder), f"{checkpoint_key(version)}/state/weights", b"some")
        if is_complete:
            publish_text(open_files(folder), f"{checkpoint_key(version)}/{CHECKPOINT_MARKER}", b"{}")
    assert list_complete_checkpoints(folder) == [0, 2]
    assert find_resume_point(folder) == ResumePoint(checkpoint_version=2, stored_batches=3)


@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)))
def test_the_batches_to_apply_again_are_without_gap_between_checkpoint_and_open_step(
    checkpoints: set[int], steps: set[int]
) -> None:
    point = plan_resume(checkpoints, steps)
    assert set(range(point.stored_batches)) <= steps
    assert point.stored_batches not in steps
    reachable = {version for version in checkpoints if version <= point.stored_batches}
    assert point.checkpoint_version == max(reachable, default=None)

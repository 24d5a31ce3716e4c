"""Room on the disk before a step."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from rollmill.tasks.errors import DiskSpaceError
from rollmill.tasks.store.filesystem import open_files, publish_text
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder, checkpoint_key
from rollmill.tasks.store.free_space import DiskSpaceGuard, check_room
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]


@pytest.mark.parametrize("n_open", [1, 2, 4, 9])
async def test_a_step_is_expected_to_be_as_large_as_the_largest_recent_one_also_if_steps_are_collected_ahead(
    n_open: int, folder: RunFolder, rows: RowMaker
) -> None:
    asked = list[int]()
    space = DiskSpaceGuard(folder, 0, 0, n_open=n_open, free=lambda _: 0)
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for step in range(12):
            if step > n_open:
                # Looked up while the steps before it have a row, and again when they are whole.
                with pytest.raises(DiskSpaceError, match=r"and (.*) are needed") as refused:
                    space.check(step)
                asked.append(int(float(str(refused.value).split(" and ")[1].split(" kB")[0]) * 1000))
            await writer.append("rollouts", rows("rollouts", 1, step=step), step=step)
            if step >= n_open - 1:
                whole = step - n_open + 1
                await writer.append("rollouts", rows("rollouts", 500, step=whole), step=whole)
    assert min(asked) > 10_000
    assert max(asked) < 1.2 * min(asked)


@pytest.mark.parametrize(("free", "is_enough"), [(6_000_000, True), (5_999_999, False)])
def test_the_required_bytes_must_be_free_exactly(folder: RunFolder, free: int, is_enough: bool) -> None:
    def check() -> None:
        check_room(folder, 3, free, rows=1_000_000, checkpoint=2_000_000, reserve=3_000_000)

    if is_enough:
        check()
        return
    with pytest.raises(
        DiskSpaceError, match=r"has 6\.0 MB free, and 6\.0 MB are needed: 1\.0 MB for as many rows"
    ):
        check()


async def test_a_step_that_does_not_fit_is_refused_before_it_starts(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for step in (0, 1):
            writer.append("rollouts", rows("rollouts", 100, step=step), step=step)
    asked: list[Path] = []

    def free(where: Path) -> int:
        asked.append(where)
        return room

    space = DiskSpaceGuard(folder, reserve_bytes=1000, first_checkpoint_bytes=1 << 30, free=free)
    room = 1000
    space.check(0)
    with pytest.raises(DiskSpaceError, match=r"step 2 was not begun.*for as many rows"):
        space.check(2)
    space.check(2, is_collected=True)
    room = 1 << 20
    space.check(2)
    with pytest.raises(DiskSpaceError, match=r"1\.1 GB for a checkpoint.*give the same command to resume"):
        space.check(2, due=[2])
    publish_text(open_files(folder), f"{checkpoint_key(2)}/state/weights", bytes(1000))
    publish_text(open_files(folder), f"{checkpoint_key(2)}/{CHECKPOINT_MARKER}", b"{}")
    space.check(2, due=[2, 3])
    room = 3000
    with pytest.raises(DiskSpaceError, match=r"2\.0 kB for a checkpoint"):
        space.check(2, due=[2, 3, 4])
    folder.checkpoint(3).mkdir(parents=True)
    (folder.checkpoint(3) / "weights").write_bytes(bytes(900))  # of the one being written
    with pytest.raises(DiskSpaceError, match=r"1\.1 kB for a checkpoint"):
        space.check(2, due=[2, 3, 4])
    assert set(asked) == {folder.local}

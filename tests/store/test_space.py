"""Room on the disk before a step."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import DiskSpaceError
from rollmill.tasks.store.filesystem import open_files, publish_text
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder, checkpoint_key
from rollmill.tasks.store.free_space import LOOKED_AT, DiskSpaceGuard, check_room, estimate_rows
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]
SIZES = st.integers(0, 1 << 40)


@given(st.dictionaries(st.integers(0, 30), SIZES), st.integers(0, 31))
def test_the_space_of_a_step_is_that_of_the_largest_recent_step(stored: dict[int, int], step: int) -> None:
    naive = 0
    for each in range(step - LOOKED_AT, step):
        naive = max(naive, stored.get(each, 0))
    assert estimate_rows(stored, step) == naive


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

"""Rows of trajectories that end together are made and staged together."""

import asyncio
from collections.abc import Awaitable
from functools import partial

from rollmill.tasks.errors import SchemaError
from rollmill.tasks.rollout.environment import Example
from rollmill.tasks.rollout.task import RowBatcher
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryBuilder, TrajectoryRequest, rollout_rows
from rollmill.tasks.store.rows import Rows, column_values

rows_of = partial(rollout_rows, "run", 0, "addition")


def trajectory(sample: int) -> Trajectory:
    work = TrajectoryRequest(
        f"run.5.{sample}.0", 5, sample, 0, Example("1+1", {}), seed=sample, temperature=1.0
    )
    return TrajectoryBuilder(work).build("complete")


class Writer:
    """Keeps staged rows; they are acknowledged when `stored` is set."""

    def __init__(self) -> None:
        self.staged: list[list[object]] = []
        self.stored = asyncio.Event()

    def keep(self, rows: Rows) -> Awaitable[None]:
        self.staged.append(list(column_values(rows, "sample")))
        return self._acknowledged()

    async def _acknowledged(self) -> None:
        await self.stored.wait()


async def test_trajectories_that_end_in_one_turn_of_the_loop_are_staged_together_each_with_its_row() -> None:
    writer = Writer()
    together = RowBatcher(rows_of, writer.keep)
    ended = [trajectory(sample) for sample in (3, 0, 2)]

    found = await asyncio.gather(*map(together.store_row, ended))
    await together.store_row(trajectory(1))

    assert writer.staged == [[3, 0, 2], [1]]
    assert [row for row, _ in found] == [rows_of([each]) for each in ended]


async def test_rows_are_acknowledged_when_the_writer_has_stored_them() -> None:
    writer = Writer()
    together = RowBatcher(rows_of, writer.keep)
    found = await asyncio.gather(*(together.store_row(trajectory(sample)) for sample in range(2)))
    waiting = [asyncio.ensure_future(acknowledged) for _, acknowledged in found]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)

    writer.stored.set()
    await asyncio.gather(*waiting)


async def test_a_row_is_staged_although_its_task_is_cancelled() -> None:
    writer = Writer()
    together = RowBatcher(rows_of, writer.keep)
    cut, other = (asyncio.create_task(together.store_row(trajectory(sample))) for sample in range(2))
    await asyncio.sleep(0)
    cut.cancel()

    row, _ = await other

    assert cut.cancelled()
    assert writer.staged == [[0, 1]]
    assert column_values(row, "sample") == [1]


async def test_an_error_of_the_writer_reaches_all_who_wait() -> None:
    def refuse(rows: Rows) -> Awaitable[None]:
        raise SchemaError(f"{rows.num_rows} rows do not fit")

    together = RowBatcher(rows_of, refuse)
    found = await asyncio.gather(
        *(together.store_row(trajectory(sample)) for sample in range(2)), return_exceptions=True
    )

    assert [str(each) for each in found] == ["2 rows do not fit"] * 2
    assert all(isinstance(each, SchemaError) for each in found)

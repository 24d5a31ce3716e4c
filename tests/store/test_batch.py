"""A batch's sequences, whichever run sampled them."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.stored_batch import read_batch_sequences

RowMaker = Callable[..., pa.RecordBatch]


async def store_run(folder: Path, rows: dict[str, pa.RecordBatch], step: int) -> RunFolder:
    opened = OpenRun.open(
        RunFolder(folder), config={}, fixed={}, versions={}, git_commit="", config_of=StoreConfig()
    )
    with opened as run:
        async with run.writer:
            for dataset, each in rows.items():
                await run.writer.append(dataset, each, step=step)
    return RunFolder(folder)


async def test_sequences_are_read_from_the_run_that_sampled_them(rows: RowMaker, tmp_path: Path) -> None:
    ids, tokens = ["a", "b", "c"], [[1, 2], [3], [4, 5, 6]]
    theirs = rows("rollouts", 3, step=4, trajectory_id=ids, token_ids=tokens)
    source = await store_run(tmp_path / "source", {"rollouts": theirs}, 4)
    ours = rows("rollouts", 1, step=0, trajectory_id=["d"], token_ids=[[7]])
    batch = rows(
        "batches",
        3,
        step=0,
        order=[0, 1, 2],
        trajectory_id=["c", "d", "a"],
        source=[source.absolute, "", source.absolute],
        source_step=[4, 0, 4],
    )
    run = await store_run(tmp_path / "run", {"rollouts": ours, "batches": batch}, 0)

    assert [each.tolist() for each in read_batch_sequences(run, 0, 9)] == [[4, 5, 6], [7], [1, 2]]
    assert [each.tolist() for each in read_batch_sequences(run, 0, 2)] == [[4, 5, 6], [1, 2]]

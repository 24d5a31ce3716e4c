"""A step's batch is read once, by all ranks together."""

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollmill.tasks.errors import BatchRefusedError, ShardError
from rollmill.tasks.store import reader
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import rows_from_table
from rollmill.tasks.store.shards import integrity
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.samples import read_portion, read_samples
from rollmill.tasks.train.service.commands import LoadPolicy, TrainStep

BLOCK_BYTES = 1 << 11


def list_shards(folder: Path) -> list[Path]:
    return sorted((folder / "rollouts" / "step=000000").glob("*.arrow"))


def split_rollouts(folder: Path, n_shards: int) -> None:
    """Store the rollouts of step 0 in several shards, in another order."""
    rows, (whole,) = rows_from_table(read(RunFolder(folder), "rollouts", step=0)), list_shards(folder)
    order = np.random.default_rng(0).permutation(rows.num_rows)
    for number, part in enumerate(np.array_split(order, n_shards)):
        written = whole.with_name("written")
        name = write_shard(written, ShardName(2, number), "rollouts", [rows.take(pa.array(part))])
        written.rename(whole.with_name(name))
    whole.unlink()


def count_read_bytes(folder: Path, portion: tuple[int, int]) -> int:
    """Bytes of the rollouts that are read for a portion: in a damaged shard, those that must be repaired until it can be read."""
    (shard,) = list_shards(folder)
    whole = shard.read_bytes()
    damaged, n_read = bytearray(whole), 0
    for place in range(BLOCK_BYTES // 2, whole.index(b"block_xxh3_64") - BLOCK_BYTES, BLOCK_BYTES):
        damaged[place] ^= 1
    while True:
        shard.write_bytes(damaged)
        try:
            read_portion(str(folder), 0, portion)
        except ShardError as error:
            (edges,) = re.findall(r"bytes (\d+) to (\d+) are not", str(error))
            span = slice(*map(int, edges))
            damaged[span] = whole[span]
            n_read += BLOCK_BYTES
        else:
            shard.write_bytes(whole)
            return n_read


def test_the_bytes_that_a_rank_reads_fall_with_the_number_of_ranks(
    batches: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [batches.row(200, 300 + row, 1.0) for row in range(24)]
    wide_bytes = sum(row.n_prompt + row.n_completion for row in rows) * (4 + 4 + 1 / 8)
    monkeypatch.setattr(integrity, "BLOCK_BYTES", BLOCK_BYTES)
    batches.write_step(tmp_path, 0, rows)
    (shard,) = list_shards(tmp_path)
    monkeypatch.setattr(reader, "PIECE_BYTES", -(-shard.stat().st_size // 4))

    for n_ranks in (2, 4):
        read_bytes = [count_read_bytes(tmp_path, (rank, n_ranks)) for rank in range(n_ranks)]
        assert sum(read_bytes) >= wide_bytes
        # Ids, headers, and a block at either end of each piece of a column come on top.
        assert max(read_bytes) < wide_bytes / n_ranks + 12 * BLOCK_BYTES, read_bytes


@pytest.mark.parametrize("n_portions", [1, 2, 5])
def test_portions_together_have_every_row_once_while_other_rows_are_stored(
    n_portions: int, batches: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 1 << 10)
    batches.write_step(tmp_path, 0, batches.uneven_rows(30))
    expected = read_samples(str(tmp_path), 0)[1]
    split_rollouts(tmp_path, 4)
    held = list[int]()
    for number in range(n_portions):
        _, samples, rows = read_portion(str(tmp_path), 0, (number, n_portions))
        for row, (ids, mask) in enumerate(zip(samples.token_ids, samples.loss_masks, strict=True)):
            np.testing.assert_array_equal(ids, expected.token_ids[row] if row in rows else [])
            np.testing.assert_array_equal(mask, expected.loss_masks[row] if row in rows else [])
        held += rows
        batches.write_shard(tmp_path / "late", "rollouts", 0, late_row(tmp_path, number))
        for shard in list_shards(tmp_path / "late"):
            shard.rename(list_shards(tmp_path)[0].with_name(shard.name.replace("000001", f"00001{number}")))

    assert sorted(held) == list(range(30))


def late_row(folder: Path, number: int) -> pa.RecordBatch:
    """A row that is not in the batch."""
    row = read(RunFolder(folder), "rollouts", step=0).slice(0, 1)
    place = row.schema.get_field_index("trajectory_id")
    return rows_from_table(row.set_column(place, row.schema.field(place), [[f"late-{number}"]]))


@pytest.mark.slow
def test_every_rank_gets_the_rows_that_it_computes_and_the_outlines_of_all(
    batches: Any, run_ranks: Callable[[str, int, dict[str, object]], None], tmp_path: Path
) -> None:
    batches.write_step(tmp_path, 0, batches.uneven_rows(30))
    split_rollouts(tmp_path, 7)

    run_ranks("batch_reading_ranks.py", 3, {"folder": str(tmp_path)})


def holding_rank(folder: Path, row: int) -> int:
    """Which of two ranks reads a row of the batch of step 0."""
    return next(rank for rank in range(2) if row in read_portion(str(folder), 0, (rank, 2))[2])


def write_long_row(batches: Any, folder: Path, rank: int) -> str:
    """Store a batch whose last row has 600 tokens and is read by `rank`, one of two; returns the batch's digest."""
    for seed in range(100):
        digest = batches.write_step(
            folder, 0, [*batches.uneven_rows(29), batches.row(500, 100, 1.0)], seed=seed
        )
        split_rollouts(folder, 7)
        if holding_rank(folder, 29) == rank:
            return str(digest)
    raise AssertionError("the other rank reads that row in each of 100 batches")


@pytest.mark.service
async def test_what_one_rank_alone_cannot_read_or_refuses_ends_the_step_on_both(
    tiny_model: Path,
    batches: Any,
    run_trainer: Callable[[TrainConfig], AbstractAsyncContextManager[Any]],
    tmp_path: Path,
) -> None:
    digest = batches.write_step(tmp_path, 0, batches.uneven_rows(30))
    split_rollouts(tmp_path, 7)
    step = TrainStep(folder=str(tmp_path), run_id="r", step=0, digest=digest)
    seen = set()

    async with run_trainer(TrainConfig(ranks=2, micro_batch_tokens=512)) as (client, _):
        await client.do(
            LoadPolicy(
                run_id="r",
                incarnation=1,
                model=str(tiny_model),
                folder=str(tmp_path),
                checkpoint=None,
                version=0,
            )
        )
        for shard in list_shards(tmp_path):
            name = pa.ipc.open_file(shard).read_all()["trajectory_id"][0].as_py()
            rank, content = holding_rank(tmp_path, int(name.rpartition("-")[2])), shard.read_bytes()
            seen.add(rank)
            named = "rank 1 refuses the batch: " if rank else ""
            shard.write_bytes(b"torn")
            # Rank 0, which answers, raises its own error as it is.
            with pytest.raises(ShardError, match=f"^{named}{shard} is damaged"):
                await client.do(step)
            shard.unlink()
            with pytest.raises(ShardError, match=r"trajectories of the batch, \d+ are not stored"):
                await client.do(step)
            shard.write_bytes(content)
        assert seen == {0, 1}

        for rank, named in enumerate(["", "rank 1 refuses the batch: "]):
            folder = tmp_path / f"long-{rank}"
            digest = write_long_row(batches, folder, rank)
            with pytest.raises(BatchRefusedError, match=f"^{named}trajectory r-0-29: it has 600 tokens"):
                await client.do(TrainStep(folder=str(folder), run_id="r", step=0, digest=digest))
        assert (await client.do(step)).version == 1

"""Shards of the last release, schema version 1, are read, and brought up when their run is written to."""

import json
from collections.abc import Callable, Iterable
from typing import NoReturn

import polars as pl
import pyarrow as pa
import pytest

from tasks.errors import ShardError
from tasks.store.config import StoreConfig
from tasks.store.filesystem import Files, files_of, publish_text
from tasks.store.inventory import all_shards
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.migration import migrate
from tasks.store.names import ShardName
from tasks.store.reader import read
from tasks.store.run import OpenRun
from tasks.store.schemas import schema_of

RowMaker = Callable[..., pa.RecordBatch]

BATCHES_1 = pa.schema(
    [
        pa.field(name, kind, nullable=False, metadata={"meaning": "as it was said then"})
        for name, kind in {
            "run": pa.string(),
            "step": pa.int32(),
            "order": pa.int32(),
            "trajectory_id": pa.string(),
            "group": pa.int64(),
            "sample": pa.int32(),
            "env": pa.string(),
            "advantage": pa.float32(),
            "reward": pa.float64(),
            "source": pa.string(),
            "source_step": pa.int32(),
        }.items()
    ],
    metadata={"dataset": "batches", "schema_version": "1"},
)


def write_plain(folder: RunFolder, key: str, rows: pa.RecordBatch) -> None:
    """As version 1 wrote shards: no digest in the name, no last batch of zero rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_batch(rows)
    publish_text(files_of(folder), key, sink.getvalue().to_pybytes())


def of_version(rows: pa.RecordBatch, version: int) -> pa.RecordBatch:
    return rows.replace_schema_metadata(rows.schema.metadata | {b"schema_version": str(version).encode()})


@pytest.fixture
def old_run(folder: RunFolder, rows: RowMaker) -> RunFolder:
    batch = rows("batches", 2, step=0, trajectory_id=["a", "b"]).drop_columns(["scorer"])
    batch = pa.record_batch(batch.columns, schema=BATCHES_1)
    write_plain(folder, "batches/step=000000/000001-000004.arrow", batch)
    for number in (0, 1):
        made = of_version(rows("rollouts", step=0, trajectory_id="ab"[number]), 1)
        write_plain(folder, f"rollouts/step=000000/000001-{number:06d}.arrow", made)
    manifest = {"run": "r", "incarnation": 1, "epoch": 1, "schema_version": 1, "config": {"steps": 2}}
    manifest |= {"versions": {}, "git_commit": "", "created_at": "2026-11-01", "status": "running"}
    publish_text(files_of(folder), "run.json", json.dumps(manifest).encode())
    return folder


class Killed:
    """Files of a process that is killed when it is about to remove some."""

    def __init__(self, files: Files) -> None:
        self.publish, self.keys, self.sizes, self.open = files.publish, files.keys, files.sizes, files.open

    def remove(self, keys: Iterable[str]) -> NoReturn:
        raise KeyboardInterrupt


def extended(folder: RunFolder) -> OpenRun:
    return OpenRun.extend(
        folder, config_of=StoreConfig(root=str(folder.local.parent), compaction_grace_s=0.1)
    )


def test_older_shards_are_read_with_defaults_in_the_columns_added_since(old_run: RunFolder) -> None:
    table = read(old_run, "batches")
    assert table.schema.equals(schema_of("batches"), check_metadata=True)
    assert table["trajectory_id"].to_pylist() == ["a", "b"]
    assert table["scorer"].to_pylist() == ["", ""]
    assert read(old_run, "batches", ["scorer", "order"]).schema.names == ["scorer", "order"]
    assert read(old_run, "rollouts", ["trajectory_id"])["trajectory_id"].to_pylist() == ["a", "b"]


async def test_a_run_that_is_opened_for_writing_is_brought_up_whole(old_run: RunFolder) -> None:
    before = {dataset: read(old_run, dataset) for dataset in ("batches", "rollouts")}
    with extended(old_run) as run:
        async with run.writer:
            pass
    assert read_manifest(old_run).schema_version == 2
    for dataset, table in before.items():
        assert read(old_run, dataset).equals(table)
        if old_run.is_local:
            plain = pl.scan_ipc(f"{old_run.local}/{dataset}/**/*.arrow", hive_partitioning=True).collect()
            assert len(plain) == table.num_rows
    names = [ShardName.of(key) for key in all_shards(files_of(old_run))]
    assert all(name and name.digest for name in names)


def test_a_kill_half_way_leaves_every_row_once_and_the_next_opening_does_the_rest(old_run: RunFolder) -> None:
    before = read(old_run, "rollouts", ["trajectory_id"])
    files = files_of(old_run)
    with pytest.raises(KeyboardInterrupt):
        migrate(old_run, Killed(files), grace_s=0.0)
    assert len(all_shards(files)) == 6
    assert read(old_run, "rollouts", ["trajectory_id"]).equals(before)
    extended(old_run).close()
    assert len(all_shards(files)) == 3
    assert read(old_run, "rollouts", ["trajectory_id"]).equals(before)


def test_a_shard_of_a_newer_version_is_refused_by_name(folder: RunFolder, rows: RowMaker) -> None:
    write_plain(folder, "groups/step=000000/000001-000000.arrow", of_version(rows("groups"), 99))
    with pytest.raises(ShardError, match=r"000001-000000\.arrow: .*schema version 99.* up to 2; use a newer"):
        read(folder, "groups")

"""Data sets of schema version 2, whose rollouts have no segments, are read as they are, also next to shards of this version."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rollmill
from rollmill.tasks.store import schemas
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read, read_trajectories
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import SCHEMA_VERSION
from rollmill.tasks.store.segments import LINEAR, SEGMENT_COLUMNS, read_segments
from rollmill.tasks.store.stored_batch import read_batch_sequences
from rollmill.tasks.train.samples import read_samples

RowMaker = Callable[..., pa.RecordBatch]
Writing = Callable[..., AbstractContextManager[None]]
SEGMENT = {"segment_starts": [0], "segment_parents": [-1]} | {key: [0] for key in SEGMENT_COLUMNS[2:]}


def open_run(folder: RunFolder, root: Path) -> OpenRun:
    config = {"steps": 2, "rollout": {"group_size": 2}}
    given = {"config": config, "fixed": {}, "versions": {}, "git_commit": ""}
    return OpenRun.open(folder, **given, config_of=StoreConfig(root=str(root)))


def make_rollouts(rows: RowMaker, run: str, group: int) -> pa.RecordBatch:
    tokens = {"token_ids": [[5, 6, group]] * 2, "loss_mask": [[False, True, True]] * 2}
    logprobs = [[np.nan, -0.5, -1.5]] * 2
    ids = [f"r.{group}.0", f"r.{group}.1"]
    keys = {"run": run, "step": 0, "group": group, "sample": [0, 1], "trajectory_id": ids, "attempt": 0}
    spans = {"version_span_starts": [[1]] * 2, "version_span_versions": [[0]] * 2}
    return rows("rollouts", 2, **keys, **tokens, logprobs=logprobs, status="complete", messages="[]", **spans)


@pytest.fixture
async def mixed(tmp_path: Path, rows: RowMaker, version_2: Writing) -> RunFolder:
    """A run of version 2 that is resumed: one partition with a shard of each version, and a batch of both."""
    folder = RunFolder(tmp_path / "run")
    with version_2(), open_run(folder, tmp_path) as run:
        async with run.writer as writer:
            made = make_rollouts(rows, run.manifest.run, 0)
            assert "segment_starts" not in made.schema.names
            await writer.append("rollouts", made, step=0)
    assert read_manifest(folder).schema_version == 2
    with open_run(folder, tmp_path) as run:
        async with run.writer as writer:
            await writer.append("rollouts", make_rollouts(rows, run.manifest.run, 1), step=0)
            ids = ["r.0.0", "r.0.1", "r.1.0", "r.1.1"]
            batch = {"order": [0, 1, 2, 3], "trajectory_id": ids, "source": "", "source_step": 0}
            await writer.append("batches", rows("batches", 4, step=0, **batch), step=0)
    return folder


async def test_rollouts_of_version_2_are_one_segment_to_every_reader(mixed: RunFolder) -> None:
    assert read_manifest(mixed).schema_version == SCHEMA_VERSION
    table = read(mixed, "rollouts", step=0)
    assert table.schema.equals(schemas.dataset_schema("rollouts"), check_metadata=True)
    assert [{name: row[name] for name in SEGMENT} for row in table.to_pylist()] == [SEGMENT] * 4
    assert read(mixed, "rollouts", ["segment_parents", "group"]).to_pylist()[0] == {
        "segment_parents": [-1],
        "group": 0,
    }
    chosen = read_trajectories(mixed, 0, ["r.1.0", "r.0.1"], ["token_ids", *SEGMENT_COLUMNS]).to_pylist()
    assert [(each["token_ids"][-1], read_segments(each)) for each in chosen] == [(1, LINEAR), (0, LINEAR)]
    _, samples = read_samples(mixed.location, 0)
    assert samples.segments == [LINEAR] * 4
    assert [each.tolist() for each in read_batch_sequences(mixed, 0, 2)] == [[5, 6, 0], [5, 6, 1]]


async def test_shards_of_both_versions_are_compacted_into_one_of_this_version(
    mixed: RunFolder, tmp_path: Path
) -> None:
    before = read(mixed, "rollouts").sort_by("trajectory_id").to_pylist()
    with open_run(mixed, tmp_path) as run:
        async with run.writer as writer:
            key = await writer.compact("rollouts/step=000000", 1 << 20)
    assert key is not None
    whole = pa.ipc.open_file(open_files(mixed).open(key))
    assert whole.schema.equals(schemas.dataset_schema("rollouts"), check_metadata=True)
    assert str(read(mixed, "rollouts").sort_by("trajectory_id").to_pylist()) == str(before)


async def test_a_plan_of_version_4_keeps_its_problems(
    tmp_path: Path, rows: RowMaker, version_2: Writing
) -> None:
    folder = RunFolder(tmp_path / "run")
    for step, version in enumerate((2, 4, SCHEMA_VERSION)):
        with version_2(version), open_run(folder, tmp_path) as run:
            async with run.writer as writer:
                given = {"problems": [[step]]} if version > 2 else {}
                await writer.append("plans", rows("plans", step=step, **given), step=step)
    expected = [([], "", -1), ([1], "", -1), ([2], "", -1)]
    names = ["problems", "source", "source_step"]
    assert [tuple(each.values()) for each in read(folder, "plans", names).to_pylist()] == expected
    frame = rollmill.open_run(folder.location).dataset("plans").sort("step").collect()
    assert frame.select(names).rows() == expected


async def test_both_versions_are_rows_of_one_frame(mixed: RunFolder) -> None:
    frame = rollmill.open_run(mixed.location).trajectories.sort("trajectory_id").collect()
    assert frame["segment_starts"].to_list() == [[0]] * 4
    assert frame["message_segments"].to_list()[:2] == [[], []]

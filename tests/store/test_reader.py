"""Reading, also what is not there or not whole."""

from collections.abc import Callable

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from rollmill.tasks.errors import SchemaError, ShardError, ShardGoneError
from rollmill.tasks.store import schema_versions
from rollmill.tasks.store.filesystem import open_files, publish_text, read_text
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_scorers, read, read_listed, read_shard, read_trajectories, scan
from rollmill.tasks.store.schemas import dataset_schema
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]


@pytest.fixture
async def filled(folder: RunFolder, rows: RowMaker) -> RunFolder:
    """Two steps of two rollouts each, scored by two scorers."""
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for step in (0, 1):
            ids = [f"r.{step}.0", f"r.{step}.1"]
            made = rows("rollouts", 2, step=step, group=[10 * step, 10 * step + 1], trajectory_id=ids)
            await writer.append("rollouts", made, step=step)
            for scorer in ("addition", "length"):
                scores = rows("scores", 2, step=step, trajectory_id=ids, scorer=scorer, version="1")
                await writer.append("scores", scores, scorer=f"{scorer}@1", step=step)
    return folder


def shard_of(folder: RunFolder, step: int = 0) -> str:
    return open_files(folder).keys(f"rollouts/step={step:06d}/*.arrow")[0]


def test_a_folder_without_rows_reads_as_an_empty_table_with_the_schema(folder: RunFolder) -> None:
    assert read(folder, "rollouts", step=5).schema.equals(dataset_schema("rollouts"), check_metadata=True)
    assert read(folder, "rollouts", ["group"]).schema.names == ["group"]
    assert scan(folder, "rollouts").collect().columns == dataset_schema("rollouts").names
    assert scan(RunFolder(folder.path("nowhere")), "groups").collect().is_empty()


def test_columns_have_the_requested_order_and_partitions_select(filled: RunFolder) -> None:
    table = read(filled, "rollouts", ["trajectory_id", "group"], step=1)
    assert table.schema.names == ["trajectory_id", "group"]
    assert table.to_pylist() == [
        {"trajectory_id": "r.1.0", "group": 10},
        {"trajectory_id": "r.1.1", "group": 11},
    ]
    assert read(filled, "scores", scorer="length@1").num_rows == 4
    assert read(filled, "scores", step=0).num_rows == 4
    assert read(filled, "scores", scorer="length@1", step=0).num_rows == 2


async def test_scorers_are_in_the_order_of_their_versions_as_numbers(
    folder: RunFolder, rows: RowMaker
) -> None:
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for version in ("10", "9", "1.2"):
            scores = rows("scores", 1, step=0, scorer="length", version=version)
            await writer.append("scores", scores, scorer=f"length@{version}", step=0)
    assert list_scorers(folder) == ["length@1.2", "length@9", "length@10"]


def test_trajectories_have_the_order_of_the_given_ids_and_may_repeat(filled: RunFolder) -> None:
    table = read_trajectories(filled, 1, ["r.1.1", "r.1.0", "r.1.1"], ["group"])
    assert table.to_pydict() == {"group": [11, 10, 11]}
    assert read_trajectories(filled, 1, [], ["group"]).num_rows == 0
    assert read_trajectories(filled, 1, ["r.1.0"]).schema.names == dataset_schema("rollouts").names


async def test_rollouts_are_read_without_the_tokens_of_shards_that_have_none_of_them(
    folder: RunFolder, rows: RowMaker
) -> None:
    files, tokens = open_files(folder), np.full(100_000, 7, np.int32)
    async with RunWriter(files, epoch=1, flush_s=0.0) as writer:
        for name in ("a", "b"):
            made = rows("rollouts", 1, step=0, trajectory_id=[name], token_ids=[tokens.tolist()])
            await writer.append("rollouts", made, step=0)
    shards = files.keys("rollouts/step=000000/*.arrow")
    assert len(shards) == 2
    (damaged,) = (key for key in shards if read_shard(folder, key)["trajectory_id"].to_pylist() == ["a"])
    content = bytearray(read_text(files, damaged))
    # In the middle of the tokens: every reader checks a shard's first 128 KiB and its last bytes.
    content[content.index(tokens.tobytes()) + tokens.nbytes // 2] ^= 1
    publish_text(files, damaged, bytes(content))
    assert read_trajectories(folder, 0, ["b"], ["token_ids"])["token_ids"].to_pylist() == [tokens.tolist()]
    with pytest.raises(ShardError, match="is damaged"):
        read_trajectories(folder, 0, ["a"], ["token_ids"])


def test_missing_trajectories_are_named(filled: RunFolder) -> None:
    with pytest.raises(ShardError, match=r"step=000001 has 1 of 3 trajectories; missing are r\.0\.0, x$"):
        read_trajectories(filled, 1, ["r.0.0", "r.1.0", "x"], ["group"])
    with pytest.raises(ShardError, match="m0, m1, m2, m3, m4 and 2 more"):
        read_trajectories(filled, 1, [f"m{n}" for n in range(7)], ["group"])


def test_unknown_columns_and_data_sets_are_refused(filled: RunFolder) -> None:
    with pytest.raises(SchemaError, match="rollouts has no column rewards; it has run, step"):
        read(filled, "rollouts", ["rewards"])
    with pytest.raises(SchemaError, match="no data set is called 'rewards'"):
        scan(filled, "rewards")


@pytest.mark.parametrize("n_bytes", [0, 1, 100, -1])
def test_a_shard_that_was_cut_off_is_an_error_that_names_it(filled: RunFolder, n_bytes: int) -> None:
    shard = shard_of(filled)
    content = read_text(open_files(filled), shard)
    publish_text(open_files(filled), shard, content[:n_bytes])
    with pytest.raises(ShardError, match=filled.path(shard)):
        read(filled, "rollouts")
    assert read(filled, "rollouts", step=1).num_rows == 2


def test_offsets_that_point_outside_a_shard_are_an_error_that_names_it(filled: RunFolder) -> None:
    shard = shard_of(filled)
    content = bytearray(read_text(open_files(filled), shard))
    offsets = bytes(pa.array([0, 3, 6], pa.int64()).buffers()[1])[:24]
    place = content.find(offsets)
    assert place > 0
    content[place + 8 : place + 16] = (1 << 40).to_bytes(8, "little")
    publish_text(open_files(filled), shard, bytes(content))
    with pytest.raises(ShardError, match=filled.path(shard)):
        read(filled, "rollouts", step=0)


def test_a_shard_of_another_schema_is_an_error_that_names_it(filled: RunFolder) -> None:
    (scores,) = open_files(filled).keys("scores/scorer=length@1/step=000000/*.arrow")
    (rollouts,) = open_files(filled).keys("rollouts/step=000000/*.arrow")
    open_files(filled).remove([rollouts])
    shard = f"rollouts/step=000000/{scores.rpartition('/')[2]}"
    publish_text(open_files(filled), shard, open_files(filled).open(scores).read())
    with pytest.raises(ShardError, match=f"{filled.path(shard)} has another schema than rollouts"):
        read(filled, "rollouts")


@pytest.mark.parametrize(("version", "remedy"), [(2, "a newer"), (6, "an older")])
def test_a_shard_of_another_schema_version_is_refused_by_name(
    filled: RunFolder, monkeypatch: pytest.MonkeyPatch, version: int, remedy: str
) -> None:
    monkeypatch.setattr(schema_versions, "SCHEMA_VERSION", version)
    monkeypatch.setattr(schema_versions, "OLDEST_SCHEMA_VERSION", version)
    (shard,) = open_files(filled).keys("rollouts/step=000000/*.arrow")
    expected = f"{filled.path(shard)}: it has schema version 5, and this Rollmill reads {version} to {version}; use {remedy} one"
    with pytest.raises(ShardError, match=expected):
        read(filled, "rollouts", step=0)


def test_a_file_that_is_not_named_as_a_shard_is_refused_by_name(filled: RunFolder) -> None:
    publish_text(open_files(filled), "groups/step=000000/000001-000000.arrow", b"ARROW1")
    with pytest.raises(ShardError, match=r"000001-000000\.arrow is not named EPOCH-NUMBER-DIGEST\.arrow"):
        read(filled, "groups")


def test_a_plain_polars_scan_opens_every_data_set_in_the_middle_of_a_run(filled: RunFolder) -> None:
    (filled.tmp / "half.arrow").write_bytes(b"ARROW1")
    rollouts = pl.scan_ipc(f"{filled.location}/rollouts/**/*.arrow", hive_partitioning=True)
    assert rollouts.filter(pl.col("step") == 1).select("group").collect()["group"].to_list() == [10, 11]
    assert rollouts.collect_schema()["step"] == pl.Int32
    scores = pl.scan_ipc(f"{filled.location}/scores/**/*.arrow", hive_partitioning=True)
    counts = scores.group_by("scorer").len().sort("scorer").collect()
    assert counts.rows() == [("addition@1", 4), ("length@1", 4)]


def test_our_scan_reads_the_columns_of_the_files_and_selects_partitions(filled: RunFolder) -> None:
    assert scan(filled, "scores").select(pl.col("scorer").unique().sort()).collect()["scorer"].to_list() == [
        "addition",
        "length",
    ]
    assert scan(filled, "scores", step=1).select(pl.len()).collect().item() == 4
    joined = scan(filled, "rollouts").join(scan(filled, "scores", scorer="length@1"), on="trajectory_id")
    assert joined.select(pl.len()).collect().item() == 4


def test_shards_removed_after_listing_are_listed_again_and_one_that_stays_missing_is_an_error() -> None:
    listings = iter([["small"], ["compacted"]])
    tables = {"compacted": pa.table({"n": [1]})}

    def read_one(key: str) -> pa.Table:
        if key not in tables:
            raise ShardGoneError(f"cannot read {key}: it is not there")
        return tables[key]

    assert read_listed(lambda: next(listings), read_one) == [tables["compacted"]]
    with pytest.raises(ShardGoneError, match="small"):
        read_listed(lambda: ["small"], read_one)

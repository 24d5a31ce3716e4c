"""Every reader of a damaged part of a shard sees the damage, on disk and on S3."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import ShardError
from rollmill.tasks.store.schemas import SCHEMAS, dataset_schema, make_batch
from rollmill.tasks.store.shards.integrity import BLOCK_BYTES, WHOLE_BYTES, CheckedShard, read_shard_layout
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName

RowMaker = Callable[..., pa.RecordBatch]
WHERE = "RUN/a.arrow"


class Elsewhere:
    """A file that is neither mapped nor in memory, and counts the requests made of it."""

    def __init__(self, content: bytes) -> None:
        self.content, self.requests = content, list[tuple[int, int]]()

    def size(self) -> int:
        return len(self.content)

    def read_at(self, size: int, offset: int) -> bytes:
        self.requests.append((offset, size))
        return self.content[offset : offset + size]


def make_shard(folder: Path, dataset: str, *rows: pa.RecordBatch) -> tuple[bytes, str]:
    """A shard's bytes, and the digest of its name."""
    name = ShardName.of(write_shard(folder / "shard", ShardName(1, 0), dataset, rows))
    assert name is not None
    return (folder / "shard").read_bytes(), name.digest


def whole(content: bytes, digest: str) -> pa.Table:
    shard = CheckedShard(pa.BufferReader(content), digest, WHERE)
    return shard.read(range(len(shard.schema())))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, rows: RowMaker) -> dict[str, tuple[bytes, str]]:
    folder = tmp_path_factory.mktemp("shards")
    return {dataset: make_shard(folder, dataset, rows(dataset, 3)) for dataset in SCHEMAS}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    """Three pieces of 6 MB of routing."""
    experts = [pa.array([np.full(6_000_000, n, np.uint8).tobytes()], pa.large_binary()) for n in range(3)]
    plain = {"run": ["r"], "step": [0], "shape": [[1, 1, 1]], "dtype": ["uint8"]}
    pieces = [
        make_batch("routing", plain | {"trajectory_id": [f"t{n}"], "experts": each})
        for n, each in enumerate(experts)
    ]
    return make_shard(tmp_path_factory.mktemp("large"), "routing", *pieces)


@given(st.sampled_from(sorted(SCHEMAS)), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_any_byte_that_changes_is_an_error_that_names_the_file(
    shards: dict[str, tuple[bytes, str]], dataset: str, place: float, change: int
) -> None:
    content, digest = shards[dataset]
    changed = bytearray(content)
    changed[int(place * len(content))] ^= change
    with pytest.raises(ShardError, match=f"{WHERE} is damaged: .*restore this file"):
        whole(bytes(changed), digest)


@given(st.sampled_from(sorted(SCHEMAS)), st.floats(0, 1, exclude_max=True))
def test_a_shard_cut_off_anywhere_is_an_error_that_names_the_file(
    shards: dict[str, tuple[bytes, str]], dataset: str, place: float
) -> None:
    content, digest = shards[dataset]
    with pytest.raises(ShardError, match=f"{WHERE} is damaged"):
        whole(content[: int(place * len(content))], digest)


@pytest.mark.parametrize("place", np.linspace(0.0, 0.9999999, 9))
def test_damage_to_a_large_shard_is_found_by_readers_of_its_column_and_by_a_full_check(
    large: tuple[bytes, str], place: float
) -> None:
    content, digest = large
    changed = bytearray(content)
    changed[int(place * len(content))] ^= 1
    with pytest.raises(ShardError, match="is damaged"):
        CheckedShard(pa.BufferReader(bytes(changed)), digest, WHERE).check()
    experts = content.find(b"\x01" * 64)
    changed = bytearray(content)
    changed[experts + 3_000_000] ^= 1
    shard = CheckedShard(pa.BufferReader(bytes(changed)), digest, WHERE)
    fields = dataset_schema("routing")
    assert shard.read([fields.get_field_index("trajectory_id")]).num_rows == 3
    with pytest.raises(ShardError, match=r"bytes \d+ to \d+ are not what was written"):
        shard.read([fields.get_field_index("experts")])


def test_a_shard_under_the_name_of_another_is_refused(shards: dict[str, tuple[bytes, str]]) -> None:
    with pytest.raises(ShardError, match="its last bytes do not match the digest in its name"):
        whole(shards["groups"][0], shards["rollouts"][1])


def test_a_large_remote_shard_is_read_in_few_requests_and_verified(
    large: tuple[bytes, str],
) -> None:
    content, digest = large
    assert len(content) > WHOLE_BYTES
    elsewhere = Elsewhere(content)
    table = CheckedShard(elsewhere, digest, WHERE).read(range(6))
    assert table.equals(whole(content, digest))
    assert len(elsewhere.requests) < 16
    changed = bytearray(content)
    changed[content.find(b"\x01" * 64) + 3_000_000] ^= 1
    with pytest.raises(ShardError, match=f"{WHERE} is damaged: bytes"):
        CheckedShard(Elsewhere(bytes(changed)), digest, WHERE).read(range(6))
    with pytest.raises(ShardError, match=f"{WHERE} is damaged: bytes"):
        CheckedShard(Elsewhere(bytes(changed)), digest, WHERE).check()


def test_a_small_remote_shard_is_one_request(shards: dict[str, tuple[bytes, str]]) -> None:
    content, digest = shards["rollouts"]
    elsewhere = Elsewhere(content)
    assert CheckedShard(elsewhere, digest, WHERE).read([0]).num_rows == 3
    assert elsewhere.requests == [(0, len(content))]


def test_columns_of_a_mapped_shard_are_not_copied(large: tuple[bytes, str]) -> None:
    content, digest = large
    source = pa.BufferReader(content)
    table = CheckedShard(source, digest, WHERE).read([5])
    base = pa.py_buffer(content).address
    assert all(base < chunk.buffers()[2].address < base + len(content) for chunk in table[0].chunks[:3])


def test_the_name_and_the_last_batch_lead_to_every_byte(large: tuple[bytes, str], tmp_path: Path) -> None:
    content, digest = large
    reader = pa.ipc.open_file(pa.BufferReader(content))
    last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    assert last.batch.num_rows == 0
    assert int(last.custom_metadata[b"block_bytes"]) == BLOCK_BYTES
    tail, _ = read_shard_layout(pa.BufferReader(content), len(content))
    assert xxhash.xxh3_64_hexdigest(content[tail:]) == digest
    (tmp_path / "a.arrow").write_bytes(content)
    assert pyarrow.dataset.dataset(tmp_path, format="ipc").count_rows() == 3


@pytest.mark.parametrize("is_mapped", [True, False])
def test_of_chosen_rows_no_more_is_read_or_checked(large: tuple[bytes, str], is_mapped: bool) -> None:
    content, digest = bytearray(large[0]), large[1]
    content[content.index(np.zeros(1_000, np.uint8).tobytes()) + 3_000_000] ^= (
        1  # in the middle of the first row's experts
    )
    elsewhere = Elsewhere(bytes(content))
    shard = CheckedShard(pa.BufferReader(bytes(content)) if is_mapped else elsewhere, digest, WHERE)
    fields = [dataset_schema("routing").get_field_index(name) for name in ("trajectory_id", "experts")]

    def read(*rows: int) -> pa.Table:
        # The shard has a batch for each row, and a last one without rows.
        return shard.read(fields, [*(np.array([row in rows]) for row in range(3)), np.empty(0, bool)])

    elsewhere.requests.clear()
    expected = whole(*large).select(["trajectory_id", "experts"])
    assert read(1).combine_chunks().equals(expected.slice(1, 1).combine_chunks())
    assert sum(size for _, size in elsewhere.requests) < 9_000_000
    assert read(1, 2)["trajectory_id"].to_pylist() == ["t1", "t2"]
    assert read().num_rows == 0
    with pytest.raises(ShardError, match="are not what was written"):
        read(0, 2)

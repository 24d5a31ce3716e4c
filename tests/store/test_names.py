"""Names of shards."""

from rollmill.tasks.store.shards.shard_names import ShardName, current_shards, list_superseded_shards

A, B, C = (
    "metrics/step=000001/000001-000004-00000000000000aa.arrow",
    "metrics/step=000001/000001-000009-compacted-00000000000000bb.arrow",
    "metrics/step=000001/000002-000000-00000000000000cc.arrow",
)
OTHER = "metrics/step=000002/000001-000003-00000000000000dd.arrow"


def test_a_shards_name_has_its_writer_its_number_and_its_digest() -> None:
    name = ShardName(2, 3, "9f86d081884c7d65", is_compacted=True)
    assert str(name) == "000002-000003-compacted-9f86d081884c7d65.arrow"
    assert ShardName.of(f"rollouts/step=000001/{name}") == name
    assert ShardName.of("rollouts/step=000001/000002-000003.arrow") is None
    assert ShardName.of("rollouts/step=000001/notes.arrow") is None


def test_a_compacted_shard_replaces_the_earlier_ones_of_its_partition_only() -> None:
    assert list_superseded_shards([A, B, C, OTHER]) == [A]
    assert current_shards([C, B, OTHER, A]) == [B, C, OTHER]
    assert current_shards([A, C]) == [A, C]


def test_of_two_compacted_shards_the_later_one_counts() -> None:
    later = "metrics/step=000001/000003-000000-compacted-00000000000000ee.arrow"
    assert current_shards([A, B, C, later]) == [later]

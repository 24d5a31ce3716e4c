"""The parts of a run that are published one by one: the finished steps of its data sets, and which of their rows are new."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rollmill.tasks.look.comparisons.paired_evaluations import is_complete
from rollmill.tasks.look.export.dataset_export import json_lines, list_partitions
from rollmill.tasks.store.folders import Partition, RunFolder, partition_folder
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.run.manifest import Manifest, read_manifest
from rollmill.tasks.store.run.resume import list_done_steps
from rollmill.tasks.store.schemas import STATE_FIELDS, dataset_schema

EVALUATED = ("evaluations", "evaluation_scores")
"""Data sets whose rows are those of a policy version."""
# Columns that no two rows share all values of, and that a new score changes. Other columns must not be added: marks that
# are stored in published tables would no longer fit.
_IDENTITY = ("trajectory_id", "group", "name", "env", "stat", "value", "reward", "duration_s", "started_at")
_CHECKSUM_BITS = 32


class Mark(NamedTuple):
    """What a table has of a part: its first `rows` rows, with a checksum of them."""

    rows: int
    checksum: int

    @property
    def packed(self) -> int:
        """Both in one positive integer of 64 bits, which is stored with the published rows."""
        return self.rows << _CHECKSUM_BITS | self.checksum

    @classmethod
    def unpack(cls, packed: int) -> Self:
        """Return the mark of a packed integer; 0: no rows."""
        return cls(packed >> _CHECKSUM_BITS, packed & (1 << _CHECKSUM_BITS) - 1)


@dataclass(frozen=True)
class StoredPart:
    """The rows of one partition of a data set that one run wrote, in the order in which they were stored.

    Attributes:
        folder: of the run that is published.
        dataset: name of the data set.
        table: name of the table for them.
        run: id of the run that wrote them.
        is_own: False for rows of another run, which a fork copied: its source may have more of them.
        partition: values of the partition keys.
        identities: the columns of these rows that a mark covers.
    """

    folder: RunFolder
    dataset: str
    table: str
    run: str
    is_own: bool
    partition: Partition
    identities: pa.Table

    @property
    def step(self) -> int:
        """The step, or the policy version of an evaluation."""
        return _step_of(self.partition)

    @property
    def place(self) -> str:
        """The partition as text. Example: scorer=addition@1/step=000012."""
        return partition_folder(self.dataset, self.partition).partition("/")[2]

    @property
    def key(self) -> str:
        """Run and partition, which name the part in its table. Example: 5eed5eed5eed5eed/step=000012."""
        return f"{self.run}/{self.place}"

    @property
    def facts(self) -> dict[str, str]:
        """What the metadata of a commit with rows of this part has."""
        return {"rollmill.run": self.run, "rollmill.step": str(self.step), "rollmill.partition": self.place}

    @property
    def n_rows(self) -> int:
        """Number of stored rows."""
        return int(self.identities.num_rows)

    def mark(self, n_rows: int) -> Mark:
        """Return the mark of the first `n_rows` rows, or of all if there are fewer."""
        rows = self.identities.slice(0, n_rows)
        digest = xxhash.xxh32()
        for batch in rows.to_batches():
            for line in json_lines(batch):
                digest.update(line)
        return Mark(rows.num_rows, digest.intdigest())

    def read_rows(self, first: int) -> pa.Table:
        """Read the rows from number `first` on, in types that all table formats have; raises StoreError."""
        stored = read(self.folder, self.dataset, None, **self.partition)
        own = stored.filter(pc.field("run") == self.run)
        return convert_rows(own.slice(first, self.n_rows - first))


def list_parts(folder: RunFolder, dataset: str) -> Iterator[StoredPart]:
    """Read the parts of a data set in the finished steps of a run, step by step.

    Raises:
        StoreError: a shard cannot be read.
    """
    manifest = read_manifest(folder)
    is_finished = _find_finished(folder, manifest, dataset)
    schema = [each.name for each in (STATE_FIELDS if dataset == "states" else dataset_schema(dataset))]
    columns = ["run", *(name for name in _IDENTITY if name in schema)]
    for name, partitions in list_partitions(folder, dataset).items():
        for partition in partitions:
            if not is_finished(_step_of(partition)):
                continue
            rows = read(folder, dataset, columns, **partition)
            for run in pc.unique(rows["run"]).to_pylist():
                own = rows.filter(pc.field("run") == run)
                yield StoredPart(folder, dataset, table_name(name), run, run == manifest.run, partition, own)


def _find_finished(folder: RunFolder, manifest: Manifest, dataset: str) -> Callable[[int], bool]:
    """Return whether a step of a data set gets no more rows by the run's loop.

    The metrics of a step are stored last. An evaluation of a version ends before the step after next; a run without steps may have one.
    """
    if manifest.status == "finished":
        return lambda step: True
    done = set(list_done_steps(folder, manifest)) & set(list_steps(folder, "metrics"))
    if dataset in EVALUATED:
        return lambda version: version + 1 in done or is_complete(folder, version)
    return lambda step: step in done


def _step_of(partition: Partition) -> int:
    return int(partition["version" if "version" in partition else "step"])


def convert_rows(rows: pa.Table) -> pa.Table:
    """Return the same values in the types that Delta, Iceberg, Lance and Parquet readers share: no large offsets, nullable columns.

    Columns carry their meaning as a comment. A table that gets a column later has null in earlier rows, which a column that is not
    nullable cannot have.
    """
    return rows.cast(pa.schema([_convert_field(each) for each in rows.schema]))


def table_name(dataset: str) -> str:
    """Return the name of the table of a data set. Example: states-guess is states_guess."""
    return re.sub(r"\W+", "_", dataset)


def _convert_field(field: pa.Field) -> pa.Field:
    texts = {key.decode(): text.decode() for key, text in (field.metadata or {}).items()}
    details = [f"{key} {texts[key]}" for key in ("unit", "shape") if key in texts]
    comment = "; ".join([texts.get("meaning", ""), *details])
    # Delta reads `comment`, Iceberg `doc`.
    return pa.field(field.name, _convert_type(field.type), metadata={"comment": comment, "doc": comment})


def _convert_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(kind):
        return pa.list_(_convert_type(kind.value_type))
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    return kind

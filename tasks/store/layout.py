"""Where everything of a run lies: folders, hive partitions, names of shards.

RUN/<data set>/<key>=<value>/.../<epoch>-<number>.arrow

Example: the writer of epoch 2 puts its third shard, rows of step 12, at
RUN/rollouts/step=000012/000002-000003.arrow.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tasks.errors import SchemaError
from tasks.store.schemas import SCHEMAS

PartitionValue: TypeAlias = int | str
Partition: TypeAlias = Mapping[str, PartitionValue]

PARTITION_KEYS: Mapping[str, tuple[str, ...]] = dict.fromkeys(SCHEMAS, ("step",)) | {
    "scores": ("scorer", "step"),
    "evaluations": ("version",),
}
"""The partition keys of each data set, outermost first."""

MANIFEST = "run.json"
FLOW_RUNS = "flow_runs.json"
_SCORER = re.compile(r"[\w.+-]+@[\w.+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run; nothing here touches the disk."""

    root: Path

    def dataset(self, name: str, **partition: PartitionValue) -> Path:
        """Folder of a data set, or of those of its partitions that are given, outermost first.

        Example: dataset("scores", scorer="addition@1", step=12) is RUN/scores/scorer=addition@1/step=000012.

        Raises:
            SchemaError: unknown data set or partition, or an outer partition is missing.
        """
        pattern = partition_pattern(name, partition)
        outer = pattern.split("/")[: 1 + len(partition)]
        if any(part.endswith("=*") for part in outer):
            raise SchemaError(
                f"{name}: give partitions from the outermost on: {', '.join(PARTITION_KEYS[name])}"
            )
        return self.root.joinpath(*outer)

    @property
    def manifest(self) -> Path:
        """run.json."""
        return self.root / MANIFEST

    @property
    def lock(self) -> Path:
        """The file that the one writing process holds locked."""
        return self.root / "lock"

    @property
    def tmp(self) -> Path:
        """Unfinished files; emptied when the run is opened for writing."""
        return self.root / ".tmp"

    @property
    def logs(self) -> Path:
        """Folder of the services' logs."""
        return self.root / "logs"

    def log(self, service: str) -> Path:
        """Log file of a service."""
        return self.logs / f"{service}.log"

    def checkpoint(self, version: int) -> Path:
        """Folder of the trainer's state that is policy version `version`."""
        return self.root / "checkpoints" / f"version={version:06d}"

    def checkpoint_marker(self, version: int) -> Path:
        """The file that is written last: a checkpoint without it is incomplete."""
        return self.checkpoint(version) / "COMPLETE.json"

    def policy(self, version: int) -> Path:
        """Folder of a policy version in Hugging Face format."""
        return self.root / "policies" / f"version={version:06d}"


def shard_name(epoch: int, number: int) -> str:
    """Name of a shard: writers of different epochs never choose the same one."""
    return f"{epoch:06d}-{number:06d}.arrow"


def partition_pattern(dataset: str, partition: Partition) -> str:
    """A data set's folder below the run's, with * for every partition not given.

    Example: partition_pattern("scores", {"step": 12}) is "scores/scorer=*/step=000012".

    Raises:
        SchemaError: unknown data set or partition, or a value that no partition can have.
    """
    if dataset not in PARTITION_KEYS:
        raise SchemaError(f"no data set is called {dataset!r}; there are {', '.join(sorted(PARTITION_KEYS))}")
    keys = PARTITION_KEYS[dataset]
    if unknown := set(partition) - set(keys):
        raise SchemaError(
            f"{dataset} is partitioned by {', '.join(keys)}, not by {', '.join(sorted(unknown))}"
        )
    return "/".join(
        [dataset, *(f"{key}={_text(key, partition[key]) if key in partition else '*'}" for key in keys)]
    )


def partition_folder(dataset: str, partition: Partition) -> str:
    """Folder of one partition below the run's, all of whose keys are given.

    Raises:
        SchemaError: as `partition_pattern`, or a key is missing.
    """
    pattern = partition_pattern(dataset, partition)
    if missing := [key for key in PARTITION_KEYS[dataset] if key not in partition]:
        raise SchemaError(
            f"{dataset} is partitioned by {', '.join(PARTITION_KEYS[dataset])}; give {', '.join(missing)}"
        )
    return pattern


def _text(key: str, value: PartitionValue) -> str:
    if key == "scorer" and isinstance(value, str) and _SCORER.fullmatch(value):
        return value
    if key != "scorer" and isinstance(value, int) and value >= 0:
        return f"{value:06d}"
    allowed = "NAME@VERSION of letters, digits and . _ + -" if key == "scorer" else "an integer >= 0"
    raise SchemaError(f"partition {key}: expected {allowed}, got {value!r}")

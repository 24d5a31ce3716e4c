"""Where everything of a run lies: folders and hive partitions.

RUN/<data set>/<key>=<value>/.../<shard>.arrow
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from tasks.errors import SchemaError
from tasks.store.schemas import SCHEMAS

PartitionValue: TypeAlias = int | str
Partition: TypeAlias = Mapping[str, PartitionValue]

PARTITION_KEYS: Mapping[str, tuple[str, ...]] = dict.fromkeys(SCHEMAS, ("step",)) | {
    "scores": ("scorer", "step"),
    "evaluation_scores": ("scorer", "step"),
    "states": ("env", "step"),
    "logprobs": ("policy", "step"),
    "shards": ("epoch",),
    "evaluations": ("version",),
}
"""The partition keys of each data set, outermost first."""

POLICIES = ("reference", "trainer")
"""Whose log-probabilities the data set `logprobs` has."""

MANIFEST = "run.json"
CHECKPOINT_MARKER = "COMPLETE.json"
FLOW_RUNS = "flow_runs.json"
_ALLOWED = {
    "scorer": "NAME@VERSION of letters, digits and . _ + -",
    "env": "the name of an environment",
    "policy": "reference or trainer",
}
_SCORER = re.compile(r"[\w.+-]+@[\w.+-]+", re.ASCII)


S3 = "s3://"
SCRATCH_ENV = "ROLLMILL_SCRATCH"
"""Names the folder, on a local disk, for what of a run on S3 cannot lie there; .rollmill/scratch by default."""


@dataclass(frozen=True, slots=True, init=False)
class RunFolder:
    """Paths of one run; nothing here touches a disk.

    Attributes:
        location: path of a folder on a local disk, or s3://bucket/prefix.
    """

    location: str

    def __init__(self, location: str | Path) -> None:
        object.__setattr__(self, "location", str(location).rstrip("/"))

    @property
    def name(self) -> str:
        """The last part of its location."""
        return self.location.rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        """True on a local disk, False on S3."""
        return not self.location.startswith(S3)

    @property
    def local(self) -> Path:
        """The run's folder on this machine: itself, or of a run on S3 the one for logs and unfinished files."""
        if self.is_local:
            return Path(self.location)
        return Path(os.environ.get(SCRATCH_ENV, ".rollmill/scratch")) / self.location.removeprefix(S3)

    @property
    def absolute(self) -> str:
        """Its location from any working folder."""
        return str(Path(self.location).absolute()) if self.is_local else self.location

    def path(self, key: str) -> str:
        """Where a key lies, for messages and readers.

        Example: path("run.json") is s3://bucket/prefix/run.json.
        """
        return f"{self.location}/{key}"

    def dataset(self, name: str, **partition: PartitionValue) -> str:
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
        return self.path("/".join(outer))

    @property
    def lock(self) -> Path:
        """The file that the one writing process of a run on a local disk holds locked."""
        return self.local / "lock"

    @property
    def tmp(self) -> Path:
        """Unfinished files; emptied when the run is opened for writing."""
        return self.local / ".tmp"

    @property
    def logs(self) -> Path:
        """Folder of the services' logs."""
        return self.local / "logs"

    def checkpoint(self, version: int) -> Path:
        """Folder, on this machine, of the trainer's state that is policy version `version`."""
        return self.local / checkpoint_key(version)

    def policy(self, version: int) -> Path:
        """Folder, on this machine, of a policy version in Hugging Face format."""
        return self.local / policy_key(version)


def checkpoint_key(version: int) -> str:
    """Folder of a checkpoint below the run's."""
    return f"checkpoints/version={version:06d}"


def policy_key(version: int) -> str:
    """Folder of a policy in Hugging Face format below the run's."""
    return f"policies/version={version:06d}"


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
    match key, value:
        case "env", str(text) if text:
            return quote(text, safe="")
        case "scorer", str(text) if _SCORER.fullmatch(text):
            return text
        case "policy", str(text) if text in POLICIES:
            return text
        case "step" | "version" | "epoch", int(number) if number >= 0:
            return f"{number:06d}"
    raise SchemaError(f"partition {key}: expected {_ALLOWED.get(key, 'an integer >= 0')}, got {value!r}")

"""The layout of a run's folder: data sets, hive partitions, checkpoints and files.

RUN/<data set>/<key>=<value>/.../<shard>.arrow
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from rollmill.tasks.errors import SchemaError
from rollmill.tasks.store.schemas import SCHEMAS

PartitionValue: TypeAlias = int | str
Partition: TypeAlias = Mapping[str, PartitionValue]

# The partition keys of each data set, outermost first.
PARTITION_KEYS: Mapping[str, tuple[str, ...]] = dict.fromkeys(SCHEMAS, ("step",)) | {
    "scores": ("scorer", "step"),
    "evaluation_scores": ("scorer", "step"),
    "states": ("env", "step"),
    "logprobs": ("policy", "step"),
    "shards": ("epoch",),
    "evaluations": ("version",),
}

# The policies whose log-probabilities a run that trains stores in the data set `logprobs`; others are teachers.
POLICIES = ("reference", "trainer")

MANIFEST = "run.json"
CHECKPOINT_MARKER = "COMPLETE.json"
FLOW_RUNS = "flow_runs.json"
_ALLOWED = {
    "scorer": "NAME@VERSION of letters, digits and . _ + -",
    "env": "the name of an environment",
    "policy": "reference, trainer, or a teacher's name of letters, digits and . _ + -",
}
_SCORER = re.compile(r"[\w.+-]+@[\w.+-]+", re.ASCII)
_POLICY = re.compile(r"[\w.+-]+", re.ASCII)


S3_SCHEME = "s3://"
# Variable with the local folder for what a run on S3 needs on a disk; .rollmill/scratch by default.
SCRATCH_ENV = "ROLLMILL_SCRATCH"


@dataclass(frozen=True, slots=True, init=False)
class RunFolder:
    """Location of one run, and the paths in it; no method accesses a disk or S3.

    Attributes:
        location: path of a folder on a local disk, or s3://bucket/prefix.
    """

    location: str

    def __init__(self, location: str | Path) -> None:
        object.__setattr__(self, "location", str(location).rstrip("/"))

    @property
    def name(self) -> str:
        """Name of the run: the last part of its location."""
        return self.location.rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        """True if the run is on a local disk, False if it is on S3."""
        return not self.location.startswith(S3_SCHEME)

    @property
    def local(self) -> Path:
        """The run's folder on this machine; for a run on S3 the scratch folder with its logs and staged files."""
        if self.is_local:
            return Path(self.location)
        return Path(os.environ.get(SCRATCH_ENV, ".rollmill/scratch")) / self.location.removeprefix(S3_SCHEME)

    @property
    def absolute(self) -> str:
        """Location of the run that is valid from any working folder."""
        return str(Path(self.location).absolute()) if self.is_local else self.location

    def path(self, key: str) -> str:
        """Return the full path of the file with a key, for messages and readers.

        Example: of a run at s3://bucket/prefix, path("run.json") is s3://bucket/prefix/run.json.
        """
        return f"{self.location}/{key}"

    def dataset(self, name: str, **partition: PartitionValue) -> str:
        """Return the folder of a data set, or of one of its partitions; partition values are given outermost first.

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
        """The file that the writing process of a run on a local disk keeps locked."""
        return self.local / "lock"

    @property
    def writers(self) -> Path:
        """Folder of the files that further processes which write to a run keep locked."""
        return self.local / "writers"

    @property
    def tmp(self) -> Path:
        """Folder of staged files; emptied when the run is opened for writing."""
        return self.local / ".tmp"

    @property
    def logs(self) -> Path:
        """Folder of the services' logs."""
        return self.local / "logs"

    def checkpoint(self, version: int) -> Path:
        """Return the folder on this machine of the checkpoint of a policy version."""
        return self.local / checkpoint_key(version)

    def policy(self, version: int) -> Path:
        """Return the folder on this machine of a policy version in Hugging Face format."""
        return self.local / policy_key(version)


def checkpoint_key(version: int) -> str:
    """Return the key of a checkpoint's folder, its path below the run's folder. Example: checkpoints/version=000012."""
    return f"checkpoints/version={version:06d}"


def policy_key(version: int) -> str:
    """Return the key of the folder of a policy in Hugging Face format. Example: policies/version=000012."""
    return f"policies/version={version:06d}"


def partition_pattern(dataset: str, partition: Partition) -> str:
    """Return the glob pattern of a data set's partitions in the run's folder, with * for each key that is not given.

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
        [
            dataset,
            *(f"{key}={_partition_text(key, partition[key]) if key in partition else '*'}" for key in keys),
        ]
    )


def partition_folder(dataset: str, partition: Partition) -> str:
    """Return the key of one partition's folder; a value for every partition key must be given.

    Raises:
        SchemaError: as for `partition_pattern`, or a partition key is missing.
    """
    pattern = partition_pattern(dataset, partition)
    if missing := [key for key in PARTITION_KEYS[dataset] if key not in partition]:
        raise SchemaError(
            f"{dataset} is partitioned by {', '.join(PARTITION_KEYS[dataset])}; give {', '.join(missing)}"
        )
    return pattern


def step_from_key(key: str) -> int | None:
    """Return the step, or policy version, of the partition that a file's key is in; None if it is in none.

    Example: "rollouts/step=000012/000001-000007-9f86d081884c7d65.arrow" is in step 12.
    """
    found = re.search(r"/(?:step|version)=(\d+)/", key)
    return int(found[1]) if found else None


def _partition_text(key: str, value: PartitionValue) -> str:
    match key, value:
        # A user chooses the name of an environment: quoted, it is one folder whatever it contains.
        case "env", str(text) if text:
            return quote(text, safe="")
        case "scorer", str(text) if _SCORER.fullmatch(text):
            return text
        case "policy", str(text) if _POLICY.fullmatch(text):
            return text
        case "step" | "version" | "epoch", int(number) if number >= 0:
            return f"{number:06d}"
    raise SchemaError(f"partition {key}: expected {_ALLOWED.get(key, 'an integer >= 0')}, got {value!r}")

"""Which partitions of a data set have shards, by their folders' names alone."""

import re

from tasks.store.filesystem import files_of
from tasks.store.layout import PartitionValue, RunFolder, partition_pattern


def stored_steps(folder: RunFolder, dataset: str, **partition: PartitionValue) -> list[int]:
    """Steps of which a data set has shards, ascending; of `evaluations` the policy versions.

    Example: stored_steps(folder, "scores", scorer="addition@1")
    """
    keys = files_of(folder).keys(f"{partition_pattern(dataset, partition)}/*.arrow")
    found = (re.search(r"/(?:step|version)=(\d+)/[^/]*$", key) for key in keys)
    return sorted({int(match[1]) for match in found if match})


def stored_scorers(folder: RunFolder) -> list[str]:
    """NAME@VERSION of every scorer whose scores are stored, in order of name."""
    keys = files_of(folder).keys("scores/scorer=*/step=*/*.arrow")
    return sorted({key.split("/")[1].removeprefix("scorer=") for key in keys})

"""Runs that train, and runs that are collected and no more: which a folder holds, and which of its steps are done."""

from tasks.errors import RunMismatchError
from tasks.store.layout import RunFolder
from tasks.store.manifest import Manifest
from tasks.store.partitions import stored_steps


def check_kind(folder: RunFolder, manifest: Manifest, *, trains: bool) -> None:
    """Refuse to train in the folder of a run of the flow collect, and the other way round; RunMismatchError."""
    if manifest.trains and not trains:
        raise RunMismatchError(
            f"{folder.location} is a run that trains, and the flow collect does not: go on with it by `rollmill run`, or "
            "give another name to begin a new run"
        )
    if trains and not manifest.trains:
        raise RunMismatchError(
            f"{folder.location} was begun by the flow collect, and has no batches: go on with it by `rollmill collect`, train "
            "a new run from it by `rollmill retrain`, or give another name to begin a new run"
        )


def done_steps(folder: RunFolder, manifest: Manifest) -> list[int]:
    """Steps of which nothing is generated any more, ascending: those with a batch, or with metrics where nothing trains."""
    return stored_steps(folder, "batches" if manifest.trains else "metrics")

"""Runs that train and runs that only collect: which kind a folder holds, and which of its steps are done."""

from rollmill.tasks.errors import RunMismatchError
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps
from rollmill.tasks.store.run.manifest import Manifest


def check_run_kind(folder: RunFolder, manifest: Manifest, *, trains: bool) -> None:
    """Refuse to train in the folder of a run that only collects, or to collect in one that trains; raises RunMismatchError."""
    if manifest.trains and not trains:
        raise RunMismatchError(
            f"{folder.location} is a run that trains, and the flow collect does not: resume it by `rollmill run`, or "
            "give another name to begin a new run"
        )
    if trains and not manifest.trains:
        raise RunMismatchError(
            f"{folder.location} was begun by the flow collect, and has no batches: resume it by `rollmill collect`, train "
            "a new run from it by `rollmill retrain`, or give another name to begin a new run"
        )


def list_done_steps(folder: RunFolder, manifest: Manifest) -> list[int]:
    """List the fully collected steps, ascending: those with a batch or, in a run that only collects, with metrics."""
    return list_steps(folder, "batches" if manifest.trains else "metrics")

"""Where a run resumes, a pure function of its checkpoints and batches; which of its steps are done."""

from collections.abc import Collection
from dataclasses import dataclass

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder, step_from_key
from rollmill.tasks.store.reader import list_steps
from rollmill.tasks.store.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run resumes: the checkpoint to load, and the stored batches to apply again to its weights.

    The step after the last stored batch is collected next.

    Attributes:
        checkpoint_version: last complete checkpoint that the stored batches lead up to; None: the start model.
        stored_batches: batches stored without a gap from step 0; those from checkpoint_version on are applied again.
    """

    checkpoint_version: int | None
    stored_batches: int


def find_resume_point(folder: RunFolder) -> ResumePoint:
    """Find which checkpoint and batches a run resumes from; an empty folder resumes at step 0 without a checkpoint."""
    return plan_resume(list_complete_checkpoints(folder), list_steps(folder, "batches"))


def plan_resume(checkpoints: Collection[int], batch_steps: Collection[int]) -> ResumePoint:
    """Determine where a run resumes from the versions of its complete checkpoints and the steps that have a batch.

    Example: checkpoints 0 and 10, batches of steps 0 to 12: load version 10, apply 10, 11 and 12, finish step 13.
    """
    # Batches after a gap do not count: each is applied to the weights that the one before it left.
    stored = 0
    while stored in batch_steps:
        stored += 1
    versions = [version for version in checkpoints if version <= stored]
    return ResumePoint(max(versions, default=None), stored)


def list_complete_checkpoints(folder: RunFolder) -> list[int]:
    """List the policy versions of a run's complete checkpoints, ascending."""
    return _list_numbers(folder, f"checkpoints/version=*/{CHECKPOINT_MARKER}")


def list_checkpoints(folder: RunFolder) -> list[int]:
    """List the policy versions of all checkpoints of a run, complete or not, ascending."""
    return _list_numbers(folder, "checkpoints/version=*/*")


def list_done_steps(folder: RunFolder, manifest: Manifest) -> list[int]:
    """List the fully collected steps, ascending: those with a batch or, in a run that only collects, with metrics."""
    return list_steps(folder, "batches" if manifest.trains else "metrics")


def _list_numbers(folder: RunFolder, pattern: str) -> list[int]:
    keys = open_files(folder).keys(pattern)
    return sorted({number for key in keys if (number := step_from_key(key)) is not None})

"""Where a run goes on: pure planning from what lies in its folder."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tasks.store.filesystem import files_of
from tasks.store.layout import CHECKPOINT_MARKER, RunFolder


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What to load, and what to apply again; the step after the last stored batch is the open one.

    Attributes:
        checkpoint_version: last complete checkpoint that the stored batches lead up to; None: the start model.
        stored_batches: batches stored without a gap from step 0; those from checkpoint_version on are applied again.
    """

    checkpoint_version: int | None
    stored_batches: int


def resume_point(folder: RunFolder) -> ResumePoint:
    """Where a run goes on, by its folder; step 0 without a checkpoint when it is empty."""
    return plan_resume(complete_checkpoints(folder), stored_batch_steps(folder))


def plan_resume(checkpoints: Collection[int], batch_steps: Collection[int]) -> ResumePoint:
    """Where a run goes on, by its complete checkpoints' versions and the steps that have a batch.

    Example: checkpoints 0 and 10, batches of steps 0 to 12: load version 10, apply 10, 11 and 12, finish step 13.
    """
    stored = 0
    while stored in batch_steps:
        stored += 1
    versions = [version for version in checkpoints if version <= stored]
    return ResumePoint(max(versions, default=None), stored)


def complete_checkpoints(folder: RunFolder) -> list[int]:
    """Versions of the checkpoints that have their marker, ascending."""
    return _numbers(files_of(folder).keys(f"checkpoints/version=*/{CHECKPOINT_MARKER}"), "version")


def stored_checkpoints(folder: RunFolder) -> list[int]:
    """Versions of which anything of a checkpoint is stored, complete or not, ascending."""
    return _numbers(files_of(folder).keys("checkpoints/version=*/*"), "version")


def stored_batch_steps(folder: RunFolder) -> list[int]:
    """Steps that have a batch, one of zero rows included, ascending."""
    return _numbers(files_of(folder).keys("batches/step=*/*.arrow"), "step")


def _numbers(keys: Sequence[str], name: str) -> list[int]:
    found = (re.search(rf"/{name}=(\d+)/", key) for key in keys)
    return sorted({int(match[1]) for match in found if match})

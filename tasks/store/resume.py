"""Where a run goes on: pure planning from what lies in its folder."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tasks.store.filesystem import files_of
from tasks.store.layout import CHECKPOINT_MARKER, RunFolder
from tasks.store.reader import read

SampleKey: TypeAlias = tuple[int, int]
"""(group, sample)"""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What to load, what to apply again, and which step to finish.

    Attributes:
        checkpoint_version: last complete checkpoint that the stored batches lead up to; None: the start model.
        stored_batches: batches stored without a gap from step 0; those from checkpoint_version on are applied again.
        open_step: the step that has no batch yet.
    """

    checkpoint_version: int | None
    stored_batches: int
    open_step: int


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What of a step is stored, and what is missing.

    Attributes:
        finished: trajectories that have a row, failed and cancelled ones too.
        scored: trajectories that have a row of the scorer.
        judged: groups that have a row.
        to_sample: planned trajectories without a row, in the plan's order.
        to_score: finished trajectories of planned groups without a row of the scorer, in the plan's order.
        to_judge: planned groups without a row, in the plan's order.
    """

    finished: frozenset[SampleKey]
    scored: frozenset[SampleKey]
    judged: frozenset[int]
    to_sample: tuple[SampleKey, ...]
    to_score: tuple[SampleKey, ...]
    to_judge: tuple[int, ...]


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
    return ResumePoint(max(versions, default=None), stored, stored)


def unfinished(
    folder: RunFolder, step: int, plan: Sequence[int], group_size: int, scorer: str
) -> StepProgress:
    """What of a step is stored, and what is missing; `plan` are group numbers, `scorer` is NAME@VERSION.

    Raises:
        ShardError: a shard cannot be read.
    """
    groups = read(folder, "groups", ["group"], step=step)
    return step_progress(
        plan,
        group_size,
        finished=_sample_keys(folder, "rollouts", step=step),
        scored=_sample_keys(folder, "scores", scorer=scorer, step=step),
        judged=frozenset(groups["group"].to_pylist()),
    )


def step_progress(
    plan: Sequence[int],
    group_size: int,
    *,
    finished: frozenset[SampleKey],
    scored: frozenset[SampleKey],
    judged: frozenset[int],
) -> StepProgress:
    """What is missing of a step, by what is stored of it.

    Example: plan (4, 5), group size 2, finished {(4, 0)}, nothing scored or judged: to sample are (4, 1), (5, 0)
    and (5, 1), to score (4, 0), to judge 4 and 5.
    """
    planned = [(group, sample) for group in plan for sample in range(group_size)]
    return StepProgress(
        finished=finished,
        scored=scored,
        judged=judged,
        to_sample=tuple(key for key in planned if key not in finished),
        to_score=tuple(key for key in planned if key in finished and key not in scored),
        to_judge=tuple(group for group in plan if group not in judged),
    )


def complete_checkpoints(folder: RunFolder) -> list[int]:
    """Versions of the checkpoints that have their marker, ascending."""
    return _numbers(files_of(folder).keys(f"checkpoints/version=*/{CHECKPOINT_MARKER}"), "version")


def stored_batch_steps(folder: RunFolder) -> list[int]:
    """Steps that have a batch, one of zero rows included, ascending."""
    return _numbers(files_of(folder).keys("batches/step=*/*.arrow"), "step")


def _numbers(keys: Sequence[str], name: str) -> list[int]:
    found = (re.search(rf"/{name}=(\d+)/", key) for key in keys)
    return sorted({int(match[1]) for match in found if match})


def _sample_keys(folder: RunFolder, dataset: str, **partition: int | str) -> frozenset[SampleKey]:
    rows = read(folder, dataset, ["group", "sample"], **partition)
    return frozenset(zip(rows["group"].to_pylist(), rows["sample"].to_pylist(), strict=True))

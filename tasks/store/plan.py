"""The plan of a step: which groups it samples, written before its first request, and the refills appended to it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from tasks.store.layout import RunFolder
from tasks.store.reader import read
from tasks.store.schemas import batch_of
from tasks.store.writer import RunWriter

Reason = Literal["plan", "refill"]


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Consecutive global group numbers: first, ..., first + n - 1.

    Attributes:
        reason: the step's plan, or a refill appended to it.
    """

    first: int
    n: int
    reason: Reason = "plan"


def step_plan(step: int, groups_per_step: int, max_refill_groups: int = 0) -> GroupRange:
    """The groups of a step: a pure function; the numbers after them, up to the next step's, are its refills'.

    Example: step 3 of 32 groups each begins at group 96; with at most 8 refills a step at group 120, and the groups
    152 to 159 are its refills, if it needs any.
    """
    return GroupRange(step * (groups_per_step + max_refill_groups), groups_per_step)


def refill_after(ranges: Sequence[GroupRange]) -> GroupRange:
    """The next refill of a step: one group, numbered after all that it has planned.

    Example: the plan (120, 32) is followed by (152, 1), and that by (153, 1).
    """
    return GroupRange(max(each.first + each.n for each in ranges), 1, "refill")


def n_refills(ranges: Sequence[GroupRange]) -> int:
    """Groups that were appended to a plan."""
    return sum(each.n for each in ranges if each.reason == "refill")


def group_numbers(ranges: Sequence[GroupRange]) -> tuple[int, ...]:
    """Every group of a plan and its refills. Example: (0, 2) and a refill (64, 1) give (0, 1, 64)."""
    return tuple(group for each in ranges for group in range(each.first, each.first + each.n))


def plan_rows(run: str, step: int, ranges: Sequence[GroupRange]) -> pa.RecordBatch:
    """A plan as rows of the `plans` data set."""
    columns = {
        "run": [run] * len(ranges),
        "step": [step] * len(ranges),
        "first_group": [each.first for each in ranges],
        "n_groups": [each.n for each in ranges],
        "reason": [each.reason for each in ranges],
    }
    return batch_of("plans", columns)


def read_plan(folder: RunFolder, step: int) -> tuple[GroupRange, ...]:
    """The stored plan of a step and its refills, in the order they were written; empty when there is none."""
    rows = read(folder, "plans", ["first_group", "n_groups", "reason"], step=step).to_pylist()
    return tuple(GroupRange(row["first_group"], row["n_groups"], row["reason"]) for row in rows)


async def settled_plan(
    folder: RunFolder,
    writer: RunWriter,
    *,
    run: str,
    step: int,
    groups_per_step: int,
    max_refill_groups: int = 0,
) -> tuple[GroupRange, ...]:
    """The stored plan of a step, and when there is none the plan made now, once it is stored."""
    if stored := await asyncio.to_thread(read_plan, folder, step):
        return stored
    ranges = (step_plan(step, groups_per_step, max_refill_groups),)
    await writer.append("plans", plan_rows(run, step, ranges), step=step)
    return ranges

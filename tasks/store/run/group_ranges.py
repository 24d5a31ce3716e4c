"""The plan of a step: which groups it samples, written before its first request, and the refills appended to it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.writer import RunWriter

Reason = Literal["plan", "refill"]


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Consecutive global group numbers first, ..., first + n - 1, of a step's plan or of a refill appended to it."""

    first: int
    n: int
    reason: Reason = "plan"


def count_refills(ranges: Sequence[GroupRange]) -> int:
    """Count the refill groups in a plan."""
    return sum(each.n for each in ranges if each.reason == "refill")


def group_numbers(ranges: Sequence[GroupRange]) -> tuple[int, ...]:
    """Return the numbers of all groups in a plan, with refills. Example: (0, 2) and a refill (64, 1) give (0, 1, 64)."""
    return tuple(group for each in ranges for group in range(each.first, each.first + each.n))


def make_plan_rows(run: str, step: int, ranges: Sequence[GroupRange]) -> pa.RecordBatch:
    """Convert a plan to rows of the data set `plans`."""
    columns = {
        "run": [run] * len(ranges),
        "step": [step] * len(ranges),
        "first_group": [each.first for each in ranges],
        "n_groups": [each.n for each in ranges],
        "reason": [each.reason for each in ranges],
    }
    return make_batch("plans", columns)


def read_plan(folder: RunFolder, step: int) -> tuple[GroupRange, ...]:
    """Read the stored plan of a step and its refills, in the order they were written; empty if there is none."""
    rows = read(folder, "plans", ["first_group", "n_groups", "reason"], step=step).to_pylist()
    return tuple(GroupRange(row["first_group"], row["n_groups"], row["reason"]) for row in rows)


async def ensure_plan(
    folder: RunFolder, writer: RunWriter, planned: GroupRange, *, run: str, step: int
) -> tuple[GroupRange, ...]:
    """Return the stored plan of a step; if there is none, store `planned` as its plan, and wait until it is stored."""
    if stored := await asyncio.to_thread(read_plan, folder, step):
        return stored
    await writer.append("plans", make_plan_rows(run, step, [planned]), step=step)
    return (planned,)

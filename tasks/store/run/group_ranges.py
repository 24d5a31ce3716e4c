"""The plan of a step: which groups it samples, written before its first request, and the refills appended to it."""

import asyncio
from collections.abc import Callable, Sequence
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
    """Consecutive global group numbers first, ..., first + n - 1, of a step's plan or of a refill appended to it.

    Attributes:
        problems: [n] index of each group's problem in its environment; empty: it follows from the group's number.
    """

    first: int
    n: int
    reason: Reason = "plan"
    problems: tuple[int, ...] = ()


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
        "problems": [list(each.problems) for each in ranges],
    }
    return make_batch("plans", columns)


def read_plan(folder: RunFolder, step: int) -> tuple[GroupRange, ...]:
    """Read the stored plan of a step and its refills, in the order they were written; empty if there is none."""
    rows = read(folder, "plans", ["first_group", "n_groups", "reason", "problems"], step=step).to_pylist()
    return tuple(
        GroupRange(row["first_group"], row["n_groups"], row["reason"], tuple(row["problems"])) for row in rows
    )


def drawn_problems(ranges: Sequence[GroupRange]) -> dict[int, int]:
    """Return the index of each group's problem, by the group's number, of those groups whose problem was drawn."""
    return {each.first + at: problem for each in ranges for at, problem in enumerate(each.problems)}


async def ensure_plan(
    folder: RunFolder, writer: RunWriter, plan: Callable[[int], GroupRange], *, run: str, step: int
) -> tuple[GroupRange, ...]:
    """Return the stored plan of a step; if there is none, store that which `plan` makes, and wait until it is stored."""
    if stored := await asyncio.to_thread(read_plan, folder, step):
        return stored
    planned = await asyncio.to_thread(plan, step)
    await writer.append("plans", make_plan_rows(run, step, [planned]), step=step)
    return (planned,)

"""The plan of a step: which groups it samples or replays, written before its first request, and the refills appended to it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.group_draw import StoredGroup
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.writer import RunWriter

Reason = Literal["plan", "refill", "replay"]

_COLUMNS = ("first_group", "n_groups", "reason", "problems", "source", "source_step", "source_group")


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Consecutive global group numbers first, ..., first + n - 1, of a step's plan or of a refill appended to it.

    Attributes:
        reason: `replay` for one planned number whose place a stored group takes, so that nothing is sampled for it.
        problems: [n] index of each group's problem in its environment; empty: it follows from the group's number.
        stored: of `replay` the group; the source is empty for one of the same run.
    """

    first: int
    n: int
    reason: Reason = "plan"
    problems: tuple[int, ...] = ()
    stored: StoredGroup | None = None


def count_refills(ranges: Sequence[GroupRange]) -> int:
    """Count the refill groups in a plan."""
    return sum(each.n for each in ranges if each.reason == "refill")


def group_numbers(ranges: Sequence[GroupRange]) -> tuple[int, ...]:
    """Return the numbers of all groups that a plan samples, with refills, without those in whose place stored ones are.

    Example: (0, 2) and a refill (64, 1) give (0, 1, 64); with a replay (1, 1) too, (0, 64).
    """
    replaced = replayed_groups(ranges)
    return tuple(
        group for each in ranges for group in range(each.first, each.first + each.n) if group not in replaced
    )


def replayed_groups(ranges: Sequence[GroupRange]) -> dict[int, StoredGroup]:
    """Return the stored groups in a plan, by the number of the planned group whose place each takes."""
    return {each.first: each.stored for each in ranges if each.stored is not None}


def make_plan_rows(run: str, step: int, ranges: Sequence[GroupRange]) -> pa.RecordBatch:
    """Convert a plan to rows of the data set `plans`."""
    columns = {
        "run": [run] * len(ranges),
        "step": [step] * len(ranges),
        "first_group": [each.first for each in ranges],
        "n_groups": [each.n for each in ranges],
        "reason": [each.reason for each in ranges],
        "problems": [list(each.problems) for each in ranges],
        "source": [each.stored.source if each.stored else "" for each in ranges],
        "source_step": [each.stored.step if each.stored else -1 for each in ranges],
        "source_group": [each.stored.group if each.stored else -1 for each in ranges],
    }
    return make_batch("plans", columns)


def read_plan(folder: RunFolder, step: int) -> tuple[GroupRange, ...]:
    """Read the stored plan of a step and its refills, in the order they were written; empty if there is none."""
    rows = read(folder, "plans", _COLUMNS, step=step).to_pylist()
    return tuple(
        GroupRange(
            row["first_group"],
            row["n_groups"],
            row["reason"],
            tuple(row["problems"]),
            StoredGroup(row["source"], row["source_step"], row["source_group"])
            if row["reason"] == "replay"
            else None,
        )
        for row in rows
    )


def drawn_problems(ranges: Sequence[GroupRange]) -> dict[int, int]:
    """Return the index of each group's problem, by the group's number, of those groups whose problem was drawn."""
    return {each.first + at: problem for each in ranges for at, problem in enumerate(each.problems)}


async def ensure_plan(
    folder: RunFolder, writer: RunWriter, plan: Callable[[int], Sequence[GroupRange]], *, run: str, step: int
) -> Sequence[GroupRange]:
    """Return the stored plan of a step; if there is none, store that which `plan` makes, and wait until it is stored."""
    if stored := await asyncio.to_thread(read_plan, folder, step):
        return stored
    planned = await asyncio.to_thread(plan, step)
    await writer.store("plans", make_plan_rows(run, step, planned), step=step)
    return planned

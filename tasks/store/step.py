"""What lies in the folder of a step already."""

from dataclasses import dataclass

from tasks.store.layout import RunFolder
from tasks.store.reader import read
from tasks.store.rows import Rows, rows_of, values


@dataclass(frozen=True, slots=True)
class StoredStep:
    """Rows of one step that earlier processes stored; nothing of it is generated again.

    Attributes:
        rollouts: rows of the `rollouts` data set.
        scores: rows of one scorer's `scores` data set.
        done_groups: groups that have a row in the `groups` data set.
    """

    rollouts: Rows
    scores: Rows
    done_groups: frozenset[int]

    @classmethod
    def read(cls, folder: RunFolder, step: int, scorer: str) -> "StoredStep":
        """Read a step; `scorer` is NAME@VERSION."""
        groups = rows_of(read(folder, "groups", columns=["group"], step=step))
        return cls(
            rollouts=rows_of(read(folder, "rollouts", step=step)),
            scores=rows_of(read(folder, "scores", scorer=scorer, step=step)),
            done_groups=frozenset(int(str(group)) for group in values(groups, "group")),
        )

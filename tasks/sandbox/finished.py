"""How a command ended in a sandbox."""

from dataclasses import dataclass
from typing import Literal

Limit = Literal["", "time", "memory", "output", "files"]
"""The limit that a command exceeded; empty for none."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended.

    Attributes:
        status: exit status; 128 + n if signal n ended it; 127: it could not be run.
        stdout: what it printed to standard output, at most 1 MiB.
        stderr: what it printed to standard error, at most 1 MiB.
        stopped_by: the limit for which it was stopped; empty if it ended by itself.
        duration_s: seconds that it took.
    """

    status: int
    stdout: bytes
    stderr: bytes
    stopped_by: Limit = ""
    duration_s: float = 0.0

    @property
    def has_succeeded(self) -> bool:
        """True if the command ended by itself with exit status 0."""
        return self.status == 0 and not self.stopped_by

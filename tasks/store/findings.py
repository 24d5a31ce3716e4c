"""What is wrong with a run: one finding each, with a remedy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NAMED = 5
"""Most things that a finding or an error names; how many there are it says always."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something of a run that is not as it should be.

    Attributes:
        where: path of a file or of a data set's folder.
        what: what is wrong with it.
        remedy: what to do.
    """

    where: str
    what: str
    remedy: str


def named(things: Iterable[object]) -> str:
    """The first few of several things, and how many more there are. Example: "a, b, c, d, e and 7 more"."""
    listed: Sequence[str] = [str(each) for each in things]
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return f"{', '.join(listed[:NAMED])}{more}"

"""Findings: faults of a stored run, each with a remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

MAX_NAMED = 5
"""Most items that a finding or an error names; it always gives their number."""
RESTORE = "restore what is missing from a copy"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a stored run.

    Attributes:
        where: path of a file or of a data set's folder.
        what: what is wrong with it.
        remedy: what to do.
    """

    where: str
    what: str
    remedy: str


def name_first(things: Iterable[object]) -> str:
    """Join the first few items to a text that ends with the number of the others.

    Example: "a, b, c, d, e and 7 more".
    """
    rest = iter(things)
    named = ", ".join(str(each) for each in islice(rest, MAX_NAMED))
    n_more = sum(1 for _ in rest)
    return f"{named} and {n_more} more" if n_more else named

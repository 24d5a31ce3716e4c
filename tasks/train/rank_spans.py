"""What ranks do at one command, by the spans that they tell."""

from collections import defaultdict
from collections.abc import Sequence

from tasks.observe.spans import Span

IDLE = "idle"
"""Name of the span of what a rank does between commands."""
WAITING = "waiting_for_rank"


def process_of(rank: int) -> str:
    """What a rank is called in spans."""
    return f"trainer/{rank}"


def since_idle(spans: Sequence[Span]) -> Sequence[Span]:
    """A rank's spans, in the order in which they were kept, of its last command alone."""
    begins = (number for number, each in enumerate(spans) if each.name == IDLE)
    return spans[max(begins, default=-1) + 1 :]


def starts_of(spans: Sequence[Span]) -> dict[str, int]:
    """When each rank began with its last command, in nanoseconds since 1970, by its process.

    Example: a rank that was idle from 0 to 5, waited for another until 6 and then read its batch began at 6.
    """
    of_ranks = defaultdict[str, list[Span]](list)
    for each in spans:
        of_ranks[each.process].append(each)
    began = {
        rank: [each.started_ns for each in since_idle(told) if each.name != WAITING]
        for rank, told in of_ranks.items()
    }
    return {rank: min(starts) for rank, starts in began.items() if starts}

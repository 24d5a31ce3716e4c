"""Names in the ranks' spans, and when each rank began with a command."""

from collections import defaultdict
from collections.abc import Sequence

from rollmill.tasks.observe.spans import Span

LANE = "main"
"""Lane of all work of a rank."""
IDLE = "idle"
"""Name of the span between two commands."""
WAITING = "waiting_for_rank"


def rank_process(rank: int) -> str:
    """Return the name that a rank's process has in spans: "trainer/RANK"."""
    return f"trainer/{rank}"


def spans_since_idle(spans: Sequence[Span]) -> Sequence[Span]:
    """Return the spans after the last idle one, which are those of a rank's last command.

    Args:
        spans: all spans of one rank, in the order in which they were recorded.
    """
    begins = (number for number, each in enumerate(spans) if each.name == IDLE)
    return spans[max(begins, default=-1) + 1 :]


def command_starts(spans: Sequence[Span]) -> dict[str, int]:
    """Find when each rank began its last command, in nanoseconds since 1970, by process name.

    Waits for another rank are no begin.

    Example: a rank that was idle from 0 to 5, waited for another until 6 and then read its batch began at 6.
    """
    of_ranks = defaultdict[str, list[Span]](list)
    for each in spans:
        of_ranks[each.process].append(each)
    began = {
        rank: [each.started_ns for each in spans_since_idle(recorded) if each.name != WAITING]
        for rank, recorded in of_ranks.items()
    }
    return {rank: min(starts) for rank, starts in began.items() if starts}

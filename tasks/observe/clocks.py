"""Spans that another process tells, by our clock."""

from collections.abc import Iterable, Sequence

from tasks.observe.spans import Span, current_lane


def shift_into(started_ns: int, ended_ns: int, since_ns: int, until_ns: int) -> int:
    """Nanoseconds to add to another clock's times, so that what happened lies inside of what we know it to lie in.

    The least that does: 0 where it lies there already, as on one machine. It is right to within the time that the
    message took and the answer.

    Args:
        started_ns: when it began, by the other clock, in nanoseconds since 1970.
        ended_ns: when it was over, likewise.
        since_ns: when we asked for it, by ours.
        until_ns: when we had the answer.

    Example: what lasts from 5 to 7 and lay in 10 to 13 is shifted by 5; had it lain in 4 to 8, by 0.
    """
    least, most = since_ns - started_ns, until_ns - ended_ns
    if least > most:
        return (least + most) // 2  # clocks that run unevenly
    return min(max(0, least), most)


def shifted(
    spans: Sequence[Span], since_ns: int, until_ns: int, asked: Sequence[Span] | None = None
) -> list[Span]:
    """Spans that a process has told, by our clock.

    Args:
        spans: of one process, or of several whose clocks are one.
        since_ns: when it was asked, by our clock, in nanoseconds since 1970.
        until_ns: when the answer was there.
        asked: those of them that lie between the question and the answer; None: all.
    """
    asked = spans if asked is None else asked
    if not asked:
        return list(spans)
    started = min(each.started_ns for each in asked)
    ended = max(each.started_ns + each.duration_ns for each in asked)
    shift = shift_into(started, ended, since_ns, until_ns)
    return [each._replace(started_ns=each.started_ns + shift) for each in spans]


def keep(spans: Iterable[Span]) -> None:
    """Keep spans of other processes where somebody records."""
    if (lane := current_lane()) is not None:
        for each in spans:
            lane.recorder.add(each)

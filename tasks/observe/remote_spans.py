"""Convert spans of another process to this process's clock."""

from collections.abc import Iterable, Sequence

from rollmill.tasks.observe.spans import Span, current_lane


def shift_spans(
    spans: Sequence[Span], since_ns: int, until_ns: int, asked: Sequence[Span] | None = None
) -> list[Span]:
    """Convert spans of another process to our clock, by the smallest shift that moves `asked` into the request's interval.

    The shift is 0 if they are in it already, as on one machine. Its error is at most the request's time on the network.

    Args:
        spans: of one process, or of several that share a clock.
        since_ns: time of our request, by our clock, in nanoseconds since 1970.
        until_ns: time of the response, by our clock, in nanoseconds since 1970.
        asked: the spans between request and response; None: all.

    Example: spans from 5 to 7 with a request from 10 to 13 are shifted by 5; with a request from 4 to 8, by 0.
    """
    asked = spans if asked is None else asked
    if not asked:
        return list(spans)
    least = since_ns - min(each.started_ns for each in asked)
    most = until_ns - max(each.started_ns + each.duration_ns for each in asked)
    # If the clocks run at different rates, the spans may last longer than the request: then the middle.
    shift = (least + most) // 2 if least > most else min(max(0, least), most)
    return [each._replace(started_ns=each.started_ns + shift) for each in spans]


def add_spans(spans: Iterable[Span]) -> None:
    """Add spans of other processes to the current recorder, if there is one."""
    if (lane := current_lane()) is not None:
        for each in spans:
            lane.recorder.add(each)

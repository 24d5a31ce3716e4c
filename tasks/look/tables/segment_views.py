"""The segments of a trajectory for people: what each continues, and its own messages and tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollmill.tasks.look.tables.view import count_noun
from rollmill.tasks.store.segments import NO_PARENT, Segment, read_segments


class SegmentView(NamedTuple):
    """One segment of a trajectory.

    Attributes:
        heading: its number and what it continues; empty for the only one of a trajectory.
        messages: its own messages, in order; those that it inherits are its parent's.
        start: index of its first own token.
    """

    heading: str
    messages: Sequence[Mapping[str, Any]]
    start: int


def list_segment_views(row: Mapping[str, Any]) -> list[SegmentView]:
    """Return the segments of a row of `rollouts` or `evaluations` with parsed messages, in order."""
    segments, messages = read_segments(row), row["messages"]
    numbers = row["message_segments"] or [0] * len(messages)
    return [
        SegmentView(
            _describe(number, segment) if len(segments) > 1 else "",
            [each for each, of in zip(messages, numbers, strict=True) if of == number],
            segment.start,
        )
        for number, segment in enumerate(segments)
    ]


def _describe(number: int, segment: Segment) -> str:
    """Describe a segment. Example: "segment 2: continues segment 0 after 120 tokens (2 messages)"."""
    if segment.parent == NO_PARENT:
        return f"segment {number}: inherits nothing"
    tokens = count_noun(segment.prefix_tokens, "token")
    messages = count_noun(segment.prefix_messages, "message")
    return f"segment {number}: continues segment {segment.parent} after {tokens} ({messages})"

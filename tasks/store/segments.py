"""The segments of a trajectory: the token sequences that the policy continued, each stored as what it adds to another.

An environment may drop or rewrite what the policy saw. The tokens from there on are another sequence than before, and begin a segment.
A segment inherits the first tokens of its parent's sequence and has own tokens after them. The stored row has the own tokens of all
segments one after another, so that a token is stored once, and a sampled one belongs to the segment that it was sampled in.

Example: the policy answered [a b] by [c d], then the environment replaced b by [x y], and the policy answered [e]. The row has the tokens
[a b c d x y e] and the segments Segment(0, -1, 0, 0) and Segment(4, 0, 1, 0), whose sequences are [a b c d] and [a x y e].
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

NO_PARENT = -1
SEGMENT_COLUMNS = (
    "segment_starts",
    "segment_parents",
    "segment_prefix_tokens",
    "segment_prefix_messages",
)
"""Columns of the fields of Segment, in their order."""

Said = TypeVar("Said")


class Segment(NamedTuple):
    """One token sequence of a trajectory, stored as what it adds to its parent's.

    Attributes:
        start: index into token_ids at which its own tokens begin; they end where the next segment begins.
        parent: number of the earlier segment that it continues; NO_PARENT: none.
        prefix_tokens: tokens of the parent's whole sequence that it begins with.
        prefix_messages: messages of the parent's conversation that it begins with.
    """

    start: int
    parent: int
    prefix_tokens: int
    prefix_messages: int


Segments: TypeAlias = tuple[Segment, ...]

LINEAR: Segments = (Segment(0, NO_PARENT, 0, 0),)
"""The segments of a trajectory whose context only grew: one, with all tokens."""


def read_segments(columns: Mapping[str, Any]) -> Segments:
    """Return the segments of a row from its SEGMENT_COLUMNS, LINEAR if it names none; `find_fault` checks them."""
    lists = (columns[name] for name in SEGMENT_COLUMNS)
    return tuple(Segment(*each) for each in zip(*lists, strict=False)) or LINEAR


def find_fault(segments: Segments, n_tokens: int) -> str:
    """Return what is wrong about the segments of a row of `n_tokens` tokens; empty if nothing is."""
    if not segments or segments[0] != LINEAR[0]:
        return "the first segment does not begin the row"
    lengths: list[int] = []
    ends = [*(each.start for each in segments[1:]), n_tokens]
    for number, (segment, end) in enumerate(zip(segments, ends, strict=True)):
        if not segment.start <= end:
            return f"segment {number} does not begin within the tokens"
        has_parent = segment.parent != NO_PARENT
        if has_parent and not 0 <= segment.parent < number:
            return f"segment {number} has no earlier segment as its parent"
        if not 0 <= segment.prefix_tokens <= (lengths[segment.parent] if has_parent else 0):
            return (
                f"segment {number} begins with {segment.prefix_tokens} tokens, which its parent does not have"
            )
        lengths.append(segment.prefix_tokens + end - segment.start)
    return ""


def index_sequences(segments: Segments, n_tokens: int) -> list[np.ndarray]:
    """Return for each segment the [L] int64 indices into token_ids of its whole sequence, inherited tokens included.

    Example: of the module's example [0 1 2 3] and [0 4 5 6].
    """
    ends = [*(each.start for each in segments[1:]), n_tokens]
    found: list[np.ndarray] = []
    for segment, end in zip(segments, ends, strict=True):
        own = np.arange(segment.start, end)
        inherited = found[segment.parent][: segment.prefix_tokens] if segment.prefix_tokens else own[:0]
        found.append(np.concatenate([inherited, own]) if len(inherited) else own)
    return found


def index_predecessors(segments: Segments, n_tokens: int) -> np.ndarray:
    """Return [T] int64: for each token the index of the one before it in its segment's sequence; -1 for a sequence's first.

    Example: of the module's example [-1 0 1 2 0 4 5].
    """
    before = np.arange(-1, n_tokens - 1)
    if len(segments) > 1:
        sequences = index_sequences(segments, n_tokens)
        for segment, sequence in zip(segments, sequences, strict=True):
            if len(sequence) > segment.prefix_tokens:
                before[segment.start] = sequence[segment.prefix_tokens - 1] if segment.prefix_tokens else -1
    return before


def count_common(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many of the first elements of two arrays are the same."""
    n = min(len(one), len(other))
    unlike = np.flatnonzero(one[:n] != other[:n])
    return int(unlike[0]) if len(unlike) else n


def list_conversations(
    segments: Segments, messages: Sequence[Said], message_segments: Sequence[int]
) -> list[list[Said]]:
    """Return the whole conversation of each segment, inherited messages included.

    Args:
        segments: of the trajectory.
        messages: of all segments, in the order in which they were said.
        message_segments: number of each message's segment; empty: all are of segment 0.
    """
    numbers = message_segments or [0] * len(messages)
    conversations: list[list[Said]] = []
    for number, segment in enumerate(segments):
        inherited = (
            conversations[segment.parent][: segment.prefix_messages] if segment.prefix_messages else []
        )
        own = [each for each, of in zip(messages, numbers, strict=True) if of == number]
        conversations.append([*inherited, *own])
    return conversations

"""One segment of a trajectory while its tokens are collected, and where a changed conversation continues those that there are."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, Tools
from rollmill.tasks.rollout.environment import Message
from rollmill.tasks.store.segments import NO_PARENT, count_common

NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True)
class SegmentBuilder:
    """Collects the tokens and messages of one segment.

    Attributes:
        parent: number of the segment whose first tokens it inherits; NO_PARENT: none.
        prefix: [P] int32, the tokens that it inherits.
        n_prefix_messages: messages that it inherits.
        messages: its conversation, inherited messages included.
        parts: token ids, and log-probabilities if they were sampled, of its tokens in order, inherited ones left out.
        spans: (index into its tokens after the inherited ones, policy version) at which each span of one version begins.
        n_tokens: tokens of its whole sequence.
        routed_experts: arrays [N, layers, experts a token] of its tokens after the inherited ones.
        n_routed: tokens of its whole sequence whose experts are known.
        turns: (messages, tokens) of the whole segment after each of its completions.
        tools: what the policy may call in it.
    """

    parent: int = NO_PARENT
    prefix: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    n_prefix_messages: int = 0
    messages: tuple[Message, ...] = ()
    parts: list[tuple[np.ndarray, np.ndarray | None]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    n_tokens: int = 0
    routed_experts: list[np.ndarray] = field(default_factory=list)
    n_routed: int = 0
    turns: list[tuple[int, int]] = field(default_factory=list)
    tools: Tools = ()

    @property
    def n_own(self) -> int:
        """Number of its tokens without inherited ones."""
        return self.n_tokens - len(self.prefix)

    def sequence(self) -> np.ndarray:
        """Return [L] int32: the ids of its whole sequence."""
        return np.concatenate([self.prefix, *(ids for ids, _ in self.parts)]).astype(np.int32)

    def own_routing(self, *, is_last: bool) -> list[np.ndarray]:
        """Return the routed experts of its tokens after the inherited ones, with zeros to its end unless it is the last segment.

        Its last token was sampled and has no experts, and the row's next token is another segment's.
        """
        n_left = self.n_own - sum(map(len, self.routed_experts))
        if is_last or not self.routed_experts or not n_left:
            return self.routed_experts
        first = self.routed_experts[0]
        return [*self.routed_experts, np.zeros((n_left, *first.shape[1:]), first.dtype)]


class RowLimit(NamedTuple):
    """What the trainer computes at once: all segments of a trajectory are in one micro-batch.

    Attributes:
        tokens: largest number of tokens of a micro-batch.
        completion_tokens: most tokens of a completion.
        is_padded: True if each segment is computed with what it inherits, and padded to the longest.
    """

    tokens: int = sys.maxsize
    completion_tokens: int = 0
    is_padded: bool = False

    def allows(self, segments: Sequence[SegmentBuilder], number: int, n_tokens: int, n_added: int) -> bool:
        """Return True if a completion may follow; a trajectory of one segment is limited by the length of a sequence alone.

        Args:
            segments: those so far.
            number: of the segment that the completion would be in.
            n_tokens: tokens of this segment before the completion.
            n_added: those of them that it does not have or inherit yet.

        Example: with RowLimit(20, 5), segments of 4 and 3 own tokens leave room for 8 more before the next completion.
        """
        n_segments = max(number + 1, len(segments))
        if n_segments == 1:
            return True
        if self.is_padded:
            longest = max(n_tokens + self.completion_tokens, *(each.n_tokens for each in segments))
            return n_segments * longest <= self.tokens
        return sum(each.n_own for each in segments) + n_added + self.completion_tokens <= self.tokens


NO_LIMIT = RowLimit()


class Continuation(NamedTuple):
    """Where a conversation continues: in a segment that it extends, or in a new one.

    Attributes:
        segment: number of the segment that it extends; that of a new one otherwise.
        parent: of a new segment, the number of its parent; NO_PARENT: none.
        n_prefix: tokens of that segment or parent that the conversation begins with.
        n_prefix_messages: messages likewise.
        added: [N] int32 tokens that follow them.
    """

    segment: int
    parent: int
    n_prefix: int
    n_prefix_messages: int
    added: np.ndarray


def find_continuation(
    tokenizer: ChatTokenizer, segments: Sequence[SegmentBuilder], messages: Sequence[Message], tools: Tools
) -> Continuation:
    """Find what the segments so far have of a conversation that replaces the present one.

    It extends a segment if it begins with all messages and all tokens of it. Otherwise it begins a new segment, whose parent is the
    one with the most of its first tokens, the earliest of several.

    Args:
        tokenizer: renders the conversation.
        segments: those of the trajectory so far.
        messages: the whole conversation.
        tools: what the policy may call.

    Raises:
        EpisodeError: the conversation is empty, or the chat template refuses it.
    """
    if not messages:
        raise EpisodeError(
            "the conversation from here on has no message; return no messages to end the episode"
        )
    n_messages = [_count_messages(each.messages, messages) for each in segments]
    tokens = _encode(tokenizer, segments, n_messages, messages, tools)
    common = [count_common(each.sequence(), tokens) for each in segments]
    extended = [
        number
        for number, each in enumerate(segments)
        if common[number] == each.n_tokens and n_messages[number] == len(each.messages)
    ]
    if extended:
        number = max(extended, key=lambda each: common[each])
        return Continuation(number, NO_PARENT, common[number], n_messages[number], tokens[common[number] :])
    # The last token of a segment was sampled and not computed: a new segment computes it as its own.
    shared = [min(n, each.n_tokens - 1) for n, each in zip(common, segments, strict=True)]
    parent = max(range(len(segments)), key=lambda each: shared[each])
    n_prefix = shared[parent]
    if not n_prefix:
        return Continuation(len(segments), NO_PARENT, 0, 0, tokens)
    return Continuation(len(segments), parent, n_prefix, n_messages[parent], tokens[n_prefix:])


def _encode(
    tokenizer: ChatTokenizer,
    segments: Sequence[SegmentBuilder],
    n_common: Sequence[int],
    messages: Sequence[Message],
    tools: Tools,
) -> np.ndarray:
    """Return [L] int32 token ids of a conversation; as much of it as was sampled in this form has the tokens that were sampled.

    `n_common` says how many of its first messages each segment has.
    """
    # With other tools, a template may write the same messages otherwise.
    known = [
        (n_messages, n_tokens, each)
        for each, n_same in zip(segments, n_common, strict=True)
        if list(each.tools) == list(tools)
        for n_messages, n_tokens in each.turns
        if n_messages <= n_same
    ]
    if known:
        n_messages, n_tokens, segment = max(known, key=lambda each: each[0])
        sampled = segment.sequence()[:n_tokens]
        before, after = messages[:n_messages], messages[n_messages:]
        try:
            rest = tokenizer.encode_reply(before, after, tools, last_token=int(sampled[-1]))
            return np.concatenate([sampled, rest])
        except EpisodeError:
            # A template may write messages of role assistant otherwise where another follows.
            if after and all(each.role != "assistant" for each in after):
                raise
    return tokenizer.encode(messages, tools)


def _count_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n

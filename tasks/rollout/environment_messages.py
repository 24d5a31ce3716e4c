"""Requests to an environment's worker process, and their answers, as JSON; the types of the fields are what is accepted.

DescribeRequest -> EnvironmentDescription
ExampleRequest  -> Example
TurnRequest     -> TurnReply; the first one opens the episode
CloseRequest    -> ClosedEpisode
"""

from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from rollmill.tasks.rollout.environment import Conversation, Example, Message, Split, TokenCounts


class EnvironmentDescription(msgspec.Struct, frozen=True):
    """Name, sizes of the splits, tools, stop texts and state columns of a worker's environment; requested once at its start."""

    name: str
    sizes: dict[Split, int]
    tools: list[dict[str, object]]
    stop: list[str]
    states: dict[str, str] = {}


class DescribeRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to a worker for the description of its environment."""


class ExampleRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to a worker for the problem with index `index` of a split."""

    split: Split
    index: int


class TurnRequest(msgspec.Struct, frozen=True, tag=True):
    """Request for the environment's next messages in an episode; the first one, without messages and counts, opens the episode."""

    episode: int
    example: Example
    seed: int
    messages: Sequence[Message]
    counts: TokenCounts | None = None


class TurnReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker answers to a TurnRequest: the environment's messages, whether they replace the conversation, and its tools."""

    messages: tuple[Message, ...]
    replaces: bool = False
    tools: list[dict[str, object]] | None = None

    @classmethod
    def of(cls, reply: Sequence[Message] | Conversation) -> Self:
        """Return the answer that carries an episode's reply."""
        if isinstance(reply, Conversation):
            tools = None if reply.tools is None else [dict(each) for each in reply.tools]
            return cls(tuple(reply.messages), replaces=True, tools=tools)
        return cls(tuple(reply))

    def reply(self) -> tuple[Message, ...] | Conversation:
        """Return the episode's reply."""
        return Conversation(self.messages, self.tools) if self.replaces else self.messages


class CloseRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to a worker to close the episode with this number, with the message that was cut and its counts, if one was."""

    episode: int
    cut: Message | None = None
    counts: TokenCounts | None = None


class ClosedEpisode(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker answers when it closed an episode: outcome, state, and what `close` raised, as (type, text)."""

    outcome: Mapping[str, object] = {}
    raised: tuple[str, str] | None = None
    state: Mapping[str, object] = {}
    state_error: str = ""

"""Requests to an environment's worker process, and their answers, as JSON; the types of the fields are what is accepted.

DescribeRequest -> EnvironmentDescription
ExampleRequest  -> Example
TurnRequest     -> tuple[Message, ...]; the first one opens the episode
CloseRequest    -> ClosedEpisode
"""

from collections.abc import Mapping, Sequence

import msgspec

from rollmill.tasks.rollout.environment import Example, Message, Split


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
    """Request for the environment's next messages in an episode; the first one, without messages, opens the episode."""

    episode: int
    example: Example
    seed: int
    messages: Sequence[Message]


class CloseRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to a worker to close the episode with this number."""

    episode: int


class ClosedEpisode(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker answers when it closed an episode: outcome, state, and what `close` raised, as (type, text)."""

    outcome: Mapping[str, object] = {}
    raised: tuple[str, str] | None = None
    state: Mapping[str, object] = {}
    state_error: str = ""

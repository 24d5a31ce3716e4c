"""What the flow and a worker process of an environment say to each other, as JSON over HTTP at a unix socket.

GET  /ping                    -> nothing; the worker's event loop runs
GET  /environment             -> Description
POST /example                 ExampleRequest -> Answer of an Example
POST /episodes/ID/reply       Turn -> Answer of messages; the first one opens the episode
POST /episodes/ID/close       -> Answer of the outcome
"""

from collections.abc import Mapping, Sequence

import msgspec

from tasks.rollout.environment import Example, Message, Split


class Description(msgspec.Struct, frozen=True):
    """What an environment is, asked once when a worker is up."""

    name: str
    sizes: dict[Split, int]
    tools: list[dict[str, object]]
    stop: list[str]
    states: dict[str, str] = {}


class ExampleRequest(msgspec.Struct, frozen=True):
    """Which problem is wanted."""

    split: Split
    index: int


class Turn(msgspec.Struct, frozen=True):
    """The conversation so far, and all that a worker needs to open the episode when it is empty."""

    example: Example
    seed: int
    messages: Sequence[Message]


class Raised(msgspec.Struct, frozen=True):
    """What the environment raised."""

    kind: str
    text: str


class ExampleAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem, or what the environment raised instead."""

    value: Example | None = None
    raised: Raised | None = None


class TurnAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The environment's turn, or what it raised instead."""

    value: tuple[Message, ...] = ()
    raised: Raised | None = None


class CloseAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a scorer may read of the episode, or what the environment raised instead; and what it keeps of it."""

    value: Mapping[str, object] = {}
    raised: Raised | None = None
    state: Mapping[str, object] = {}
    state_error: str = ""

"""What a run and its collectors say to each other, over one WebSocket connection for each collector.

Rows travel as Arrow streams (tasks.store.parcels), everything else as MessagePack.
"""

from typing import TypeAlias

import msgspec

from tasks.observe.spans import Span


class Message(msgspec.Struct, frozen=True, tag=True):
    """Anything that is said."""


class Hello(Message, frozen=True):
    """A collector is ready to take groups.

    Attributes:
        epoch: of the run's writer that it was started for; one of another epoch is sent away.
    """

    name: str
    epoch: int


class Servers(Message, frozen=True):
    """What the run knows of the vLLM servers, whenever that changes.

    Attributes:
        states: by address, whether it may be asked, and its cuts.
        keys: by address, the API key of those that the run has launched, which ask for one of its own.
    """

    states: dict[str, tuple[bool, int]]
    keys: dict[str, str]


class Group(Message, frozen=True):
    """A group of the step's plan to be sampled and scored.

    Attributes:
        lease: names this handing out in what follows.
        to_sample: (sample, attempt) of each trajectory that is missing.
        rollouts, scores, to_score: rows that are stored of it; see tasks.store.step.GroupPlan.
        granted: trajectories of it that may begin now; `Grant` allows more.
    """

    lease: int
    step: int
    group: int
    to_sample: list[tuple[int, int]]
    rollouts: bytes
    scores: bytes
    to_score: bytes
    granted: int


class Grant(Message, frozen=True):
    """So many more trajectories of a group may begin."""

    lease: int
    n: int


class Appended(Message, frozen=True):
    """Rows of a group, to be stored; the answer is `Stored` with its ticket."""

    ticket: int
    lease: int
    dataset: str
    rows: bytes


class Stored(Message, frozen=True):
    """The rows are stored."""

    ticket: int


class Vouch(Message, frozen=True):
    """May an answer of a server be kept? The answer is `Verdict` with its ticket.

    Attributes:
        versions: names of the weights that gave it.
        cuts: the server's, as the collector knew them when it sent the request.
    """

    ticket: int
    server: str
    versions: list[str]
    cuts: int


class Verdict(Message, frozen=True):
    """Why the answer may not be kept; empty when it may."""

    ticket: int
    error: str


class ServerFailed(Message, frozen=True):
    """A request to a server failed."""

    server: str
    error: str
    is_lost: bool


class Spans(Message, frozen=True):
    """Where the time of groups that are over went, by the collector's clock."""

    spans: list[Span]


class Done(Message, frozen=True):
    """All of a group is sampled, scored and stored."""

    lease: int


class End(Message, frozen=True):
    """There is nothing more to collect.

    Attributes:
        is_finished: False when the run was stopped, or failed.
    """

    is_finished: bool


ToCollector: TypeAlias = Servers | Group | Grant | Stored | Verdict | End
FromCollector: TypeAlias = Hello | Appended | Vouch | ServerFailed | Spans | Done

to_collector = msgspec.msgpack.Decoder(ToCollector)
from_collector = msgspec.msgpack.Decoder(FromCollector)
encoded = msgspec.msgpack.Encoder().encode

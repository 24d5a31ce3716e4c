"""What the flow and its Ray actors send each other: requests, references to stored rows, and small rows without tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollmill.tasks.score.group_outcomes import SURVIVOR_COLUMNS, SURVIVOR_SCORE_COLUMNS
from rollmill.tasks.serve.server_pool import ServerChange
from rollmill.tasks.store.shards.inventory import ShardEvent

Result = TypeVar("Result")

_IDENTITY = ("trajectory_id", "group", "sample", "status", "error_type", "error")
ROLLOUT_COLUMNS = tuple(dict.fromkeys((*_IDENTITY, "attempt", *SURVIVOR_COLUMNS)))
"""Columns of `rollouts` that the flow gets: what advantages, failures and summaries are computed from."""
SCORE_COLUMNS = tuple(dict.fromkeys((*_IDENTITY, *SURVIVOR_SCORE_COLUMNS)))
"""Columns of `scores` that the flow gets."""


@dataclass(frozen=True, slots=True)
class ActorStart:
    """What an actor is made from.

    Attributes:
        name: of the actor; no two of a run have one name, also not one after the other.
        run: id of the run.
        epoch: of the flow, under which the actor stores shards.
        location: of the run's folder, absolute.
        model: folder of the start model, absolute, with the tokenizer.
        settings: RunConfig as JSON.
        slots: trajectories that it plays at once.
        path: module folders of the flow, for user code.
        cwd: working folder of the flow.
        log: file for its output.
    """

    name: str
    run: str
    epoch: int
    location: str
    model: str
    settings: str
    slots: int
    path: tuple[str, ...]
    cwd: str
    log: str


@dataclass(frozen=True, slots=True)
class ActorReply(Generic[Result]):
    """Result of a call of an actor, and the shards that the actor has written since its last reply, for the run's inventory."""

    result: Result
    shards: Sequence[ShardEvent]


@dataclass(frozen=True, slots=True)
class ActorReport:
    """What happened in an actor since its last report.

    Attributes:
        finished: number of trajectories whose slots are free, by group.
        alarms: servers that failed a request, by address; True: the actor sends them no more requests.
    """

    finished: Mapping[int, int] = field(default_factory=dict)
    alarms: Mapping[str, bool] = field(default_factory=dict)


Changes = Sequence[ServerChange]

"""What a collector has of a run that it collects for: enough to sample and score its groups, and no folder."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from flows.config import RunConfig
from flows.ui.picture import Picture
from tasks.rollout.admission import Admission
from tasks.rollout.environment import Environment
from tasks.rollout.sampling import Player
from tasks.score.scoring import Scoring
from tasks.serve.pool import ServerPool
from tasks.store.layout import PartitionValue
from tasks.store.rows import Rows


class Appender(Protocol):
    """Takes rows to be stored."""

    def append(self, dataset: str, rows: Rows, **partition: PartitionValue) -> Awaitable[None]:
        """Hand over rows of one partition; what is returned is done when they are stored."""


@dataclass(frozen=True, slots=True)
class Collecting:
    """A run as one of its groups sees it in a collector; what else a Run has is None.

    Attributes:
        id: of the run that the rows are of.
        admission: gives the slots that the run grants this group.
        writer: hands rows to the run.
    """

    id: str
    config: RunConfig
    environment: Environment
    scoring: Scoring
    player: Player
    pool: ServerPool
    picture: Picture
    admission: Admission
    writer: Appender
    reference: None = None
    recomputing: None = None

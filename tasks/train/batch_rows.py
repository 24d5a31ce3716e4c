"""A step's batch as a rank reads it: its rows, and what is stored of them under other policies."""

from dataclasses import dataclass, replace
from typing import Self

from tasks.train.config import TrainConfig
from tasks.train.other_policies import StoredLogprobs, read_stored
from tasks.train.protocol import TrainStep
from tasks.train.samples import Samples, read_batch_routing, read_samples


@dataclass(frozen=True, slots=True)
class BatchRows:
    """What one rank has read of a batch.

    Attributes:
        digest: of the stored batch.
        stored: log-probabilities under other policies, of the rows that have some.
    """

    digest: str
    samples: Samples
    stored: StoredLogprobs

    @classmethod
    def read(cls, command: TrainStep, config: TrainConfig) -> Self:
        """Read a step's batch.

        Raises:
            ShardError: a shard cannot be read, or a trajectory of the batch, or its routed experts, are not there.
        """
        digest, samples = read_samples(command.folder, command.step)
        if config.replay_routing:
            samples = replace(samples, routing=read_batch_routing(command.folder, command.step))
        stored = read_stored(command.folder, command.step, config)
        return cls(digest, samples, stored)

"""What ranks other than 0 do with errors, which rank 0 has too or has not."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.service.commands import Command, DigestState, Shutdown
from rollmill.tasks.train.service.ranks import CommandChannel
from rollmill.tasks.train.service.trainer_process import follow

WAIT_S = 0.5


class Failing:
    """A rank that refuses everything."""

    def attribute_to_step(self, _command: Command[Any], _taken_ns: int) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, _command: Command[Any]) -> None:
        raise ConfigError("train.loss", "gpso", "there is no such loss")


def channels() -> tuple[CommandChannel, CommandChannel]:
    """Rank 0's, and another rank's."""
    store = dist.HashStore()
    return CommandChannel(store, WAIT_S), CommandChannel(store, WAIT_S)


def test_a_rank_continues_after_an_error_that_rank_0_answers() -> None:
    leading, following = channels()
    leading.publish(DigestState())
    leading.report_outcome(refused=True)
    leading.publish(Shutdown())
    follow(Failing(), following)


def done(leading: CommandChannel) -> None:
    leading.report_outcome(refused=False)


def waits(leading: CommandChannel) -> None:
    """It says nothing."""


@pytest.mark.parametrize("rank_0", [done, waits])
def test_an_error_of_one_rank_alone_is_its_end(rank_0: Callable[[CommandChannel], None]) -> None:
    leading, following = channels()
    leading.publish(DigestState())
    rank_0(leading)
    with pytest.raises(ConfigError):
        follow(Failing(), following)

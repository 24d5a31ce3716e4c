"""The trainer service: what each rank of `torchrun -m tasks.train.service CONFIG.json` runs.

Rank 0 serves the control API; all ranks carry out the commands. A rank that fails ends the service, and torchrun
prints its traceback last.
"""

import os
import sys
import time
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from tasks.errors import ConfigError, RollmillError
from tasks.observe.loop import LoopMonitor
from tasks.train.checkpoint_writer import CheckpointWriter
from tasks.train.control import ControlServer, LocalCommands, complete, control_app
from tasks.train.launch import TOKEN_ENV
from tasks.train.operations import Operations
from tasks.train.process_group import join_ranks
from tasks.train.protocol import (
    AwaitCheckpoint,
    Command,
    Offer,
    Send,
    ServiceConfig,
    Shutdown,
    TrainerHealth,
)
from tasks.train.ranks import CommandChannel, Heartbeats
from tasks.train.timeline import Timeline
from tasks.train.transfer import Transfer
from tasks.train.worker import Worker


@record
def main() -> None:
    """Serve until told to shut down."""
    config = ServiceConfig.model_validate_json(Path(sys.argv[1]).read_text())
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(config.train.threads)
    ranks = join_ranks(config.train.step_timeout_s)
    timeout_s = config.train.heartbeat_timeout_s
    heartbeats = Heartbeats(ranks.own_connection(), ranks.rank, ranks.world_size, timeout_s)
    channel = CommandChannel(ranks.store, timeout_s)
    transfer = Transfer(config, ranks.rank, ranks.world_size)
    writer = CheckpointWriter(ranks.own_connection(), ranks.rank, ranks.world_size, timeout_s)
    monitor, timeline = LoopMonitor(0.0, 0.0, print, prefix="train/control_"), Timeline(ranks)
    worker = Worker(config.train, ranks.device, transfer, writer, monitor, timeline)
    if ranks.rank == 0:
        lead(config, worker, transfer, channel, heartbeats, monitor, timeline)
    else:
        follow(worker, channel)
    writer.join()
    dist.destroy_process_group()


def lead(
    config: ServiceConfig,
    worker: Worker,
    transfer: Transfer,
    channel: CommandChannel,
    heartbeats: Heartbeats,
    monitor: LoopMonitor,
    timeline: Timeline,
) -> None:
    """Rank 0: take commands, check them, pass them on, carry them out; `monitor` is that of the control API's loop."""
    token = os.environ.get(TOKEN_ENV, "")
    if not token:
        raise ConfigError(TOKEN_ENV, "", "set this environment variable to the trainer's access token")
    operations = Operations()

    def health() -> TrainerHealth:
        at = worker.progress
        return TrainerHealth(
            run=at.run,
            incarnation=worker.incarnation,
            version=at.version,
            digest=at.digest,
            world_size=dist.get_world_size(),
            heartbeats=heartbeats.silences_s,
            busy=operations.busy,
            settings=config.train.model_dump(mode="json"),
        )

    local: LocalCommands = {
        AwaitCheckpoint.name: lambda command: worker.writer.written(command.version),
        Offer.name: lambda _: transfer.offer(),
    }
    server = ControlServer(
        control_app(operations, local, {Send.name: transfer.progress}, health, token, monitor),
        config.host,
        config.port,
    )
    while not serve_one(operations, worker, channel, timeline):
        pass
    server.stop()


class Follower(Protocol):
    """A Worker, as ranks other than 0 have it."""

    def asked(self, command: Command, taken_ns: int) -> AbstractContextManager[None]:
        """Book what goes on inside to the step that a command is for."""

    def run(self, command: Command) -> Any:
        """Carry out a command."""


def serve_one(operations: Operations, worker: Worker, channel: CommandChannel, timeline: Timeline) -> bool:
    """Carry out the next command; True when it was the last."""
    operation, taken_ns = operations.take(), time.time_ns()

    def run(command: Command) -> Any:
        try:
            with worker.asked(command):
                return carry_out(command)
        finally:
            operation.spans.extend(timeline.take())

    def carry_out(command: Command) -> Any:
        result = worker.prepare(command)
        if result is not None:
            return result
        channel.publish(command, taken_ns)
        try:
            result = worker.run(command)
        except RollmillError:
            channel.tell(refused=True)
            raise
        channel.tell(refused=False)
        return result

    if operation.command.name == Shutdown.name:
        channel.publish(operation.command)
        operation.outcome.set_result(None)
        return True
    complete(operation, run)
    return False


def follow(worker: Follower, channel: CommandChannel) -> None:
    """Every other rank: carry out what rank 0 passes on.

    What fails on rank 0 too, a wrong setting for example, rank 0 answers with. What fails on this rank alone is the end
    of it, and so of the service: rank 0 may wait for it.
    """
    while (told := channel.next())[0].name != Shutdown.name:
        try:
            with worker.asked(*told):
                worker.run(told[0])
        except RollmillError:
            if not channel.was_refused():
                raise


if __name__ == "__main__":
    main()

"""The trainer service: what each rank runs, started by `rank_launcher`.

Rank 0 serves the control API; all ranks carry out the commands. A rank that fails ends the service.
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

from rollmill.tasks.errors import ConfigError, RollmillError
from rollmill.tasks.observe.loop_monitor import LoopMonitor
from rollmill.tasks.train.checkpoints.checkpoint_writer import CheckpointWriter
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service.answers import TrainerHealth
from rollmill.tasks.train.service.commands import Command, Shutdown
from rollmill.tasks.train.service.control_api import ControlServer, Operations, build_control_app
from rollmill.tasks.train.service.launch import TOKEN_ENV, ServiceConfig
from rollmill.tasks.train.service.rank_timeline import RankTimeline
from rollmill.tasks.train.service.rank_worker import RankWorker
from rollmill.tasks.train.service.ranks import CommandChannel, Heartbeats, describe_device, join_ranks
from rollmill.tasks.train.weight_transfer import WeightTransfer


def main() -> None:
    """Run one rank of the trainer service until the service is shut down."""
    config = ServiceConfig.model_validate_json(Path(sys.argv[1]).read_text())
    # DeepSpeed calls functions of torch that are deprecated; users can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(config.train.threads)
    ranks, timeout_s = join_ranks(config.train.command_timeout_s), config.heartbeat_timeout_s
    # A connection to the store serves one request at a time: each thread that waits has a separate one.
    heartbeats = Heartbeats(ranks.own_connection(), ranks.rank, ranks.world_size, timeout_s)
    channel = CommandChannel(ranks.store, timeout_s)
    transfer = WeightTransfer(config, ranks.rank, ranks.world_size)
    writer = CheckpointWriter(ranks.own_connection(), ranks.rank, ranks.world_size, timeout_s)
    monitor, timeline = LoopMonitor(0.0, 0.0, print, prefix="train/control_"), RankTimeline(ranks)
    worker = RankWorker(config.train, ranks.device, transfer, writer, monitor, timeline)
    if ranks.rank == 0:
        lead(config, worker, channel, heartbeats, monitor)
    else:
        follow(worker, channel)
    # A checkpoint that is being written is completed before the process ends.
    writer.join()
    heartbeats.stop()
    dist.destroy_process_group()


class LeadingRank:
    """Rank 0 as the control API calls it: health, local commands, and the progress of any command."""

    def __init__(
        self, config: TrainConfig, worker: RankWorker, heartbeats: Heartbeats, operations: Operations
    ) -> None:
        self._config, self._worker = config, worker
        self._heartbeats, self._operations = heartbeats, operations

    def health(self) -> TrainerHealth:
        """Return the trainer's state: run, loaded version, seconds since each rank's last heartbeat, and the running command."""
        at = self._worker.progress
        return TrainerHealth(
            run=at.run,
            incarnation=self._worker.incarnation,
            version=at.version,
            digest=at.digest,
            world_size=dist.get_world_size(),
            heartbeats=self._heartbeats.silences_s,
            busy=self._operations.busy,
            settings=self._config.model_dump(mode="json"),
            device=describe_device(self._worker.device),
        )

    def answers_at_once(self, command: Command[Any]) -> bool:
        """Return True for a local command, which needs no other rank."""
        return command.is_local

    def run(self, command: Command[Any]) -> Any:
        """Carry out a local command on rank 0, and return its answer."""
        return command.run(self._worker)

    def progress(self, command: Command[Any]) -> dict[str, int]:
        """Return counts by name that show how far a running command is; empty if the command reports none."""
        return command.progress(self._worker)


def lead(
    config: ServiceConfig,
    worker: RankWorker,
    channel: CommandChannel,
    heartbeats: Heartbeats,
    monitor: LoopMonitor,
) -> None:
    """Serve the control API on rank 0, and carry out commands on all ranks until one ends the service.

    `monitor` watches the event loop that serves the API.

    Raises:
        ConfigError: the environment has no access token.
    """
    # Without a token anyone who reaches the port could load and overwrite policies.
    if not (token := os.environ.get(TOKEN_ENV, "")):
        raise ConfigError(TOKEN_ENV, "", "set this environment variable to the trainer's access token")
    operations = Operations()
    trainer = LeadingRank(config.train, worker, heartbeats, operations)
    app = build_control_app(operations, trainer, token, monitor)
    server = ControlServer(app, config.host, config.port)
    while serve_one(operations, worker, channel):
        pass
    server.stop()


def serve_one(operations: Operations, worker: RankWorker, channel: CommandChannel) -> bool:
    """Carry out the next queued command on all ranks; returns False if it was Shutdown."""
    operation, taken_ns = operations.queue.get(), time.time_ns()

    def run(command: Command[Any]) -> Any:
        try:
            with worker.attribute_to_step(command):
                # A refused or repeated command never reaches the other ranks, so nothing has to be undone there.
                if (answer := worker.prepare(command)) is not None:
                    return answer
                channel.publish(command, taken_ns)
                try:
                    answer = worker.run(command)
                except RollmillError:
                    channel.report_outcome(refused=True)
                    raise
                channel.report_outcome(refused=False)
                return answer
        finally:
            # The client reads the spans as soon as the outcome is set, so they must be complete before.
            operation.spans.extend(worker.timeline.take())

    if isinstance(operation.command, Shutdown):
        channel.publish(operation.command)
        operation.outcome.set_result(None)
        return False
    operation.run(run)
    return True


class Follower(Protocol):
    """What `follow` needs of a rank other than 0: methods that carry out commands and record spans."""

    def attribute_to_step(self, command: Command[Any], taken_ns: int) -> AbstractContextManager[None]:
        """Return a context manager that records spans under the step of a command."""

    def run(self, command: Command[Any]) -> Any:
        """Carry out this rank's part of a command."""


def follow(worker: Follower, channel: CommandChannel) -> None:
    """Carry out the commands that rank 0 publishes, on a rank other than 0, until Shutdown.

    Raises:
        RollmillError: a command failed on this rank, and rank 0 does not report that it failed there too.
    """
    while True:
        command, taken_ns = channel.next()
        if isinstance(command, Shutdown):
            return
        try:
            with worker.attribute_to_step(command, taken_ns):
                worker.run(command)
        except RollmillError:
            # An error that rank 0 has too, a wrong setting for example, is answered by rank 0, and every rank continues.
            if not channel.was_refused():
                raise


if __name__ == "__main__":
    main()

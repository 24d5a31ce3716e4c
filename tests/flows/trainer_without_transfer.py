"""The trainer as it is, one rank, but that its weights go nowhere: the servers of the test are stubs."""

import os
import sys
from pathlib import Path
from typing import Any

from tasks.observe.loop import LoopMonitor
from tasks.serve.process import free_port
from tasks.sync.buckets import TransferPlan
from tasks.sync.order import Place, Sent, Target, WeightOffer
from tasks.train.checkpoint_writer import CheckpointWriter
from tasks.train.process_group import join_ranks
from tasks.train.protocol import ServiceConfig
from tasks.train.ranks import CommandChannel, Heartbeats
from tasks.train.service import lead
from tasks.train.timeline import Timeline
from tasks.train.worker import Worker


class NoTransfer:
    """Takes the place of the way to the servers, and of the sender."""

    def prepare(self, _engine: object) -> None:
        return None

    def offer(self) -> WeightOffer:
        plan = TransferPlan((), 0, ((),))
        return WeightOffer(plan.to_json(), "127.0.0.1", 0, Place("here", "cpu").to_json())

    def send(self, _engine: object, targets: list[Target]) -> list[Sent]:
        return [Sent(each.server, 0, 0.0) for each in targets]

    def progress(self) -> dict[str, int]:
        return {}


def main() -> None:
    config = ServiceConfig.model_validate_json(Path(sys.argv[1]).read_text())
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks, timeout_s = join_ranks(config.train.step_timeout_s), config.train.heartbeat_timeout_s
    heartbeats = Heartbeats(ranks.own_connection(), 0, 1, timeout_s)
    writer = CheckpointWriter(ranks.own_connection(), 0, 1, timeout_s)
    transfer: Any = NoTransfer()
    monitor, timeline = LoopMonitor(0.0, 0.0, print, prefix="train/control_"), Timeline(ranks)
    worker = Worker(config.train, ranks.device, transfer, writer, monitor, timeline)
    channel = CommandChannel(ranks.store, timeout_s)
    lead(config, worker, transfer, channel, heartbeats, monitor, timeline)


if __name__ == "__main__":
    main()

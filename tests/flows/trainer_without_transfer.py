"""The trainer as it is, one rank, but that its weights go nowhere: the servers of the test are stubs."""

import os
import sys
from pathlib import Path
from typing import Any

from rollmill.tasks.observe.loop_monitor import LoopMonitor
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.sync.transfer_plan import TransferPlan
from rollmill.tasks.sync.weight_messages import ProcessLocation, SendResult, SendTarget, WeightOffer
from rollmill.tasks.train.checkpoints.checkpoint_writer import CheckpointWriter
from rollmill.tasks.train.service.launch import ServiceConfig
from rollmill.tasks.train.service.rank_timeline import RankTimeline
from rollmill.tasks.train.service.rank_worker import RankWorker
from rollmill.tasks.train.service.ranks import CommandChannel, Heartbeats, join_ranks
from rollmill.tasks.train.service.trainer_process import lead


class NoTransfer:
    """Takes the place of the way to the servers, and of the sender."""

    def prepare(self, _engine: object) -> None:
        return None

    def offer(self) -> WeightOffer:
        plan = TransferPlan()
        return WeightOffer(plan, "127.0.0.1", 0, ProcessLocation("here", "cpu"))

    def send(self, _engine: object, targets: list[SendTarget]) -> list[SendResult]:
        return [SendResult(each.server, 0, 0.0) for each in targets]

    def progress(self) -> dict[str, int]:
        return {}


def main() -> None:
    config = ServiceConfig.model_validate_json(Path(sys.argv[1]).read_text())
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks, timeout_s = join_ranks(config.train.command_timeout_s), config.heartbeat_timeout_s
    heartbeats = Heartbeats(ranks.own_connection(), 0, 1, timeout_s)
    writer = CheckpointWriter(ranks.own_connection(), 0, 1, timeout_s)
    transfer: Any = NoTransfer()
    monitor, timeline = LoopMonitor(0.0, 0.0, print, prefix="train/control_"), RankTimeline(ranks)
    worker = RankWorker(config.train, ranks.device, transfer, writer, monitor, timeline)
    channel = CommandChannel(ranks.store, timeout_s)
    lead(config, worker, channel, heartbeats, monitor)


if __name__ == "__main__":
    main()

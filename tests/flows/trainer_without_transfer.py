"""The trainer as it is, one rank, but that its weights go nowhere: the servers of the test are stubs."""

import os
import sys
from pathlib import Path
from typing import Any

from tasks.serve.process import free_port
from tasks.train.checkpoint_writer import CheckpointWriter
from tasks.train.process_group import join_ranks
from tasks.train.protocol import ServiceConfig
from tasks.train.ranks import CommandChannel, Heartbeats
from tasks.train.service import lead
from tasks.train.worker import Worker


class NoTransfer:
    """Takes the place of the way to the servers, and of the sender."""

    @property
    def sender(self) -> "NoTransfer":
        return self

    def plan(self, _engine: object) -> dict[str, Any]:
        return {}

    def rendezvous(self, _engine: object) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": 0}

    def connect(self, _server: str, _prefix: str) -> None:
        return None

    def disconnect(self, _server: str) -> None:
        return None

    def send(self, _engine: object, _servers: list[str]) -> dict[str, Any]:
        return {"bytes": 0, "buckets": 0, "seconds": 0.0}


def main() -> None:
    config = ServiceConfig.model_validate_json(Path(sys.argv[1]).read_text())
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks, timeout_s = join_ranks(config.train.step_timeout_s), config.train.heartbeat_timeout_s
    heartbeats = Heartbeats(ranks.own_connection(), 0, 1, timeout_s)
    writer = CheckpointWriter(ranks.own_connection(), 0, 1, timeout_s)
    transfer: Any = NoTransfer()
    worker = Worker(config.train, ranks.device, transfer, writer)
    lead(config, worker, transfer, CommandChannel(ranks.store, timeout_s), heartbeats)


if __name__ == "__main__":
    main()
